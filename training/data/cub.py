"""CUB-200-2011: classes 1-100 train, 101-200 test."""

from collections.abc import Iterator
from pathlib import Path

from training.data.annotations import fault, inside, read_rows, whole_number
from training.data.official import Count, Official, Record

TRAIN_CLASSES = 100
CLASSES = 200


def _read(root: Path) -> Iterator[Record]:
    """`images.txt` (id, path below images/), `classes.txt`, `image_class_labels.txt`.

    `train_test_split.txt` is for classification (every class in both parts) and is not read.
    """
    names, paths = _numbered(root / "classes.txt"), _numbered(root / "images.txt")
    labels = root / "image_class_labels.txt"
    for number, (image, label) in read_rows(labels, "image_id class_id"):
        chosen = whole_number(labels, number, label, CLASSES)
        if label not in names:
            raise fault(labels, number, f"class {label} is not in classes.txt")
        if image not in paths:
            raise fault(labels, number, f"image {image} is not in images.txt or has two classes")
        line, path = paths.pop(image)
        part = "train" if chosen <= TRAIN_CLASSES else "test"
        path = inside(root / "images.txt", line, f"images/{path}")
        yield Record(part, path, names[label][1], f"{root / 'images.txt'}, line {line}")
    for image, (line, path) in paths.items():
        raise fault(root / "images.txt", line, f"image {image} ({path}) has no class in {labels}")


def _numbered(path: Path) -> dict[str, tuple[int, str]]:
    """Line and value of each id."""
    found: dict[str, tuple[int, str]] = {}
    for number, (key, value) in read_rows(path, "id name"):
        if key in found:
            raise fault(path, number, f"the id {key} is used a second time")
        found[key] = (number, value)
    return found


CUB = Official(
    name="CUB-200-2011",
    needs=(("images.txt",), ("image_class_labels.txt",), ("classes.txt",), ("images",)),
    expected={"train": Count(5864, 100), "test": Count(5924, 100)},
    read=_read,
)
"""The Caltech-UCSD Birds-200-2011 Dataset (Wah et al., 2011),
https://data.caltech.edu/records/65de6-vp158."""
