"""Building: counts, failures that are not fatal, and galleries that survive any failure."""

import json
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kinlens.embedder.errors import GalleryError, InvalidParameterError, PlanError, SourceError
from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.gallery import Gallery, current_generation
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.ingest.build import BuildReport, BuildSettings, build_gallery, needed_mb
from kinlens.indexer.ingest.sources import Record, csv_source, folder_source
from tests.indexer.conftest import (
    PHOTOS,
    CountingEmbedder,
    fails_at,
    faults,
    listed,
    query,
    small_files,
    stops_at,
)
from tests.support.seams import EmbedSettings, plan_index
from tests.tiny import encoded, photo

Build = Callable[[], BuildReport]


def keys(path: Path, embedder: FakeEmbedder, image: Path) -> list[str]:
    """The answer of a gallery to one image: every item, the nearest first."""
    with closing(Gallery.open(path)) as gallery:
        return [hit.key for hit in gallery.search(query(embedder, image), 1000)[0]]


def items(path: Path) -> list[tuple[int, str, dict[str, object]]]:
    with closing(Gallery.open(path)) as gallery:
        return [(item.id, item.key, dict(item.attributes)) for item in gallery.items()]


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
    for name in PHOTOS:
        assert keys(out, embedder, shop / name)[0] in {name, "copy.gif"}


def test_item_numbers_do_not_depend_on_threads_or_batches(
    shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    numbers = []
    for workers, batch_size in ((1, 100), (4, 1)):
        out = tmp_path / f"gallery-{workers}"
        settings = BuildSettings(embed=EmbedSettings(batch_size, workers))
        build_gallery(folder_source(shop), embedder, out, settings)
        numbers.append([(number, key) for number, key, _ in items(out)])
    assert numbers[0] == numbers[1] == list(enumerate(sorted(PHOTOS), 1))


def test_a_source_without_one_readable_image_is_refused_and_changes_nothing(
    built: Path, shop: Path, embedder: CountingEmbedder, tmp_path: Path
) -> None:
    before = current_generation(built)
    bad = tmp_path / "bad"
    bad.mkdir()
    for number in range(5):
        (bad / f"{number}.jpg").write_text("not an image")
    with pytest.raises(SourceError, match=r"None of the 5 images .* 0\.jpg: The file is not"):
        build_gallery(folder_source(bad), embedder, built)
    assert current_generation(built) == before


def test_a_new_build_replaces_the_generation_and_leaves_no_draft(
    built: Path, build: Build, shop: Path
) -> None:
    before = current_generation(built)
    (shop / "new.png").write_bytes(encoded(photo(99)))
    report = build()
    assert current_generation(built) == report.generation != before
    assert len(items(built)) == 7
    assert len(list((built / "versions").iterdir())) == 2


def test_a_full_disk_is_a_clear_message_and_the_old_gallery_stays(
    built: Path, build: Build, shop: Path
) -> None:
    before = current_generation(built)
    (shop / "new.png").write_bytes(encoded(photo(99)))
    with (
        small_files(300),
        pytest.raises(GalleryError, match=r"Cannot write .*Check the free space"),
    ):
        build()
    assert current_generation(built) == before
    assert build().indexed == 7


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
    for number in range(200):
        (shop / f"{number:03d}.png").write_bytes(encoded(photo(number), "PNG"))
    build_gallery(folder_source(shop), embedder, out)
    written_mb = sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) / 2**20
    estimate_mb = needed_mb(plan_index(200, embedder.dim, IndexSettings()))
    page_mb = 1  # a file of SQLite has a few pages, however small
    assert written_mb < estimate_mb + page_mb
    assert (
        needed_mb(plan_index(1_000_000, 512, IndexSettings(memory_mb=1e5)))
        > (4 * 512 + 256 + 310) / 1.048576
    )


def test_a_file_name_with_control_characters_is_skipped_and_reported(
    shop: Path, build: Build
) -> None:
    (shop / "line\nbreak.png").write_bytes(encoded(photo(99)))
    report = build()
    assert report.indexed == 6
    assert [failure.reason for failure in report.failures] == [
        "The file name cannot be stored: it has control characters or is too long. Rename the file."
    ]


@pytest.mark.parametrize(
    ("name", "expected"), [(None, "my-shop-2"), ("shop.v2", "shop.v2"), ("a/b", ""), ("ä", "")]
)
def test_the_name_is_given_or_that_of_the_folder_and_fits_in_a_url(
    shop: Path, tmp_path: Path, embedder: CountingEmbedder, name: str | None, expected: str
) -> None:
    out = tmp_path / "my shop (2)"
    if expected:
        build_gallery(folder_source(shop), embedder, out, BuildSettings(name))
        with closing(Gallery.open(out)) as gallery:
            assert gallery.name == expected
    else:
        with pytest.raises(InvalidParameterError, match=r"cannot be used in a URL.*--name"):
            build_gallery(folder_source(shop), embedder, out, BuildSettings(name))
        assert not out.exists()


def test_what_cannot_be_built_is_refused_before_the_work(
    shop: Path, out: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BuildSettings(index=IndexSettings(memory_mb=0.001))
    with pytest.raises(PlanError, match=r"needs .* of memory.*--memory-mb"):
        build_gallery(folder_source(shop), embedder, out, settings)
    assert not out.exists()
    records = (Record("a", "f.gif", {"size": 1}), Record("b", "cup/a.png", {"size": "large"}))
    with pytest.raises(InvalidParameterError, match=r"'size' is a number, and 'b' has 'large'"):
        build_gallery(listed(shop, *records), embedder, out)
    usage = namedtuple("usage", "total used free")(10, 10, 100)
    monkeypatch.setattr("kinlens.indexer.ingest.build.shutil.disk_usage", lambda path: usage)
    with pytest.raises(GalleryError, match=r"needs about .* MB in .*are free.*--out"):
        build_gallery(folder_source(shop), embedder, out)
    assert embedder.batches == []


# What a build that was stopped had done.


@pytest.fixture
def stopped(shop: Path, out: Path, embedder: CountingEmbedder) -> Path:
    """A gallery whose first build had embedded everything when the disk was full."""

    def hook(point: str) -> None:
        if point.startswith("segment"):
            fails_at(0)(point)

    with faults(hook), pytest.raises(GalleryError, match="No space left"):
        build_gallery(folder_source(shop), embedder, out)
    return out


def test_the_work_of_a_stopped_build_is_kept_for_its_bundle_alone(
    stopped: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    source, other = folder_source(shop), CountingEmbedder(bundle_id="c" * 64)
    report = build_gallery(source, other, stopped)
    assert (report.embedded, report.reused, sum(other.batches)) == (6, 0, 6)
    Gallery.open(stopped, expected_bundle_id="c" * 64).close()
    report = build_gallery(source, embedder, stopped)
    assert (report.embedded, report.reused) == (0, 6)
    assert not list((stopped / "versions").glob(".*"))


def test_what_a_stopped_build_had_of_another_source_is_not_published(
    stopped: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    (shop / "f.gif").unlink()
    (shop / "cup" / "a.png").write_text("not an image any more")
    file = shop / "list.csv"
    file.write_text("key,path,class:number\ncup/a.png,cup/a.png,1\nhat,hat/d.bmp,2\n")
    report = build_gallery(csv_source(file), embedder, stopped)
    assert (report.found, report.indexed, report.reused) == (2, 1, 0)
    assert sum(embedder.batches) == 6
    assert [(key, attributes) for _, key, attributes in items(stopped)] == [("hat", {"class": 2})]


def test_a_failure_in_any_step_leaves_the_old_or_the_new_gallery(
    shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    for name in [*PHOTOS][2:]:
        (shop / name).unlink()
    old = tmp_path / "old"
    build_gallery(folder_source(shop), embedder, old)
    before = current_generation(old)
    (shop / "new.png").write_bytes(encoded(photo(99)))
    finished: list[str] = []
    with faults(finished.append):
        build_gallery(folder_source(shop), embedder, shutil.copytree(old, tmp_path / "finished"))
    kinds = [point.partition(" of ")[0] for point in finished]  # of the draft, then of the gallery
    last = {kind: step for step, kind in enumerate(kinds)}
    for step in sorted({*last.values(), *map(kinds.index, kinds)}):
        out = Path(shutil.copytree(old, tmp_path / f"gallery-{step}"))
        seen: list[str] = []
        with faults(fails_at(step, seen)):
            assert failed(lambda out=out: build_gallery(folder_source(shop), embedder, out))
        is_new = seen.count("current: after rename") == 2  # the draft had the first one
        assert (current_generation(out) != before) == is_new
        assert ("new.png" in keys(out, embedder, shop / "new.png")) == is_new
        report = build_gallery(folder_source(shop), embedder, out)
        if "write: after commit" in seen and not is_new:
            assert (report.embedded, report.reused) == (0, 3)
        assert keys(out, embedder, shop / "new.png")[0] == "new.png"
        assert not list((out / "versions").glob(".*"))


def failed(work: Callable[[], object]) -> bool:
    try:
        work()
    except (GalleryError, OSError) as error:
        return "No space left on device" in str(error)
    return False


CHILD = """
import sys
from pathlib import Path
from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.sources import folder_source

shop, out = sys.argv[1:]
settings = BuildSettings(embed=EmbedSettings(batch_size=1, workers=2))
embedder = FakeEmbedder(bundle_id="b" * 64, delay_s=0.02)
build_gallery(folder_source(shop), embedder, out, settings, lambda n: print(n, flush=True))
"""


def test_a_killed_build_leaves_the_gallery_intact_and_continues_where_it_stopped(
    built: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    before = current_generation(built)
    for number in range(100):
        (shop / f"{number:03d}.png").write_bytes(encoded(photo(100 + number)))
    embedder.batches.clear()
    command = [sys.executable, "-c", CHILD, str(shop), str(built)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        done = 0
        while done < 20:
            done += int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert current_generation(built) == before
    report = build_gallery(folder_source(shop), embedder, built)
    assert report.reused >= done
    assert report.reused + report.embedded == 106
    assert sum(embedder.batches) == report.embedded > 0
    assert len(items(built)) == 106


def test_a_build_that_died_after_its_publication_takes_nothing_from_readers(
    shop: Path, out: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    # The first time this point is passed, the draft itself is made.
    with faults(stops_at("current: after rename", 2)), pytest.raises(KeyboardInterrupt):
        build_gallery(folder_source(shop), embedder, out)
    with closing(Gallery.open(out)) as reader:
        build_gallery(folder_source(shop), CountingEmbedder("c" * 64), out)
        other = tmp_path / "other"
        other.mkdir()
        (other / "new.png").write_bytes(encoded(photo(99)))
        build_gallery(folder_source(other), embedder, out)
        [hits] = reader.search(query(embedder, shop / "f.gif"), 1)
        assert (hits[0].key, reader.size) == ("f.gif", 6)
        assert current_generation(out) != reader.generation


def test_attributes_that_only_a_stopped_build_had_are_forgotten(
    shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    file = shop / "list.csv"
    file.write_text("key,path,price\na,f.gif,low\n")
    with faults(stops_at("adopt: before commit", 1)), pytest.raises(KeyboardInterrupt):
        build_gallery(csv_source(file), embedder, out)
    file.write_text("key,path\na,f.gif\n")
    assert build_gallery(csv_source(file), embedder, out).reused == 1
    with closing(Gallery.open(out)) as gallery:
        assert gallery.schema() == {}
