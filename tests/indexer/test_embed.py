"""The stream of images: in order, all threads at work, memory bounded."""

import threading
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import BundleError
from embedder.types import Images
from indexer.ingest.embed import Batch, Outcome, embedded_batches
from indexer.ingest.sources import Record, Source, folder_source
from tests.indexer.conftest import PICTURES, CountingEmbedder, listed, query
from tests.support.seams import EmbedSettings
from tests.tiny import encoded, picture


def many(tmp_path: Path, count: int) -> Source:
    root = tmp_path / "many"
    root.mkdir()
    for number in range(count):
        (root / f"{number:03d}.png").write_bytes(encoded(picture(number)))
    return folder_source(root)


def run(
    source: Source, embedder: CountingEmbedder, *settings: int, known: set[str] | None = None
) -> list[Batch]:
    embed = EmbedSettings(*settings)
    with embedded_batches(source, embedder, (known or set()).intersection, embed) as batches:
        return [*batches]


def outcomes_of(batches: list[Batch]) -> dict[str, Outcome]:
    return {outcome.record.key: outcome for batch in batches for outcome in batch.outcomes}


def vectors_of(batches: list[Batch]) -> dict[str, np.ndarray]:
    return {sha256: vector for batch in batches for sha256, vector in batch.vectors.items()}


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (2, 3), (100, 2)])
def test_outcomes_come_in_the_order_of_the_source_with_the_right_vectors(
    shop: Path, embedder: CountingEmbedder, batch_size: int, workers: int
) -> None:
    batches = run(folder_source(shop), embedder, batch_size, workers)
    outcomes, vectors = outcomes_of(batches), vectors_of(batches)
    assert [*outcomes] == sorted(PICTURES)
    for key, outcome in outcomes.items():
        assert outcome.format == PICTURES[key][0]
        expected = query(embedder, shop / key)[0]
        np.testing.assert_allclose(vectors[outcome.sha256], expected, atol=1e-5)
    assert max(embedder.batches) <= batch_size


def test_known_content_and_copies_in_a_batch_are_not_embedded_again(
    shop: Path, embedder: CountingEmbedder
) -> None:
    known = {*vectors_of(run(folder_source(shop), embedder))}
    embedder.batches.clear()
    for name in ("new", "newer"):
        (shop / f"{name}.png").write_bytes(encoded(picture(99)))
    batches = run(folder_source(shop), embedder, known=known)
    assert embedder.batches == [1]
    assert len(outcomes_of(batches)) == 8


def test_a_record_whose_content_is_known_by_its_hash_is_not_even_read(
    shop: Path, embedder: CountingEmbedder
) -> None:
    gone = Record("gone", "gone.png", {}, "a" * 64, "PNG")
    [outcome] = outcomes_of(run(listed(shop, gone), embedder, known={"a" * 64})).values()
    assert (outcome.failure, outcome.sha256, outcome.format) == (None, "a" * 64, "PNG")
    other = Record("other", "f.gif", {}, "a" * 64, "GIF")
    [outcome] = outcomes_of(run(listed(shop, other), embedder)).values()
    assert "was changed" in str(outcome.failure)


def test_unreadable_images_have_their_reasons_and_stop_nobody(
    shop: Path, embedder: CountingEmbedder
) -> None:
    cut = (shop / "cup" / "b.jpg").read_bytes()[:-200]
    (shop / "text.jpg").write_text("not an image")
    (shop / "empty.png").write_bytes(b"")
    for number in range(6):
        (shop / f"cut{number}.jpg").write_bytes(cut)
    batches = run(folder_source(shop), embedder, 2, 2)
    outcomes = outcomes_of(batches)
    failures = {key: outcome.failure for key, outcome in outcomes.items() if outcome.failure}
    assert {*failures} == {"text.jpg", "empty.png", *(f"cut{number}.jpg" for number in range(6))}
    assert "not an image" in failures["text.jpg"]
    assert "empty" in failures["empty.png"]
    assert all("truncated" in failures[f"cut{number}.jpg"] for number in range(6))
    assert len(vectors_of(batches)) == 6


def test_a_file_that_vanished_or_is_too_large_is_reported(
    shop: Path, embedder: CountingEmbedder
) -> None:
    records = (Record("f", "f.gif"), Record("gone", "gone.png"), Record("long", "x" * 300))
    outcomes = outcomes_of(run(listed(shop, *records), embedder, 32, 1, 10))
    assert "the limit is 10" in str(outcomes["f"].failure)
    assert "missing" in str(outcomes["gone"].failure)
    assert outcomes["long"].failure == "File name too long"


def test_all_workers_embed_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(3, timeout=20)

    class Meeting(CountingEmbedder):
        def embed(self, images: Images) -> np.ndarray:
            barrier.wait()
            return super().embed(images)

    assert len(vectors_of(run(many(tmp_path, 6), Meeting(), 1, 3))) == 6


def test_only_a_bounded_number_of_batches_is_ahead_of_the_reader(tmp_path: Path) -> None:
    embedder = CountingEmbedder()
    ahead: list[int] = []
    source, settings = many(tmp_path, 40), EmbedSettings(batch_size=1, workers=2)
    with embedded_batches(source, embedder, lambda _: (), settings) as batches:
        for taken, _ in enumerate(batches, 1):
            ahead.append(len(embedder.batches) - taken)
    assert len(ahead) == 40
    assert max(ahead) <= 2 * 2


def test_a_model_that_fails_ends_the_stream_and_its_threads(tmp_path: Path) -> None:
    class Breaking(CountingEmbedder):
        def embed(self, images: Images) -> np.ndarray:
            if len(self.batches) == 4:
                raise BundleError("The model gave vectors that are not finite numbers.")
            return super().embed(images)

    with pytest.raises(BundleError, match="not finite"):
        run(many(tmp_path, 20), Breaking(), 1, 1)
    assert not [t for t in threading.enumerate() if t.name.startswith("embed")]
