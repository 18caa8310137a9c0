"""The official split of a data set as lists that the indexer reads."""

from dataclasses import dataclass
from pathlib import Path

from embedder.errors import DatasetError
from training.data.layouts import OFFICIAL, recognise
from training.data.official import read_official
from training.data.table import write_table


@dataclass(frozen=True)
class Written:
    """How many images each list holds, and the folder that their paths start from."""

    images: dict[str, int]
    root: Path


def write_lists(root: Path, out: Path, kind: str | None, allow_partial: bool) -> Written:
    """Write train.csv, test.csv and, where there is one, gallery.csv into `out`.

    Raises: DatasetError if `root` is no official data set, or not a whole one.
    """
    if not root.is_dir():
        raise DatasetError(f"{root} is not a folder. Give the folder of a data set.")
    kind = kind or recognise(root) or "unknown"
    if kind not in OFFICIAL:
        raise DatasetError(
            f"{root} is not an official data set but of kind {kind!r}. Give the folder "
            f"that was unpacked, or name its kind with --kind: {', '.join(OFFICIAL)}."
        )
    split = read_official(OFFICIAL[kind], root, allow_partial)
    parts = {"train": split.train, "test": split.test, "gallery": split.gallery}
    out.mkdir(parents=True, exist_ok=True)
    found = {name: images for name, images in parts.items() if images is not None}
    for name, images in found.items():
        write_table(out / f"{name}.csv", images)
    return Written({name: len(images) for name, images in found.items()}, split.test.root)
