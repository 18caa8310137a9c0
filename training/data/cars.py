"""Cars196: classes 1-98 train, 99-196 test."""

from collections.abc import Iterator
from pathlib import Path

import scipy.io

from embedder.errors import DatasetError
from training.data.annotations import inside
from training.data.official import Count, Official, Record, read_official
from training.data.records import Split

TRAIN_CLASSES = 98
CLASSES = 196


def _read(root: Path) -> Iterator[Record]:
    """`cars_annos.mat`: a path below the folder and a class for each image."""
    annotations = root / "cars_annos.mat"
    for number, (path, label) in enumerate(_rows(annotations), start=1):
        if not 1 <= label <= CLASSES:
            raise DatasetError(
                f"{annotations}, row {number}: class {label} is not one of 1 to {CLASSES}. "
                "Download it again."
            )
        part = "train" if label <= TRAIN_CLASSES else "test"
        image = inside(annotations, number, path)
        yield Record(part, image, f"{label:03d}", f"{annotations}, row {number}")


def _rows(path: Path) -> list[tuple[str, int]]:
    try:
        table = scipy.io.loadmat(path, squeeze_me=True)["annotations"]
        return [(str(row["relative_im_path"]), int(row["class"])) for row in table]
    except Exception as error:
        # scipy raises key, index, value, zlib, struct and its own errors on a damaged file.
        raise DatasetError(
            f"{path} is not the annotation file of Cars196 ({error}). Download it again."
        ) from error


CARS196 = Official(
    name="Cars196",
    needs=(("cars_annos.mat",), ("car_ims",)),
    expected={"train": Count(8054, 98), "test": Count(8131, 98)},
    read=_read,
)
"""3D Object Representations for Fine-Grained Categorization (Krause et al., 2013)."""


def read_cars196(root: Path, allow_partial: bool = False) -> Split:
    """Read Cars196. Raises: DatasetError, as `read_official`."""
    return read_official(CARS196, root, allow_partial)
