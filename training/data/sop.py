"""Stanford Online Products: 11,318 classes train, 11,316 others test."""

from collections.abc import Iterator
from pathlib import Path

from training.data.annotations import fault, inside, read_rows, whole_number
from training.data.official import Count, Official, Record

CLASSES = 22634
_HEADING = "image_id class_id super_class_id path"


def _read(root: Path) -> Iterator[Record]:
    """`Ebay_train.txt` and `Ebay_test.txt`: a heading, then a row an image."""
    for part in ("train", "test"):
        path = root / f"Ebay_{part}.txt"
        heading = next(read_rows(path, _HEADING), (1, ["nothing"]))
        if heading[1] != _HEADING.split():
            raise fault(path, heading[0], f"the file must begin with the line '{_HEADING}'")
        for number, (_, label, _, image) in read_rows(path, _HEADING, skip=heading[0]):
            name = f"{whole_number(path, number, label, CLASSES):05d}"
            yield Record(part, inside(path, number, image), name, f"{path}, line {number}")


SOP = Official(
    name="Stanford Online Products",
    needs=(("Ebay_train.txt",), ("Ebay_test.txt",)),
    expected={"train": Count(59551, 11318), "test": Count(60502, 11316)},
    read=_read,
)
"""Deep Metric Learning via Lifted Structured Feature Embedding (Song et al., 2016),
https://cvgl.stanford.edu/projects/lifted_struct/."""
