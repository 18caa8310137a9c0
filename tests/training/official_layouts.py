"""Miniature trees in the layouts of the official data sets."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from tests.tiny import encoded, photo

SIZE = (24, 20)


def write_layout(kind: str, root: Path, classes: int = 2, images: int = 4) -> Path:
    """Fill `root` with `classes` train and as many test classes of `images` images each.

    In-Shop divides the images of a test class into queries and gallery, half and half.
    """
    first_test, write = _LAYOUTS[kind]
    first_test = first_test or classes + 1
    numbers = (*range(1, classes + 1), *range(first_test, first_test + classes))
    root.mkdir(parents=True, exist_ok=True)
    for seed, path in enumerate(write(root, [(n, v) for n in numbers for v in range(images)]), 1):
        write_image(root / path, seed)
    return root


def write_image(path: Path, seed: int) -> None:
    """A tiny JPEG, another for each seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(photo(seed, SIZE), "JPEG"))


def _write(path: Path, rows: Iterable[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


Views = list[tuple[int, int]]
"""(class, view) of each image."""


def _cub(root: Path, views: Views) -> list[str]:
    names = [f"{number:03d}.Bird_{number}" for number in range(1, 201)]
    paths = [f"{names[n - 1]}/Bird_{n}_{view:04d}.jpg" for n, view in views]
    _write(root / "classes.txt", (f"{n} {name}" for n, name in enumerate(names, 1)))
    _write(root / "images.txt", (f"{n} {path}" for n, path in enumerate(paths, 1)))
    labels = (f"{image} {n}" for image, (n, _) in enumerate(views, 1))
    _write(root / "image_class_labels.txt", labels)
    return [f"images/{path}" for path in paths]


def _cars196(root: Path, views: Views) -> list[str]:
    import scipy.io  # here, since its import takes a second

    rows = [(f"car_ims/{image:06d}.jpg", n, 0) for image, (n, _) in enumerate(views, 1)]
    kinds = [(name, "O") for name in ("relative_im_path", "class", "test")]
    scipy.io.savemat(root / "cars_annos.mat", {"annotations": np.array([rows], dtype=kinds)})
    return [path for path, _, _ in rows]


def _sop(root: Path, views: Views) -> list[str]:
    paths = [f"mug_final/{n:012d}_{view}.JPG" for n, view in views]
    rows = [f"{image} {n} 8 {paths[image - 1]}" for image, (n, _) in enumerate(views, 1)]
    heading, half = "image_id class_id super_class_id path", len(rows) // 2
    _write(root / "Ebay_train.txt", [heading, *rows[:half]])
    _write(root / "Ebay_test.txt", [heading, *rows[half:]])
    return paths


def _in_shop(root: Path, views: Views) -> list[str]:
    paths = [f"img/WOMEN/Dresses/id_{n:08d}/{view:02d}_1_front.jpg" for n, view in views]
    rows = [str(len(paths)), "image_name item_id evaluation_status"]
    for image, (n, view) in enumerate(views):
        part = "train" if image < len(views) // 2 else ("query", "gallery")[view % 2]
        rows.append(f"{paths[image]:<60} id_{n:08d} {part}")
    _write(root / "Eval" / "list_eval_partition.txt", rows)
    return paths


def _aircraft(root: Path, views: Views) -> list[str]:
    _write(root / "data" / "variants.txt", (f"Boeing {number}" for number in range(700, 800)))
    rows = [f"{1_000_000 + image} Boeing {699 + n}" for image, (n, _) in enumerate(views, 1)]
    for at, part in enumerate(("train", "val", "test")):
        own = (row for row, (_, view) in zip(rows, views, strict=True) if view % 3 == at)
        _write(root / "data" / f"images_variant_{part}.txt", own)
    return [f"data/images/{row.split()[0]}.jpg" for row in rows]


# By kind: the first test class, 0 for the one that follows the train classes.
_LAYOUTS: dict[str, tuple[int, Callable[[Path, Views], list[str]]]] = {
    "cub": (101, _cub),
    "cars196": (99, _cars196),
    "sop": (11319, _sop),
    "in_shop": (0, _in_shop),
    "aircraft": (51, _aircraft),
}
KINDS = tuple(_LAYOUTS)
