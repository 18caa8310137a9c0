"""Adding to a live gallery: only what changed is embedded, and what is finished stays; and the
stream of images behind it: in order, all threads at work, memory bounded."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kinlens.embedder.errors import (
    BundleError,
    BundleMismatchError,
    InvalidParameterError,
    SourceError,
)
from kinlens.embedder.types import Images
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.add import AddReport, add_source
from kinlens.indexer.ingest.embed import Outcome, embedded_batches
from kinlens.indexer.ingest.sources import Record, Source, csv_source, folder_source
from kinlens.indexer.types import Entry, Written
from tests.indexer.conftest import PHOTOS, CountingEmbedder, listed, query
from tests.support.seams import EmbedSettings
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


def test_what_does_not_belong_to_the_gallery_is_refused_before_the_work(
    gallery, shop, embedder
) -> None:
    other, root = CountingEmbedder(bundle_id="c" * 64), gallery.image_root
    kinds = Record("new", "f.gif", {"colour": "red"}), Record("other", "f.gif", {"class": 5})
    for source, model, error, message in (
        (listed(root, Record("a", "gone.png")), embedder, SourceError, "None of the 1 images of"),
        (folder_source(shop / "hat"), embedder, SourceError, r"relative to .*hat, .*--image-root"),
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


def outcomes_of(source: Source, embedder: CountingEmbedder, *settings: int) -> dict[str, Outcome]:
    with embedded_batches(source, embedder, lambda _: (), EmbedSettings(*settings)) as batches:
        return {outcome.record.key: outcome for batch in batches for outcome in batch.outcomes}


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
