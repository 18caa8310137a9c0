"""From the `data` table of a job to its train and test images."""

from collections.abc import Callable
from pathlib import Path

from training.config.data import (
    AircraftData,
    Cars196Data,
    CsvData,
    CubData,
    Data,
    FolderData,
    InShopData,
    RenderedData,
    SopData,
)
from training.config.job import expand_path
from training.data.folder import read_folder
from training.data.layouts import OFFICIAL
from training.data.official import read_official
from training.data.records import Split, without_small_classes
from training.data.splits import split_by_class
from training.data.table import read_table, split_by_column
from training.rendered.catalogue import Catalogue, write_catalogue

Progress = Callable[[], None]


def load_split(data: Data, on_image: Progress | None = None) -> Split:
    """Load the images that `data` describes; `on_image` is called for each rendered view.

    Raises: DatasetError, JobError.
    """
    root = expand_path(data.root, "data.root")
    match data:
        case Cars196Data() | CubData() | SopData() | InShopData() | AircraftData():
            return read_official(OFFICIAL[data.kind], root, data.allow_partial)
        case CsvData():
            return _load_csv(root, data)
        case FolderData():
            records = without_small_classes(root, read_folder(root), data.small_classes)
        case RenderedData():
            catalogue = Catalogue(data.products, data.views, data.size_px, data.seed)
            write_catalogue(root, catalogue, on_image)
            records = read_folder(root)
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


def _load_csv(root: Path, data: CsvData) -> Split:
    records, splits = read_table(root, data.file)
    records = without_small_classes(root, records, data.small_classes)
    if splits is not None:
        return split_by_column(root, records, splits)
    return split_by_class(root, records, data.train_fraction, data.split_seed)
