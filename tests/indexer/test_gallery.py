"""A published gallery: right answers, safe images, and refusal of whatever does not fit."""

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from embedder.errors import (
    BundleMismatchError,
    GalleryCorruptError,
    GalleryNotFoundError,
    ItemNotFoundError,
)
from indexer.gallery import Gallery
from indexer.ingest.build import BuildReport
from indexer.types import SearchOptions
from tests.indexer.conftest import PICTURES, CountingEmbedder, query
from tests.tiny import encoded, picture


def version_of(path: Path) -> Path:
    return path / "versions" / (path / "CURRENT").read_text().strip()


def number_of(gallery: Gallery, key: str) -> int:
    return gallery.stored([key])[key].id


@pytest.fixture
def opened(built: Path) -> Iterator[Gallery]:
    """The gallery of the shop, open."""
    gallery = Gallery.open(built)
    yield gallery
    gallery.close()


def test_each_image_finds_itself_first_with_score_one(
    opened: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    queries = np.concatenate([query(embedder, shop / key) for key in PICTURES])
    together = opened.search(queries, 4)
    for key, row, hits in zip(PICTURES, queries, together, strict=True):
        assert hits[0].key == key
        assert hits[0].score == pytest.approx(1, abs=1e-5)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        [alone] = opened.search(row[None], 4)
        assert [hit.key for hit in alone] == [hit.key for hit in hits]
        scores = [hit.score for hit in hits]
        assert [hit.score for hit in alone] == pytest.approx(scores, abs=1e-6)


def test_a_gallery_tells_what_it_is(opened: Gallery, embedder: CountingEmbedder) -> None:
    assert (opened.name, opened.size, opened.dim) == ("gallery", 6, 32)
    assert opened.bundle_id == embedder.bundle_id
    assert len(opened.version) == 64
    assert opened.created_at.endswith("+00:00")


def test_identical_images_come_in_the_order_of_their_numbers(
    shop: Path, build: Callable[[], BuildReport], out: Path, embedder: CountingEmbedder
) -> None:
    for number in (3, 1, 2):
        (shop / f"z{number}.gif").write_bytes((shop / "f.gif").read_bytes())
    build()
    gallery = Gallery.open(out)
    for k in (1, 2, 3, 4, 9):
        hits = gallery.search(query(embedder, shop / "f.gif"), k)[0]
        assert [hit.key for hit in hits[:4]] == ["f.gif", "z1.gif", "z2.gif", "z3.gif"][:k]
    gallery.close()


def test_min_score_keeps_exactly_the_hits_that_reach_it(
    opened: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    vector = query(embedder, shop / "f.gif")
    every = opened.search(vector, 6)[0]
    for hit in every:
        options = SearchOptions(min_score=max(hit.score, -1.0))
        [kept] = opened.search(vector, 6, options)
        assert kept == [other for other in every if other.score >= hit.score]
    assert opened.search(-vector, 6, SearchOptions(min_score=1.0)) == [[]]


def test_threads_search_and_read_images_at_once(
    opened: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    vectors = {key: query(embedder, shop / key) for key in PICTURES}

    def check(key: str) -> bool:
        hit = opened.search(vectors[key], 2)[0][0]
        return hit.key == key and len(opened.image(hit.id).data) > 0

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, list(PICTURES) * 20))


def test_images_come_as_the_bytes_that_were_indexed(opened: Gallery, shop: Path) -> None:
    types = {
        "cup/a.png": "image/png",
        "cup/b.jpg": "image/jpeg",
        "hat/c.webp": "image/webp",
        "f.gif": "image/gif",
    }
    for key, media_type in types.items():
        image = opened.image(number_of(opened, key))
        assert image.data == (shop / key).read_bytes()
        assert image.media_type == media_type


@pytest.mark.parametrize("key", ["hat/d.bmp", "hat/e.tiff"])
def test_what_browsers_do_not_show_becomes_a_jpeg(opened: Gallery, shop: Path, key: str) -> None:
    image = opened.image(number_of(opened, key))
    assert image.media_type == "image/jpeg"
    shown, original = Image.open(io.BytesIO(image.data)), Image.open(shop / key)
    assert shown.format == "JPEG"
    assert shown.size == original.size
    assert np.abs(np.asarray(shown, np.int16) - np.asarray(original, np.int16)).mean() < 5


@pytest.mark.parametrize("number", [-1, 0, 7, 2**63, 10**30])
def test_an_unknown_number_is_refused(opened: Gallery, number: int) -> None:
    with pytest.raises(ItemNotFoundError, match=rf"no item {number};"):
        opened.image(number)


def test_a_file_that_is_gone_or_changed_is_not_served_and_others_are(
    opened: Gallery, shop: Path
) -> None:
    (shop / "f.gif").unlink()
    (shop / "cup" / "a.png").write_bytes(encoded(picture(77)))
    for key in ("f.gif", "cup/a.png"):
        with pytest.raises(ItemNotFoundError, match="the file is gone or was changed"):
            opened.image(number_of(opened, key))
    assert opened.image(number_of(opened, "cup/b.jpg")).data


def test_a_pipe_in_place_of_an_image_keeps_nobody_waiting(opened: Gallery, shop: Path) -> None:
    number = number_of(opened, "f.gif")
    (shop / "f.gif").unlink()
    os.mkfifo(shop / "f.gif")
    with ThreadPoolExecutor(1) as pool, pytest.raises(ItemNotFoundError):
        pool.submit(opened.image, number).result(timeout=10)


def test_a_file_that_has_become_huge_is_not_read(
    opened: Gallery, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(shop / "f.gif", 2**30 + 1)  # sparse
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("was read"))
    with pytest.raises(ItemNotFoundError, match="was changed"):
        opened.image(number_of(opened, "f.gif"))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_an_image_that_cannot_be_read_just_now_is_not_called_gone(
    opened: Gallery, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = number_of(opened, "f.gif")

    def failing(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(GalleryCorruptError, match=rf"f\.gif .*{os.strerror(code)}.*Check the"):
        opened.image(number)


def test_the_image_root_is_told_and_cannot_be_changed(opened: Gallery, shop: Path) -> None:
    assert opened.image_root == shop.resolve()
    with pytest.raises(AttributeError):
        opened.image_root = Path("/etc")  # type: ignore[misc]


def test_a_file_replaced_by_a_link_out_of_the_root_is_not_served(
    opened: Gallery, shop: Path, tmp_path: Path
) -> None:
    (shop / "f.gif").rename(tmp_path / "moved.gif")
    (shop / "f.gif").symlink_to(tmp_path / "moved.gif")
    with pytest.raises(ItemNotFoundError):
        opened.image(number_of(opened, "f.gif"))


def test_images_may_have_moved_to_another_root(built: Path, shop: Path, tmp_path: Path) -> None:
    shop.rename(tmp_path / "moved")
    gallery = Gallery.open(built, image_root=tmp_path / "moved")
    assert gallery.image(1).data == (tmp_path / "moved" / "cup" / "a.png").read_bytes()
    gallery.close()


def test_a_gallery_of_another_bundle_is_refused_by_both_ids(built: Path) -> None:
    message = r"bundle b{12}, .* bundle in use is c{12}:.*kinlens-index build .*--bundle"
    with pytest.raises(BundleMismatchError, match=message):
        Gallery.open(built, expected_bundle_id="c" * 64)


def test_a_missing_gallery_is_told_from_a_damaged_one(built: Path, tmp_path: Path) -> None:
    with pytest.raises(GalleryNotFoundError, match="No gallery at"):
        Gallery.open(tmp_path / "none")
    manifest = version_of(built) / "manifest.json"
    for damage in (partial(manifest.write_text, "{"), manifest.unlink):
        damage()
        with pytest.raises(GalleryCorruptError, match=r"manifest\.json is not a gallery manifest"):
            Gallery.open(built)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "other"}, "does not match its digest"),
        ({"bundle_id": "c" * 64}, "does not match its digest"),
        ({"source_root": "/etc"}, "does not match its digest"),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"dim": "many"}, "dim: Input should be a valid integer"),
        ({"schema_version": 1}, "schema 1, .* reads 2.*kinlens-index build"),
        ({"schema_version": 3}, "schema 3, .* reads 2.*or a newer one"),
        ({"schema_version": "new"}, "schema_version: Input should be 2"),
    ],
)
def test_an_edited_or_foreign_manifest_is_refused(
    built: Path, change: dict[str, object], message: str
) -> None:
    file = version_of(built) / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(GalleryCorruptError, match=message):
        Gallery.open(built)


def test_a_generation_under_another_name_is_refused(built: Path) -> None:
    generation = version_of(built)
    generation.rename(generation.with_name("0" * 12))
    (built / "CURRENT").write_text("0" * 12)
    with pytest.raises(GalleryCorruptError, match=r"belongs to the generation .*its name back"):
        Gallery.open(built)


def test_an_open_gallery_answers_while_newer_ones_are_published(
    built: Path, shop: Path, build: Callable[[], BuildReport], embedder: CountingEmbedder
) -> None:
    gallery = Gallery.open(built)
    version = version_of(built)
    for number in range(3):
        (shop / f"new{number}.png").write_bytes(encoded(picture(90 + number)))
        build()
    with ThreadPoolExecutor(1) as pool:  # a thread that has no connection yet
        hits = pool.submit(gallery.search, query(embedder, shop / "f.gif"), 100).result()[0]
    assert (hits[0].key, len(hits)) == ("f.gif", 6)
    assert version.exists()
    gallery.close()
    build()
    assert not version.exists()


def test_closing_leaves_no_descriptor_open_and_neither_does_a_failed_opening(
    built: Path,
) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    Gallery.open(built).close()
    before = descriptors()
    Gallery.open(built).close()
    with pytest.raises(BundleMismatchError):
        Gallery.open(built, expected_bundle_id="c" * 64)
    assert descriptors() == before
