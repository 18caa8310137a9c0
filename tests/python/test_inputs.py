"""What people bring: sources, keys, vectors and images of every kind are taken or named."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from PIL import Image

import kinlens
from kinlens.embedder.errors import (
    BundleNotFoundError,
    GalleryNotFoundError,
    InvalidParameterError,
    JobError,
    KinlensError,
    SourceError,
)
from kinlens.embedder.session import OnnxEmbedder
from tests.tiny import TINY_DIM, encoded, photo, write_photos_as, write_tiny_bundle

VECTORS = np.random.default_rng(0).standard_normal((2, TINY_DIM)).astype(np.float32)
KEYS = ["a", "b"]
NAMES = ("cup/0.png", "hat/2.png", "loose.png")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_photos_as(tmp_path / "shop", NAMES)


@pytest.fixture
def gallery(bundle: OnnxEmbedder, tmp_path: Path) -> Iterator[kinlens.Gallery]:
    with kinlens.create_gallery(
        tmp_path / "gallery", bundle=bundle, image_root=tmp_path / "shop"
    ) as made:
        yield made


def stored(gallery: kinlens.Gallery) -> list[str]:
    return [item.key for item in gallery.each_item()]


@pytest.mark.parametrize(
    "vectors",
    [
        VECTORS.tolist(),
        [*VECTORS],
        iter(VECTORS),
        VECTORS.astype(np.float16).astype(np.float32),
        pd.DataFrame(VECTORS),
        pd.Series([*VECTORS]),
        pa.array(VECTORS.tolist()),
        pa.FixedSizeListArray.from_arrays(pa.array(VECTORS.ravel()), TINY_DIM),
    ],
    ids=lambda value: type(value).__name__,
)
def test_vectors_come_in_any_container(vectors: Any, gallery: kinlens.Gallery) -> None:
    assert gallery.put_many(KEYS, vectors).added == 2
    unit = VECTORS[1] / np.linalg.norm(VECTORS[1])
    np.testing.assert_allclose(gallery.vector("b"), unit, atol=1e-3)


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ((key for key in KEYS), KEYS),
        (pd.Index(KEYS), KEYS),
        (pa.array(KEYS), KEYS),
        (np.array(KEYS), KEYS),
        (range(2), ["0", "1"]),
        (np.arange(2), ["0", "1"]),
        ([Path("a"), "b"], KEYS),
    ],
)
def test_keys_are_texts_paths_or_whole_numbers(
    keys: Any, names: list[str], gallery: kinlens.Gallery
) -> None:
    gallery.put_many(keys, VECTORS)
    assert stored(gallery) == names


@pytest.mark.parametrize(
    ("keys", "vectors", "fault"),
    [
        ([None, "b"], VECTORS, "key None is neither a text nor a whole number"),
        ([float("nan"), "b"], VECTORS, "key nan is neither a text"),
        ([b"a", "b"], VECTORS, "key b'a' is neither a text"),
        ([True, "b"], VECTORS, "key True is neither a text"),
        ("ab", VECTORS, "'ab' must be a list of keys"),
        (["a", "a"], VECTORS, "Key 'a' occurs twice"),
        ([str(n % 4096) for n in range(4097)], np.ones((4097, TINY_DIM)), "'0' occurs twice"),
        (KEYS, [["x"] * TINY_DIM] * 2, "vectors is"),
        (KEYS, [[1.0], [1.0, 2.0]], "no array of numbers"),
        (KEYS, None, "'a' is not a NewItem"),
        (zip(KEYS, VECTORS, strict=True), None, r"\('a', array.* is not a NewItem"),
        (kinlens.NewItem("a", vector=VECTORS[0]), None, "must be a list of NewItem"),
        ([kinlens.NewItem("a", vector=VECTORS[:1])], None, "The vector of item 'a' is"),
        ([kinlens.NewItem("", b"x")], None, "'' is not a valid key"),
        (pd.DataFrame({"key": [1.0], "path": ["a.png"]}), None, "key = 1.0 is neither"),
    ],
)
def test_what_is_no_key_or_vector_is_named(
    keys: Any, vectors: Any, fault: str, gallery: kinlens.Gallery
) -> None:
    with pytest.raises((InvalidParameterError, SourceError), match=fault) as refusal:
        gallery.put_many(keys, vectors)
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 500
    assert stored(gallery) == []


@pytest.mark.parametrize("kind", ["items", "table", "images"])
def test_a_key_of_an_earlier_batch_is_refused(
    kind: str, gallery: kinlens.Gallery, shop: Path
) -> None:
    keys = [*map(str, range(4096)), "0"]
    items: Any = (kinlens.NewItem(key, vector=VECTORS[0]) for key in keys)
    if kind == "table":
        items = pa.table({"key": keys, "vector": [VECTORS[0].tolist()] * len(keys)})
    elif kind == "images":
        items = (kinlens.NewItem(key, shop / "loose.png") for key in [*keys[:99], "0"])
    with pytest.raises(InvalidParameterError, match="Key '0' occurs twice"):
        gallery.put_many(items, batch_size=1, workers=1)
    assert gallery.item("0").id == 1


def test_tables_of_arrow_have_vectors_or_paths(gallery: kinlens.Gallery, shop: Path) -> None:
    columns: dict[str, Any] = {"key": [7, 8], "vector": VECTORS.tolist(), "n": [1, None]}
    assert gallery.put_many(pa.record_batch(columns)).added == 2
    assert gallery.put_many(pa.table(columns).to_reader()).unchanged == 2
    paths = pa.table({"key": ["c"], "path": [str(shop / "loose.png")], "n": [3]})
    assert gallery.put_many(paths).added == 1
    assert gallery.add(pa.table({"key": ["d"], "path": ["loose.png"]})).added == 1
    assert gallery.put_many(pd.DataFrame({"key": [], "vector": []})).added == 0
    assert {i.key: i.attributes for i in gallery.each_item()} == {
        "7": {"n": 1}, "8": {}, "c": {"n": 3}, "d": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    "images",
    [
        lambda shop: shop.rglob("*.png"),
        lambda shop: {*shop.rglob("*.png")},
        lambda shop: map(str, sorted(shop.rglob("*.png"))),
        lambda shop: pd.Series([str(path) for path in shop.rglob("*.png")]),
        lambda shop: np.array([str(path) for path in shop.rglob("*.png")]),
    ],
)
def test_paths_come_in_any_container(
    images: Callable[[Path], Any], bundle: OnnxEmbedder, shop: Path, tmp_path: Path
) -> None:
    with kinlens.build(images(shop), bundle, out=tmp_path / "made") as made:
        assert sorted(stored(made)) == [*NAMES]
        assert made.add(images(shop)).unchanged == 3


def test_a_missing_file_in_the_middle_loses_no_other(gallery: kinlens.Gallery, shop: Path) -> None:
    paths = [shop / NAMES[0], shop / "no.png", shop / NAMES[2]]
    with pytest.warns(UserWarning, match=r"Skipped 1 of 3 images.*no\.png"):
        report = gallery.add(paths)
    assert (report.added, len(report.failures)) == (2, 1)


def test_a_tilde_is_the_home_folder(
    bundle: OnnxEmbedder, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    with kinlens.build("~/shop", bundle, out="~/made") as made:
        assert made.search("~/shop/loose.png", 1)[0].key == "loose.png"
        assert made.add(["~/shop/loose.png"]).unchanged == 1
        assert made.sync("~/shop").unchanged == 3
        made.export("~/made.parquet")
        made.backup("~/copy")
    kinlens.restore_gallery("~/copy", "~/restored")
    kinlens.import_gallery("~/made.parquet", "~/imported")
    for name in ("made", "copy", "restored", "imported"):
        assert (tmp_path / name / "CURRENT").is_file()
    assert not Path("~").exists()
    with kinlens.open_gallery("~/made") as made:
        assert len(made) == 3


@pytest.mark.parametrize("mode", ["1", "L", "LA", "La", "P", "PA", "CMYK", "RGBA", "I;16", "I;16B"])
def test_an_image_of_each_mode_is_the_same_query(
    mode: str, gallery: kinlens.Gallery, shop: Path
) -> None:
    shown = photo(0)
    if mode.startswith("I;16"):
        grey = np.asarray(shown.convert("L")).astype(">u2" if mode.endswith("B") else "<u2") * 257
        image = Image.frombytes(mode, shown.size, grey.astype(grey.dtype).tobytes())
        expected = shown.convert("L")
    else:
        image = shown.convert("LA").convert(mode) if mode == "La" else shown.convert(mode)
        expected = image.convert("LA").convert("RGB") if mode == "La" else image.convert("RGB")
    gallery.put("it", expected)
    gallery.put("other", photo(5))
    [hit, _] = gallery.search(image, 2)
    assert (hit.key, round(hit.score, 2)) == ("it", 1)


BAD_IMAGES: dict[str, tuple[Any, str]] = {
    "float": (np.ones((8, 8, 3)), r"uint8 \(H, W\) or \(H, W, 3\), not float64 \(8, 8, 3\)"),
    "planes": (np.ones((3, 8, 8), np.uint8), r"not uint8 \(3, 8, 8\)"),
    "empty array": (np.ones((0, 8, 3), np.uint8), "empty"),
    "truncated": (encoded(photo(1), "JPEG")[:400], "damaged|cut off|truncated"),
    "no bytes": (b"", "empty"),
    "lazy": (Image.open(io.BytesIO(encoded(photo(1), "JPEG")[:900])), "truncated"),
    "text file": (io.StringIO("x"), "opened with 'rb'"),
    "web": ("https://shop.example/1.jpg", "is not the path of a file"),
    "data URL": ("data:image/jpeg;base64,AAAA", "is not the path of a file"),
    "no path": ("", "'' is not the path"),
    "words": ("a green mug", "searched with text="),
    "folder": ("tests", "is a folder"),
    "number": (3, "is not an image.*got int"),
    "none": ([None], "is not an image.*got NoneType"),
}


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_what_is_no_image_is_named(name: str, gallery: kinlens.Gallery) -> None:
    image, fault = BAD_IMAGES[name]
    with pytest.raises(KinlensError, match=fault) as refusal:
        gallery.search(image)
    assert "\n" not in str(refusal.value)


def test_numbers_of_numpy_are_numbers(gallery: kinlens.Gallery) -> None:
    for number in range(4):
        gallery.put(f"k{number}", np.asarray(photo(number)))
    hits = gallery.search([np.asarray(photo(1)), np.asarray(photo(2).resize((9, 9)))], np.int64(2))
    assert len(hits) == 2
    assert gallery.item(np.int64(hits[0].id)).key == hits[0].key
    assert len(gallery.items(limit=np.int64(3), offset=np.int64(1))) == 3
    assert gallery.search(image for image in [photo(3)])[0].key == "k3"


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda g: g.remove(3), "keys = 3 must be a list"),
        (lambda g: g.remove([3]), "must be a text, not 3"),
        (lambda g: g.patch({3: {"a": 1}}), "by key"),
        (lambda g: g.patch([("a", 1)]), "by key"),
        (lambda g: g.sync(pd.DataFrame()), "cannot be synced"),
        (lambda g: g.sync(".", max_removed=0.5), "percentage"),
        (lambda g: g.add({"path": ["a"]}), "no source of images"),
        (lambda g: g.add(b"a"), "no source of images"),
        (lambda g: g.add(""), "empty text"),
        (lambda g: g.add([photo(1)]), "which is no path"),
        (lambda g: g.put_many([], batch_size=0), "batch_size = 0 must be"),
        (lambda g: g.put(3, photo(1)), "key 3 must be a string"),
        (lambda g: g.put("q", photo(1), [1]), r"attributes of 'q' = \[1\] must be attributes by"),
        (lambda g: g.patch({"x": 5}), "changes of 'x' = 5 must be attributes by name"),
        (lambda g: g.patch_products({"x": {5: 1}}), "changes of 'x' = .* by name"),
        (lambda g: g.patch_where("a = 1", 5), "changes = 5 must be attributes by name"),
        (lambda g: g.item(None), "item = None must be a key"),
        (lambda g: g.item(1.5), "item = 1.5 must be a key"),
        (lambda g: g.items(limit="x"), "limit = 'x' must be a whole number"),
        (lambda g: g.items(after=None), "after = None must be a whole number"),
        (lambda g: kinlens.compare(g, 5), "5 is not a gallery"),
        (lambda g: g.put_many(pd.DataFrame({"sku1": ["a"], "vector": [[1.0]]})), "with key_column"),
    ],
)
def test_wrong_arguments_are_named(
    call: Callable[[kinlens.Gallery], Any], fault: str, gallery: kinlens.Gallery, shop: Path
) -> None:
    with pytest.raises(KinlensError, match=fault):
        call(gallery)


@pytest.mark.parametrize(
    ("path", "gallery_fault", "bundle_fault"),
    [
        ("made", None, "is a gallery. Open it with kinlens.open_gallery"),
        ("tiny", "is a bundle, a model. Load it with kinlens.load_bundle", None),
        ("shop", "folder of images. Make a gallery", "folder of images. Make a gallery"),
        ("shop/loose.png", "is a file. Use the folder", "is a file"),
        ("model.onnx", "is a file. Use the folder of its bundle", "kinlens.import_model"),
        ("empty", "is an empty folder", "is an empty folder"),
        ("notes", "it has a.txt", "neither a gallery nor a bundle"),
        ("", "must be the path", "must be the path"),
        ("s3://shop/made", "is an address. Copy it into a folder", "is an address"),
        (Path("hf://org/name"), "for load_bundle", None),
        ("nothing", "nothing does not exist", "nothing does not exist"),
        (".", "is a folder of galleries: made", "is a folder of galleries: made"),
    ],
)
def test_a_wrong_path_names_what_is_there(
    path: str, gallery_fault: str | None, bundle_fault: str | None,
    bundle: OnnxEmbedder, shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    kinlens.build(shop, bundle, out="made").close()
    Path("tiny").symlink_to(bundle.bundle.path)
    for folder in ("empty", "notes"):
        Path(folder).mkdir()
    Path("notes/a.txt").write_text("x")
    Path("model.onnx").write_bytes(b"x")
    if gallery_fault:
        with pytest.raises(GalleryNotFoundError, match=gallery_fault):
            kinlens.open_gallery(path)
    if bundle_fault:
        with pytest.raises(BundleNotFoundError, match=bundle_fault):
            kinlens.load_bundle(path)


def test_a_bundle_says_what_it_is_and_how_good(bundle: Any, tmp_path: Path) -> None:
    assert "8 numbers for each photo" in repr(bundle)
    assert repr(bundle).endswith("; not tested>")
    tested = kinlens.load_bundle(write_tiny_bundle(tmp_path, recall={"R@1": 66.9}).path)
    shown: str = getattr(tested, "_repr_html_")()  # noqa: B009
    for text in (repr(tested), shown):
        assert "for 67 of 100 photos of its test, the first result is right" in text


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        (None, "None is no source of images"),
        (3, "3 is no source of images"),
        ([(photo(1), "a")], "Row 1 has <PIL.Image.Image"),
        (pd.DataFrame({"path": ["a.png"]}), "must have path and class"),
        (pd.DataFrame({"path": ["a.png", "b.png"], "class": ["x", None]}), "Row 2, b.png, has no"),
        (iter([]), "list of images is empty"),
    ],
)
def test_what_cannot_be_adapted_to_is_named(images: Any, fault: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=fault):
        kinlens.adapt(images, tmp_path / "out", run=tmp_path / "run")
