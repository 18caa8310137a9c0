"""The classes and functions of `kinlens.training` that are parts of a job; most need torch."""

from kinlens.training.config.job import Job, load_job
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.folder import Result
from kinlens.training.losses.base import MetricLoss, ProxyLoss, matryoshka
from kinlens.training.losses.miners import (
    Triplets,
    batch_hard,
    distance_weighted,
    hard_pairs,
    semi_hard,
)
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
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.determinant import DeterminantRegularizer
from kinlens.training.regularizers.flows import NICE, ConditionalGlow, RealNVP
from kinlens.training.regularizers.graph_consistency import GraphConsistencyRegularizer
from kinlens.training.regularizers.koleo import KoLeoRegularizer
from kinlens.training.regularizers.non_isotropy import NonIsotropyRegularizer
from kinlens.training.regularizers.skewed_mean import SkewedMeanRegularizer
from kinlens.training.report.log import (
    Callback,
    MlflowCallback,
    WandbCallback,
)

# fmt: off
__all__ = [
    "NICE", "ArcFaceLoss", "BatchProxySeparationLoss", "BatchSampler", "BinomialDevianceLoss",
    "Callback", "ConditionalGlow", "ContrastiveLoss", "DeterminantRegularizer",
    "GraphConsistencyRegularizer", "Job", "KoLeoRegularizer", "LiftedStructureLoss", "MarginLoss",
    "MetricLoss", "MlflowCallback", "MultiSimilarityLoss", "NPairLoss", "NonIsotropyRegularizer",
    "ProxyAnchorLoss", "ProxyLoss", "ProxyNCALoss", "ProxySeparationLoss", "RealNVP",
    "Regularizer", "Result", "SkewedMeanRegularizer", "SoftTripleLoss", "TripletLoss",
    "Triplets", "WandbCallback", "batch_hard", "distance_weighted", "hard_pairs", "load_job",
    "matryoshka", "semi_hard",
]
# fmt: on
