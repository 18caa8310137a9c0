"""Verification: finds what is wrong and accepts what only looks alike."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import BundleMismatchError, GalleryCorruptError
from indexer.build import BuildReport
from indexer.faiss_engine import FaissStore
from indexer.verify import sampled_ids, verify_gallery
from tests.indexer.conftest import CountingEmbedder
from tests.indexer.test_gallery import restamp, version_of
from tests.tiny import encoded, picture


@pytest.mark.parametrize("with_images", [False, True])
def test_a_good_gallery_has_no_problems(
    built: Path, embedder: CountingEmbedder, with_images: bool
) -> None:
    seen: list[int] = []
    report = verify_gallery(built, embedder if with_images else None, on_progress=seen.append)
    assert (report.size, report.checked, report.problems) == (6, 6, ())
    assert report.from_images == with_images
    assert sum(seen) == 6


@pytest.mark.parametrize("with_images", [False, True])
def test_copies_and_equal_pixels_in_other_files_are_no_problem(
    shop: Path,
    build: Callable[[], BuildReport],
    out: Path,
    embedder: CountingEmbedder,
    with_images: bool,
) -> None:
    (shop / "a-copy.gif").write_bytes((shop / "f.gif").read_bytes())
    (shop / "z.bmp").write_bytes(encoded(picture(1), "BMP"))
    build()
    report = verify_gallery(out, embedder if with_images else None)
    assert (report.checked, report.problems) == (8, ())


def tampered(built: Path, numbers: list[int], vectors: Callable[[np.ndarray], np.ndarray]) -> None:
    """Write other vectors under the same numbers, with hashes that fit."""
    path = version_of(built) / "index.faiss"
    old = FaissStore.load(path).vectors(np.arange(6))
    path.unlink()
    store = FaissStore.create(32)
    store.add(np.array(numbers), vectors(old))
    store.save(path)
    restamp(built)


def test_vectors_under_the_wrong_numbers_are_found_with_the_images_only(
    built: Path, embedder: CountingEmbedder
) -> None:
    tampered(built, [1, 0, 2, 3, 4, 5], lambda old: old)
    report = verify_gallery(built, embedder)
    assert [problem.key for problem in report.problems] == ["cup/a.png", "cup/b.jpg"]
    assert "cosine" in report.problems[0].reason
    assert verify_gallery(built).problems == ()


def test_vectors_that_do_not_find_themselves_are_found_without_images(built: Path) -> None:
    def shorter(old: np.ndarray) -> np.ndarray:
        new = old.copy()
        new[3] = 0.9995 * old[4]
        return new

    tampered(built, list(range(6)), shorter)
    report = verify_gallery(built)
    assert [problem.key for problem in report.problems] == ["hat/c.webp"]
    assert "before itself" in report.problems[0].reason


def test_images_that_are_gone_changed_or_damaged_are_named(
    built: Path, shop: Path, embedder: CountingEmbedder
) -> None:
    (shop / "f.gif").unlink()
    (shop / "cup" / "a.png").write_bytes(encoded(picture(77)))
    report = verify_gallery(built, embedder)
    assert {problem.key for problem in report.problems} == {"f.gif", "cup/a.png"}
    assert verify_gallery(built).problems == ()


def test_moved_images_are_found_below_their_new_root(
    built: Path, shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    shop.rename(tmp_path / "moved")
    assert len(verify_gallery(built, embedder).problems) == 6
    assert verify_gallery(built, embedder, image_root=tmp_path / "moved").problems == ()


def test_another_bundle_and_a_damaged_file_are_refused(built: Path) -> None:
    with pytest.raises(BundleMismatchError):
        verify_gallery(built, CountingEmbedder(bundle_id="c" * 64))
    (version_of(built) / "report.json").write_text("{}")
    with pytest.raises(GalleryCorruptError, match=r"report\.json"):
        verify_gallery(built)


def test_a_sample_is_the_same_each_time_and_within_the_gallery(built: Path) -> None:
    assert sampled_ids(6) == [0, 1, 2, 3, 4, 5]
    assert sampled_ids(6, 100) == sampled_ids(6)
    sample = sampled_ids(1_000_000)
    assert sample == sampled_ids(1_000_000) == sorted(set(sample))
    assert len(sample) == 1000
    assert 0 <= sample[0] < sample[-1] < 1_000_000
    assert verify_gallery(built, sample=2).checked == 2
