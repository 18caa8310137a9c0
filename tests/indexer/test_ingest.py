"""Adding to a live gallery: only what changed is embedded, and nothing is lost by a kill."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import indexer.ingest.add
from embedder.errors import (
    BundleError,
    BundleMismatchError,
    InvalidParameterError,
    SourceError,
)
from embedder.types import Images
from indexer.gallery import Gallery
from indexer.ingest.add import AddReport, add_source
from indexer.ingest.sources import Record, csv_source, folder_source
from indexer.types import Entry, Written
from tests.indexer.conftest import PICTURES, CountingEmbedder, listed, query
from tests.support.seams import EmbedSettings
from tests.tiny import encoded, picture


@pytest.fixture
def gallery(built: Path, embedder: CountingEmbedder) -> Iterator[Gallery]:
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


def best(gallery: Gallery, embedder: CountingEmbedder, file: Path) -> str:
    [hits] = gallery.search(query(embedder, file), 1)
    return hits[0].key


def test_new_images_are_found_and_old_ones_are_not_touched(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    (shop / "hat" / "new.png").write_bytes(encoded(picture(99)))
    numbers = {item.key: item.id for item in gallery.items()}
    report = add(gallery, embedder)
    assert (report.added, report.unchanged, report.embedded) == (1, 6, 1)
    assert embedder.batches == [1]
    assert best(gallery, embedder, shop / "hat" / "new.png") == "hat/new.png"
    [item] = [item for item in gallery.items() if item.key == "hat/new.png"]
    assert (item.path, item.format, item.attributes) == ("hat/new.png", "PNG", {"class": "hat"})
    assert {key: gallery.stored([key])[key].id for key in numbers} == numbers


def test_a_source_without_changes_is_not_embedded_and_changes_nothing(
    gallery: Gallery, embedder: CountingEmbedder
) -> None:
    before = gallery.version
    report = add(gallery, embedder)
    assert (report.unchanged, report.embedded) == (6, 0)
    assert embedder.batches == []
    assert gallery.version == before


def test_other_content_under_an_old_key_replaces_the_item(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    old = gallery.stored(["f.gif"])["f.gif"]
    (shop / "f.gif").write_bytes(encoded(picture(50), "GIF"))
    report = add(gallery, embedder)
    assert (report.replaced, report.unchanged, report.embedded) == (1, 5, 1)
    new = gallery.stored(["f.gif"])["f.gif"]
    assert new.id != old.id
    assert best(gallery, embedder, shop / "f.gif") == "f.gif"
    assert gallery.size == 6


def test_content_that_is_known_under_another_key_is_not_embedded_again(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    report = add(gallery, embedder)
    assert (report.added, report.embedded) == (1, 0)
    assert embedder.batches == []
    [copy], [original] = gallery.entries(["copy.gif"]), gallery.entries(["f.gif"])
    np.testing.assert_array_equal(copy.vector, original.vector)


def test_other_attributes_alone_keep_the_number_and_the_vector(
    gallery: Gallery, embedder: CountingEmbedder
) -> None:
    source = folder_source(gallery.image_root)
    number = gallery.stored(["f.gif"])["f.gif"].id
    priced = [replace(r, attributes={"price": 5, "sale": True}) for r in source.records()]
    report = add_source(gallery, replace(source, records=lambda: iter(priced)), embedder)
    assert (report.updated, report.embedded) == (6, 0)
    assert embedder.batches == []
    item = gallery.stored(["f.gif"])["f.gif"]
    assert (item.id, item.attributes) == (number, {"price": 5, "sale": True})


def test_attributes_stay_unless_the_source_decides_on_them(
    gallery: Gallery, shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    gallery.update({"f.gif": {"class": "toy", "price": 5}, "cup/a.png": {"price": 6}})
    (shop / "cup" / "a.png").write_bytes(encoded(picture(50)))
    report = add(gallery, embedder)
    assert (report.replaced, report.updated, report.unchanged) == (1, 1, 4)
    items = gallery.stored(["f.gif", "cup/a.png"])
    assert items["f.gif"].attributes == {"price": 5}
    assert items["cup/a.png"].attributes == {"class": "cup", "price": 6}
    (tmp_path / "list.csv").write_text("key,path,price:number\nf.gif,f.gif,\n")
    add_source(gallery, csv_source(tmp_path / "list.csv", shop), embedder)
    assert gallery.stored(["f.gif"])["f.gif"].attributes == {}


@pytest.mark.parametrize("batch_size", [1, 100])
def test_a_change_by_others_that_is_acknowledged_during_an_add_is_kept(
    gallery: Gallery,
    built: Path,
    shop: Path,
    embedder: CountingEmbedder,
    monkeypatch: pytest.MonkeyPatch,
    batch_size: int,
) -> None:
    gallery.update({"f.gif": {"class": "toy", "price": 5}, "cup/a.png": {"price": 6, "size": 1}})
    (shop / "cup" / "a.png").write_bytes(encoded(picture(50)))
    other, store = Gallery.open(built), gallery.add

    def overtaken(entries: list[Entry], owned: frozenset[str] | None = None) -> Written:
        other.update({"f.gif": {"price": 7}, "cup/a.png": {"price": 8, "size": None, "new": True}})
        return store(entries, owned)

    monkeypatch.setattr(gallery, "add", overtaken)
    report = add(gallery, embedder, batch_size=batch_size)
    other.close()
    assert (report.replaced, report.updated, report.unchanged) == (1, 1, 4)
    items = gallery.stored(["f.gif", "cup/a.png"])
    assert items["f.gif"].attributes == {"price": 7}
    assert items["cup/a.png"].attributes == {"class": "cup", "price": 8, "new": True}


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (1, 4), (2, 3), (100, 2)])
def test_every_copy_in_every_batch_is_stored_with_the_same_vector(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder, batch_size: int, workers: int
) -> None:
    for number in range(9):
        (shop / f"copy{number}.png").write_bytes(encoded(picture(99)))
    report = add(gallery, embedder, batch_size=batch_size, workers=workers)
    assert (report.added, report.embedded) == (9, 1)
    assert 1 <= sum(embedder.batches) <= 1 + 2 * workers  # those in work at the same moment
    assert gallery.size == 15
    entries = gallery.entries([f"copy{number}.png" for number in range(9)])
    assert len({entry.vector.tobytes() for entry in entries}) == 1


def test_every_copy_of_a_broken_image_is_reported(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    for number in range(6):
        (shop / f"bad{number}.jpg").write_text("not an image")
    report = add(gallery, embedder, batch_size=1, workers=4)
    assert [failure.key for failure in report.failures] == [f"bad{n}.jpg" for n in range(6)]
    assert len({failure.reason for failure in report.failures}) == 1
    assert gallery.size == 6


def test_an_item_whose_file_cannot_be_read_any_more_stays_and_is_reported(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    before = gallery.stored(["f.gif"])
    (shop / "f.gif").write_bytes(b"")
    (shop / "new.jpg").write_bytes(b"")
    report = add(gallery, embedder)
    reasons = {failure.key: failure.reason for failure in report.failures}
    assert "The gallery keeps what it has under this key." in reasons["f.gif"]
    assert "The gallery keeps" not in reasons["new.jpg"]
    assert gallery.stored(["f.gif"]) == before
    assert (report.unchanged, gallery.size) == (5, 6)


def test_each_batch_is_visible_to_others_as_soon_as_it_is_reported(
    gallery: Gallery, built: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    for number in range(8):
        (shop / f"new{number}.png").write_bytes(encoded(picture(100 + number)))
    seen: list[tuple[int, int]] = []
    done = 0
    other = Gallery.open(built)

    def progress(count: int) -> None:
        nonlocal done
        done += count
        seen.append((done, other.size))

    source = folder_source(shop)
    new = [record for record in source.records() if record.key.startswith("new")]
    fresh = replace(source, records=lambda: iter(new))
    add_source(gallery, fresh, embedder, EmbedSettings(2, 2), progress)
    other.close()
    assert seen == [(2, 8), (4, 10), (6, 12), (8, 14)]


def test_content_that_another_process_removes_meanwhile_is_embedded_again(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    monkeypatch.setattr(gallery, "vectors_of_contents", lambda sha256s: {})
    report = add(gallery, embedder)
    assert (report.added, report.embedded, report.failures) == (1, 1, ())
    assert best(gallery, embedder, shop / "copy.gif") in {"copy.gif", "f.gif"}


def test_a_source_without_one_readable_image_is_refused(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    source = listed(gallery.image_root, Record("a", "gone.png"))
    with pytest.raises(SourceError, match=r"None of the 1 images of the list can be read"):
        add_source(gallery, source, embedder)
    assert gallery.size == 6


def test_images_that_start_from_another_folder_are_refused_with_both_names(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    with pytest.raises(SourceError, match=r"start from .*hat, those of gallery .*--image-root"):
        add_source(gallery, folder_source(shop / "hat"), embedder)
    assert embedder.batches == []


def test_another_bundle_is_refused_before_the_work(gallery: Gallery, shop: Path) -> None:
    other = CountingEmbedder(bundle_id="c" * 64)
    with pytest.raises(BundleMismatchError, match=r"b{12}, not with c{12}"):
        add_source(gallery, folder_source(shop), other)
    assert other.batches == []


def test_an_attribute_of_another_type_is_refused_before_the_work(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    records = (Record("new", "f.gif", {"colour": "red"}), Record("other", "f.gif", {"class": 5}))
    source = listed(gallery.image_root, *records)
    with pytest.raises(InvalidParameterError, match=r"'class' is a text, and 'other' has 5"):
        add_source(gallery, source, embedder)
    assert gallery.size == 6
    assert embedder.batches == []


def test_a_model_that_fails_keeps_what_was_finished(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    class Breaking(CountingEmbedder):
        def embed(self, images: Images) -> np.ndarray:
            if len(self.batches) == 4:
                raise BundleError("The model gave vectors that are not finite numbers.")
            return super().embed(images)

    for number in range(10):
        (shop / f"a{number}.png").write_bytes(encoded(picture(100 + number)))
    with pytest.raises(BundleError, match="not finite"):
        add(gallery, Breaking(), batch_size=1, workers=1)
    assert gallery.size == 10
    assert add(gallery, embedder).added == 6


CHILD = """
import sys
from pathlib import Path
from embedder.fake import FakeEmbedder
from indexer.ingest.embed import EmbedSettings
from indexer.gallery import Gallery
from indexer.ingest.sources import folder_source
from indexer.ingest.add import add_source

gallery = Gallery.open(sys.argv[1])
done = 0
def progress(count):
    global done
    done += count
    print(done, flush=True)

embedder = FakeEmbedder(bundle_id="b" * 64, delay_s=0.02)
add_source(gallery, folder_source(sys.argv[2]), embedder, EmbedSettings(1, 2), progress)
"""


def test_a_killed_add_keeps_its_batches_and_continues_with_the_same_call(
    built: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    for number in range(100):
        (shop / f"{number:03d}.png").write_bytes(encoded(picture(100 + number)))
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(built), str(shop)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(indexer.ingest.add.__file__).parents[2],
    )
    with process:
        assert process.stdout is not None
        done = next(int(line) for line in process.stdout if int(line) >= 20)
        process.send_signal(signal.SIGKILL)
    embedder.batches.clear()
    gallery = Gallery.open(built)
    kept = gallery.size - 6
    assert kept >= done
    report = add(gallery, embedder)
    assert (report.added, report.unchanged) == (100 - kept, 6 + kept)
    assert sum(embedder.batches) == 100 - kept
    assert gallery.size == 106
    gallery.close()


def test_all_keys_of_the_shop_are_still_there_after_every_kind_of_change(
    gallery: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    (shop / "f.gif").write_bytes(encoded(picture(50), "GIF"))
    (shop / "cup" / "new.png").write_bytes(encoded(picture(51)))
    (shop / "hat" / "bad.png").write_text("not an image")
    add(gallery, embedder, batch_size=2, workers=3)
    assert sorted(item.key for item in gallery.items()) == sorted([*PICTURES, "cup/new.png"])
