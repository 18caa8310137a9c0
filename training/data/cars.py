"""Cars196 in its official layout: classes 1-98 train, 99-196 test."""

from pathlib import Path

import scipy.io

from embedder.errors import DatasetError
from training.data.records import LabelledImages, Split, labelled

TRAIN_CLASSES = range(1, 99)
EXPECTED_TRAIN = 8054
EXPECTED_TEST = 8131


def read_cars196(root: Path, allow_partial: bool = False) -> Split:
    """Read `cars_annos.mat` and `car_ims/`.

    References:
        3D Object Representations for Fine-Grained Categorization (Krause et al., 2013).

    Args:
        root: folder that holds both.
        allow_partial: accept other counts than the official ones (a subset of the images).

    Raises: DatasetError if files are missing or counts differ.
    """
    annotations = root / "cars_annos.mat"
    if not annotations.is_file() or not (root / "car_ims").is_dir():
        raise DatasetError(
            f"{root} is not Cars196 in the official layout: it must hold cars_annos.mat and "
            "car_ims/. Check data.root."
        )
    records = _read_annotations(annotations)
    missing = [path for path, _ in records if not (root / path).is_file()]
    if missing and not allow_partial:
        raise DatasetError(
            f"{len(missing)} of the {len(records)} images that {annotations} lists are missing, "
            f"for example {missing[0]}. Unpack car_ims again, or set data.allow_partial = true."
        )
    gone = set(missing)
    split = Split(
        train=_part(root, records, gone, train=True), test=_part(root, records, gone, train=False)
    )
    found = (len(split.train), len(split.test))
    if found != (EXPECTED_TRAIN, EXPECTED_TEST) and not allow_partial:
        raise DatasetError(
            f"Cars196 in {root} has {found[0]:,} train and {found[1]:,} test images; expected are "
            f"{EXPECTED_TRAIN:,} and {EXPECTED_TEST:,}. For a subset set data.allow_partial = true."
        )
    return split


def _read_annotations(path: Path) -> list[tuple[str, int]]:
    try:
        table = scipy.io.loadmat(path, squeeze_me=True)["annotations"]
        return [(str(row["relative_im_path"]), int(row["class"])) for row in table]
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise DatasetError(
            f"{path} is not the annotation file of Cars196 ({error}). Download it again."
        ) from error


def _part(
    root: Path, records: list[tuple[str, int]], gone: set[str], train: bool
) -> LabelledImages:
    chosen = [
        (path, f"{number:03d}")
        for path, number in records
        if (number in TRAIN_CLASSES) == train and path not in gone
    ]
    if not chosen:
        raise DatasetError(f"{root} holds no {'train' if train else 'test'} image of Cars196.")
    return labelled(root, chosen)
