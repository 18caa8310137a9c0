"""The losses and regularizers of jobs, by name. To add one, add a class to the folder `losses` or
`regularizers`, and a line to LOSSES or REGULARIZERS.

The constructor defines the options of a job: all its parameters except `classes` and `dim`, which
come from the data and the network. Bounds are in its annotations.

Why the losses are not those of pytorch-metric-learning 2.9 (tests compare those that are equal):

- It lacks `binomial_deviance`, `loss1` and `loss2`.
- Its `n_pair` has one pair of each class and no norms. Its `proxy_nca` has the own proxy in the
  denominator. Its `contrastive` and `triplet` average over the terms above 0 by default.
- Its `lifted_structure` takes the sum over no positives as 1, where the anchor should not count.
- All but its `soft_triple` select entries by masks or `nonzero`, for which each step waits for the
  GPU. Here shapes are fixed. All triplets take B^3 there and B^2 here.
- Values of `proxy_anchor`, `arcface`, `soft_triple`, `multi_similarity` and `margin` are equal. But
  it checks no labels, and its options lack the types and bounds that a job is checked by.
"""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from kinlens.training.losses.base import MetricLoss, ProxyLoss
from kinlens.training.losses.pairs import (
    BinomialDevianceLoss,
    ContrastiveLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NPairLoss,
)
from kinlens.training.losses.proxy_anchor import (
    BatchProxySeparationLoss,
    ProxyAnchorLoss,
    ProxySeparationLoss,
)
from kinlens.training.losses.softmax import ArcFaceLoss, ProxyNCALoss, SoftTripleLoss
from kinlens.training.losses.triplet import MarginLoss, TripletLoss
from kinlens.training.parts.fields import Options, OwnRegularizer, Section
from kinlens.training.parts.own import is_own, own_part
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.determinant import DeterminantRegularizer
from kinlens.training.regularizers.graph_consistency import GraphConsistencyRegularizer
from kinlens.training.regularizers.koleo import KoLeoRegularizer
from kinlens.training.regularizers.non_isotropy import NonIsotropyRegularizer
from kinlens.training.regularizers.skewed_mean import SkewedMeanRegularizer

LOSSES: dict[str, type[MetricLoss]] = {
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
"""Losses that learn a vector per class, which some regularizers act on."""

REGULARIZERS: dict[str, type[Regularizer]] = {
    "determinant": DeterminantRegularizer,
    "skewed_mean": SkewedMeanRegularizer,
    "non_isotropy": NonIsotropyRegularizer,
    "graph_consistency": GraphConsistencyRegularizer,
    "koleo": KoLeoRegularizer,
}

GIVEN = ("classes", "dim")
"""Constructor arguments that are not options."""


def loss_kind(name: str) -> Any:
    """The class of a loss, or the instance that a caller of `fit` has made."""
    return own_part(name) if is_own(name) else LOSSES[name]


def regularizer_kind(name: str, options: Options) -> type[Regularizer]:
    """The class of the table `regularizers.NAME`."""
    kind: type[Regularizer]
    kind = own_part(options.name) if isinstance(options, OwnRegularizer) else REGULARIZERS[name]
    return kind


def has_proxies(kind: Any) -> bool:
    return issubclass(kind if inspect.isclass(kind) else type(kind), ProxyLoss)


def build_loss(settings: Section, classes: int, dim: int) -> nn.Module:
    """The loss of a job's `loss` table, for C classes and embeddings of length D."""
    options = settings.model_dump(exclude={"matryoshka"})
    kind = loss_kind(options.pop("name"))
    if isinstance(kind, nn.Module):
        return copy.deepcopy(kind)
    loss: nn.Module = _built(kind, options, classes, dim)
    return loss


def build_regularizer(name: str, options: Options, classes: int, dim: int) -> Regularizer:
    """The regularizer of a job's table `regularizers.NAME`, as `build_loss`."""
    values = {key: value for key, value in dict(options).items() if key not in ("share", "name")}
    made: Regularizer = _built(regularizer_kind(name, options), values, classes, dim)
    return made


def _built(kind: Any, options: Mapping[str, Any], classes: int, dim: int) -> Any:
    given = dict(zip(GIVEN, (classes, dim), strict=True))
    wanted = given.keys() & inspect.signature(kind).parameters
    return kind(**{name: given[name] for name in wanted}, **options)
