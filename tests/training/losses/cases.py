"""Every loss in small instances, and batches to try it on."""

import inspect

import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.training.losses.base import MetricLoss
from kinlens.training.terms import LOSSES, WITH_PROXIES

CLASSES, DIM = 5, 6

CASES: dict[str, dict[str, object]] = {
    "proxy_anchor": {},
    "proxy_nca": {},
    "arcface": {},
    "soft_triple": {"centres_per_class": 3},
    "soft_triple of one centre": {"centres_per_class": 1},
    "loss1": {},
    "loss2": {},
    "contrastive": {},
    "contrastive hard": {"mining": "hard"},
    "triplet": {},
    "triplet all": {"mining": "all"},
    "triplet hard": {"mining": "hard"},
    "triplet distance_weighted": {"mining": "distance_weighted"},
    "lifted_structure": {},
    "lifted_structure all": {"mining": "all"},
    "n_pair": {},
    "margin": {},
    "margin all": {"mining": "all"},
    "multi_similarity": {},
    "multi_similarity all": {"mining": "all"},
    "binomial_deviance": {},
}
PROXY_CASES = [name for name in CASES if name.split()[0] in WITH_PROXIES]
PAIR_CASES = [name for name in CASES if name not in PROXY_CASES]


def make(name: str, seed: int = 1, classes: int = CLASSES, **options: object) -> MetricLoss:
    """The loss of a case with options of its own; the same start values on every call."""
    torch.manual_seed(seed)
    kind = LOSSES[name.split()[0]]
    sizes = {"classes": classes, "dim": DIM}
    given = {n: size for n, size in sizes.items() if n in inspect.signature(kind).parameters}
    return kind(**given, **CASES[name], **options)


def batch(count: int = 14, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Unit embeddings and labels, among them a class with a single sample; the last is absent."""
    generator = torch.Generator().manual_seed(0)
    embeddings = F.normalize(torch.randn(count, DIM, generator=generator), dim=1)
    labels = torch.randint(0, classes - 2, (count,), generator=generator)
    labels[0] = classes - 2
    return embeddings, labels


def value(loss: MetricLoss, embeddings: Tensor, labels: Tensor, seed: int = 3) -> Tensor:
    """The loss without gradient; a loss that draws draws the same each time."""
    torch.manual_seed(seed)
    return loss(embeddings, labels).detach()
