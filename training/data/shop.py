"""Images of one's own: a folder of class folders or a CSV, and their class-disjoint split."""

import csv
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from embedder.errors import DatasetError
from training.data.records import IMAGE_SUFFIXES, LabelledImages, Split, labelled

FEWEST = 2
"""Classes in each part: in a part of one class every answer is right."""

_WHY = (
    f"Each part needs {FEWEST} or more, since every answer is right where there is one class. Put "
    "the images of each class into a sub-folder of its own, 2 images or more, or do without a "
    "training: kinlens-train export --backbone mobilenet_v2."
)

Records = list[tuple[str, str]]
"""(path relative to the root, class name) of each image."""


def read_folder(root: Path) -> Records:
    """The images of a folder; hidden files and folders are left out.

    The class is the folder that holds the image, named by its path below root: "mug", or
    "Women/Dress", which is another class than "Men/Dress". Galleries built from a folder have the
    same names.

    Raises: DatasetError if the folder is missing or holds no images in sub-folders.
    """
    if not root.is_dir():
        raise DatasetError(f"The data set folder {root} does not exist. Check data.root.")
    records = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.suffix.lower() in IMAGE_SUFFIXES and len(relative.parts) > 1 and not hidden:
            records.append((relative.as_posix(), relative.parent.as_posix()))
    if not records:
        raise DatasetError(
            f"{root} has no images in sub-folders. Put the images of each class into a sub-folder "
            "of its own: shop/mug-17/front.jpg, or shop/mugs/mug-17/front.jpg."
        )
    return records


def read_table(root: Path, file: str) -> tuple[Records, dict[str, str] | None]:
    """The images of a CSV, and the part ("train", "test") of each path if it has a column split.

    Raises: DatasetError naming the line of the first fault.
    """
    rows, faults = scan_table(root, file)
    if faults:
        raise DatasetError(faults[0])
    parts = {row["path"]: (row.get("split") or "").strip() for row in rows}
    return [(row["path"], row["label"]) for row in rows], parts if any(parts.values()) else None


def scan_table(root: Path, file: str) -> tuple[list[dict[str, str]], list[str]]:
    """Rows that can be used, and what is wrong with the others.

    Raises: DatasetError if the file is missing, is not a text or lacks a column.
    """
    path = root / file
    seen: set[str] = set()
    faults, usable = [], []
    for number, row in _numbered_rows(path):
        image = row["path"]
        if not image or not row["label"]:
            faults.append(f"{path}, line {number}: path and label must not be empty.")
        elif image in seen:
            faults.append(f"{path}, line {number}: {image} is listed a second time.")
        elif not (root / image).is_file():
            faults.append(f"{path}, line {number}: the image {root / image} is missing.")
        else:
            usable.append(row)
        seen.add(image)
    return usable, faults


def _numbered_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    if not path.is_file():
        raise DatasetError(f"The CSV {path} does not exist. Check data.root and data.file.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = {"path", "label"} - set(reader.fieldnames or ())
            if missing:
                raise DatasetError(
                    f"{path} lacks the column(s) {', '.join(sorted(missing))}; it has "
                    f"{', '.join(reader.fieldnames or ()) or 'none'}. "
                    "The first line names the columns."
                )
            return [(reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DatasetError(
            f"{path} is not a CSV in UTF-8 ({error}). Save it again as CSV in UTF-8."
        ) from error


def write_table(path: Path, images: LabelledImages) -> None:
    """Write a list that the indexer reads: columns key, path, class; paths relative to the root."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("key", "path", "class"))
        for image, label in zip(images.paths, images.labels, strict=True):
            writer.writerow((image, image, images.class_names[label]))


def without_small_classes(root: Path, records: Records, policy: str) -> Records:
    """Apply `small_classes`: a class with one image has no positive pair.

    Raises: DatasetError under "refuse" if there is such a class.
    """
    sizes = Counter(name for _, name in records)
    small = sorted(name for name, size in sizes.items() if size < 2)
    if small and policy == "refuse":
        shown = ", ".join(repr(name) for name in small[:5]) + (", ..." if len(small) > 5 else "")
        raise DatasetError(
            f"{len(small)} of the {len(sizes)} classes in {root} have only one image ({shown}); "
            "a class needs at least 2 to have a pair. Add images, remove these classes, or set "
            'data.small_classes = "drop".'
        )
    return [record for record in records if sizes[record[1]] >= 2]


def split_by_class(
    root: Path, records: Iterable[tuple[str, str]], train_fraction: float, seed: int
) -> Split:
    """Put a random part of the classes into train and the rest into test, at least 2 in each.

    Args:
        root: folder that the paths are relative to.
        records: (path, class name).
        train_fraction: part of the classes for training, between 0 and 1.
        seed: of the choice.

    Raises: DatasetError if there are fewer than 4 classes.
    """
    records = list(records)
    names = sorted({name for _, name in records})
    if len(names) < 2 * FEWEST:
        raise DatasetError(
            f"{root} has {len(names)} class(es) to train and test with; {2 * FEWEST} are needed, "
            f"{FEWEST} to train on and {FEWEST} others to test with. {_WHY}"
        )
    order = np.random.default_rng(seed).permutation(len(names))
    count = min(max(round(len(names) * train_fraction), FEWEST), len(names) - FEWEST)
    chosen = {names[index] for index in order[:count]}
    return Split(
        train=labelled(root, [record for record in records if record[1] in chosen]),
        test=labelled(root, [record for record in records if record[1] not in chosen]),
    )


def split_by_column(root: Path, records: Records, parts: dict[str, str]) -> Split:
    """The split that a CSV states: the part of each path.

    Raises: DatasetError if a class is in both parts, or a part has a single class.
    """
    found: dict[str, Records] = defaultdict(list)
    for record in records:
        found[parts[record[0]]].append(record)
    if set(found) != {"train", "test"}:
        raise DatasetError(
            f"The column split holds {', '.join(repr(p) for p in sorted(found)) or 'nothing'}; "
            "it must hold 'train' and 'test', both at least once."
        )
    split = Split(labelled(root, found["train"]), labelled(root, found["test"]))
    for part, images in (("train", split.train), ("test", split.test)):
        if images.classes < FEWEST:
            raise DatasetError(f"{root} has {images.classes} {part} class(es). {_WHY}")
    return split
