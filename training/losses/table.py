"""The losses of jobs, by name. A new one is a file of this folder and a line of LOSSES.

The constructor of a loss says which options a job may set: all its parameters but `classes` and
`dim`, which the data and the network give. Bounds stand in its annotations.
"""

import inspect

from torch import nn

from training.config.settings import Section
from training.losses.arcface import ArcFaceLoss
from training.losses.binomial_deviance import BinomialDevianceLoss
from training.losses.contrastive import ContrastiveLoss
from training.losses.lifted_structure import LiftedStructureLoss
from training.losses.margin import MarginLoss
from training.losses.multi_similarity import MultiSimilarityLoss
from training.losses.n_pair import NPairLoss
from training.losses.proxies import ProxyLoss
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_nca import ProxyNCALoss
from training.losses.proxy_separation import BatchProxySeparationLoss, ProxySeparationLoss
from training.losses.soft_triple import SoftTripleLoss
from training.losses.triplet import TripletLoss

LOSSES: dict[str, type[nn.Module]] = {
    "contrastive": ContrastiveLoss,
    "triplet": TripletLoss,
    "lifted_structure": LiftedStructureLoss,
    "n_pair": NPairLoss,
    "proxy_nca": ProxyNCALoss,
    "margin": MarginLoss,
    "arcface": ArcFaceLoss,
    "multi_similarity": MultiSimilarityLoss,
    "soft_triple": SoftTripleLoss,
    "proxy_anchor": ProxyAnchorLoss,
    "binomial_deviance": BinomialDevianceLoss,
    "loss1": ProxySeparationLoss,
    "loss2": BatchProxySeparationLoss,
}

WITH_PROXIES = tuple(name for name, kind in LOSSES.items() if issubclass(kind, ProxyLoss))
"""The losses that learn a vector per class, which some regularizers act on."""

GIVEN = ("classes", "dim")
"""What a loss is built with beside its options."""


def build_loss(settings: Section, classes: int, dim: int) -> nn.Module:
    """The loss of a job's `loss` table, for C classes and embeddings of length D."""
    options = settings.model_dump()
    kind = LOSSES[options.pop("name")]
    wanted = inspect.signature(kind).parameters
    given = zip(GIVEN, (classes, dim), strict=True)
    return kind(**{name: size for name, size in given if name in wanted}, **options)
