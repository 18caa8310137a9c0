"""A published gallery: right answers, safe images, and refusal of whatever does not fit."""

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kinlens.embedder.errors import (
    BundleMismatchError,
    GalleryCorruptError,
    ItemNotFoundError,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import BuildReport
from tests.indexer.conftest import PHOTOS, CountingEmbedder, generation_of, query
from tests.tiny import encoded, photo


def number_of(gallery: Gallery, key: str) -> int:
    return gallery.stored([key])[key].id


@pytest.fixture
def opened(built: Path) -> Iterator[Gallery]:
    gallery = Gallery.open(built)
    yield gallery
    gallery.close()


def test_a_gallery_describes_itself_and_each_of_its_images_finds_itself(
    opened: Gallery, shop: Path, embedder: CountingEmbedder
) -> None:
    assert (opened.name, opened.size, opened.dim) == ("gallery", 6, 32)
    assert (opened.bundle_id, opened.image_root) == (embedder.bundle_id, shop.resolve())
    assert opened.created_at.endswith("+00:00")
    queries = np.concatenate([query(embedder, shop / key) for key in PHOTOS])
    for key, row, hits in zip(PHOTOS, queries, opened.search(queries, 4), strict=True):
        assert hits[0].key == key
        assert hits[0].score == pytest.approx(1, abs=1e-5)
        [alone] = opened.search(row[None], 4)
        assert [hit.key for hit in alone] == [hit.key for hit in hits]


def test_images_come_as_the_bytes_that_were_indexed_or_as_jpeg_for_browsers(
    built: Path, shop: Path, tmp_path: Path
) -> None:
    moved = shop.rename(tmp_path / "moved")
    with closing(Gallery.open(built, image_root=moved)) as gallery:
        for key, (kind, _) in PHOTOS.items():
            image = gallery.image(number_of(gallery, key))
            if kind in ("BMP", "TIFF"):
                assert image.media_type == "image/jpeg"
                shown, original = Image.open(io.BytesIO(image.data)), Image.open(moved / key)
                assert (shown.format, shown.size) == ("JPEG", original.size)
                far = np.asarray(shown, np.int16) - np.asarray(original, np.int16)
                assert np.abs(far).mean() < 5
            else:
                assert image.media_type == f"image/{kind.lower()}"
                assert image.data == (moved / key).read_bytes()


@pytest.mark.parametrize("number", [-1, 0, 7, 2**63, 10**30])
def test_an_unknown_number_is_refused(opened: Gallery, number: int) -> None:
    with pytest.raises(ItemNotFoundError, match=rf"no item {number};"):
        opened.image(number)


def test_a_file_that_is_gone_changed_or_something_else_is_not_served_and_others_are(
    opened: Gallery, shop: Path, tmp_path: Path
) -> None:
    changes: list[Callable[[Path], object]] = [
        Path.unlink,
        lambda file: file.write_bytes(encoded(photo(77))),
        lambda file: (file.unlink(), os.mkfifo(file)),
        lambda file: file.symlink_to(file.rename(tmp_path / "outside the root.gif")),
    ]
    number, content = number_of(opened, "f.gif"), (shop / "f.gif").read_bytes()
    for change in changes:
        change(shop / "f.gif")
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(ItemNotFoundError, match="was removed or changed"),
        ):
            pool.submit(opened.image, number).result(timeout=10)
        (shop / "f.gif").unlink(missing_ok=True)
        (shop / "f.gif").write_bytes(content)
    assert opened.image(number).data == content


def test_a_file_that_has_become_huge_is_not_read(
    opened: Gallery, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(shop / "f.gif", 2**30 + 1)  # sparse
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("was read"))
    with pytest.raises(ItemNotFoundError, match="was removed or changed"):
        opened.image(number_of(opened, "f.gif"))


@pytest.mark.parametrize("code", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_an_image_that_cannot_be_read_now_is_not_reported_as_removed(
    opened: Gallery, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = number_of(opened, "f.gif")

    def failing(path: Path) -> bytes:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "read_bytes", failing)
    with pytest.raises(GalleryCorruptError, match=rf"f\.gif .*{os.strerror(code)}.*Check the"):
        opened.image(number)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, r"manifest\.json is not a gallery manifest"),
        ("{", r"manifest\.json is not a gallery manifest"),
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
def test_a_missing_damaged_edited_or_foreign_manifest_is_refused(
    built: Path, change: dict[str, object] | str | None, message: str
) -> None:
    file = generation_of(built) / "manifest.json"
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text()) | change)
    file.unlink()
    if change is not None:
        file.write_text(change)
    with pytest.raises(GalleryCorruptError, match=message):
        Gallery.open(built)


def test_a_generation_under_another_name_is_refused(built: Path) -> None:
    generation = generation_of(built)
    generation.rename(generation.with_name("0" * 12))
    (built / "CURRENT").write_text("0" * 12)
    with pytest.raises(GalleryCorruptError, match=r"belongs to the generation .*its name back"):
        Gallery.open(built)


def test_an_open_gallery_answers_while_newer_ones_are_published(
    built: Path, shop: Path, build: Callable[[], BuildReport], embedder: CountingEmbedder
) -> None:
    gallery = Gallery.open(built)
    version = generation_of(built)
    for number in range(3):
        (shop / f"new{number}.png").write_bytes(encoded(photo(90 + number)))
        build()
    with ThreadPoolExecutor(1) as pool:  # a thread that has no connection yet
        hits = pool.submit(gallery.search, query(embedder, shop / "f.gif"), 100).result()[0]
    assert (hits[0].key, len(hits)) == ("f.gif", 6)
    assert version.exists()
    gallery.close()
    build()
    assert not version.exists()


def test_closing_and_a_refused_opening_leave_no_descriptor_open(built: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    Gallery.open(built).close()
    before = descriptors()
    Gallery.open(built).close()
    message = r"bundle b{12}, .* bundle in use is c{12}:.*kinlens-index build .*--bundle"
    with pytest.raises(BundleMismatchError, match=message):
        Gallery.open(built, expected_bundle_id="c" * 64)
    assert descriptors() == before
