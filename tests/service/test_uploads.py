"""Uploads: whole and on the disk before they count, gone when nobody has them."""

import hashlib
import threading
from pathlib import Path

import pytest

from embedder.errors import GalleryCorruptError, GalleryWriteError, ItemNotFoundError
from service.galleries.uploads import Uploads
from tests.support.seams import set_fault_hook

WAIT_S = 20.0


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path / "uploads")


def test_what_is_saved_is_read_back_by_its_digest(uploads) -> None:
    assert uploads.save(b"one") == uploads.save(b"one") == digest(b"one")
    assert uploads.open(digest(b"one")) == b"one"
    with pytest.raises(ItemNotFoundError):
        uploads.open(digest(b"two"))


def test_a_damaged_file_is_not_shown(uploads) -> None:
    sha256 = uploads.save(b"one")
    (uploads.root / sha256[:2] / sha256).write_bytes(b"two")
    with pytest.raises(GalleryCorruptError, match="damaged"):
        uploads.open(sha256)


@pytest.mark.parametrize("step", range(1, 6))
def test_a_write_that_is_cut_short_leaves_nothing_or_the_whole(uploads, step: int) -> None:
    uploads.save(b"before")
    steps: list[str] = []

    def fail(point: str) -> None:
        steps.append(point)
        if len(steps) == step:
            raise OSError(28, "No space left on device")

    set_fault_hook(fail)
    try:
        with pytest.raises(GalleryWriteError, match="No space"):
            uploads.save(b"one")
    finally:
        set_fault_hook(None)
    if uploads.has(digest(b"one")):
        assert uploads.open(digest(b"one")) == b"one"
    assert uploads.save(b"one") == digest(b"one")
    assert uploads.open(digest(b"before")) == b"before"


def test_a_discard_removes_what_no_item_has_and_nothing_else(uploads) -> None:
    kept, gone, other = uploads.save(b"kept"), uploads.save(b"gone"), uploads.save(b"other")
    assert uploads.discard_unless(lambda _: {kept}, [kept, gone, "0" * 64]) == 1
    assert [uploads.has(one) for one in (kept, gone, other)] == [True, False, True]


def test_a_sweep_removes_orphans_and_what_interrupted_writes_left(uploads) -> None:
    saved = [uploads.save(str(n).encode()) for n in range(20)]
    stage = uploads.root / saved[0][:2] / ".stage-x"
    stage.write_bytes(b"half")
    assert uploads.sweep(lambda asked: set(asked) & set(saved[:5])) == 15
    assert [uploads.has(one) for one in saved] == [True] * 5 + [False] * 15
    assert not stage.exists()
    assert Uploads(uploads.root / "nowhere").sweep(lambda _: ()) == 0


def test_a_content_that_is_about_to_be_named_is_not_discarded(uploads) -> None:
    """Without the lock, a delete that looked before the write would take the picture away."""
    sha256 = uploads.save(b"one")
    named: set[str] = set()
    looked = threading.Event()

    def held(_: object) -> set[str]:
        looked.set()
        return named

    with uploads.keeping([sha256]):
        thread = threading.Thread(target=uploads.discard_unless, args=(held, [sha256]))
        thread.start()
        assert not looked.wait(0.2)
        uploads.save(b"one")
        named.add(sha256)
    thread.join(WAIT_S)
    assert looked.is_set()
    assert uploads.has(sha256)
