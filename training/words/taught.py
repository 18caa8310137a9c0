"""A map from the features of texts into the space of the images, taught by a catalogue.

Letters: T texts, H numbers of a text's features, I items, D numbers of an image vector.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.types import Embeddings
from kinlens.training.words.catalogue import Catalogue

Floats = NDArray[np.float32]

PENALTY = 0.1
"""Of the ridge regression, relative to the mean square of the features."""

STEPS, TEXTS, ITEMS = 150, 128, 2048
"""Steps of the contrastive fit; texts and items of each step, drawn at random."""

RATE = 0.15
"""First step of Adam, relative to the mean size of a weight; it falls to 0."""

SCALE = 20.0
"""Inverse temperature of the cosines."""


@dataclass(frozen=True)
class WordMap:
    r"""Text features to vectors of images, :math:`q = (W^\top f + b) / \lVert W^\top f + b \rVert`.

    Attributes:
        weight: W, (H, D).
        bias: b, (D,).
    """

    weight: Floats
    bias: Floats

    def __call__(self, features: Floats) -> Embeddings:
        """Features (T, H) to unit vectors (T, D)."""
        mapped = features @ self.weight + self.bias
        unit: Embeddings = mapped / np.maximum(
            np.linalg.norm(mapped, axis=1, keepdims=True), np.finfo(np.float32).tiny
        )
        return unit


def ridge(catalogue: Catalogue, features: Floats) -> WordMap:
    r"""The least squares fit of the mean image of each text, with all means subtracted.

    .. math:: W = \arg\min \sum_t \lVert W^\top (f_t - \bar f) - (\bar x_t - \bar x) \rVert^2
        + \lambda \lVert W \rVert^2

    Texts without items are not read. It is solved for T unknowns, which are often fewer than H.
    """
    taught = _taught(catalogue)
    vectors = catalogue.vectors - catalogue.vectors.mean(axis=0)
    targets = np.stack([vectors[catalogue.members[text]].mean(axis=0) for text in taught])
    centre = features[taught].mean(axis=0, dtype=np.float64)
    centred = features[taught] - centre  # (T, H)
    products = centred @ centred.T  # (T, T)
    products += (PENALTY * np.trace(products) / len(products) + 1e-9) * np.eye(len(products))
    weight = centred.T @ np.linalg.solve(products, targets)
    return WordMap(weight.astype(np.float32), (-centre @ weight).astype(np.float32))


def fit_map(catalogue: Catalogue, features: Floats) -> WordMap:
    r"""The map under which each text prefers its own items to all others, from `ridge` on.

    .. math:: L = - \sum_t \frac{1}{|P_t|} \sum_{i \in P_t}
        \log \frac{\exp(s \, q_t \cdot c_i)}{\sum_j \exp(s \, q_t \cdot c_j)}, \qquad
        c_i = \frac{x_i - \bar x}{\lVert x_i - \bar x \rVert}

    P are the items of a text. This is the loss of Khosla et al. with texts as anchors, see
    https://arxiv.org/abs/2004.11362. A least squares fit points at the mean image of a text; this
    one points away from the images of other texts too.
    """
    start, taught, rng = ridge(catalogue, features), _taught(catalogue), np.random.default_rng(0)
    used = np.unique(np.concatenate([catalogue.members[text] for text in taught]))
    items = torch.from_numpy(catalogue.vectors - catalogue.vectors.mean(axis=0))
    items = F.normalize(items, dim=1)  # (I, D)
    rows = torch.from_numpy(features[taught])  # (T, H)
    weight, bias = (torch.from_numpy(part).requires_grad_() for part in (start.weight, start.bias))
    first = RATE * float(np.abs(start.weight).mean())
    optimizer = torch.optim.Adam([weight, bias], lr=first)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 1e-3, STEPS)
    for _ in range(STEPS):
        asked = rng.permutation(len(taught))[:TEXTS]
        pool = rng.permutation(used)[:ITEMS]
        relation = _relation(catalogue, [taught[row] for row in asked], pool)  # (T', I')
        queries = F.normalize(rows[asked] @ weight + bias, dim=1)
        logarithms = F.log_softmax(SCALE * queries @ items[pool].T, dim=1)
        count = relation.sum(dim=1)
        loss = -((logarithms * relation).sum(dim=1) / count.clamp(min=1)).sum()
        optimizer.zero_grad()
        (loss / (count > 0).sum().clamp(min=1)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return WordMap(weight.detach().numpy(), bias.detach().numpy())


def _taught(catalogue: Catalogue) -> list[int]:
    """The numbers of the texts that describe an item."""
    return [number for number, members in enumerate(catalogue.members) if len(members)]


def _relation(catalogue: Catalogue, texts: list[int], items: NDArray[np.int64]) -> Tensor:
    """1 where a text (T') describes an item (I'), else 0."""
    place = np.full(len(catalogue.vectors), -1)
    place[items] = np.arange(len(items))
    found = torch.zeros(len(texts), len(items))
    for row, text in enumerate(texts):
        columns = place[catalogue.members[text]]
        found[row, columns[columns >= 0]] = 1
    return found
