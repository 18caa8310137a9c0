"""kinlens.Gallery and kinlens: labelled queries, calibration, upkeep, copies, plans."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

import kinlens
from kinlens.embedder.errors import (
    FilterError,
    GalleryCorruptError,
    GalleryError,
    GalleryNotFoundError,
    InvalidParameterError,
    KinlensError,
    PlanError,
    SourceError,
)
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.galleries import uploads_folder
from kinlens.library.upkeep import publish_changes
from tests.tiny import encoded, photo, write_photos_as

COUNT = 8


def page(shown: object) -> str:
    """What a notebook shows."""
    html: str = getattr(shown, "_repr_html_")()  # noqa: B009 (the name is one of IPython)
    return html


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Two photos of each of four products."""
    names = [f"<b>{number // 2}/{number}.png" for number in range(COUNT)]
    return write_photos_as(tmp_path / "shop", names)


@pytest.fixture
def gallery(shop: Path, bundle: OnnxEmbedder, tmp_path: Path) -> Iterator[kinlens.Gallery]:
    with kinlens.build(shop, bundle, out=tmp_path / "gallery") as made:
        yield made


def test_a_gallery_is_evaluated_with_labelled_photos_of_every_form(
    gallery: kinlens.Gallery, shop: Path
) -> None:
    keys = [item.key for item in gallery.each_item()]
    with pytest.raises(InvalidParameterError, match="Label queries first"):
        gallery.evaluate()
    customer = shop.parent / "customer.png"
    customer.write_bytes(encoded(photo(0), "PNG", compress_level=0))
    pixels = np.asarray(PIL.Image.open(io.BytesIO(encoded(photo(2)))).convert("RGB"))
    made = [
        gallery.add_golden(customer, keys=[keys[0]]),
        gallery.add_golden(customer.with_name("shop") / keys[1], keys=[keys[1]]),
        gallery.add_golden(pixels, attribute="class", value="<b>1", name="<i>array"),
        gallery.add_golden(PIL.Image.fromarray(pixels[::-1].copy())),
    ]
    assert [query.name for query in made] == ["customer.png", "1.png", "<i>array", ""]
    assert made[3].no_match
    assert gallery.golden().queries == made
    report = gallery.evaluate(min_score=0.5)
    assert (report.queries, report.judged, report.no_match) == (4, 3, 1)
    assert report.recall_at_1 == 1
    assert "recall@1   1.0000" in str(report)
    html = page(report)
    assert "<td>recall@1</td><td>1.0000" in html
    assert "<i>array" not in html + page(gallery.golden())
    assert "&lt;i&gt;array" in page(gallery.golden())
    assert gallery.remove_golden(made[0].sha256[:12], made[1].sha256) == 2
    assert [query.name for query in gallery.golden().queries] == ["<i>array", ""]
    assert gallery.guarantee(from_items=True).lines()
    with pytest.raises(InvalidParameterError, match="either a bundle or from_items"):
        gallery.guarantee(gallery.bundle, from_items=True)
    [run] = gallery.golden_runs().runs
    assert run == report
    assert "<table>" in page(gallery.golden_runs())


def test_a_label_or_photo_that_cannot_be_used_is_named(
    gallery: kinlens.Gallery, shop: Path
) -> None:
    image = encoded(photo(0))
    (shop / "text.png").write_text("not an image")
    listed = shop / "list.csv"
    listed.write_text("image,keys\ntext.png,nobody\n")
    for work, kind, message in (
        (lambda: gallery.add_golden(image, keys=["nobody"]), InvalidParameterError, "'nobody'"),
        (lambda: gallery.add_golden(image, keys=[]), InvalidParameterError, "exactly one of"),
        (lambda: gallery.add_golden(image, keys="k"), InvalidParameterError, "a list of keys"),
        (lambda: gallery.add_golden(image, attribute="size", value=1), FilterError, "size"),
        (lambda: gallery.add_golden(shop / "gone.png"), SourceError, "gone.png"),
        (lambda: gallery.add_golden(shop / "text.png"), SourceError, "text.png cannot be used"),
        (lambda: gallery.add_golden(7), InvalidParameterError, "7 is not an image"),
        (lambda: gallery.add_golden_list(listed), SourceError, "text.png cannot be used"),
        (lambda: gallery.remove_golden("0f"), InvalidParameterError, "0 queries"),
    ):
        with pytest.raises(kind, match=message):
            work()
    assert gallery.golden().queries == []
    listed.write_text("image,class\n<b>0/0.png,<b>0\n<b>1/2.png,\n")
    assert [one.wanted for one in gallery.add_golden_list(listed).queries] == [
        "class = <b>0",
        "no match",
    ]


def test_a_gallery_is_calibrated_compacted_and_verified(
    gallery: kinlens.Gallery, shop: Path
) -> None:
    found = gallery.calibrate()
    assert (found.product, found.products) == ("class", 4)
    assert "4 products by the attribute class" in str(found)
    with pytest.raises(InvalidParameterError, match="'colour'"):
        gallery.calibrate("colour")
    assert gallery.compact().skipped
    assert "Nothing has changed" in str(gallery.compact())
    gallery.remove([gallery.items()[0].key])
    report = gallery.compact(index="hnsw")
    assert report.manifest is not None
    assert (report.manifest.kind, report.manifest.size) == ("hnsw", COUNT - 1)
    assert "Index hnsw of 7 items" in page(report)
    with pytest.raises(PlanError, match="Unknown index 'tree'"):
        gallery.compact(index="tree")
    checked = gallery.verify(images=True, queries=gallery.vectors()[:3])
    assert (checked.is_good, checked.from_images, checked.recall_queries) == (True, True, 3)
    assert "7 of 7 checked items" in page(checked)
    with pytest.raises(InvalidParameterError):
        gallery.verify(queries=[[1.0, 0.0]])
    (shop / "<b>3/7.png").write_bytes(encoded(photo(99)))
    bad = gallery.verify(images=True)
    assert not bad.is_good
    assert [problem.key for problem in bad.problems] == ["<b>3/7.png"]
    assert "<b>3" not in page(bad)
    assert gallery.stats()["size"] == COUNT - 1


def test_a_compaction_deletes_the_uploaded_images_of_erased_items(
    gallery: kinlens.Gallery,
) -> None:
    for key, seed in (("kept", 90), ("erased", 91)):
        gallery.put(key, encoded(photo(seed)))
    uploads = uploads_folder(gallery.store.path)
    assert len([file for file in uploads.rglob("*") if file.stem[:2] == file.parent.name]) == 2
    gallery.remove("erased")
    gallery.compact()
    assert len([file for file in uploads.rglob("*") if file.stem[:2] == file.parent.name]) == 1
    assert gallery.image("kept")
    assert gallery.restore("erased") == []


def test_near_duplicates_come_with_a_report(gallery: kinlens.Gallery) -> None:
    gallery.put("copy", encoded(photo(3), "PNG", compress_level=0))
    found = gallery.duplicates(min_score=0.9999)
    [group] = found
    assert {hit.key for hit in group} == {"copy", "<b>1/3.png"}
    assert (found.report.items, found.report.size) == (2, COUNT + 1)
    assert "Groups of near-duplicates: 1, with 2 of the 9 items" in str(found)
    html = page(found)
    assert "Groups of near-duplicates" in html
    assert "<b>1" not in html
    with pytest.raises(InvalidParameterError, match="min_score"):
        gallery.duplicates(min_score=2)


def test_two_galleries_are_compared_by_the_products_of_their_items(
    gallery: kinlens.Gallery, shop: Path, bundle: OnnxEmbedder, tmp_path: Path
) -> None:
    keys = [item.key for item in gallery.each_item()]
    with kinlens.build(shop, bundle, out=tmp_path / "other", name="other") as other:
        report = kinlens.compare(gallery, other)
        assert (report.class_attribute, report.queries, report.judged) == ("class", COUNT, COUNT)
        assert report.overlap_at_k == 1
        assert report.old.recall_at_1 == report.new.recall_at_1
        some = kinlens.compare(gallery, other, keys[:3], k=1)
        assert (some.queries, some.k) == (3, 1)
        html = page(report)
        assert f"<td>items</td><td>{COUNT}</td><td>{COUNT}</td>" in html
        assert "100.0% of the first 10 hits are the same." in str(report)
        for queries, options, message in (
            (["nobody"], {}, "none of these items in common"),
            ("<b>0/0.png", {}, "a list of keys"),
            (None, {"attribute": "colour"}, "gallery gallery has class"),
        ):
            with pytest.raises(InvalidParameterError, match=message):
                kinlens.compare(gallery, other, queries, **options)


def test_a_gallery_is_copied_in_every_way(gallery: kinlens.Gallery, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="export writes Parquet")
    path = gallery.store.path
    file, copy, saved = tmp_path / "shop.parquet", tmp_path / "copy", tmp_path / "saved"
    assert gallery.export(file) == COUNT
    report = kinlens.import_gallery(file, copy, name="copy", index="hnsw")
    assert (report.name, report.items) == ("copy", COUNT)
    with kinlens.open_gallery(copy, gallery.bundle) as again:
        assert [item.key for item in again.each_item()] == [
            item.key for item in gallery.each_item()
        ]
        assert again.stats()["index"] == "hnsw"
    assert gallery.backup(saved).items == COUNT
    with pytest.raises(GalleryError, match="already exists"):
        gallery.backup(saved)
    with pytest.raises(GalleryError, match="replace"):
        kinlens.restore_gallery(saved, path)
    assert kinlens.restore_gallery(saved, tmp_path / "restored").name == "gallery"
    published = gallery.publish(str(tmp_path / "published"))
    assert published.items == COUNT
    assert f"{COUNT} items" in page(published)
    np.save(tmp_path / "own.npy", np.eye(4, dtype=np.float32))
    (tmp_path / "keys.txt").write_text("a\nb\nc\nd\n")
    own = kinlens.import_gallery(
        tmp_path / "own.npy", tmp_path / "own", model="clip", keys=tmp_path / "keys.txt"
    )
    assert (own.items, own.dim) == (4, 4)
    shutil.rmtree(saved / "versions")
    for work, kind, message in (
        (lambda: kinlens.import_gallery(tmp_path / "own.npy", copy), SourceError, "own.npy"),
        (lambda: kinlens.import_gallery(tmp_path / "no.parquet", copy), KinlensError, "no.parquet"),
        (lambda: kinlens.import_gallery(file, copy, index="diskann"), InvalidParameterError, "Mil"),
        (
            lambda: kinlens.import_gallery(file, "milvus://127.0.0.1:1/x", memory_mb=9),
            InvalidParameterError,
            "only for a gallery in a folder",
        ),
        (lambda: kinlens.restore_gallery(tmp_path, copy), GalleryNotFoundError, "No backup"),
        (
            lambda: kinlens.restore_gallery(saved, copy, replace=True),
            (GalleryCorruptError, GalleryNotFoundError),
            "saved",
        ),
    ):
        with pytest.raises(kind, match=message):
            work()
    with kinlens.open_gallery(copy, gallery.bundle) as unharmed:
        assert unharmed.size == COUNT


def test_a_plan_shows_its_costs_and_all_kinds_are_compared() -> None:
    chosen = kinlens.plan(1_000_000, 128, memory_mb=1200)
    assert chosen.kind == "ivf-pq"
    assert "<td>index</td><td>ivf-pq on cpu" in page(chosen)
    assert str(chosen) == "\n".join(chosen.lines())
    plans = kinlens.compare_plans(1_000_000, 128, memory_mb=600)
    assert [one["kind"] for one in plans.plans] == ["flat", "hnsw", "ivf-pq"]
    assert [one["kind"] for one in plans.plans if one["refused"]] == ["ivf-pq"]
    assert "<td>ivf-pq</td>" in page(plans)
    for n, dim, choice in ((0, 8, {}), (10, 0, {}), (10, 8, {"index": "tree"})):
        with pytest.raises(PlanError):
            kinlens.plan(n, dim, **choice)


def test_a_damaged_golden_set_stops_evaluation_and_backup(
    gallery: kinlens.Gallery, tmp_path: Path
) -> None:
    gallery.add_golden(encoded(photo(0)))
    (gallery.store.path / "golden.sqlite").write_bytes(b"no database at all" * 100)
    for work in (gallery.evaluate, gallery.verify, lambda: gallery.backup(tmp_path / "bad")):
        with pytest.raises(GalleryCorruptError, match=r"golden\.sqlite"):
            work()
    assert not (tmp_path / "bad").exists()


def test_changes_are_published_at_an_interval(gallery: kinlens.Gallery, tmp_path: Path) -> None:
    path, address = gallery.store.path, str(tmp_path / "published")
    reports = publish_changes(path, address, every="0.1s")
    assert next(reports).items == COUNT
    gallery.remove([gallery.items()[0].key])
    assert next(reports).items == COUNT - 1
    for every in ("soon", "0s", "2d"):
        with pytest.raises(InvalidParameterError, match="every = "):
            next(publish_changes(path, address, every=every))
