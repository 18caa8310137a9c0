"""kinlens.build, create_gallery and the changes of a gallery, with every kind of source."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import (
    GalleryConflictError,
    GalleryError,
    InvalidParameterError,
    ItemNotFoundError,
    SourceError,
)
from kinlens.embedder.programs.progress import console as err
from kinlens.embedder.programs.progress import progress_bar as progress
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.entries import Entry, Written
from tests.tiny import TINY_DIM, encoded, photo, write_photos_as


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    return write_photos_as(tmp_path / "shop", ("cup/0.png", "cup/1.png", "hat/2.png", "loose.png"))


@pytest.fixture
def gallery(bundle: OnnxEmbedder, tmp_path: Path) -> Iterator[kinlens.Gallery]:
    with kinlens.create_gallery(tmp_path / "gallery", bundle=bundle) as made:
        yield made


def keys(gallery: kinlens.Gallery) -> list[str]:
    return [item.key for item in gallery.each_item()]


def test_a_gallery_is_built_from_each_kind_of_source(
    shop: Path, bundle: OnnxEmbedder, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    names = ["cup/0.png", "cup/1.png", "hat/2.png", "loose.png"]
    out = tmp_path / "gallery"
    with kinlens.build(shop, bundle, out=out) as made:
        assert keys(made) == names
        assert made.item("cup/0.png").attributes == {"class": "cup"}
        assert made.report.embedded == 4
        assert made.store.built_with() == tiny_bundle.path.resolve()
    with kinlens.build(str(shop), tiny_bundle.path, out=out, name="again") as made:
        assert (made.name, made.report.reused) == ("again", 4)
    with kinlens.build([shop / name for name in names[:3]], bundle, out=out) as made:
        assert keys(made) == names[:3]
    with kinlens.build([str(shop / "loose.png")], bundle, out=out, root=shop) as made:
        assert keys(made) == ["loose.png"]
    table = pd.DataFrame(
        {
            "key": ["A", "B", "C"],
            "path": [shop / "cup/0.png", shop / "hat", [shop / "cup/1.png", shop / "loose.png"]],
            "price:number": ["9.5", np.nan, 3],
            "sale": [True, False, None],
        }
    )
    with kinlens.build(table, bundle, out=out, root=shop) as made:
        assert keys(made) == ["A", "B/2.png", "C/1.png", "C/loose.png"]
        assert made.item("A").attributes == {"product": "A", "price": 9.5, "sale": True}
        assert made.item("C/1.png").attributes == {"product": "C", "price": 3}
        assert made.search(photo(3), 1)[0].key == "C/loose.png"
    (tmp_path / "link").symlink_to(shop)
    linked = pd.DataFrame({"path": [tmp_path / "link/cup/0.png"]})
    with kinlens.build(linked, bundle, out=out, root=tmp_path / "link") as made:
        assert made.item(str(tmp_path / "link/cup/0.png")).path == "cup/0.png"
    (shop / "list.csv").write_text("key,path\nA,cup/0.png\n", encoding="utf-8")
    with kinlens.build(shop / "list.csv", bundle, out=out) as made:
        assert keys(made) == ["A"]
    with kinlens.build(shop / "cup", bundle, out=out, csv=None, dims=4) as made:
        assert (made.dim, made.search(photo(1), 1)[0].key) == (4, "1.png")


@pytest.mark.real_data
def test_photos_of_a_shop_find_themselves_and_are_shown(
    shared_data: Path, bundle: OnnxEmbedder, tmp_path: Path
) -> None:
    folder = shared_data / "data/grocery-store/iconic-images-and-descriptions/Vegetables"
    photos = sorted(folder.rglob("*.jpg"))[:8]
    with kinlens.build(photos, bundle, out=tmp_path / "gallery", root=folder) as made:
        for photo_ in photos:
            [hit] = made.search(photo_, 1)
            assert hit.key == photo_.relative_to(folder).as_posix()
            assert hit.score == pytest.approx(1, abs=1e-4)
        page: str = getattr(made.search(photos[0], 8), "_repr_html_")()  # noqa: B009
        assert page.count("data:image/jpeg;base64,") == 8
        assert len(page) < 8 * 20_000


@pytest.mark.parametrize(
    ("images", "fault"),
    [
        ("nowhere", "There is no folder nowhere"),
        ([], "is empty"),
        ([b"bytes"], "cannot be used|is missing|is not|no image"),
        (7, "7 is no source of images"),
        (pd.DataFrame({"key": ["A"]}), "it needs path"),
        (pd.DataFrame({"key": [None], "path": ["a.png"]}), "row 1 of the DataFrame has no key"),
        (
            pd.DataFrame({"key": ["A"], "path": ["a.png"], "n:number": ["x"]}),
            "n:number = 'x'",
        ),
    ],
)
def test_a_source_that_cannot_be_used_is_named(
    images: object, fault: str, bundle: OnnxEmbedder, tmp_path: Path
) -> None:
    with pytest.raises(SourceError, match=fault):
        kinlens.build(images, bundle, out=tmp_path / "gallery")


def test_the_index_and_the_batches_are_chosen(
    shop: Path, bundle: OnnxEmbedder, tmp_path: Path
) -> None:
    out = tmp_path / "gallery"
    with kinlens.build(shop, bundle, out=out, index="hnsw", batch_size=2, workers=1) as made:
        assert made.store.facts().segment.kind == "hnsw"
        assert made.add(shop, batch_size=1, workers=1).unchanged == 4
        assert made.sync(shop, workers=2).unchanged == 4
    with pytest.raises(TypeError, match="colour"):
        kinlens.build(shop, bundle, out=out, colour="red")


def test_a_bad_file_among_many_is_skipped_by_name(
    shop: Path, bundle: OnnxEmbedder, gallery: kinlens.Gallery, tmp_path: Path
) -> None:
    (shop / "cup/broken.png").write_bytes(b"no image")
    with pytest.warns(
        UserWarning, match=r"Skipped 1 of 5 images.*cup/broken\.png: The file is not"
    ):
        made = kinlens.build(shop, bundle, out=tmp_path / "made")
    with made:
        assert [one.key for one in made.report.failures] == ["cup/broken.png"]
        with pytest.warns(UserWarning, match="broken"):
            report = made.add(shop)
        assert (report.unchanged, len(report.failures)) == (4, 1)
    items = [
        kinlens.NewItem("good", shop / "loose.png"),
        kinlens.NewItem("bad", shop / "cup/broken.png"),
        kinlens.NewItem("gone", shop / "nope.png"),
    ]
    with pytest.warns(UserWarning, match="Skipped 2 of 3 images"):
        report = gallery.put_many(items)
    assert report.added == 1
    reasons = {one.key: (one.path, one.reason) for one in report.failures}
    assert reasons["bad"][0] == str(shop / "cup/broken.png")
    assert "nope.png does not exist" in reasons["gone"][1]
    with pytest.raises(SourceError, match=r"'bad' cannot be used: The file is not an image"):
        gallery.put("bad", shop / "cup/broken.png")


def test_put_keeps_the_image_and_the_attributes(
    shop: Path, gallery: kinlens.Gallery, tmp_path: Path
) -> None:
    item = gallery.put("shoes/1", shop / "loose.png", {"price": 59.9, "sizes": [38, 39]})
    assert item.attributes == {"price": 59.9, "sizes": (38, 39)}
    (shop / "loose.png").unlink()
    assert gallery.image("shoes/1") == encoded(photo(3))
    assert gallery.put("shoes/1", photo(4)).attributes == item.attributes
    assert gallery.search(photo(4), 1)[0].key == "shoes/1"
    assert gallery.put("shoes/1", photo(4), {}).attributes == {}
    assert gallery.put("hats/1", np.asarray(photo(5)), keep=False).has_image is False
    with pytest.raises(ItemNotFoundError):
        gallery.image("hats/1")
    raw = gallery.vector("shoes/1") * 3
    gallery.put("copy", vector=raw)
    np.testing.assert_allclose(gallery.vector("copy"), raw / 3, atol=1e-6)
    assert gallery.search(photo(4), 2)[1].has_image in (True, False)
    assert len(gallery) == 3


def test_put_many_takes_arrays_tables_and_items(
    bundle: OnnxEmbedder, gallery: kinlens.Gallery, shop: Path
) -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((5, TINY_DIM)).astype(np.float32)
    assert gallery.put_many([f"n{n}" for n in range(5)], vectors).added == 5
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(gallery.vectors([f"n{n}" for n in range(5)]), units, atol=1e-6)
    gallery.patch({"n0": {"price": 3}})
    assert gallery.put_many(["n0"], vectors[:1]).unchanged == 1
    assert gallery.item("n0").attributes == {"price": 3}
    frame = pd.DataFrame({"key": ["p0", "p1"], "vector": [*units[:2]], "price": [1.5, np.nan]})
    assert gallery.put_many(frame).added == 2
    assert gallery.item("p0").attributes == {"price": 1.5}
    assert gallery.item("p1").attributes == {}
    table = pa.table({"id": ["a0"], "embedding": [units[2].tolist()], "colour": ["red"]})
    assert gallery.put_many(table).added == 1
    assert gallery.item("a0").attributes == {"colour": "red"}
    files = pd.DataFrame({"key": ["f0"], "path": [str(shop / "loose.png")], "colour": ["blue"]})
    assert gallery.put_many(files).added == 1
    assert gallery.image("f0") == (shop / "loose.png").read_bytes()
    many = (kinlens.NewItem(f"i{n}", encoded(photo(n)), {"n": n}) for n in range(40))
    assert gallery.put_many(many).added == 40
    assert gallery.search(photo(7), 1)[0].key == "i7"
    assert gallery.put_many([]).added == 0
    again = gallery.to_pandas(vectors=True, filter="n < 2").drop(columns="id")
    assert gallery.put_many(again).updated + gallery.put_many(again).unchanged >= 0
    assert gallery.item("i1").attributes == {"n": 1}


@pytest.mark.parametrize(
    ("items", "vectors", "fault"),
    [
        (["a"], np.ones((1, 3)), "has 3 numbers, those of the gallery have 8"),
        (["a", "b"], np.ones((1, 8)), r"pass an array \(2, 8\)"),
        (["a"], np.zeros((1, 8)), "vector of 'a' is zero"),
        (["a"], np.full((1, 8), np.nan), "NaN"),
        (["a"], None, "is not a NewItem"),
        ({"a": 1}, None, "must be a list of NewItem"),
        ([kinlens.NewItem("a")], None, "'a' needs either an image or a vector"),
        ([kinlens.NewItem("a", b"x", {}, np.ones(8))], None, "'a' needs either an image or a"),
        (
            [kinlens.NewItem("a", encoded(photo(1))), kinlens.NewItem("b", vector=np.ones(8))],
            None,
            "'b' has no image, but others",
        ),
        ([kinlens.NewItem("a", b"x"), kinlens.NewItem("a", b"y")], None, "occurs twice"),
        ([kinlens.NewItem(7, b"x")], None, "key 7 must be a string"),
        (pa.table({"id": ["a"]}), None, "no such column"),
    ],
)
def test_what_cannot_be_put_is_named(
    items: object, vectors: object, fault: str, gallery: kinlens.Gallery
) -> None:
    with pytest.raises((InvalidParameterError, SourceError), match=fault):
        gallery.put_many(items, vectors)
    assert len(gallery) == 0


def test_items_are_patched_removed_and_restored(gallery: kinlens.Gallery) -> None:
    for number in range(6):
        product = f"P{number // 2}"
        gallery.put(f"k{number}", photo(number), {"product": product, "price": number})
    assert gallery.patch({"k0": {"price": None, "sale": True}}) == 1
    assert gallery.update({"k1": {"sale": False}}) == 1
    assert gallery.patch_products({"P2": {"price": 9.5}}) == 2
    assert gallery.patch_where("price = 9.5", {"sale": True}) == 2
    assert gallery.count("sale = true") == 3
    with pytest.raises(ItemNotFoundError, match="nobody"):
        gallery.patch({"nobody": {"price": 1}})
    with pytest.raises(InvalidParameterError, match="filter is empty"):
        gallery.remove_where("")
    assert gallery.add([]) == Written()
    assert gallery.remove("k0") == 1
    assert gallery.remove(["k1", "nobody"]) == 1
    with pytest.raises(GalleryConflictError, match="Nothing was removed"):
        gallery.remove("k2", ["k0"])
    assert [item.key for item in gallery.restore(["k0", "k2"])] == ["k0"]
    assert gallery.remove_where("price = 9.5") == 2
    assert keys(gallery) == ["k2", "k3", "k0"]
    assert gallery.retype_attribute("price", "text") == 2
    assert gallery.drop_attribute("price") == 2
    gallery.compact()
    assert gallery.restore("k4") == []
    assert gallery.search(photo(3), 1)[0].key == "k3"


def test_sync_makes_a_gallery_equal_to_a_folder(
    shop: Path, bundle: OnnxEmbedder, tmp_path: Path
) -> None:
    gallery = kinlens.build(shop, bundle, out=tmp_path / "made")
    (shop / "cup/0.png").unlink()
    (shop / "new.png").write_bytes(encoded(photo(9)))
    would = gallery.sync(shop, dry_run=True)
    assert (would.added, would.removed) == (1, 1)
    assert "cup/0.png" in gallery
    done = gallery.sync(shop)
    assert (done.added, done.removed, done.unchanged) == (1, 1, 3)
    for name in ("cup/1.png", "hat/2.png"):
        (shop / name).unlink()
    with pytest.raises(GalleryConflictError, match="2 of 4 items"):
        gallery.sync(shop)
    assert gallery.sync(shop, check=False).refused
    assert gallery.sync(shop, max_removed="50%").removed == 2
    assert keys(gallery) == ["loose.png", "new.png"]
    (shop / "more").mkdir()
    (shop / "more/a.png").write_bytes(encoded(photo(11)))
    assert gallery.add(shop / "more").added == 1
    assert gallery.add([shop / "more/a.png"]).updated == 0
    assert gallery.add([Entry("own", gallery.vector("new.png"))]).added == 1
    with pytest.raises(SourceError, match="outside"):
        gallery.add(tmp_path)
    gallery.close()


def test_near_duplicates_are_grouped(gallery: kinlens.Gallery) -> None:
    for number in range(8):
        gallery.put(f"k{number}", photo(number))
    gallery.put("copy", encoded(photo(3), "PNG", compress_level=0))
    [group] = gallery.duplicates(min_score=0.999)
    assert {hit.key for hit in group} == {"k3", "copy"}


def test_a_gallery_for_vectors_of_any_model(tmp_path: Path) -> None:
    gallery = kinlens.create_gallery(tmp_path / "clip", dim=16, model="clip", name="clip")
    vectors = np.random.default_rng(1).standard_normal((30, 16))
    gallery.put_many([f"k{n}" for n in range(30)], vectors)
    found = gallery.search(vectors[:3] / np.linalg.norm(vectors[:3], axis=1, keepdims=True), k=2)
    assert [hits[0].key for hits in found] == ["k0", "k1", "k2"]
    assert gallery.similar("k5", k=3)[0].key != "k5"
    with pytest.raises(GalleryError, match="bundle that built gallery clip is unknown"):
        gallery.search(photo(1))
    with pytest.raises(GalleryConflictError, match="has a gallery already"):
        kinlens.create_gallery(tmp_path / "clip", dim=16)
    for given in ({}, {"dim": 0}, {"dim": 8, "name": "a b"}):
        with pytest.raises(InvalidParameterError):
            kinlens.create_gallery(tmp_path / "other", **given)


def test_two_processes_share_a_gallery(
    gallery: kinlens.Gallery, tiny_bundle: Bundle, shop: Path
) -> None:
    gallery.put("mine", photo(1))
    path = str(gallery.store.path)
    code = (
        "import kinlens\n"
        f"with kinlens.open_gallery({path!r}, {str(tiny_bundle.path)!r}) as gallery:\n"
        f"    gallery.put('theirs', {str(shop / 'loose.png')!r})\n"
        "    gallery.remove('mine')\n"
        f"    print([hit.key for hit in gallery.search({str(shop / 'loose.png')!r})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['theirs']"
    assert done.stderr == "", "progress bars are for terminals"
    assert [hit.key for hit in gallery.search(photo(3))] == ["theirs"]
    assert gallery.put("mine", photo(2)).key == "mine"


def test_bars_are_shown_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(err, "_force_terminal", is_terminal)
        with err.capture() as captured, progress(3, "Counting") as advance:
            advance(3)
        assert ("3 of 3" in captured.get()) is is_terminal
    with err.capture() as captured, contextlib.ExitStack() as stack:
        stack.enter_context(progress(2, "Counting", shown=True))(2)
    assert "2 of 2" in captured.get()
