"""Adding and building: only what changed is embedded, and what is finished stays."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder import machine as cores
from kinlens.embedder.durable import lock_folder
from kinlens.embedder.errors import (
    BundleError,
    BundleMismatchError,
    GalleryBusyError,
    GalleryError,
    InvalidParameterError,
    PlanError,
    SourceError,
)
from kinlens.embedder.machine import core_count, memory_mb
from kinlens.embedder.types import Images
from kinlens.indexer.entries import Entry, Written
from kinlens.indexer.galleries import current_generation
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.ingest.add import AddReport, add_source
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.embed import embedded_batches
from kinlens.indexer.ingest.sources import Record, Source, csv_source, folder_source
from kinlens.indexer.types import GalleryExport, Progress
from tests.indexer.conftest import PHOTOS, CountingEmbedder, fails_at, faults, listed, query
from tests.support.seams import EmbedSettings, import_gallery
from tests.tiny import encoded, photo


@pytest.fixture
def gallery(built, embedder) -> Iterator[Gallery]:
    """The gallery of the shop, opened; the embedder has counted nothing yet."""
    embedder.batches.clear()
    gallery = Gallery.open(built)
    yield gallery
    gallery.close()


def add(gallery: Gallery, embedder: CountingEmbedder, **settings: int) -> AddReport:
    """Bring the gallery up to date with its folder."""
    source = folder_source(gallery.image_root)
    report = add_source(gallery, source, embedder, EmbedSettings(**settings))
    parts = (report.added, report.replaced, report.updated, report.unchanged)
    assert sum(parts) + len(report.failures) == report.found == source.count
    return report


def test_only_what_is_new_or_changed_is_embedded(gallery, shop, embedder) -> None:
    version, before = gallery.version, gallery.stored([*PHOTOS])
    report = add(gallery, embedder)
    assert (report.unchanged, report.embedded, gallery.version) == (6, 0, version)
    (shop / "hat" / "new.png").write_bytes(encoded(photo(99)))
    (shop / "cup" / "a.png").write_bytes(encoded(photo(50)))
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    report = add(gallery, embedder)
    assert (report.added, report.replaced, report.unchanged, report.embedded) == (2, 1, 5, 2)
    assert sum(embedder.batches) == 2
    for key in ("hat/new.png", "cup/a.png"):
        assert gallery.search(query(embedder, shop / key), 1)[0][0].key == key
    new = gallery.stored(["hat/new.png"])["hat/new.png"]
    assert (new.path, new.format, new.attributes) == ("hat/new.png", "PNG", {"class": "hat"})
    now = gallery.stored([*PHOTOS])
    assert {key for key in before if now[key].id != before[key].id} == {"cup/a.png"}
    copy, original = gallery.entries(["copy.gif", "f.gif"])
    np.testing.assert_array_equal(copy.vector, original.vector)


def test_attributes_that_the_source_does_not_decide_on_stay_as_others_change_them_meanwhile(
    gallery, built, shop, embedder, monkeypatch
) -> None:
    gallery.update({"f.gif": {"class": "toy", "price": 5}, "cup/a.png": {"price": 6, "size": 1}})
    (shop / "cup" / "a.png").write_bytes(encoded(photo(50)))
    other, store = Gallery.open(built), gallery.add

    def overtaken(entries: list[Entry], owned: frozenset[str] | None = None) -> Written:
        other.update({"f.gif": {"price": 7}, "cup/a.png": {"price": 8, "size": None, "new": True}})
        return store(entries, owned)

    monkeypatch.setattr(gallery, "add", overtaken)
    report = add(gallery, embedder)
    other.close()
    assert (report.replaced, report.updated, report.unchanged) == (1, 1, 4)
    items = gallery.stored(["f.gif", "cup/a.png"])
    assert items["f.gif"].attributes == {"price": 7}
    assert items["cup/a.png"].attributes == {"class": "cup", "price": 8, "new": True}
    monkeypatch.undo()
    (shop / "list.csv").write_text("key,path,price:number\nf.gif,f.gif,\n")
    add_source(gallery, csv_source(shop / "list.csv", shop), embedder)
    assert gallery.stored(["f.gif"])["f.gif"].attributes == {}


def test_an_item_whose_file_cannot_be_read_any_more_stays_and_is_reported(
    gallery, shop, embedder
) -> None:
    before = gallery.stored(["f.gif"])
    (shop / "f.gif").write_bytes(b"")
    (shop / "new.jpg").write_bytes(b"")
    report = add(gallery, embedder)
    reasons = {failure.key: failure.reason for failure in report.failures}
    assert "The gallery keeps its existing item with this key." in reasons["f.gif"]
    assert "The gallery keeps" not in reasons["new.jpg"]
    assert gallery.stored(["f.gif"]) == before
    assert (report.unchanged, gallery.size) == (5, 6)


def test_an_image_whose_content_is_removed_meanwhile_is_reported(
    gallery, shop, embedder, monkeypatch
) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    contents = gallery.contents

    def overtaken(sha256s: Sequence[str]) -> set[str]:
        known = contents(sha256s)
        if known:
            gallery.remove(["f.gif"])  # as another process may
        return known

    monkeypatch.setattr(gallery, "contents", overtaken)
    report = add(gallery, embedder)
    assert {failure.key for failure in report.failures} == {"copy.gif", "f.gif"}
    assert all("Run the same command again" in failure.reason for failure in report.failures)
    assert (report.unchanged, report.embedded) == (5, 0)
    monkeypatch.undo()
    assert add(gallery, embedder).added == 2


def test_what_does_not_belong_to_the_gallery_is_refused_before_the_work(
    gallery, shop, embedder
) -> None:
    other, root = CountingEmbedder(bundle_id="c" * 64), gallery.image_root
    kinds = Record("new", "f.gif", {"colour": "red"}), Record("other", "f.gif", {"class": 5})
    for source, model, error, message in (
        (listed(root, Record("a", "gone.png")), embedder, SourceError, "None of the 1 images of"),
        (folder_source(shop / "hat"), embedder, SourceError, r"relative to .*hat, .*image_root"),
        (folder_source(shop), other, BundleMismatchError, r"b{12}, not with c{12}"),
        (listed(root, *kinds), embedder, InvalidParameterError, "'class' is a text, and 'other' h"),
    ):
        with pytest.raises(error, match=message):
            add_source(gallery, source, model)
    assert embedder.batches == other.batches == []
    assert gallery.size == 6


class Breaking(CountingEmbedder):
    """Fails at the fifth batch."""

    def embed(self, images: Images) -> np.ndarray:
        if len(self.batches) == 4:
            raise BundleError("The model gave vectors that are not finite numbers.")
        return super().embed(images)


def test_a_model_that_fails_ends_its_threads_and_keeps_what_was_finished(
    gallery, shop, embedder
) -> None:
    for number in range(10):
        (shop / f"a{number}.png").write_bytes(encoded(photo(100 + number)))
    with pytest.raises(BundleError, match="not finite"):
        add(gallery, Breaking(), batch_size=1, workers=1)
    assert not [t for t in threading.enumerate() if t.name.startswith("embed")]
    assert gallery.size == 10
    assert add(gallery, embedder).added == 6


# The stream of images that builds and additions take.


def outcomes_of(source: Source, embedder: CountingEmbedder, *settings: int) -> dict[str, Record]:
    with embedded_batches(source, embedder, lambda _: (), EmbedSettings(*settings)) as batches:
        return {record.key: record for batch in batches for record in batch.records}


def test_unreadable_images_are_reported_with_reasons_and_do_not_stop_the_rest(
    shop, embedder
) -> None:
    cut = (shop / "cup" / "b.jpg").read_bytes()[:-200]
    wrong = {"text": (b"not an image", "not an image"), "empty": (b"", "empty")}
    wrong |= {f"cut{number}": (cut, "truncated") for number in range(6)}
    for name, (content, _) in wrong.items():
        (shop / f"{name}.png").write_bytes(content)
    records = [*folder_source(shop).records(), Record("gone", "gone.png"), Record("l", "x" * 300)]
    outcomes = outcomes_of(listed(shop, *records), embedder, 2, 2)
    failures = {key: outcome.failure for key, outcome in outcomes.items() if outcome.failure}
    assert failures.keys() == {"gone", "l", *(f"{name}.png" for name in wrong)}
    for name, (_, reason) in wrong.items():
        assert reason in failures[f"{name}.png"]
    assert "missing" in failures["gone"]
    assert failures["l"] == "File name too long"
    small = outcomes_of(folder_source(shop), embedder, 32, 1, 10)
    assert "the limit is 10" in str(small["f.gif"].failure)


def test_all_workers_embed_at_once(shop) -> None:
    barrier = threading.Barrier(3, timeout=20)

    class Meeting(CountingEmbedder):
        def embed(self, images: Images) -> np.ndarray:
            barrier.wait()
            return super().embed(images)

    assert len(outcomes_of(folder_source(shop), Meeting(), 1, 3)) == 6


def test_only_a_bounded_number_of_batches_is_ahead_of_the_reader(shop, embedder) -> None:
    for number in range(34):
        (shop / f"{number:03d}.png").write_bytes(encoded(photo(100 + number)))
    ahead: list[int] = []
    source, settings = folder_source(shop), EmbedSettings(batch_size=1, workers=2)
    with embedded_batches(source, embedder, lambda _: (), settings) as batches:
        for taken, _ in enumerate(batches, 1):
            ahead.append(len(embedder.batches) - taken)
    assert len(ahead) == 40
    assert max(ahead) <= 2 * 2


# Cores and memory: what this process may use, not what the machine has.


def test_threads_are_as_many_as_the_cores_of_this_process(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "quota_of", lambda group: None)
    assert core_count() == 3
    assert EmbedSettings().worker_count == 3
    assert EmbedSettings(workers=5).worker_count == 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "garbage"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({}, 8),
    ],
)
def test_the_share_of_time_of_a_container_counts_rounded_up(
    monkeypatch, tmp_path, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert core_count(tmp_path) == expected


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_limit_of_a_container_is_respected(tmp_path, name: str) -> None:
    whole = memory_mb(tmp_path)
    assert whole > 1
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{2**20}\n")
    assert memory_mb(tmp_path) == 1
    (tmp_path / name).write_text("max\n")
    assert memory_mb(tmp_path) == whole


# Building: the work of builds that were stopped or killed.


def items(path: Path) -> list[tuple[int, str, dict[str, object]]]:
    with closing(Gallery.open(path)) as gallery:
        return [(item.id, item.key, dict(item.attributes)) for item in gallery.items()]


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


@pytest.fixture
def stopped(shop, out, embedder) -> Path:
    """A gallery whose first build had embedded everything when the disk was full."""

    def hook(point: str) -> None:
        if point.startswith("segment"):
            fails_at(0)(point)

    with faults(hook), pytest.raises(GalleryError, match="No space is left"):
        build_gallery(folder_source(shop), embedder, out)
    return out


def test_the_work_of_a_stopped_build_is_kept_for_its_bundle_alone(stopped, shop, embedder) -> None:
    source, other = folder_source(shop), CountingEmbedder(bundle_id="c" * 64)
    [kept] = (stopped / "versions").glob(".draft-*")
    forgotten, living = kept.with_name(".draft-1"), kept.with_name(".draft-2")
    for draft in (forgotten, living):
        draft.mkdir()
        os.utime(draft, (0, 0))
    lock = lock_folder(living)
    report = build_gallery(source, other, stopped)
    assert {*(stopped / "versions").glob(".draft-*")} == {kept, living}
    os.close(lock)
    assert (report.embedded, report.reused, sum(other.batches)) == (6, 0, 6)
    Gallery.open(stopped, expected_bundle_id="c" * 64).close()
    report = build_gallery(source, embedder, stopped)
    assert (report.embedded, report.reused) == (0, 6)
    assert not list((stopped / "versions").glob(".*"))


def test_a_resumed_build_of_the_same_source_rewrites_no_attributes(
    stopped, shop, embedder, monkeypatch
) -> None:
    monkeypatch.setattr(Gallery, "update", None)  # a call would fail
    assert build_gallery(folder_source(shop), embedder, stopped).reused == 6


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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_what_is_written_while_a_gallery_is_built_is_in_the_new_generation(
    built, shop, embedder, is_stopped: bool
) -> None:
    vector = query(embedder, shop / "f.gif")[0]
    with closing(Gallery.open(built)) as old:
        old.add([Entry("earlier", vector)])

        def write(count: int) -> None:
            old.add([Entry("new", vector, attributes={"class": "x"}), Entry("gone", vector)])
            old.update({"cup/a.png": {"price": 5}})
            old.remove(["hat/d.bmp", "gone", "never"])
            if is_stopped:
                raise KeyboardInterrupt

        if is_stopped:
            with pytest.raises(KeyboardInterrupt):
                build_gallery(folder_source(shop), embedder, built, None, write)
        report = build_gallery(
            folder_source(shop),
            embedder,
            built,
            None,
            None if is_stopped else write,
            lambda count: None if old.stored(["late"]) else old.add([Entry("late", vector)]),
        )
        assert report.carried == 5
        with pytest.raises(GalleryBusyError, match="was replaced by a build"):
            old.remove(["new"])
    attributes = {key: own for _, key, own in items(built)}
    assert attributes.keys() == {*PHOTOS, "new", "late"} - {"hat/d.bmp"}
    assert attributes["new"] == {"class": "x"}
    assert attributes["cup/a.png"] == {"class": "cup", "price": 5}
    with closing(Gallery.open(built)) as new:
        assert {item.key for item in new.restore(["gone", "hat/d.bmp"])} == {"gone", "hat/d.bmp"}
    assert not build_gallery(folder_source(shop), embedder, built).carried


def test_an_update_during_a_build_brings_back_neither_image_nor_item_nor_price(
    built, shop, embedder
) -> None:
    build_gallery(
        listed(shop, Record("a", "f.gif", {"price": 1}), Record("b", "f.gif")), embedder, built
    )
    with closing(Gallery.open(built)) as old:

        def feed(count: int) -> None:
            old.update({"a": {"stock": 5, "price": 3}, "b": {"stock": 5}})

        source = listed(shop, Record("a", "hat/d.bmp", {"price": 2}))
        build_gallery(source, embedder, built, None, feed)
    [(_, key, attributes)] = items(built)
    assert (key, attributes) == ("a", {"price": 2, "stock": 5})
    with closing(Gallery.open(built)) as made:
        assert np.allclose(made.entries(["a"])[0].vector, query(embedder, shop / "hat/d.bmp")[0])


def test_an_attribute_of_another_type_in_the_source_does_not_lose_a_later_item(
    built, shop, embedder, caplog
) -> None:
    with closing(Gallery.open(built)) as old:
        new = Entry("new", query(embedder, shop / "f.gif")[0], attributes={"size": "L", "a": "b"})
        source = listed(shop, Record("f", "f.gif", {"size": 1}))
        build_gallery(source, embedder, built, None, lambda count: old.add([new]))
    assert [own for _, _, own in items(built)] == [{"size": 1}, {"a": "b"}]
    assert "Attribute 'size' is a number, and 'new' has 'L'" in caplog.text


def test_no_acknowledged_write_is_lost_when_a_build_replaces_the_gallery(
    built, shop, embedder
) -> None:
    vector, stored = query(embedder, shop / "f.gif")[0], []
    begun = threading.Event()

    def write() -> None:
        with closing(Gallery.open(built)) as old:
            while True:
                try:
                    old.add([Entry(f"new{len(stored)}", vector)])
                    stored.append(f"new{len(stored)}")
                except GalleryBusyError as error:
                    if "was replaced" in str(error):
                        return
                begun.set()

    writer = threading.Thread(target=write)

    def start(count: int) -> None:
        writer.start()
        assert begun.wait(60)

    build_gallery(folder_source(shop), embedder, built, None, start)
    writer.join(60)
    assert not writer.is_alive()
    assert {*stored, *PHOTOS} <= {key for _, key, _ in items(built)}


def test_a_build_with_another_model_refuses_the_writes_that_it_could_not_take(
    built, shop, embedder
) -> None:
    new = Entry("new", query(embedder, shop / "f.gif")[0])
    with closing(Gallery.open(built)) as old:

        def write(count: int) -> None:
            with pytest.raises(GalleryBusyError, match=r"build \(process \d+\) is replacing"):
                old.add([new])

        build_gallery(folder_source(shop), CountingEmbedder("c" * 64), built, None, write)


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
    built, embedder, tmp_path
) -> None:
    before = current_generation(built)
    bad = tmp_path / "bad"
    bad.mkdir()
    for number in range(5):
        (bad / f"{number}.jpg").write_text("not an image")
    with pytest.raises(SourceError, match=r"None of the 5 images .* 0\.jpg: The file is not"):
        build_gallery(folder_source(bad), embedder, built)
    assert current_generation(built) == before


@pytest.mark.parametrize("moment", ["embedding", "interruption", "indexing", "swap"])
@pytest.mark.parametrize("operation", ["build", "import"])
def test_what_a_compaction_erases_meanwhile_does_not_come_back(
    built, shop, embedder, operation: str, moment: str
) -> None:
    """Attributes that are removed stay away, too, in each spelling of a key."""
    composed, decomposed = "\u00e9.png", "e\u0301.png"
    (shop / decomposed).write_bytes(encoded(photo(77)))
    with closing(Gallery.open(built)) as old:
        old.add([replace(entry, key=composed) for entry in old.entries(["f.gif"])])
        entries = [replace(entry, attributes={}) for entry in chain(*old.scan())]
        facts = {"name": "shop", "bundle_id": old.bundle_id}
        dump = GalleryExport(facts, old.dim, len(entries), lambda: iter(entries))

        def run(on_progress: Progress, on_indexed: Progress) -> None:
            if operation == "build":
                build_gallery(folder_source(shop), embedder, built, None, on_progress, on_indexed)
            else:
                import_gallery(dump, built, on_progress=on_progress, on_indexed=on_indexed)

        left = ["embedding", "interruption", "indexing", "swap"]

        def reach(*moments: str) -> None:
            while left and left[0] in moments:
                reached = left.pop(0)
                if reached == "embedding":
                    old.update({composed: {"price": 5, "old": True}})
                    old.add([replace(entries[0], key="added.png")])
                if reached == moment:
                    old.update({composed: {"old": None}})
                    old.remove(["hat/d.bmp", "cup/a.png", "added.png"])
                    old.compact()
                    old.add([replace(entries[0], key="cup/a.png", attributes={"back": True})])
                    if moment == "interruption":
                        raise KeyboardInterrupt

        def hook(point: str) -> None:
            if point.startswith("generation"):
                reach("swap")
            elif point.startswith("current") and not left:  # while writers are kept out
                with pytest.raises(GalleryBusyError, match="is compacting"):
                    old.compact()

        for _ in range(2 if moment == "interruption" else 1):
            with faults(hook), contextlib.suppress(KeyboardInterrupt):
                run(lambda _: reach("embedding", "interruption"), lambda _: reach("indexing"))
        assert not left
        with pytest.raises(GalleryBusyError, match="was replaced by a build"):
            old.remove(["f.gif"])
    attributes = {key.replace(decomposed, composed): own for _, key, own in items(built)}
    assert attributes.keys() == {*PHOTOS, composed} - {"hat/d.bmp"}
    assert attributes["cup/a.png"] == {"back": True}
    assert attributes[composed] == {"price": 5}
