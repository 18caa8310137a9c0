"""Building: counts, failures that are not fatal, and galleries that survive any crash."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import indexer.ingest.build
from embedder.errors import (
    GalleryError,
    GalleryWriteError,
    InvalidParameterError,
    PlanError,
    SourceError,
)
from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.ingest.build import BuildReport, BuildSettings, build_gallery, needed_mb, planned
from indexer.ingest.sources import Record, csv_source, folder_source
from tests.indexer.conftest import PICTURES, CountingEmbedder, listed, query, small_files
from tests.support.seams import EmbedSettings, set_fault_hook
from tests.tiny import encoded, picture

Build = Callable[[], BuildReport]


def keys(path: Path, embedder: FakeEmbedder, image: Path) -> list[str]:
    """The answer of a gallery to one image."""
    gallery = Gallery.open(path)
    try:
        return [hit.key for hit in gallery.search(query(embedder, image), 100)[0]]
    finally:
        gallery.close()


def size_of(path: Path) -> int:
    gallery = Gallery.open(path)
    try:
        return gallery.size
    finally:
        gallery.close()


def generation_of(path: Path) -> str:
    gallery = Gallery.open(path)
    gallery.close()
    return gallery.generation


def test_every_readable_image_is_indexed_and_the_report_adds_up(
    build: Build, shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "text.jpg").write_text("not an image")
    report = build()
    assert (report.found, report.indexed, report.embedded) == (8, 7, 6)
    assert (report.reused, report.duplicates) == (0, 1)
    assert [failure.key for failure in report.failures] == ["text.jpg"]
    written = json.loads((out / "versions" / report.generation / "report.json").read_text())
    assert written == json.loads(report.model_dump_json(exclude={"generation"}))
    for name in PICTURES:
        assert keys(out, embedder, shop / name)[0] in {name, "copy.gif"}


def test_attributes_reach_the_answers(shop: Path, out: Path, embedder: CountingEmbedder) -> None:
    rows = 'key,path,note\nÄ1,f.gif,"a, ""b"" \u2028 👟"\nB2,cup/a.png,\n'
    (shop / "list.csv").write_text(rows, encoding="utf-8")
    build_gallery(csv_source(shop / "list.csv"), embedder, out)
    gallery = Gallery.open(out)
    best = gallery.search(query(embedder, shop / "f.gif"), 1)[0][0]
    gallery.close()
    assert (best.key, best.attributes) == ("Ä1", {"note": 'a, "b" \u2028 👟'})


def test_item_numbers_do_not_depend_on_threads_or_batches(
    shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    numbers = []
    for workers, batch_size in ((1, 100), (4, 1)):
        out = tmp_path / f"gallery-{workers}"
        settings = BuildSettings(embed=EmbedSettings(batch_size, workers))
        build_gallery(folder_source(shop), embedder, out, settings)
        gallery = Gallery.open(out)
        numbers.append([(item.id, item.key) for item in gallery.items()])
        gallery.close()
    assert numbers[0] == numbers[1] == list(enumerate(sorted(PICTURES), 1))


def test_the_name_is_given_or_that_of_the_folder(
    shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    out = tmp_path / "my shop (2)"
    for name, expected in ((None, "my-shop-2"), ("shop.v2", "shop.v2")):
        build_gallery(folder_source(shop), embedder, out, BuildSettings(name))
        gallery = Gallery.open(out)
        assert gallery.name == expected
        gallery.close()


@pytest.mark.parametrize("name", ["a/b", "../x", ".hidden", "ä", "x" * 65, "a b"])
def test_a_name_that_cannot_stand_in_an_address_is_refused(
    shop: Path, out: Path, embedder: CountingEmbedder, name: str
) -> None:
    with pytest.raises(InvalidParameterError, match=r"cannot stand in an address.*--name"):
        build_gallery(folder_source(shop), embedder, out, BuildSettings(name))
    assert not out.exists()


def test_a_source_without_one_readable_image_is_refused_and_changes_nothing(
    built: Path, shop: Path, embedder: CountingEmbedder, tmp_path: Path
) -> None:
    before = generation_of(built)
    bad = tmp_path / "bad"
    bad.mkdir()
    for number in range(5):
        (bad / f"{number}.jpg").write_text("not an image")
    with pytest.raises(SourceError, match=r"None of the 5 images .* 0\.jpg: The content is not"):
        build_gallery(folder_source(bad), embedder, built)
    assert generation_of(built) == before


def test_a_new_build_replaces_the_generation_and_leaves_nothing_beside(
    built: Path, build: Build, shop: Path
) -> None:
    before = generation_of(built)
    (built / "work.sqlite").write_text("of a build by an earlier version")
    (shop / "new.png").write_bytes(encoded(picture(99)))
    report = build()
    assert generation_of(built) == report.generation != before
    assert size_of(built) == 7
    assert not (built / "work.sqlite").exists()
    assert len(list((built / "versions").iterdir())) == 2


def test_vectors_of_another_bundle_are_never_reused(
    shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(shop)
    monkeypatch.setattr(Gallery, "compact", full)
    with pytest.raises(GalleryError, match="No space left"):
        build_gallery(source, embedder, out)
    monkeypatch.undo()
    other = CountingEmbedder(bundle_id="c" * 64)
    report = build_gallery(source, other, out)
    assert (report.embedded, report.reused) == (6, 0)
    gallery = Gallery.open(out, expected_bundle_id="c" * 64)
    assert gallery.size == 6
    gallery.close()


def test_an_interrupted_build_survives_a_finished_one_with_another_bundle(
    shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_source(shop)
    monkeypatch.setattr(Gallery, "compact", full)
    with pytest.raises(GalleryError, match="No space left"):
        build_gallery(source, embedder, out)
    monkeypatch.undo()
    build_gallery(source, CountingEmbedder(bundle_id="c" * 64), out)
    report = build_gallery(source, embedder, out)
    assert (report.embedded, report.reused) == (0, 6)
    assert not list((out / "versions").glob(".*"))


def test_a_project_of_the_user_is_refused_and_stays_whole(
    shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    project = tmp_path / "project"
    thesis = project / "versions" / "2024-final" / "src" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    for file in (thesis, project / "notes.txt"):
        file.write_text("years of work")
    before = sorted(project.rglob("*"))
    with pytest.raises(GalleryError, match=r"notes\.txt is something else.*--out"):
        build_gallery(folder_source(shop), embedder, project)
    assert sorted(project.rglob("*")) == before
    assert embedder.batches == []


def full(*arguments: object, **options: object) -> None:
    raise GalleryWriteError("No space left on device")


def failing(*arguments: object, **options: object) -> None:
    raise OSError(28, "No space left on device")


def fail_at(number: int) -> tuple[Callable[[str], None], list[str]]:
    """A fault hook that fails at the step with this number, and the steps that it has seen."""
    seen: list[str] = []

    def hook(point: str) -> None:
        seen.append(point)
        if len(seen) == number:
            failing()

    return hook, seen


@pytest.fixture
def faults() -> Iterator[Callable[[Callable[[str], None] | None], None]]:
    yield set_fault_hook
    set_fault_hook(None)


def test_a_failure_in_any_step_leaves_the_old_or_the_new_gallery(
    shop: Path, tmp_path: Path, faults: Callable[..., None]
) -> None:
    embedder = CountingEmbedder()
    old = tmp_path / "old"
    build_gallery(folder_source(shop), embedder, old)
    before = generation_of(old)
    new_image = shop / "new.png"
    new_image.write_bytes(encoded(picture(99)))
    failed: list[str] = []
    for step in itertools.count(1):
        out = tmp_path / f"gallery-{step}"
        shutil.copytree(old, out)
        embedder.batches.clear()
        hook, seen = fail_at(step)
        faults(hook)
        try:
            build_gallery(folder_source(shop), embedder, out)
            break
        except (GalleryError, OSError) as error:
            failed.append(str(error))
        finally:
            faults(None)
        is_new = seen.count("current: after rename") == 2  # the draft had the first one
        assert (generation_of(out) != before) == is_new
        assert ("new.png" in keys(out, embedder, new_image)) == is_new
        report = build_gallery(folder_source(shop), embedder, out)
        if "write: after commit" in seen and not is_new:
            assert (report.embedded, report.reused, sum(embedder.batches)) == (0, 7, 7)
        assert keys(out, embedder, new_image)[0] == "new.png"
        assert not list((out / "versions").glob(".stage-*"))
    assert len(failed) == len(seen) >= 14
    assert all("No space left on device" in message for message in failed)


CHILD = """
import sys
from pathlib import Path
import os
from embedder.fake import FakeEmbedder
from indexer.ingest.build import BuildSettings, build_gallery
from embedder.durable import set_fault_hook
from indexer.ingest.embed import EmbedSettings
from indexer.ingest.sources import folder_source

shop, out, die_at = sys.argv[1:]
done = 0
def progress(count):
    global done
    done += count
    print(done, flush=True)

times = 0
def die(point):
    global times
    times += point == die_at
    if times == 2:  # the first time the draft is made
        os._exit(9)

set_fault_hook(die)
delay_s = 0.02 if die_at == "embedding" else 0
settings = BuildSettings(embed=EmbedSettings(batch_size=1, workers=2))
embedder = FakeEmbedder(bundle_id="b" * 64, delay_s=delay_s)
build_gallery(folder_source(shop), embedder, out, settings, progress)
"""


def child(shop: Path, out: Path, die_at: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(shop), str(out), die_at],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(indexer.ingest.build.__file__).parents[2],
    )


def test_a_killed_build_leaves_the_gallery_intact_and_continues_where_it_stopped(
    built: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    before = generation_of(built)
    for number in range(200):
        (shop / f"{number:03d}.png").write_bytes(encoded(picture(100 + number)))
    embedder.batches.clear()
    with child(shop, built, "embedding") as process:
        assert process.stdout is not None
        done = next(int(line) for line in process.stdout if int(line) >= 20)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert generation_of(built) == before
    report = build_gallery(folder_source(shop), embedder, built)
    assert report.reused >= done
    assert report.reused + report.embedded == 206
    assert sum(embedder.batches) == report.embedded > 0
    assert size_of(built) == 206


def test_what_a_stopped_build_had_of_another_source_is_not_published(
    shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gallery, "compact", full)
    with pytest.raises(GalleryError, match="No space left"):
        build_gallery(folder_source(shop), embedder, out)
    monkeypatch.undo()
    (shop / "f.gif").unlink()
    (shop / "cup" / "a.png").write_text("not an image any more")
    (shop / "list.csv").write_text(
        "key,path,class:number\ncup/a.png,cup/a.png,1\nhat,hat/d.bmp,2\n"
    )
    report = build_gallery(csv_source(shop / "list.csv"), embedder, out)
    assert (report.found, report.indexed, report.reused) == (2, 1, 0)
    assert sum(embedder.batches) == 6
    gallery = Gallery.open(out)
    assert [(item.key, item.attributes) for item in gallery.items()] == [("hat", {"class": 2})]
    gallery.close()


@pytest.mark.parametrize("die_at", ["generation: after rename", "current: after rename"])
def test_a_build_that_dies_while_publishing_leaves_a_whole_gallery(
    built: Path, shop: Path, embedder: CountingEmbedder, die_at: str
) -> None:
    (shop / "new.png").write_bytes(encoded(picture(99)))
    with child(shop, built, die_at) as process:
        process.communicate()
    assert process.returncode == 9
    assert size_of(built) == (7 if die_at.startswith("current") else 6)
    report = build_gallery(folder_source(shop), embedder, built)
    assert report.reused == (0 if die_at.startswith("current") else 7)
    assert size_of(built) == 7
    assert len(list((built / "versions").iterdir())) == 2


def test_a_second_build_at_the_same_time_is_refused(built: Path, build: Build, shop: Path) -> None:
    refused: list[str] = []

    def second_build(count: int) -> None:
        with pytest.raises(GalleryError) as caught:
            build()
        refused.append(str(caught.value))

    build_gallery(folder_source(shop), FakeEmbedder(), built, on_progress=second_build)
    assert len(refused) == 1
    assert "Another build" in refused[0]
    gallery = Gallery.open(built, expected_bundle_id="fake")
    gallery.close()


def test_a_full_disk_is_a_clear_message_and_the_old_gallery_stays(
    built: Path, build: Build, shop: Path
) -> None:
    before = generation_of(built)
    (shop / "new.png").write_bytes(encoded(picture(99)))
    with (
        small_files(300),
        pytest.raises(GalleryError, match=r"Cannot write .*Check the free space"),
    ):
        build()
    assert generation_of(built) == before
    assert build().indexed == 7


def test_too_little_free_space_is_said_before_the_work(
    build: Build, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(10, 10, 100)
    monkeypatch.setattr("indexer.ingest.build.shutil.disk_usage", lambda path: usage)
    with pytest.raises(GalleryError, match=r"needs about .* MB in .*are free.*--out"):
        build()
    assert embedder.batches == []


def test_an_error_of_the_progress_display_is_not_taken_for_a_full_disk(
    shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    def broken(count: int) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        build_gallery(folder_source(shop), embedder, out, on_progress=broken)


def test_a_place_that_cannot_be_written_is_named(shop: Path, embedder: CountingEmbedder) -> None:
    with pytest.raises(GalleryError, match=r"Cannot write the gallery .*Not a directory"):
        build_gallery(folder_source(shop), embedder, shop / "f.gif" / "gallery")


def test_the_space_asked_for_is_enough_for_what_is_written(
    tmp_path: Path, embedder: CountingEmbedder
) -> None:
    shop, out = tmp_path / "many", tmp_path / "gallery"
    shop.mkdir()
    for number in range(300):
        (shop / f"{number:03d}.png").write_bytes(encoded(picture(number), "PNG"))
    build_gallery(folder_source(shop), embedder, out)
    written_mb = sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 2**20
    estimate_mb = needed_mb(planned(300, embedder.dim, IndexSettings()))
    page_mb = 1  # a file of SQLite has a few pages of 16 KiB, however small
    assert written_mb < estimate_mb + page_mb
    assert needed_mb(planned(1_000_000, 512, IndexSettings(memory_mb=1e5))) > 2 * 4 * 512 / 1.048576


def test_an_index_that_does_not_fit_is_refused_before_the_work(
    shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    settings = BuildSettings(index=IndexSettings(memory_mb=0.001))
    with pytest.raises(PlanError, match=r"needs .* of memory.*--memory-mb"):
        build_gallery(folder_source(shop), embedder, out, settings)
    assert embedder.batches == []
    assert not out.exists()


def test_attributes_that_cannot_be_stored_are_refused_before_the_work(
    shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    records = (Record("a", "f.gif", {"size": 1}), Record("b", "cup/a.png", {"size": "large"}))
    with pytest.raises(InvalidParameterError, match=r"'size' is a number, and 'b' has 'large'"):
        build_gallery(listed(shop, *records), embedder, out)
    assert embedder.batches == []


def test_a_name_with_control_characters_is_left_out_and_reported(shop: Path, build: Build) -> None:
    (shop / "line\nbreak.png").write_bytes(encoded(picture(99)))
    report = build()
    assert report.indexed == 6
    assert [failure.reason for failure in report.failures] == [
        "Its name cannot be stored: it has control characters or is too long. Rename the file."
    ]


def test_the_index_is_of_the_kind_that_was_asked_for(
    shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    seen: list[int] = []
    settings = BuildSettings(index=IndexSettings(kind="hnsw", target_recall=0.9))
    build_gallery(folder_source(shop), embedder, out, settings, on_indexed=seen.append)
    assert sum(seen) == 6
    gallery = Gallery.open(out)
    segment = gallery.facts().segment
    gallery.close()
    assert segment is not None
    assert (segment.kind, segment.target_recall) == ("hnsw", 0.9)
