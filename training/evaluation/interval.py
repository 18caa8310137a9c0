"""How far a recall may be from that of other photographs of the same kind."""

import math

import numpy as np

from training.data.records import LabelledImages, labels_in

_Z = 1.959964  # 95 %


def interval(recall: float, queries: int) -> tuple[float, float]:
    """The 95 % interval of a share in percent over so many queries (Wilson, 1927).

    Queries count as independent; photographs of one class are alike, so it is rather too narrow.
    """
    share, z2 = recall / 100, _Z**2 / queries
    middle = (share + z2 / 2) / (1 + z2)
    half = _Z * math.sqrt(share * (1 - share) / queries + z2 / (4 * queries)) / (1 + z2)
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)


def with_interval(recall: float, queries: int) -> str:
    """A recall in percent as "58.0 (50.0 to 65.6)"."""
    low, high = interval(recall, queries)
    return f"{recall:.1f} ({low:.1f} to {high:.1f})"


def queries_in(images: LabelledImages, gallery: LabelledImages | None = None) -> int:
    """How many of `images` have another image of their class to find, there or in a gallery."""
    if gallery is not None:
        return int(np.isin(images.labels, labels_in(gallery, images.class_names)).sum())
    sizes = np.bincount(images.labels, minlength=images.classes)
    return int(sizes[sizes > 1].sum())
