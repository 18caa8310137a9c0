"""Semi-hard triplets: the hardest negative that is still farther than the positive."""

import torch
from torch import Tensor

from training.mining.pairs import Triplets, all_pairs


def semi_hard(similarities: Tensor, labels: Tensor) -> Triplets:
    """For each anchor and positive: argmax S_an over the negatives with S_an < S_ap.

    By sorting each row once: memory B^2, not B^3.

    **Reading.** A pair without such a negative gives no triplet. A negative beyond the margin is
    not excluded: its triplet costs nothing, but it counts in a mean.

    References:
        FaceNet: A Unified Embedding for Face Recognition and Clustering (Schroff et al., 2015),
        section 3.2. https://arxiv.org/abs/1503.03832

    Args:
        similarities: (B, B), larger is more alike.
        labels: (B,).
    """
    similarities = similarities.detach()
    pairs = all_pairs(labels)
    anchor, positive = pairs.positive.nonzero(as_tuple=True)  # (P,)
    ranked, order = similarities.masked_fill(~pairs.negative, -torch.inf).sort(dim=1)
    rank = torch.searchsorted(ranked, similarities)[anchor, positive] - 1  # (P,), last one below
    found = (rank >= 0) & ranked[anchor, rank].isfinite()
    anchor, positive, rank = anchor[found], positive[found], rank[found]
    return Triplets(anchor, positive, order[anchor, rank])
