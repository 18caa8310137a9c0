"""Every loss in a small instance, and batches to try it on."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.losses.arcface import ArcFaceLoss
from training.losses.binomial_deviance import BinomialDevianceLoss
from training.losses.contrastive import ContrastiveLoss
from training.losses.lifted_structure import LiftedStructureLoss
from training.losses.margin import MarginLoss
from training.losses.multi_similarity import MultiSimilarityLoss
from training.losses.n_pair import NPairLoss
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_nca import ProxyNCALoss
from training.losses.proxy_separation import BatchProxySeparationLoss, ProxySeparationLoss
from training.losses.soft_triple import SoftTripleLoss
from training.losses.triplet import TripletLoss

CLASSES, DIM = 5, 6

PROXY_LOSSES: dict[str, Callable[[], nn.Module]] = {
    "proxy_anchor": lambda: ProxyAnchorLoss(CLASSES, DIM),
    "proxy_nca": lambda: ProxyNCALoss(CLASSES, DIM),
    "arcface": lambda: ArcFaceLoss(CLASSES, DIM),
    "soft_triple": lambda: SoftTripleLoss(CLASSES, DIM, centres_per_class=3),
    "soft_triple_of_one_centre": lambda: SoftTripleLoss(CLASSES, DIM, centres_per_class=1),
    "loss1": lambda: ProxySeparationLoss(CLASSES, DIM),
    "loss2": lambda: BatchProxySeparationLoss(CLASSES, DIM),
    "loss2_mean": lambda: BatchProxySeparationLoss(CLASSES, DIM, over_batch="mean"),
}

# The losses of this table draw nothing and do not depend on where a sample stands in the batch.
ORDERLESS: dict[str, Callable[[], nn.Module]] = {
    **PROXY_LOSSES,
    "contrastive": ContrastiveLoss,
    "contrastive_hard": lambda: ContrastiveLoss(mining="hard"),
    "triplet": TripletLoss,
    "triplet_all": lambda: TripletLoss(mining="all"),
    "triplet_hard": lambda: TripletLoss(mining="hard"),
    "lifted_structure": LiftedStructureLoss,
    "lifted_structure_all": lambda: LiftedStructureLoss(mining="all"),
    "n_pair": NPairLoss,
    "n_pair_normalized": lambda: NPairLoss(normalize=True),
    "margin_all": lambda: MarginLoss(CLASSES, mining="all", nu=0.1),
    "multi_similarity": MultiSimilarityLoss,
    "multi_similarity_all": lambda: MultiSimilarityLoss(mining="all"),
    "binomial_deviance": BinomialDevianceLoss,
}

LOSSES: dict[str, Callable[[], nn.Module]] = {
    **ORDERLESS,
    "triplet_distance_weighted": lambda: TripletLoss(mining="distance_weighted"),
    "n_pair_one_per_class": lambda: NPairLoss(pairs="one_per_class"),
    "margin": lambda: MarginLoss(CLASSES),
    "margin_per_class": lambda: MarginLoss(CLASSES, beta_per_class=True, nu=0.1),
}


def make(name: str) -> nn.Module:
    """The loss of that name; the same start values on every call."""
    torch.manual_seed(1)
    return LOSSES[name]()


def batch(
    count: int = 14, dim: int = DIM, classes: int = CLASSES, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Unit embeddings and labels, among them a class with a single sample; the last is absent."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = F.normalize(torch.randn(count, dim, generator=generator), dim=1)
    labels = torch.randint(0, classes - 2, (count,), generator=generator)
    labels[0] = classes - 2
    return embeddings, labels


def value(loss: nn.Module, embeddings: Tensor, labels: Tensor, seed: int = 3) -> Tensor:
    """The loss without gradient; a loss that draws draws the same each time."""
    torch.manual_seed(seed)
    result = loss(embeddings, labels)
    assert isinstance(result, Tensor)
    return result.detach()
