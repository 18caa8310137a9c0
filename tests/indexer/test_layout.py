"""The folder of a gallery: one builder, one current generation, nothing half done."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kinlens.embedder.durable import in_use, lock_folder
from kinlens.embedder.errors import (
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
)
from kinlens.indexer.gallery import Gallery
from tests.indexer.conftest import faults, stops_at
from tests.support.seams import GalleryFolder


def publish(out: Path) -> str:
    gallery = Gallery.create(out, name="shop", bundle_id="b", dim=4)
    gallery.close()
    return gallery.generation


def names(out: Path) -> set[str]:
    return {entry.name for entry in (out / "versions").iterdir()}


def killed_before_it_is_current(out: Path) -> str:
    """A new generation that is left behind by an interrupted process; its name."""
    before = names(out)
    with faults(stops_at("current: before rename")), pytest.raises(KeyboardInterrupt):
        publish(out)
    [left] = names(out) - before
    return left


def test_open_generations_and_the_previous_one_stay_and_older_ones_are_removed(out: Path) -> None:
    first = Gallery.create(out, name="shop", bundle_id="b", dim=4)
    published = [publish(out) for _ in range(2)]
    assert names(out) == {first.generation, *published}
    first.close()
    last = publish(out)
    assert names(out) == {published[-1], last}
    assert (out / "CURRENT").read_text().strip() == last


def test_what_killed_builds_leave_does_not_pile_up_or_prevent_the_next(out: Path) -> None:
    (out / "versions" / ".stage-a1b2_c3d").mkdir(parents=True)
    for name in ("LOCK", ".CURRENT.tmp"):
        (out / name).touch()
    current = publish(out)
    assert names(out) == {current}
    for _ in range(3):
        left = killed_before_it_is_current(out)
        assert names(out) == {current, left}
    last = publish(out)
    assert names(out) == {current, last}


@pytest.mark.parametrize("content", [None, "f" * 12])
def test_no_generation_is_removed_while_current_is_damaged_or_missing(
    out: Path, content: str | None
) -> None:
    """Any generation may be the one to go back to."""
    published = {publish(out) for _ in range(2)}
    (out / "CURRENT").unlink()
    if content is not None:
        (out / "CURRENT").write_text(content)
    left = killed_before_it_is_current(out)
    assert names(out) == {*published, left}


@pytest.mark.parametrize(
    "files",
    [
        ("versions/0123456789ab/manifest.json", "versions/2024-final/thesis.tex"),
        ("versions/0123456789ABC/thesis.tex",),
        ("CURRENT", "LOCK", "work.sqlite"),
    ],
)
def test_a_folder_with_foreign_files_is_refused_and_left_alone(
    tmp_path: Path, files: tuple[str, ...]
) -> None:
    project = tmp_path / "project"
    for name in files:
        file = project / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("years of work")
    with pytest.raises(GalleryError, match=r"files that do not belong to a gallery.*--out"):
        publish(project)
    left = [file for file in project.rglob("*") if file.is_file()]
    assert sorted(left) == sorted(project / name for name in files)
    assert {file.read_text() for file in left} == {"years of work"}


def test_a_folder_without_a_manifest_is_never_removed(out: Path) -> None:
    work = out / "versions" / "0123456789ab" / "thesis.tex"
    work.parent.mkdir(parents=True)
    work.write_text("years of work")
    published = [publish(out) for _ in range(3)]
    assert work.read_text() == "years of work"
    assert names(out) == {"0123456789ab", *published[1:]}


def test_a_folder_without_a_gallery_is_named_with_the_cure(out: Path) -> None:
    with pytest.raises(GalleryNotFoundError, match=r"No gallery at .*kinlens-index build"):
        Gallery.open(out)
    (out / "versions" / ".draft-bbbbbbbbbbbb").mkdir(parents=True)
    with pytest.raises(GalleryNotFoundError, match=r"was interrupted.*continues.*or reports"):
        Gallery.open(out)


@pytest.mark.parametrize("content", [b"../../etc", b"ffffffffffff\n", b"\xff\xfe"])
def test_a_current_file_that_points_nowhere_is_refused(out: Path, content: bytes) -> None:
    publish(out)
    (out / "CURRENT").write_bytes(content)
    with pytest.raises(GalleryCorruptError, match=r"CURRENT points to .*Build the gallery again"):
        Gallery.open(out)


def test_what_another_process_writes_aside_stays_when_a_build_begins(out: Path) -> None:
    publish(out)
    with GalleryFolder(out).aside() as stage:
        (stage / "copy").write_text("half way")
        publish(out)
        assert (stage / "copy").read_text() == "half way"
    assert not stage.exists()


def test_a_build_acquires_the_lock_although_writes_never_pause(out: Path) -> None:
    """Four writers overlap: at every moment one of them holds the lock."""
    first = publish(out)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            with contextlib.suppress(GalleryBusyError), GalleryFolder(out).writing(first):
                time.sleep(0.02)

    with ThreadPoolExecutor(5) as pool:
        writers = [pool.submit(write) for _ in range(4)]
        build = pool.submit(publish, out)
        try:
            second = build.result(timeout=60)
        finally:
            done.set()
        assert [writer.result() for writer in writers] == [None] * 4
    with closing(Gallery.open(out)) as gallery:
        assert gallery.generation == second


def test_a_folder_lock_holds_while_others_ask_for_it(tmp_path: Path) -> None:
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            in_use(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        for _ in range(1000):
            descriptor = lock_folder(tmp_path)
            assert in_use(tmp_path)
            os.close(descriptor)
        done.set()
        asking.result()
