"""In-Shop Clothes Retrieval (DeepFashion): train, query and gallery as its authors divide them."""

from collections.abc import Iterator
from pathlib import Path

from training.data.annotations import fault, inside, read_rows
from training.data.official import Count, Official, Record

LIST = "list_eval_partition.txt"
PLACES = (f"Eval/{LIST}", f"Anno/{LIST}", LIST)
_COLUMNS = "image_name item_id evaluation_status"
_PARTS = {"train": "train", "query": "test", "gallery": "gallery"}


def _read(root: Path) -> Iterator[Record]:
    """`list_eval_partition.txt`: number of images, a heading, then a row an image."""
    path = next(root / place for place in PLACES if (root / place).exists())
    headings = list(read_rows(path, "text"))[:2]
    if len(headings) < 2 or headings[1][1][0].split() != _COLUMNS.split():
        raise fault(
            path, 2, f"the file must begin with the number of images and the line '{_COLUMNS}'"
        )
    for number, (image, label, status) in read_rows(path, _COLUMNS, skip=headings[1][0]):
        if status not in _PARTS:
            raise fault(path, number, f"{status!r} is not one of {', '.join(_PARTS)}")
        yield Record(_PARTS[status], inside(path, number, image), label, f"{path}, line {number}")


def _images(root: Path) -> Path:
    """The list says img/...; the authors' archive unpacks to Img/img/ or, as many keep it, img/."""
    return root / "Img" if (root / "Img" / "img").is_dir() else root


IN_SHOP = Official(
    name="In-Shop Clothes Retrieval",
    needs=(PLACES, ("img", "Img/img")),
    expected={
        "train": Count(25882, 3997),
        "test": Count(14218, 3985),
        "gallery": Count(12612, 3985),
    },
    read=_read,
    image_root=_images,
)
"""DeepFashion: Powering Robust Clothes Recognition and Retrieval with Rich Annotations (Liu et
al., 2016), https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion/InShopRetrieval.html."""
