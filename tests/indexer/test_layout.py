"""The folder of a gallery: one builder, one current generation, nothing half done."""

import contextlib
import os
import shutil
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embedder.durable import hold, in_use
from embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    GalleryWriteError,
)
from indexer.folder.layout import disk_errors_explained
from indexer.gallery import Gallery
from tests.indexer.conftest import as_nobody
from tests.support.seams import GalleryFolder, set_fault_hook

GENERATIONS = [digit * 12 for digit in "abcd"]


def publish(folder: GalleryFolder, name: str) -> Path:
    with folder.locked(), folder.stage() as stage:
        (stage / "data").write_text(name)
        (stage / "manifest.json").touch()
        return folder.publish(stage, name)


class Killed(BaseException):
    """The process ends here."""


def publish_until(point: str, folder: GalleryFolder, name: str) -> None:
    """A build that ends at the first step with this name."""

    def hook(step: str) -> None:
        if step == point:
            raise Killed

    set_fault_hook(hook)
    try:
        with pytest.raises(Killed):
            publish(folder, name)
    finally:
        set_fault_hook(None)


def names(out: Path) -> list[str]:
    return sorted(entry.name for entry in (out / "versions").iterdir())


def test_what_was_published_is_current(out: Path) -> None:
    folder = GalleryFolder(out)
    for name in GENERATIONS[:2]:
        publish(folder, name)
        assert folder.current() == out / "versions" / name
        assert (folder.current() / "data").read_text() == name


def test_the_previous_generation_stays_and_older_ones_go(out: Path) -> None:
    for name in GENERATIONS[:3]:
        publish(GalleryFolder(out), name)
    assert names(out) == ["b" * 12, "c" * 12]


def test_a_generation_that_is_open_is_not_removed_before_it_is_closed(out: Path) -> None:
    folder = GalleryFolder(out)
    descriptor = hold(publish(folder, GENERATIONS[0]))
    for name in GENERATIONS[1:3]:
        publish(folder, name)
    assert names(out) == ["a" * 12, "b" * 12, "c" * 12]
    os.close(descriptor)
    publish(folder, GENERATIONS[3])
    assert names(out) == ["c" * 12, "d" * 12]


def test_a_generation_that_never_became_current_goes_with_the_next(out: Path) -> None:
    folder = GalleryFolder(out)
    publish(folder, GENERATIONS[0])
    orphan = out / "versions" / ("e" * 12)
    orphan.mkdir()
    (orphan / "manifest.json").touch()
    publish(folder, GENERATIONS[1])
    assert names(out) == ["a" * 12, "b" * 12]


def test_builds_that_are_killed_before_they_become_current_do_not_pile_up(out: Path) -> None:
    folder = GalleryFolder(out)
    publish(folder, "f" * 12)
    for name in GENERATIONS:
        publish_until("current: before rename", folder, name)
        assert names(out) == [name, "f" * 12]


def test_without_a_current_generation_nothing_goes_before_one_is_published(out: Path) -> None:
    folder = GalleryFolder(out)
    for name in GENERATIONS[:2]:
        publish(folder, name)
    (out / "CURRENT").unlink()  # by mistake: its generation is the one to go back to
    publish_until("current: before rename", folder, GENERATIONS[2])
    assert names(out) == sorted(GENERATIONS[:3])
    publish(folder, GENERATIONS[3])
    assert names(out) == [GENERATIONS[3]]


def test_what_is_not_current_goes_before_a_new_generation_is_written(out: Path) -> None:
    folder = GalleryFolder(out)
    for name in GENERATIONS[:2]:
        publish(folder, name)
    descriptor = hold(publish(folder, GENERATIONS[2]))
    publish(folder, GENERATIONS[3])
    foreign = out / "versions" / ("0" * 12)
    foreign.mkdir()
    publish(folder, "e" * 12)
    with folder.locked(), folder.stage() as stage:
        assert names(out) == [stage.name, foreign.name, "c" * 12, "e" * 12]
    os.close(descriptor)


@pytest.mark.parametrize("content", ["", "f" * 12, "../../elsewhere", "f" * 300])
def test_nothing_goes_before_a_build_where_current_is_damaged(out: Path, content: str) -> None:
    folder = GalleryFolder(out)
    for name in GENERATIONS[:2]:
        publish(folder, name)
    (out / "CURRENT").write_text(content)
    with folder.locked(), folder.stage() as stage:
        assert names(out) == [stage.name, *GENERATIONS[:2]]


def test_a_stage_that_is_not_published_is_gone_and_so_are_left_overs(out: Path) -> None:
    folder = GalleryFolder(out)
    with folder.locked():
        (out / "versions" / ".stage-killed").mkdir()
        with folder.stage() as stage:
            assert names(out) == [stage.name]
        assert names(out) == []


def test_a_folder_that_may_not_be_written_is_refused_with_the_reason() -> None:
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o555)
        with as_nobody(), pytest.raises(GalleryWriteError, match=r"Cannot write .*permissions"):
            Gallery.create(Path(parent) / "gallery", name="shop", bundle_id="b", dim=4)
        with (
            as_nobody(),
            pytest.raises(GalleryWriteError, match=r"Cannot write .*permissions"),
            GalleryFolder(parent).locked(),
        ):
            raise AssertionError("locked")


def test_a_gallery_below_a_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(GalleryWriteError, match=r"Cannot write .*Not a directory"):
        Gallery.create(tmp_path / "file" / "gallery", name="shop", bundle_id="b", dim=4)


def test_a_second_build_is_refused_by_the_process_of_the_first(out: Path) -> None:
    with (
        GalleryFolder(out).locked(),
        pytest.raises(GalleryBusyError, match=rf"process {os.getpid()}\) is writing .*--out"),
        GalleryFolder(out).locked(),
    ):
        raise AssertionError("two builds have the lock")
    with GalleryFolder(out).locked():
        assert (out / "LOCK").read_text() == str(os.getpid())


def test_a_folder_with_other_things_in_it_is_not_touched(shop: Path) -> None:
    before = sorted(shop.rglob("*"))
    with (
        pytest.raises(GalleryError, match=r"is not a gallery.*--out"),
        GalleryFolder(shop).locked(),
    ):
        raise AssertionError("locked")
    with (
        pytest.raises(GalleryError, match="is not a gallery"),
        GalleryFolder(shop / "f.gif").locked(),
    ):
        raise AssertionError("locked")
    assert sorted(shop.rglob("*")) == before


@pytest.mark.parametrize(
    "names",
    [
        ("notes.txt", "versions/2024-final/src/thesis.tex"),
        ("versions/2024-final/thesis.tex",),
        ("versions/0123456789ab/manifest.json", "versions/2024-final/thesis.tex"),
        ("versions/0123456789ABC/thesis.tex",),
        ("LOCK", "notes.txt"),
        ("CURRENT", "LOCK", "work.sqlite", "work.sqlite.bak"),
    ],
)
def test_a_familiar_name_does_not_make_a_folder_ours(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    project = tmp_path / "project"
    for name in names:
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("years of work")
    with pytest.raises(GalleryError, match=r"is not a gallery.*is something else.*--out"):
        publish(GalleryFolder(project), GENERATIONS[0])
    left = [file for file in project.rglob("*") if file.is_file()]
    assert sorted(left) == sorted(project / name for name in names)
    assert {file.read_text() for file in left} == {"years of work"}


def test_a_folder_without_a_manifest_is_never_removed(out: Path) -> None:
    work = out / "versions" / "0123456789ab" / "thesis.tex"
    work.parent.mkdir(parents=True)
    work.write_text("years of work")
    for name in GENERATIONS:
        publish(GalleryFolder(out), name)
    assert work.read_text() == "years of work"
    assert names(out) == ["0123456789ab", "c" * 12, "d" * 12]


def test_a_removal_that_was_cut_short_is_ended_by_the_next_build(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = GalleryFolder(out)
    for name in GENERATIONS[:2]:
        publish(folder, name)

    def cut_short(path: Path, ignore_errors: bool = False) -> None:
        (path / "manifest.json").unlink(missing_ok=True)

    monkeypatch.setattr(shutil, "rmtree", cut_short)
    publish(folder, GENERATIONS[2])
    monkeypatch.undo()
    assert names(out) == [f".stage-{'a' * 12}", "b" * 12, "c" * 12]
    publish(folder, GENERATIONS[3])
    assert names(out) == ["c" * 12, "d" * 12]


def test_an_interrupted_build_leaves_a_folder_that_is_still_ours(out: Path) -> None:
    (out / "versions" / ".stage-a1b2_c3d").mkdir(parents=True)
    for name in ("LOCK", ".CURRENT.tmp", "work.sqlite", "work.sqlite-wal", "work.sqlite-shm"):
        (out / name).touch()
    publish(GalleryFolder(out), GENERATIONS[0])
    assert names(out) == ["a" * 12]


def test_an_empty_folder_may_become_a_gallery(out: Path) -> None:
    out.mkdir()
    publish(GalleryFolder(out), GENERATIONS[0])
    assert names(out) == ["a" * 12]


def test_a_folder_without_a_gallery_is_named_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(GalleryNotFoundError, match=r"No gallery at .*kinlens-index build"):
        GalleryFolder(tmp_path / "none").current()
    (tmp_path / "file").touch()
    with pytest.raises(GalleryNotFoundError, match="No gallery at"):
        GalleryFolder(tmp_path / "file").current()


def test_an_unfinished_gallery_is_told_from_a_missing_one(out: Path) -> None:
    (out / "versions" / ".draft-bbbbbbbbbbbb").mkdir(parents=True)
    with pytest.raises(GalleryNotFoundError, match=r"was interrupted.*continues"):
        GalleryFolder(out).current()


@pytest.mark.parametrize("content", [b"", b"../../etc", b"ffffffffffff\n", b"\xff\xfe", b"abc\n"])
def test_a_current_file_that_points_nowhere_is_refused(out: Path, content: bytes) -> None:
    publish(GalleryFolder(out), GENERATIONS[0])
    (out / "CURRENT").write_bytes(content)
    with pytest.raises(GalleryCorruptError, match=r"CURRENT points to .*Build the gallery again"):
        GalleryFolder(out).current()


def test_a_failed_write_says_what_to_do(out: Path) -> None:
    error = PermissionError(13, "Permission denied")
    message = r"Cannot write .*Permission denied\. Check the free space and the permissions"
    with pytest.raises(GalleryWriteError, match=message), disk_errors_explained(out):
        raise error


def test_a_write_is_refused_while_a_build_replaces_the_gallery(out: Path) -> None:
    folder = GalleryFolder(out)
    publish(folder, GENERATIONS[0])
    with (
        folder.locked(),
        pytest.raises(GalleryBusyError, match=rf"process {os.getpid()}\) is replacing .*Repeat"),
        GalleryFolder(out).writing(GENERATIONS[0]),
    ):
        raise AssertionError("the write went on")
    with folder.writing(GENERATIONS[0]), GalleryFolder(out).writing(GENERATIONS[0]):
        pass  # writes do not keep each other out here


def test_a_write_into_a_generation_that_was_replaced_is_refused(out: Path) -> None:
    folder = GalleryFolder(out)
    for name in GENERATIONS[:2]:
        publish(folder, name)
    with (
        pytest.raises(GalleryBusyError, match=r"was replaced by a build.*Open it again"),
        folder.writing(GENERATIONS[0]),
    ):
        raise AssertionError("the write went on")


def test_a_stage_in_use_stays_when_a_build_begins(out: Path) -> None:
    folder = GalleryFolder(out)
    publish(folder, GENERATIONS[0])
    with folder.aside() as stage:
        (stage / "copy").write_text("half way")
        with GalleryFolder(out).locked(), folder.stage():
            assert (stage / "copy").read_text() == "half way"
    assert not stage.exists()


def test_a_build_gets_its_turn_although_writes_never_pause(out: Path) -> None:
    """Four writers overlap: at every moment one of them holds the lock."""
    folder = GalleryFolder(out)
    publish(folder, GENERATIONS[0])
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            with contextlib.suppress(GalleryBusyError), folder.writing(GENERATIONS[0]):
                time.sleep(0.02)

    with ThreadPoolExecutor(5) as pool:
        writers = [pool.submit(write) for _ in range(4)]
        build = pool.submit(lambda: publish(GalleryFolder(out), GENERATIONS[1]))
        try:
            build.result(timeout=60)
        finally:
            done.set()
        assert [writer.result() for writer in writers] == [None] * 4
    assert folder.current_name() == GENERATIONS[1]


def test_who_holds_a_folder_holds_it_while_others_ask_for_it(tmp_path: Path) -> None:
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            in_use(tmp_path)

    with ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(ask) for _ in range(2)]
        for _ in range(2000):
            descriptor = hold(tmp_path)
            assert in_use(tmp_path)
            os.close(descriptor)
        done.set()
        assert [one.result() for one in asking] == [None, None]
