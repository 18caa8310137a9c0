"""From the `loss` table of a job to the loss."""

from torch import nn

from training.config import losses as config
from training.losses.arcface import ArcFaceLoss
from training.losses.binomial_deviance import BinomialDevianceLoss
from training.losses.contrastive import ContrastiveLoss
from training.losses.lifted_structure import LiftedStructureLoss
from training.losses.margin import MarginLoss
from training.losses.multi_similarity import MultiSimilarityLoss
from training.losses.n_pair import NPairLoss
from training.losses.proxy_anchor import ProxyAnchorLoss
from training.losses.proxy_nca import ProxyNCALoss
from training.losses.proxy_separation import ProxySeparationLoss
from training.losses.proxy_separation_by_batch import BatchProxySeparationLoss
from training.losses.soft_triple import SoftTripleLoss
from training.losses.triplet import TripletLoss


def build_loss(  # noqa: C901, PLR0912 (a case for each loss)
    settings: config.Loss, classes: int, dim: int
) -> nn.Module:
    """The loss of a job for C classes and embeddings of length D; options have one name in both."""
    options = settings.model_dump(exclude={"name", "beta_per_class"})
    match settings:
        case config.Contrastive():
            return ContrastiveLoss(**options)
        case config.Triplet():
            return TripletLoss(**options)
        case config.LiftedStructure():
            return LiftedStructureLoss(**options)
        case config.NPair():
            return NPairLoss(**options)
        case config.ProxyNCA():
            return ProxyNCALoss(classes, dim, **options)
        case config.Margin():
            return MarginLoss(**options, classes=classes if settings.beta_per_class else None)
        case config.ArcFace():
            return ArcFaceLoss(classes, dim, **options)
        case config.MultiSimilarity():
            return MultiSimilarityLoss(**options)
        case config.SoftTriple():
            return SoftTripleLoss(classes, dim, **options)
        case config.ProxyAnchor():
            return ProxyAnchorLoss(classes, dim, **options)
        case config.BinomialDeviance():
            return BinomialDevianceLoss(**options)
        case config.Loss1():
            return ProxySeparationLoss(classes, dim, **options)
        case config.Loss2():
            return BatchProxySeparationLoss(classes, dim, **options)
