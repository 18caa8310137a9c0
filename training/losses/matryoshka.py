"""Matryoshka: embeddings whose first numbers are embeddings too.

Shapes: B samples, D dimensions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F


def matryoshka(
    loss: nn.Module, embeddings: Tensor, labels: Tensor, dims: Sequence[int] = ()
) -> Tensor:
    r"""The mean of a loss over the first n numbers of the embeddings, for n = D and each of `dims`:

    .. math:: \frac{1}{|M|} \sum_{n \in M} L(x_{1:n}, y), \qquad M = \{D\} \cup \text{dims}

    The first n numbers have unit length again, unless the loss has `normalized = False`. Learnt
    vectors of length D, such as proxies, are cut in the same way, so all n share them.

    References:
        Matryoshka Representation Learning (Kusupati et al., 2022), eq. 1 with equal weights; shared
        vectors are its MRL-E (section 3). https://arxiv.org/abs/2205.13147

    Args:
        loss: maps embeddings (B, D) and labels (B,) to a scalar.
        embeddings: of any length, (B, D).
        labels: (B,).
        dims: each from 1 to D.
    """
    width = embeddings.shape[1]
    values = []
    for n in sorted({*dims, width}):
        first = embeddings[:, :n]
        if getattr(loss, "normalized", True):
            first = F.normalize(first, dim=1)
        cut = {
            name: parameter[..., :n]
            for name, parameter in loss.named_parameters()
            if n < width and parameter.ndim > 1 and parameter.shape[-1] == width
        }
        values.append(functional_call(loss, cut, (first, labels)) if cut else loss(first, labels))
    return torch.stack(values).mean()
