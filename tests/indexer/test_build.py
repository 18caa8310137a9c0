"""Building: counts, failures that are not fatal, and galleries that survive any failure."""

import json
import signal
import subprocess
import sys
from collections import namedtuple
from contextlib import closing
from pathlib import Path

import pytest

from kinlens.embedder.errors import GalleryError, InvalidParameterError, PlanError, SourceError
from kinlens.indexer.gallery import Gallery, current_generation
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.sources import Record, csv_source, folder_source
from tests.indexer.conftest import PHOTOS, CountingEmbedder, fails_at, faults, listed, query
from tests.tiny import encoded, photo


def items(path: Path) -> list[tuple[int, str, dict[str, object]]]:
    with closing(Gallery.open(path)) as gallery:
        return [(item.id, item.key, dict(item.attributes)) for item in gallery.items()]


def test_every_readable_image_is_indexed_and_the_report_adds_up(build, shop, out, embedder) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "text.jpg").write_text("not an image")
    (shop / "line\nbreak.png").write_bytes(encoded(photo(99)))
    report = build()
    assert (report.found, report.indexed, report.embedded) == (9, 7, 6)
    assert (report.reused, report.duplicates) == (0, 1)
    unnamed, text = sorted(report.failures, key=lambda failure: failure.key)
    assert "has control characters or is too long" in unnamed.reason
    assert text.key == "text.jpg"
    written = json.loads((out / "versions" / report.generation / "report.json").read_text())
    assert written == json.loads(report.model_dump_json(exclude={"generation"}))
    with closing(Gallery.open(out)) as gallery:
        for name in PHOTOS:
            [[hit]] = gallery.search(query(embedder, shop / name), 1)
            assert hit.key in {name, "copy.gif"}


def test_what_cannot_be_built_is_refused_before_the_work(shop, out, embedder, monkeypatch) -> None:
    for settings, error, message in (
        (BuildSettings(index=IndexSettings(memory_mb=0.001)), PlanError, "memory.*--memory-mb"),
        (BuildSettings("a/b"), InvalidParameterError, r"cannot be used in a URL.*--name"),
    ):
        with pytest.raises(error, match=message):
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
def stopped(shop, out, embedder) -> Path:
    """A gallery whose first build had embedded everything when the disk was full."""

    def hook(point: str) -> None:
        if point.startswith("segment"):
            fails_at(0)(point)

    with faults(hook), pytest.raises(GalleryError, match="No space left"):
        build_gallery(folder_source(shop), embedder, out)
    return out


def test_the_work_of_a_stopped_build_is_kept_for_its_bundle_alone(stopped, shop, embedder) -> None:
    source, other = folder_source(shop), CountingEmbedder(bundle_id="c" * 64)
    report = build_gallery(source, other, stopped)
    assert (report.embedded, report.reused, sum(other.batches)) == (6, 0, 6)
    Gallery.open(stopped, expected_bundle_id="c" * 64).close()
    report = build_gallery(source, embedder, stopped)
    assert (report.embedded, report.reused) == (0, 6)
    assert not list((stopped / "versions").glob(".*"))


def test_what_a_stopped_build_had_of_another_source_is_not_published(
    stopped, shop, embedder
) -> None:
    (shop / "f.gif").unlink()
    (shop / "cup" / "a.png").write_text("not an image any more")
    file = shop / "list.csv"
    file.write_text("key,path,class:number\ncup/a.png,cup/a.png,1\nhat,hat/d.bmp,2\n")
    report = build_gallery(csv_source(file), embedder, stopped)
    assert (report.found, report.indexed, report.reused) == (2, 1, 0)
    assert sum(embedder.batches) == 6
    assert [(key, attributes) for _, key, attributes in items(stopped)] == [("hat", {"class": 2})]


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
    built, shop, embedder
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
