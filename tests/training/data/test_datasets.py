"""Official data sets, on miniature trees in their layouts."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import scipy.io
from pydantic import TypeAdapter

from kinlens.embedder.errors import DatasetError
from kinlens.training.config.settings import Data
from kinlens.training.data.datasets import OFFICIAL, Count, read_official
from kinlens.training.data.load import load_split, recognise, remarks, write_lists
from kinlens.training.data.records import Split, labelled, labels_in
from tests.training.official_layouts import KINDS, write_image, write_layout

PUBLISHED = {
    "cub": "5,864 train images of 100 classes, 5,924 test images of 100",
    "cars196": "8,054 train images of 98 classes, 8,131 test images of 98",
    "sop": "59,551 train images of 11,318 classes, 60,502 test images of 11,316",
    "in_shop": "25,882 train images of 3,997 classes, 14,218 test images of 3,985 classes, "
    "12,612 gallery images of 3,985",
    "aircraft": "5,000 train images of 50 classes, 5,000 test images of 50",
}
FIRST_TRAIN_AND_TEST = {
    "cub": ("001.Bird_1", "101.Bird_101"),
    "cars196": ("001", "099"),
    "sop": ("00001", "11319"),
    "in_shop": ("id_00000001", "id_00000004"),
    "aircraft": ("Boeing 700", "Boeing 750"),
}


def data_of(kind: str, root: Path, **more: object):
    return TypeAdapter(Data).validate_python({"kind": kind, "root": str(root), **more})


def partial(kind: str, root: Path) -> Split:
    return load_split(data_of(kind, root, allow_partial=True))


@pytest.mark.parametrize("kind", KINDS)
def test_an_official_layout_gives_class_disjoint_parts(tmp_path: Path, kind: str) -> None:
    assert recognise(tmp_path) is None
    split = partial(kind, write_layout(kind, tmp_path, classes=3, images=4))
    assert recognise(tmp_path) == kind
    assert (len(split.train), split.train.classes) == (12, 3)
    assert split.test.classes == 3
    assert len(split.test) + (len(split.gallery) if split.gallery else 0) == 12
    first = split.train.class_names[0], split.test.class_names[0]
    assert first == FIRST_TRAIN_AND_TEST[kind]
    for images in filter(None, (split.train, split.test, split.gallery)):
        assert all((images.root / path).is_file() for path in images.paths)


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_counts_are_asserted(tmp_path: Path, kind: str) -> None:
    write_layout(kind, tmp_path, classes=2)
    with pytest.raises(DatasetError) as caught:
        load_split(data_of(kind, tmp_path))
    message = str(caught.value)
    assert "has 8 train images of 2 classes" in message
    assert f"expected: {PUBLISHED[kind]} classes" in message
    assert "data.allow_partial = true (--allow-partial)" in message
    sizes = {part: Count(8, 2) for part in ("train", "test")}
    if kind == "in_shop":
        sizes |= {part: Count(4, 2) for part in ("test", "gallery")}
    whole = replace(OFFICIAL[kind], expected=sizes)
    assert read_official(whole, tmp_path).sha256() == partial(kind, tmp_path).sha256()


@pytest.mark.parametrize("kind", KINDS)
def test_missing_images_are_counted_and_one_is_named(tmp_path: Path, kind: str) -> None:
    write_layout(kind, tmp_path)
    gone = sorted(path for path in tmp_path.rglob("*") if path.suffix.lower() == ".jpg")[:2]
    for path in gone:
        path.unlink()
    with pytest.raises(DatasetError, match=r"2 of the 16 images .* missing in") as caught:
        load_split(data_of(kind, tmp_path))
    assert gone[0].name in str(caught.value)
    assert len(partial(kind, tmp_path).train) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_lacks_a_list_or_the_images_is_refused(tmp_path: Path, kind: str) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(DatasetError, match=r"official layout: it lacks .*Check data.root"):
            partial(kind, place)
    write_layout(kind, tmp_path / "data-set")
    with pytest.raises(DatasetError, match="data-set looks right"):
        partial(kind, tmp_path)


@pytest.mark.parametrize(
    ("kind", "file", "line", "text"),
    [
        ("cub", "image_class_labels.txt", 2, "2 201"),
        ("cub", "image_class_labels.txt", 2, "2"),
        ("cub", "image_class_labels.txt", 2, "99 1"),
        ("sop", "Ebay_train.txt", 3, "2 one 8 x.JPG"),
        ("sop", "Ebay_test.txt", 3, "2 11319 8"),
        ("in_shop", "Eval/list_eval_partition.txt", 4, "img/a.jpg id_1 val"),
        ("aircraft", "data/images_variant_val.txt", 2, "0000001 Concorde"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, kind: str, file: str, line: int, text: str) -> None:
    path = write_layout(kind, tmp_path) / file
    lines = path.read_text().splitlines()
    lines[line - 1] = text
    path.write_text("\n".join(lines))
    with pytest.raises(DatasetError, match=f"{path.name}, line {line}: '{text}' does not fit"):
        partial(kind, tmp_path)


def test_lists_with_other_line_ends_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    write_layout("sop", tmp_path)
    before = partial("sop", tmp_path).sha256()
    write_image(tmp_path / "mug_final" / "extra.JPG", 99)  # an image that no list has
    for path in tmp_path.glob("Ebay_*.txt"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert partial("sop", tmp_path).sha256() == before
    (tmp_path / "Ebay_test.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DatasetError, match=r"Ebay_test.txt cannot be read"):
        partial("sop", tmp_path)


def test_aircraft_joins_its_lists_in_the_order_of_variants(tmp_path: Path) -> None:
    write_layout("aircraft", tmp_path, classes=2, images=5)
    variants = tmp_path / "data" / "variants.txt"
    variants.write_text("\n".join(reversed(variants.read_text().splitlines())))
    split = partial("aircraft", tmp_path)
    assert len(split.train) == len(split.test) == 10
    assert split.train.class_names == ("Boeing 750", "Boeing 751")


@pytest.mark.parametrize(("place", "images"), [("Anno", "Img/img"), (".", "img")])
def test_in_shop_is_read_in_both_of_its_layouts(tmp_path: Path, place: str, images: str) -> None:
    usual = partial("in_shop", write_layout("in_shop", tmp_path / "usual"))
    other = write_layout("in_shop", tmp_path / "other")
    (other / images).parent.mkdir(exist_ok=True)
    (other / "img").rename(other / images)
    (other / place).mkdir(exist_ok=True)
    name = "list_eval_partition.txt"
    (other / "Eval" / name).rename(other / place / name)
    assert partial("in_shop", other).sha256() == usual.sha256()


def test_in_shop_searches_the_gallery_for_its_queries(tmp_path: Path) -> None:
    split = partial("in_shop", write_layout("in_shop", tmp_path, classes=2, images=4))
    assert split.gallery is not None
    assert split.test.class_names == split.gallery.class_names == ("id_00000003", "id_00000004")
    assert len(split.test) == len(split.gallery) == 4
    assert not split.without_gallery
    assert labels_in(split.gallery, split.test.class_names).tolist() == [0, 0, 1, 1]


def test_queries_without_a_gallery_class_are_reported(tmp_path: Path) -> None:
    write_layout("in_shop", tmp_path)
    for path in sorted((tmp_path / "img").rglob("id_00000003/*"))[1::2]:
        path.unlink()
    split = partial("in_shop", tmp_path)
    assert split.without_gallery == ("id_00000003",)
    messages = remarks(data_of("in_shop", tmp_path, allow_partial=True), split)
    assert "allow_partial is set" in messages[0]
    assert "1 class(es) of queries have no image in the gallery, for example 'id_0" in messages[1]


def test_labels_of_a_gallery_are_numbered_as_those_of_the_queries(tmp_path: Path) -> None:
    queries = labelled(tmp_path, [("q/b.png", "b"), ("q/d.png", "d")])
    gallery = labelled(tmp_path, [(f"g/{name}.png", name) for name in "abcd"])
    assert labels_in(gallery, queries.class_names).tolist() == [2, 0, 3, 1]


def test_a_class_in_two_parts_is_refused(tmp_path: Path) -> None:
    one, two, three = (labelled(tmp_path, [(f"{n}/1.png", n)]) for n in "abc")
    both = labelled(tmp_path, [("a/2.png", "a"), ("d/1.png", "d")])
    assert Split(one, two, validation=three).validation is three
    for parts in ((one, both), (one, two, both), (one, two, None, both)):
        with pytest.raises(DatasetError, match=r"1 class\(es\) are in train and in .*'a'"):
            Split(*parts)
    with pytest.raises(DatasetError, match="in validation and in test"):
        Split(two, one, validation=both)


def test_the_digest_of_a_split_covers_validation_and_gallery(tmp_path: Path) -> None:
    train, test, more = (labelled(tmp_path, [(f"{n}/1.png", n)]) for n in "abc")
    both = Split(train, test, validation=more).sha256(), Split(train, test, gallery=more).sha256()
    # As checkpoints from before validation and gallery existed have it.
    old = "b3cbba382a2a683df17cb3925d258426584ce677c51bed96861362fc41dbffa0"
    assert Split(train, test).sha256() == old
    assert len({old, *both}) == 3


def test_an_empty_part_is_refused(tmp_path: Path) -> None:
    write_layout("cub", tmp_path)
    for path in (tmp_path / "images").glob("0*/*"):
        path.unlink()
    with pytest.raises(DatasetError, match="has no train image of CUB"):
        partial("cub", tmp_path)


@pytest.mark.parametrize("damage", ["empty", "short", "zeroed", "newer"])
def test_a_damaged_cars_annotation_file_is_one_clear_error(tmp_path: Path, damage: str) -> None:
    path = write_layout("cars196", tmp_path) / "cars_annos.mat"
    rows = {"annotations": scipy.io.loadmat(path)["annotations"]}
    scipy.io.savemat(path, rows, do_compression=True)
    content = path.read_bytes()
    newer = b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM" + bytes(64)
    zeroed = content[:150] + bytes(50) + content[200:]
    damaged = {"empty": b"", "short": content[:50], "zeroed": zeroed, "newer": newer}
    path.write_bytes(damaged[damage])
    with pytest.raises(DatasetError, match="is not the annotation file of Cars196"):
        partial("cars196", tmp_path)


@pytest.mark.real_data
def test_the_half_of_cars196_has_its_counts(shared_data: Path) -> None:
    split = partial("cars196", shared_data / "data" / "cars196-half")
    assert (len(split.train), len(split.test)) == (4052, 4092)
    assert (split.train.classes, split.test.classes) == (98, 98)


@pytest.mark.parametrize("kind", KINDS)
def test_lists_name_existing_images_and_disjoint_classes(kind: str, tmp_path: Path) -> None:
    root, lists = write_layout(kind, tmp_path / kind), tmp_path / "lists"
    written = write_lists(root, lists, None, allow_partial=True)
    rows = {
        path.stem: list(csv.DictReader(path.read_text().splitlines())) for path in lists.iterdir()
    }
    assert {part: len(found) for part, found in rows.items()} == {
        part: len(images) for part, images in written.items()
    }
    classes = {part: {row["class"] for row in found} for part, found in rows.items()}
    assert not classes["train"] & classes["test"]
    assert classes.get("gallery", classes["test"]) == classes["test"]
    paths = [row["path"] for found in rows.values() for row in found]
    assert len(set(paths)) == len(paths) == 16
    assert all((written["test"].root / path).is_file() for path in paths)


def test_lists_are_of_whole_official_data_sets_unless_a_part_is_allowed(tmp_path: Path) -> None:
    root, lists = write_layout("sop", tmp_path / "sop"), tmp_path / "lists"
    with pytest.raises(DatasetError, match=r"59,551 train images"):
        write_lists(root, lists, None, allow_partial=False)
    for place, kind in ((tmp_path / "nothing", None), (root, "folder")):
        with pytest.raises(DatasetError, match=r"is not"):
            write_lists(place, lists, kind, allow_partial=True)
