"""From the `data` table of a job, or a folder, to train and test images."""

from collections.abc import Callable
from pathlib import Path

from embedder.errors import DatasetError
from training.config.job import expand_path
from training.config.settings import CsvData, Data, FolderData, RenderedData
from training.data.datasets import OFFICIAL, read_official
from training.data.records import LabelledImages, Split
from training.data.shop import (
    read_folder,
    read_table,
    split_by_class,
    split_by_column,
    without_small_classes,
    write_table,
)
from training.rendered.catalogue import Catalogue, write_catalogue

TABLE = "images.csv"
KINDS = (*OFFICIAL, "csv", "folder")


def load_split(data: Data, on_image: Callable[[], None] | None = None) -> Split:
    """Load the images that `data` describes; `on_image` is called for each rendered view.

    Raises: DatasetError, JobError.
    """
    root, parts = expand_path(data.root, "data.root"), None
    match data:
        case FolderData():
            records = without_small_classes(root, read_folder(root), data.small_classes)
        case CsvData():
            records, parts = read_table(root, data.file)
            records = without_small_classes(root, records, data.small_classes)
        case RenderedData():
            catalogue = Catalogue(data.products, data.views, data.size_px, data.seed)
            write_catalogue(root, catalogue, on_image)
            records = read_folder(root)
        case _:
            return read_official(OFFICIAL[data.kind], root, data.allow_partial)
    if parts is not None:
        return split_by_column(root, records, parts)
    return split_by_class(root, records, data.train_fraction, data.split_seed)


def remarks(data: Data, split: Split) -> list[str]:
    """What a person should know of a split before it is used, a sentence each."""
    said = []
    if getattr(data, "allow_partial", False):
        name = OFFICIAL[data.kind].name
        said.append(f"{name}: allow_partial is set, the official counts are not asserted")
    if split.without_gallery:
        said.append(
            f"{len(split.without_gallery)} class(es) of queries have no image in the gallery, for "
            f"example {split.without_gallery[0]!r}; these queries have no right answer"
        )
    return said


def recognise(root: Path) -> str | None:
    """The kind of data set that `root` looks most like; None if it looks like none.

    A folder that has only some of what an official layout needs is still that kind, so that what
    it lacks can be named.
    """
    lacking = {kind: len(official.lacks(root)) for kind, official in OFFICIAL.items()}
    best = min(lacking, key=lambda kind: lacking[kind] / len(OFFICIAL[kind].needs))
    if not lacking[best]:
        return best
    if (root / TABLE).is_file():
        return "csv"
    # A file of the layout; folders of images alone prove nothing.
    if any((root / name).is_file() for names in OFFICIAL[best].needs for name in names):
        return best
    if data_sets_in(root):
        return None
    try:
        read_folder(root)
    except DatasetError:
        return None
    return "folder"


def data_sets_in(root: Path) -> list[Path]:
    """Sub-folders that are whole official layouts: `root` is one level too high."""
    return [
        path
        for path in sorted(root.iterdir())
        if path.is_dir() and any(not official.lacks(path) for official in OFFICIAL.values())
    ]


def write_lists(
    root: Path, out: Path, kind: str | None, allow_partial: bool
) -> dict[str, LabelledImages]:
    """Write the official split as train.csv, test.csv and, where there is one, gallery.csv.

    Returns what each list has. Raises: DatasetError if `root` is no official data set, or not a
    whole one.
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
    lists = {name: images for name, images in parts.items() if images is not None}
    out.mkdir(parents=True, exist_ok=True)
    for name, images in lists.items():
        write_table(out / f"{name}.csv", images)
    return lists
