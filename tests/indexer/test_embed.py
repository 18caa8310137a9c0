"""The stream of images: in order, each content once, all threads at work, memory bounded."""

import threading
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import BundleError
from embedder.types import Images
from indexer.ingest.embed import Outcome, embed_source
from indexer.ingest.sources import Record, Source, folder_source
from tests.indexer.conftest import PICTURES, CountingEmbedder, query
from tests.support.seams import EmbedSettings, WorkFile
from tests.tiny import encoded, picture


@pytest.fixture
def work(tmp_path: Path, embedder: CountingEmbedder) -> WorkFile:
    return WorkFile(tmp_path / "work", embedder.bundle_id, embedder.dim)


def many(tmp_path: Path, count: int) -> Source:
    root = tmp_path / "many"
    root.mkdir()
    for number in range(count):
        (root / f"{number:03d}.png").write_bytes(encoded(picture(number)))
    return folder_source(root)


def by_key(outcomes: list[Outcome]) -> dict[str, Outcome]:
    return {outcome.record.key: outcome for outcome in outcomes}


@pytest.mark.parametrize(("batch_size", "workers"), [(1, 1), (2, 3), (100, 2)])
def test_outcomes_come_in_the_order_of_the_source_with_the_right_vectors(
    shop: Path, embedder: CountingEmbedder, work: WorkFile, batch_size: int, workers: int
) -> None:
    settings = EmbedSettings(batch_size, workers)
    outcomes = embed_source(folder_source(shop), embedder, work, settings)
    assert [outcome.record.key for outcome in outcomes] == sorted(PICTURES)
    assert [outcome.format for outcome in outcomes] == [PICTURES[k][0] for k in sorted(PICTURES)]
    vectors = work.vectors([outcome.sha256 for outcome in outcomes])
    expected = np.concatenate([query(embedder, shop / key) for key in sorted(PICTURES)])
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
    assert max(embedder.batches) <= batch_size


def test_identical_bytes_are_embedded_once(
    shop: Path, embedder: CountingEmbedder, work: WorkFile
) -> None:
    for number in range(5):
        (shop / f"copy{number}.gif").write_bytes((shop / "f.gif").read_bytes())
    outcomes = embed_source(folder_source(shop), embedder, work, EmbedSettings(2, 4))
    assert len(outcomes) == 11
    assert sum(embedder.batches) == len(work.known()) == 6
    assert all(outcome.failure is None for outcome in outcomes)


def test_what_the_work_file_knows_is_not_embedded_again(
    shop: Path, embedder: CountingEmbedder, work: WorkFile
) -> None:
    embed_source(folder_source(shop), embedder, work, EmbedSettings())
    embedder.batches.clear()
    (shop / "new.png").write_bytes(encoded(picture(99)))
    outcomes = embed_source(folder_source(shop), embedder, work, EmbedSettings())
    assert embedder.batches == [1]
    assert len(outcomes) == 7


def test_unreadable_images_have_their_reasons_and_stop_nobody(
    shop: Path, embedder: CountingEmbedder, work: WorkFile
) -> None:
    (shop / "text.jpg").write_text("not an image")
    (shop / "empty.png").write_bytes(b"")
    (shop / "cut.jpg").write_bytes((shop / "cup" / "b.jpg").read_bytes()[:-200])
    outcomes = by_key(embed_source(folder_source(shop), embedder, work, EmbedSettings(2, 2)))
    failures = {key: outcome.failure for key, outcome in outcomes.items() if outcome.failure}
    assert set(failures) == {"text.jpg", "empty.png", "cut.jpg"}
    assert "not an image" in failures["text.jpg"]
    assert "empty" in failures["empty.png"]
    assert "truncated" in failures["cut.jpg"]
    assert len(work.known()) == 6


def test_every_copy_of_a_broken_image_is_reported(
    shop: Path, embedder: CountingEmbedder, work: WorkFile
) -> None:
    cut = (shop / "cup" / "b.jpg").read_bytes()[:-200]
    for number in range(6):
        (shop / f"cut{number}.jpg").write_bytes(cut)
    outcomes = embed_source(folder_source(shop), embedder, work, EmbedSettings(2, 4))
    failed = [outcome for outcome in outcomes if outcome.failure]
    assert len(failed) == 6
    assert len({outcome.failure for outcome in failed}) == 1


def test_a_file_that_vanished_or_is_too_large_is_reported(
    shop: Path, embedder: CountingEmbedder, work: WorkFile
) -> None:
    records = (Record("f", "f.gif"), Record("gone", "gone.png"), Record("long", "x" * 300))
    source = Source(shop, records, "test")
    f, gone, long = embed_source(source, embedder, work, EmbedSettings(max_bytes=10))
    assert "the limit is 10" in str(f.failure)
    assert "missing" in str(gone.failure)
    assert long.failure == "File name too long"


def test_progress_adds_up_to_the_number_of_images(
    shop: Path, embedder: CountingEmbedder, work: WorkFile
) -> None:
    seen: list[int] = []
    embed_source(folder_source(shop), embedder, work, EmbedSettings(4, 2), seen.append)
    assert seen == [4, 2]


def test_all_workers_embed_at_once(tmp_path: Path) -> None:
    barrier = threading.Barrier(3, timeout=20)

    class Meeting(CountingEmbedder):
        def embed(self, images: Images) -> np.ndarray:
            barrier.wait()
            return super().embed(images)

    embedder = Meeting()
    work = WorkFile(tmp_path / "work", embedder.bundle_id, embedder.dim)
    embed_source(many(tmp_path, 6), embedder, work, EmbedSettings(batch_size=1, workers=3))
    assert len(work.known()) == 6
    work.close()


def test_only_a_bounded_number_of_batches_is_ahead_of_the_writer(tmp_path: Path) -> None:
    embedder = CountingEmbedder()
    ahead: list[int] = []

    class SlowWork(WorkFile):
        written = 0

        def add(self, vectors: dict[str, np.ndarray]) -> None:
            super().add(vectors)
            self.written += 1
            ahead.append(len(embedder.batches) - self.written)

    work = SlowWork(tmp_path / "work", embedder.bundle_id, embedder.dim)
    embed_source(many(tmp_path, 40), embedder, work, EmbedSettings(batch_size=1, workers=2))
    assert work.written == 40
    assert max(ahead) <= 2 * 2
    work.close()


def test_a_model_that_fails_stops_the_build_and_keeps_what_was_finished(tmp_path: Path) -> None:
    class Breaking(CountingEmbedder):
        def embed(self, images: Images) -> np.ndarray:
            if len(self.batches) == 4:
                raise BundleError("The model gave vectors that are not finite numbers.")
            return super().embed(images)

    embedder = Breaking()
    work = WorkFile(tmp_path / "work", embedder.bundle_id, embedder.dim)
    with pytest.raises(BundleError, match="not finite"):
        embed_source(many(tmp_path, 20), embedder, work, EmbedSettings(batch_size=1, workers=1))
    assert len(work.known()) == 4
    assert not [t for t in threading.enumerate() if t.name.startswith("embed")]
    work.close()
