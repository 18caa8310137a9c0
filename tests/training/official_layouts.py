"""Miniature trees in the layouts of the official data sets."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import scipy.io

from tests.tiny import encoded, picture

SIZE = (24, 20)
KINDS = ("cub", "cars196", "sop", "in_shop", "aircraft")


def write_layout(kind: str, root: Path, classes: int = 2, images: int = 4) -> Path:
    """Fill `root` with `classes` train and as many test classes of `images` images each.

    In-Shop divides the images of a test class into queries and gallery, half and half.
    """
    root.mkdir(parents=True, exist_ok=True)
    {
        "cub": write_cub,
        "cars196": write_cars196,
        "sop": write_sop,
        "in_shop": write_in_shop,
        "aircraft": write_aircraft,
    }[kind](root, classes, images)
    return root


def write_image(path: Path, seed: int) -> None:
    """A tiny JPEG, another for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(picture(seed, SIZE), "JPEG"))


def write_cub(root: Path, classes: int, images: int) -> None:
    """`images/`, `images.txt`, `image_class_labels.txt`, `classes.txt`, all 200 classes named."""
    names = [f"{number:03d}.Bird_{number}" for number in range(1, 201)]
    (root / "classes.txt").write_text(_lines(f"{n} {name}" for n, name in enumerate(names, 1)))
    paths, labels = [], []
    for number in (*range(1, classes + 1), *range(101, 101 + classes)):
        for view in range(images):
            paths.append(f"{names[number - 1]}/Bird_{number}_{view:04d}.jpg")
            labels.append(number)
            write_image(root / "images" / paths[-1], len(paths))
    (root / "images.txt").write_text(_lines(f"{n} {path}" for n, path in enumerate(paths, 1)))
    text = _lines(f"{n} {label}" for n, label in enumerate(labels, 1))
    (root / "image_class_labels.txt").write_text(text)


def write_cars196(root: Path, classes: int, images: int) -> None:
    """`car_ims/` and `cars_annos.mat`."""
    rows = []
    for number in (*range(1, classes + 1), *range(99, 99 + classes)):
        for _ in range(images):
            rows.append((f"car_ims/{len(rows) + 1:06d}.jpg", number, 0))
            write_image(root / rows[-1][0], len(rows))
    kinds = [(name, "O") for name in ("relative_im_path", "class", "test")]
    scipy.io.savemat(root / "cars_annos.mat", {"annotations": np.array([rows], dtype=kinds)})


def write_sop(root: Path, classes: int, images: int) -> None:
    """`Ebay_train.txt`, `Ebay_test.txt` and a folder of images."""
    image = 0
    for part, first in (("train", 1), ("test", 11319)):
        rows = ["image_id class_id super_class_id path"]
        for number in range(first, first + classes):
            for view in range(images):
                image += 1
                path = f"mug_final/{number:012d}_{view}.JPG"
                rows.append(f"{image} {number} 8 {path}")
                write_image(root / path, image)
        (root / f"Ebay_{part}.txt").write_text(_lines(rows))


def write_in_shop(root: Path, classes: int, images: int) -> None:
    """`img/` and `Eval/list_eval_partition.txt`."""
    rows = []
    for number in range(1, 2 * classes + 1):
        for view in range(images):
            path = f"img/WOMEN/Dresses/id_{number:08d}/{view:02d}_1_front.jpg"
            part = "train" if number <= classes else ("query", "gallery")[view % 2]
            rows.append(f"{path:<60} id_{number:08d} {part}")
            write_image(root / path, len(rows))
    (root / "Eval").mkdir(exist_ok=True)
    heading = [str(len(rows)), "image_name item_id evaluation_status"]
    (root / "Eval" / "list_eval_partition.txt").write_text(_lines([*heading, *rows]))


def write_aircraft(root: Path, classes: int, images: int) -> None:
    """`data/images/`, `data/variants.txt` with all 100 variants, and three lists of images."""
    variants = [f"Boeing {number}" for number in range(700, 800)]
    lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
    image = 1_000_000
    for variant in (*variants[:classes], *variants[50 : 50 + classes]):
        for view in range(images):
            image += 1
            lists[("train", "val", "test")[view % 3]].append(f"{image} {variant}")
            write_image(root / "data" / "images" / f"{image}.jpg", image)
    (root / "data" / "variants.txt").write_text(_lines(variants))
    for part, rows in lists.items():
        (root / "data" / f"images_variant_{part}.txt").write_text(_lines(rows))


def _lines(rows: Iterator[str] | list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)
