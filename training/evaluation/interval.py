"""How far a recall may be from that of other photographs of the same kind."""

import math

import numpy as np

from training.data.records import LabelledImages, labels_in

_Z = 1.959964  # 95 %


def half_width(recall: float, queries: int) -> float:
    """Half of the 95 % interval of a share in percent over so many queries (Wilson, 1927).

    Queries count as independent; photographs of one class are alike, so it is rather too narrow.
    """
    share = recall / 100
    spread = share * (1 - share) / queries + _Z**2 / (4 * queries**2)
    return 100 * _Z * math.sqrt(spread) / (1 + _Z**2 / queries)


def with_interval(recall: float, queries: int) -> str:
    """A recall in percent as "58.0 ± 4.0"."""
    return f"{recall:.1f} ± {half_width(recall, queries):.1f}"


def queries_in(images: LabelledImages, gallery: LabelledImages | None = None) -> int:
    """How many of `images` have another image of their class to find, there or in a gallery."""
    if gallery is not None:
        return int(np.isin(images.labels, labels_in(gallery, images.class_names)).sum())
    sizes = np.bincount(images.labels, minlength=images.classes)
    return int(sizes[sizes > 1].sum())
