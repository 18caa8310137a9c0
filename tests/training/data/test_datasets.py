"""Official data sets, on miniature trees in their layouts."""

import csv
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from kinlens.embedder.errors import DatasetError
from kinlens.training.config.settings import Data
from kinlens.training.data.load import load_split, recognise, write_lists
from kinlens.training.data.records import Split, labelled, labels_in
from tests.training.official_layouts import KINDS, write_layout

PUBLISHED = {
    "cub": ("001.Bird_1", "101.Bird_101", (5864, 100), (5924, 100)),
    "cars196": ("001", "099", (8054, 98), (8131, 98)),
    "sop": ("00001", "11319", (59_551, 11_318), (60_502, 11_316)),
    "in_shop": ("id_00000001", "id_00000004", (25_882, 3997), (14_218, 3985), (12_612, 3985)),
    "aircraft": ("Boeing 700", "Boeing 750", (5000, 50), (5000, 50)),
}
"""The first train and test class, images and classes of train, test and gallery."""


def data_of(kind: str, root: Path, **more: object):
    return TypeAdapter(Data).validate_python({"kind": kind, "root": str(root), **more})


def partial(kind: str, root: Path) -> Split:
    return load_split(data_of(kind, root, allow_partial=True))


@pytest.mark.parametrize("kind", PUBLISHED)
def test_an_official_layout_gives_class_disjoint_parts_of_the_published_counts(
    tmp_path: Path, kind: str
) -> None:
    first_train, first_test, *counts = PUBLISHED[kind]
    assert recognise(tmp_path) is None
    split = partial(kind, write_layout(kind, tmp_path, classes=3, images=4))
    assert recognise(tmp_path) == kind
    assert (len(split.train), split.train.classes, split.test.classes) == (12, 3, 3)
    assert len(split.test) + (len(split.gallery) if split.gallery else 0) == 12
    assert split.train.class_names[0] == first_train
    assert split.test.class_names[0] == first_test
    parts = zip(("train", "test", "gallery"), counts, strict=False)
    published = ", ".join(f"{n:,} {part} images of {c:,} classes" for part, (n, c) in parts)
    for words in (
        "has 12 train images of 3 classes",
        f"expected: {published}",
        "data.allow_partial = true (--allow-partial)",
    ):
        with pytest.raises(DatasetError, match=re.escape(words)):
            load_split(data_of(kind, tmp_path))
    gone = sorted(path for path in tmp_path.rglob("*") if path.suffix.lower() == ".jpg")[:2]
    for path in gone:
        path.unlink()
    with pytest.raises(DatasetError, match=rf"2 of the 24 images .* missing in .*{gone[0].name}"):
        load_split(data_of(kind, tmp_path))
    assert len(partial(kind, tmp_path).train) == 10


def test_a_folder_that_lacks_a_list_or_the_images_is_refused(tmp_path: Path) -> None:
    for kind in KINDS:
        with pytest.raises(DatasetError, match=r"official layout: it lacks .*Check data.root"):
            partial(kind, tmp_path)
    write_layout("cub", tmp_path / "data-set")
    with pytest.raises(DatasetError, match="data-set looks right"):
        partial("cub", tmp_path)
    for path in (tmp_path / "data-set" / "images").glob("0*/*"):
        path.unlink()
    with pytest.raises(DatasetError, match="has no train image of CUB"):
        partial("cub", tmp_path / "data-set")


@pytest.mark.parametrize(
    ("kind", "file", "line", "text"),
    [
        ("cub", "image_class_labels.txt", 2, "2 201"),
        ("sop", "Ebay_train.txt", 3, "2 one 8 x.JPG"),
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


def test_a_class_in_two_parts_is_refused(tmp_path: Path) -> None:
    one, two, three = (labelled(tmp_path, [(f"{n}/1.png", n)]) for n in "abc")
    both = labelled(tmp_path, [("a/2.png", "a"), ("d/1.png", "d")])
    for parts in ((one, both), (one, two, both), (one, two, None, both)):
        with pytest.raises(DatasetError, match=r"1 class\(es\) are in train and in .*'a'"):
            Split(*parts)
    with pytest.raises(DatasetError, match="in validation and in test"):
        Split(two, one, validation=both)
    more = {"validation": three}, {"gallery": three}
    # As checkpoints from before validation and gallery existed have it.
    old = "b3cbba382a2a683df17cb3925d258426584ce677c51bed96861362fc41dbffa0"
    assert Split(one, two).sha256() == old
    assert len({old, *(Split(one, two, **part).sha256() for part in more)}) == 3
    # Labels of a gallery are numbered as those of the queries.
    gallery = labelled(tmp_path, [(f"g/{name}.png", name) for name in "efga"])
    queries = labelled(tmp_path, [("q/e.png", "e"), ("q/g.png", "g")])
    assert labels_in(gallery, queries.class_names).tolist() == [2, 0, 3, 1]


@pytest.mark.real_data
def test_the_half_of_cars196_has_its_counts(shared_data: Path) -> None:
    split = partial("cars196", shared_data / "data" / "cars196-half")
    assert (len(split.train), len(split.test)) == (4052, 4092)
    assert (split.train.classes, split.test.classes) == (98, 98)


@pytest.mark.parametrize("kind", ["cub", "in_shop"])
def test_lists_name_existing_images_and_disjoint_classes(kind: str, tmp_path: Path) -> None:
    root, lists = write_layout(kind, tmp_path / kind), tmp_path / "lists"
    for layout, allowed, message in ((None, False, "train images of"), ("folder", True, "is not")):
        with pytest.raises(DatasetError, match=message):
            write_lists(root, lists, layout, allow_partial=allowed)
    written = write_lists(root, lists, None, allow_partial=True)
    rows = {p.stem: list(csv.DictReader(p.read_text().splitlines())) for p in lists.iterdir()}
    assert rows.keys() == written.keys()
    classes = {part: {row["class"] for row in found} for part, found in rows.items()}
    assert not classes["train"] & classes["test"]
    assert classes.get("gallery", classes["test"]) == classes["test"]
    paths = {row["path"] for found in rows.values() for row in found}
    assert len(paths) == sum(map(len, rows.values())) == 16
    assert all((written["test"].root / path).is_file() for path in paths)
