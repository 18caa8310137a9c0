"""Selection of the pairs and triplets of a batch for a loss.

Results have fixed shapes, masks and indices (B, B), so that no step waits for a GPU. Miners pass no
gradient. B is the number of samples; `similarities` are (B, B), larger is more similar, `labels`
(B,).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.parts.own import is_own, own_part

_NEAREST, _FARTHEST = 0.5, 1.4
"""Bounds of the distances from which `distance_weighted` draws, those of the authors' code."""


class Pairs(NamedTuple):
    """Masks (B, B): row is the anchor, column the other sample."""

    positive: Tensor
    negative: Tensor


class Triplets(NamedTuple):
    """At most one negative for each anchor (row) and positive (column), both (B, B).

    `mined` is True where there is a triplet; `negative` is the index of its negative, and an
    arbitrary index elsewhere.
    """

    mined: Tensor
    negative: Tensor


Miner = Callable[[Tensor, Tensor], Triplets]
"""Similarities (B, B) and labels (B,) to triplets."""


def mine(mining: str | Miner, similarities: Tensor, labels: Tensor, dim: int) -> Triplets:
    """The triplets of a miner: its name, the import path of your own, or a function."""
    if callable(mining):
        return mining(similarities, labels)
    if mining == "distance_weighted":
        return distance_weighted(similarities, labels, dim)
    known = {"semi_hard": semi_hard, "hard": batch_hard}
    miner: Miner = own_part(mining) if is_own(mining) else known[mining]
    return miner(similarities, labels)


def all_pairs(labels: Tensor) -> Pairs:
    """Every ordered pair of two different samples, split by whether their class is equal."""
    same = labels[:, None] == labels[None, :]
    itself = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
    return Pairs(same & ~itself, ~same)


def hard_pairs(similarities: Tensor, labels: Tensor, epsilon: float = 0.1) -> Pairs:
    """Positives with S_ap < max S_an + epsilon, negatives with S_an > min S_ap - epsilon.

    Hard is relative to the anchor's hardest opposite pair. An anchor without positives, or without
    negatives, keeps no pair; any other anchor keeps pairs of both kinds or none.

    References:
        Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning (Wang et al.,
        2019), section on pair mining. https://arxiv.org/abs/1904.06627
    """
    similarities = similarities.detach()
    pairs = all_pairs(labels)
    hardest_negative, _ = _row_max(similarities, pairs.negative)  # (B,)
    hardest_positive, _ = _row_max(-similarities, pairs.positive)
    return Pairs(
        pairs.positive & (similarities < hardest_negative[:, None] + epsilon),
        pairs.negative & (similarities > -hardest_positive[:, None] - epsilon),
    )


def batch_hard(similarities: Tensor, labels: Tensor) -> Triplets:
    """One triplet per anchor: argmin S_ap and argmax S_an; none if it lacks either.

    References:
        In Defense of the Triplet Loss for Person Re-Identification (Hermans et al., 2017).
        https://arxiv.org/abs/1703.07737
    """
    similarities = similarities.detach()
    pairs = all_pairs(labels)
    farthest, positive = _row_max(-similarities, pairs.positive)
    nearest, negative = _row_max(similarities, pairs.negative)
    found = farthest.isfinite() & nearest.isfinite()  # (B,)
    column = torch.arange(len(labels), device=labels.device)
    mined = (positive[:, None] == column) & found[:, None]  # (B, B)
    return Triplets(mined, (negative * found)[:, None].expand_as(mined))


def semi_hard(similarities: Tensor, labels: Tensor) -> Triplets:
    """For each anchor and positive: argmax S_an over the negatives with S_an < S_ap.

    Each row is sorted once: memory B^2, not B^3. A pair without such a negative gives no triplet;
    a negative beyond the margin of the loss is not excluded.

    References:
        FaceNet: A Unified Embedding for Face Recognition and Clustering (Schroff et al., 2015),
        section 3.2. https://arxiv.org/abs/1503.03832
    """
    similarities = similarities.detach()
    pairs = all_pairs(labels)
    ranked, order = similarities.masked_fill(~pairs.negative, -torch.inf).sort(dim=1)
    rank = torch.searchsorted(ranked, similarities) - 1  # (B, B), last one below
    below = rank.clamp(min=0)
    found = (rank >= 0) & ranked.gather(1, below).isfinite()
    return Triplets(pairs.positive & found, order.gather(1, below))


def distance_weighted(similarities: Tensor, labels: Tensor, dim: int) -> Triplets:
    """For each anchor and positive, a negative drawn with `negative_probabilities` on the CPU."""
    probabilities = negative_probabilities(similarities, labels, dim)
    cumulative = probabilities.cumsum(dim=1)  # (B, B)
    cumulative = cumulative / cumulative[:, -1:]  # ends in exactly 1, or NaN without negatives
    drawn = torch.rand(probabilities.shape, dtype=torch.float64)
    drawn = drawn.to(labels.device, non_blocking=True)
    negative = torch.searchsorted(cumulative, drawn, right=True)  # (B, B), first one above
    pairs = all_pairs(labels)
    found = pairs.positive & pairs.negative.any(dim=1)[:, None]
    return Triplets(found, negative.where(found, 0))


def negative_probabilities(similarities: Tensor, labels: Tensor, dim: int) -> Tensor:
    r"""The probability of each negative of each anchor: cosines (B, B) to (B, B) in float64.

    Proportional to the inverse of the density of distances d on the unit sphere of R^D, for d < 1.4
    and with d raised to at least 0.5, which bounds the variance:

    .. math:: q(d)^{-1} = d^{2 - D} (1 - d^2 / 4)^{(3 - D) / 2}

    An anchor whose negatives are all too far chooses among them uniformly, which keeps its positive
    pairs in the loss. Rows of anchors without a negative are 0.

    References:
        Sampling Matters in Deep Embedding Learning (Wu et al., 2017), section 4.
        https://arxiv.org/abs/1706.07567
    """
    negative = all_pairs(labels).negative
    squared = (2 - 2 * similarities.detach().double()).clamp(min=0)
    d2 = squared.clamp(min=_NEAREST**2, max=4 - 1e-9)
    log_weights = (2 - dim) / 2 * d2.log() + (3 - dim) / 2 * (1 - d2 / 4).log()
    near = negative & (squared < _FARTHEST**2)
    none_near = ~near.any(dim=1, keepdim=True)
    log_weights = log_weights.masked_fill(none_near, 0.0)
    allowed = torch.where(none_near, negative, near)
    return log_weights.masked_fill(~allowed, -torch.inf).softmax(dim=1).nan_to_num(nan=0.0)


def _row_max(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum and its index over the columns in mask: (B, B) to (B,); -inf without a column."""
    padded = F.pad(values.masked_fill(~mask, -torch.inf), (0, 1), value=-torch.inf)
    best, index = padded.max(dim=1)
    return best, index
