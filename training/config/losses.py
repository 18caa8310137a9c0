"""The `loss` table of a job: which loss, by `name`, and its options. Defaults: the benchmark's."""

from typing import Annotated, Literal

from pydantic import Field

from training.config.section import Section

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Cosine = Annotated[float, Field(ge=-1, le=1)]


class Contrastive(Section):
    """See training.losses.contrastive."""

    name: Literal["contrastive"] = "contrastive"
    margin: Cosine = 0.5
    mining: Literal["all", "hard"] = "all"


class Triplet(Section):
    """See training.losses.triplet."""

    name: Literal["triplet"] = "triplet"
    margin: NotNegative = 0.1
    mining: Literal["all", "semi_hard", "hard", "distance_weighted"] = "semi_hard"


class LiftedStructure(Section):
    """See training.losses.lifted_structure."""

    name: Literal["lifted_structure"] = "lifted_structure"
    margin: float = 0.5
    mining: Literal["all", "hard"] = "hard"
    epsilon: NotNegative = 0.1


class NPair(Section):
    """See training.losses.n_pair."""

    name: Literal["n_pair"] = "n_pair"
    l2: NotNegative = 0.02
    pairs: Literal["all", "one_per_class"] = "all"
    normalize: bool = False


class ProxyNCA(Section):
    """See training.losses.proxy_nca."""

    name: Literal["proxy_nca"] = "proxy_nca"
    scale: Positive = 1.0


class Margin(Section):
    """See training.losses.margin; `beta_per_class` learns a beta for each class."""

    name: Literal["margin"] = "margin"
    margin: NotNegative = 0.5
    beta: Positive = 1.2
    nu: NotNegative = 0.0
    learn_beta: bool = True
    beta_per_class: bool = False
    mining: Literal["all", "distance_weighted"] = "distance_weighted"
    farthest: float = Field(1.4, gt=0, le=2)


class ArcFace(Section):
    """See training.losses.arcface."""

    name: Literal["arcface"] = "arcface"
    margin_degrees: float = Field(28.6, ge=0, lt=90)
    scale: Positive = 64.0


class MultiSimilarity(Section):
    """See training.losses.multi_similarity."""

    name: Literal["multi_similarity"] = "multi_similarity"
    alpha: Positive = 2.0
    beta: Positive = 50.0
    margin: float = 0.5
    epsilon: NotNegative = 0.1
    mining: Literal["all", "hard"] = "hard"


class SoftTriple(Section):
    """See training.losses.soft_triple."""

    name: Literal["soft_triple"] = "soft_triple"
    centres_per_class: int = Field(10, ge=1)
    scale: Positive = 20.0
    gamma: Positive = 10.0
    margin: NotNegative = 0.1
    tau: NotNegative = 0.2


class ProxyAnchor(Section):
    """See training.losses.proxy_anchor."""

    name: Literal["proxy_anchor"] = "proxy_anchor"
    alpha: Positive = 32.0
    margin: float = 0.1


class BinomialDeviance(Section):
    """See training.losses.binomial_deviance."""

    name: Literal["binomial_deviance"] = "binomial_deviance"
    alpha: Positive = 2.0
    beta: Cosine = 0.5
    negative_cost: Positive = 25.0


class Loss1(Section):
    """See training.losses.proxy_separation."""

    name: Literal["loss1"] = "loss1"
    alpha: Positive = 32.0
    margin: float = 0.1


class Loss2(Section):
    """See training.losses.proxy_separation_by_batch."""

    name: Literal["loss2"] = "loss2"
    alpha: Positive = 32.0
    margin: float = 0.1
    over_batch: Literal["sum", "mean"] = "sum"


Loss = Annotated[
    Contrastive
    | Triplet
    | LiftedStructure
    | NPair
    | ProxyNCA
    | Margin
    | ArcFace
    | MultiSimilarity
    | SoftTriple
    | ProxyAnchor
    | BinomialDeviance
    | Loss1
    | Loss2,
    Field(discriminator="name"),
]

WITH_PROXIES = ("proxy_nca", "proxy_anchor", "soft_triple", "arcface", "loss1", "loss2")
"""The losses that learn a vector per class, which some regularizers act on."""
