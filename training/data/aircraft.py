"""FGVC-Aircraft: the first 50 variants train, the last 50 test."""

from collections.abc import Iterator
from pathlib import Path

from training.data.annotations import fault, inside, read_rows
from training.data.official import Count, Official, Record

TRAIN_VARIANTS = 50
_LISTS = tuple(f"data/images_variant_{part}.txt" for part in ("train", "val", "test"))


def _read(root: Path) -> Iterator[Record]:
    """`variants.txt` gives the order; the three lists of images (id, variant) are taken together.

    **Reading**: the strip of 20 px with the photographer's name at the foot of each picture stays;
    a centre crop of 224 of 256 px cuts it off in pictures of at least 320 px.
    """
    order: dict[str, int] = {}
    variants = root / "data" / "variants.txt"
    for number, (name,) in read_rows(variants, "variant"):
        if name in order:
            raise fault(variants, number, f"the variant {name!r} is listed a second time")
        order[name] = len(order)
    for path in (root / name for name in _LISTS):
        for number, (image, variant) in read_rows(path, "image variant"):
            if variant not in order:
                raise fault(path, number, f"the variant {variant!r} is not in variants.txt")
            part = "train" if order[variant] < TRAIN_VARIANTS else "test"
            file = inside(path, number, f"data/images/{image}.jpg")
            yield Record(part, file, variant, f"{path}, line {number}")


AIRCRAFT = Official(
    name="FGVC-Aircraft",
    needs=(("data/variants.txt",), *((name,) for name in _LISTS), ("data/images",)),
    expected={"train": Count(5000, 50), "test": Count(5000, 50)},
    read=_read,
)
"""Fine-Grained Visual Classification of Aircraft (Maji et al., 2013),
https://www.robots.ox.ac.uk/~vgg/data/fgvc-aircraft/."""
