"""Hard pairs as Multi-Similarity defines them: relative to the anchor's hardest opposite pair."""

import torch
from torch import Tensor
from torch.nn import functional as F

from training.mining.pairs import Pairs, all_pairs


def multi_similarity(similarities: Tensor, labels: Tensor, epsilon: float = 0.1) -> Pairs:
    """Positives with S_ap < max S_an + epsilon, negatives with S_an > min S_ap - epsilon.

    An anchor without positives, or without negatives, keeps no pair; any other anchor keeps
    pairs of both kinds or none.

    References:
        Multi-Similarity Loss with General Pair Weighting for Deep Metric Learning (Wang et al.,
        2019), section on pair mining. https://arxiv.org/abs/1904.06627

    Args:
        similarities: (B, B), larger is more alike.
        labels: (B,).
        epsilon: how much easier than the hardest opposite pair a pair may be.
    """
    similarities = similarities.detach()
    pairs = all_pairs(labels)
    hardest_negative = _row_max(similarities, pairs.negative)  # (B, 1)
    hardest_positive = -_row_max(-similarities, pairs.positive)  # (B, 1)
    return Pairs(
        pairs.positive & (similarities < hardest_negative + epsilon),
        pairs.negative & (similarities > hardest_positive - epsilon),
    )


def _row_max(values: Tensor, mask: Tensor) -> Tensor:
    """Maximum over the columns in mask: (B, B) to (B, 1); -inf without a column."""
    padded = F.pad(values.masked_fill(~mask, -torch.inf), (0, 1), value=-torch.inf)
    return padded.amax(dim=1, keepdim=True)
