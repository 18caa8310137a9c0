"""A published gallery: right answers, safe images, and refusal of whatever does not fit."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kinlens.embedder.errors import BundleMismatchError, GalleryCorruptError, ItemNotFoundError
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import BuildReport
from tests.indexer.conftest import CountingEmbedder, generation_of, query
from tests.tiny import encoded, photo


def number_of(gallery: Gallery, key: str) -> int:
    return gallery.stored([key])[key].id


@pytest.fixture
def opened(built: Path) -> Iterator[Gallery]:
    gallery = Gallery.open(built)
    yield gallery
    gallery.close()


def test_a_file_that_is_gone_changed_or_something_else_is_not_served_and_others_are(
    opened: Gallery, shop: Path, tmp_path: Path
) -> None:
    changes: list[Callable[[Path], object]] = [
        Path.unlink,
        lambda file: file.write_bytes(encoded(photo(77))),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: file.symlink_to(file.rename(tmp_path / "outside the root.gif")),
    ]
    number, content = number_of(opened, "f.gif"), (shop / "f.gif").read_bytes()
    with pytest.raises(ItemNotFoundError, match=r"no item 7;"):
        opened.image(7)
    for change in changes:
        change(shop / "f.gif")
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(ItemNotFoundError, match="was removed or changed"),
        ):
            pool.submit(opened.image, number).result(timeout=10)
        (shop / "f.gif").unlink(missing_ok=True)
        (shop / "f.gif").write_bytes(content)
    assert opened.image(number).data == content


def test_an_image_that_cannot_be_read_now_is_not_reported_as_removed(
    opened: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path) -> bytes:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    number = number_of(opened, "f.gif")
    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(GalleryCorruptError, match=r"f\.gif .*Too many open files.*Check the"):
        opened.image(number)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"manifest\.json is not a gallery manifest"),
        ("{", r"manifest\.json is not a gallery manifest"),
        ({"source_root": "/etc"}, "does not match its digest"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"schema_version": 1}, "schema 1, .* reads 2.*kinlens-index build"),
        ({"schema_version": 3}, "schema 3, .* reads 2.*or a newer one"),
    ],
)
def test_a_missing_damaged_edited_or_foreign_manifest_is_refused(
    built: Path, change: dict[str, object] | str | None, message: str
) -> None:
    file = generation_of(built) / "manifest.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change)
    file.unlink()
    if change is not None:
        file.write_text(change)
    with pytest.raises(GalleryCorruptError, match=message):
        Gallery.open(built)


def test_an_open_gallery_answers_while_newer_ones_are_published(
    built: Path, shop: Path, build: Callable[[], BuildReport], embedder: CountingEmbedder
) -> None:
    gallery = Gallery.open(built)
    version = generation_of(built)
    for number in range(3):
        (shop / f"new{number}.png").write_bytes(encoded(photo(90 + number)))
        build()
    with ThreadPoolExecutor(1) as pool:  # a thread that has no connection yet
        hits = pool.submit(gallery.search, query(embedder, shop / "f.gif"), 100).result()[0]
    assert (hits[0].key, len(hits)) == ("f.gif", 6)
    assert version.exists()
    gallery.close()
    build()
    assert not version.exists()


def test_closing_and_a_refused_opening_leave_no_descriptor_open(built: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    Gallery.open(built).close()
    before = descriptors()
    Gallery.open(built).close()
    message = r"bundle b{12}, .* bundle in use is c{12}:.*kinlens-index build .*--bundle"
    with pytest.raises(BundleMismatchError, match=message):
        Gallery.open(built, expected_bundle_id="c" * 64)
    assert descriptors() == before
