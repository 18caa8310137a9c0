"""The layouts of data sets by the name of their kind, and how a folder shows which it has."""

from collections.abc import Mapping
from pathlib import Path

from embedder.errors import DatasetError
from training.data.aircraft import AIRCRAFT
from training.data.cars import CARS196
from training.data.cub import CUB
from training.data.folder import read_folder
from training.data.in_shop import IN_SHOP
from training.data.official import Official
from training.data.sop import SOP

OFFICIAL: Mapping[str, Official] = {
    "cub": CUB,
    "cars196": CARS196,
    "sop": SOP,
    "in_shop": IN_SHOP,
    "aircraft": AIRCRAFT,
}
TABLE = "images.csv"
KINDS = (*OFFICIAL, "csv", "folder")


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
    if _has_a_list(OFFICIAL[best], root):
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


def _has_a_list(official: Official, root: Path) -> bool:
    """Whether `root` has a file of the layout; folders of images alone prove nothing."""
    return any((root / name).is_file() for names in official.needs for name in names)
