"""The folder of a gallery: one builder, one current generation, nothing half done or foreign."""

import contextlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from kinlens.embedder import durable
from kinlens.embedder.durable import in_use, lock_folder, staged, sweep, write_whole
from kinlens.embedder.errors import (
    BundleMismatchError,
    GalleryBusyError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
)
from kinlens.indexer.gallery import Gallery
from tests.indexer.conftest import faults, generation_of, stops_at
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


def test_open_generations_and_the_previous_one_stay_and_older_ones_are_removed(out) -> None:
    first = Gallery.create(out, name="shop", bundle_id="b", dim=4)
    published = [publish(out) for _ in range(2)]
    assert names(out) == {first.generation, *published}
    first.close()
    last = publish(out)
    assert names(out) == {published[-1], last}
    assert (out / "CURRENT").read_text().strip() == last


def test_what_killed_builds_leave_does_not_pile_up_or_prevent_the_next(out) -> None:
    (out / "versions" / ".stage-a1b2_c3d").mkdir(parents=True)
    for name in ("LOCK", ".CURRENT.tmp", ".stage-q7w8_e9r"):
        (out / name).touch()
    current = publish(out)
    assert names(out) == {current}
    for _ in range(3):
        left = killed_before_it_is_current(out)
        assert names(out) == {current, left}
    last = publish(out)
    assert names(out) == {current, last}


@pytest.mark.parametrize("content", [None, b"ffffffffffff\n", b"../../etc", b"\xff\xfe"])
def test_while_current_is_damaged_no_generation_is_opened_or_removed(
    out, content: bytes | None
) -> None:
    """Any generation may be the one to go back to."""
    published = {publish(out) for _ in range(2)}
    (out / "CURRENT").unlink()
    if content is not None:
        (out / "CURRENT").write_bytes(content)
        with pytest.raises(GalleryCorruptError, match=r"CURRENT points to .*Build the gallery"):
            Gallery.open(out)
    left = killed_before_it_is_current(out)
    assert names(out) == {*published, left}


@pytest.mark.parametrize(
    "files",
    [
        ("versions/0123456789ab/manifest.json", "versions/2024-final/thesis.tex"),
        ("versions/0123456789ABC/thesis.tex",),
        ("CURRENT", "LOCK", "work.sqlite"),
        ("versions/0123456789ab/thesis.tex",),  # which could be of a gallery
    ],
)
def test_foreign_files_are_left_alone(out, files: tuple[str, ...]) -> None:
    for name in files:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("years of work")
    if files[0] == "versions/0123456789ab/thesis.tex":
        published = [publish(out) for _ in range(3)]
        assert names(out) == {"0123456789ab", *published[1:]}
    else:
        with pytest.raises(GalleryError, match=r"files that do not belong to a gallery.*--out"):
            publish(out)
        assert len([file for file in out.rglob("*") if file.is_file()]) == len(files)
    assert {(out / name).read_text() for name in files} == {"years of work"}


def test_a_folder_without_a_gallery_is_named_with_the_cure(out) -> None:
    with pytest.raises(GalleryNotFoundError, match=r"No gallery at .*kinlens-index build"):
        Gallery.open(out)
    (out / "versions" / ".draft-bbbbbbbbbbbb").mkdir(parents=True)
    with pytest.raises(GalleryNotFoundError, match=r"was interrupted.*continues.*or reports"):
        Gallery.open(out)


def test_what_another_process_writes_aside_stays_when_a_build_begins(out) -> None:
    publish(out)
    with GalleryFolder(out).aside() as stage:
        (stage / "copy").write_text("half way")
        publish(out)
        assert (stage / "copy").read_text() == "half way"
    assert not stage.exists()


def test_a_build_acquires_the_lock_although_writes_never_pause(out) -> None:
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


def test_a_folder_lock_holds_while_others_ask_for_it(tmp_path) -> None:
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"manifest\.json is not a gallery manifest"),
        ("{", r"manifest\.json is not a gallery manifest"),
        ({"source_root": "/etc"}, "does not match its digest"),
        ({"colour": "red"}, "colour is unknown; remove it"),
        ({"schema_version": 1}, "schema 1, .* reads 2.*kinlens-index build"),
        ({"schema_version": 3}, "schema 3, .* reads 2.*or a newer one"),
    ],
)
def test_a_missing_damaged_edited_or_foreign_manifest_is_refused(
    built, change: dict[str, object] | str | None, message: str
) -> None:
    file = generation_of(built) / "manifest.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change)
    file.unlink()
    if change is not None:
        file.write_text(change)
    with pytest.raises(GalleryCorruptError, match=message):
        Gallery.open(built)


def test_closing_and_a_refused_opening_leave_no_descriptor_open(built) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    Gallery.open(built).close()
    before = descriptors()
    Gallery.open(built).close()
    message = r"bundle b{12}, .* bundle in use is c{12}:.*kinlens-index build .*--bundle"
    with pytest.raises(BundleMismatchError, match=message):
        Gallery.open(built, expected_bundle_id="c" * 64)
    assert descriptors() == before


@pytest.mark.parametrize("before_lock", [True, False])
def test_a_new_stage_survives_the_sweep_of_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_lock: bool
) -> None:
    lock, others = durable.lock_folder, [tmp_path]

    def beside_a_sweep(folder: Path) -> int:
        if before_lock and others:
            sweep(others.pop())
        descriptor = lock(folder)
        if others:
            sweep(others.pop())
        return descriptor

    monkeypatch.setattr(durable, "lock_folder", beside_a_sweep)
    with staged(tmp_path) as stage:
        (stage / "file").write_bytes(b"1")
    assert not others
    assert not [*tmp_path.iterdir()]
    others.append(tmp_path)
    write_whole(tmp_path / "file", b"2", "test")
    assert not others
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"2")]


def test_writers_and_builds_delete_what_killed_ones_left_beside_a_gallery(out) -> None:
    Gallery.create(out, name="shop", bundle_id="b", dim=4).close()
    stages = {out / ".stage-q7w8_e9r", out / ".stage-a1b2_c3d"}
    for change in (write, publish):
        for stage in stages:
            stage.touch()
        own = min(stages)
        descriptor = lock_folder(own)  # of a process that is alive
        change(out)
        assert {*out.glob(".stage-*")} == {own}
        os.close(descriptor)
        change(out)
        assert not [*out.glob(".stage-*")]


def write(path: Path) -> None:
    with closing(Gallery.open(path)) as gallery:
        gallery.remove(["nothing"])
