"""What is minimised: a loss, plus the regularizers that the job names, one or several."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.job import Job
from training.distributed import gather
from training.losses.proxies import ProxyLoss
from training.losses.table import build_loss
from training.models.embedding import EmbeddingNet
from training.regularizers.determinant import DeterminantRegularizer
from training.regularizers.graph_consistency import GraphConsistency
from training.regularizers.non_isotropy import NonIsotropyRegularizer
from training.regularizers.shares import Shares
from training.regularizers.skewed_mean import SkewedMeanRegularizer, class_means

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Terms:
    """The scalar to minimise and its named parts, for the log."""

    total: Tensor
    parts: Parts


class Objective(nn.Module):
    r"""Loss and regularizers with their own parameters (proxies, flows that are not exported).

    .. math:: w L + c_d (\lambda_1 R_{g_1} - \lambda_2 R_{g_2}) + \sum_r c_r \lambda_r R_r

    The scales c are 1 for fixed weights; for a regularizer with a `share` they are calibrated, see
    `training.regularizers.shares`, which also measures the share of each in some training steps: at
    flow 1 for the determinant, at the proxies for a skewed mean of proxies, else at the features.

    All of it runs in float32, whatever the precision of the trunk.

    **Readings.** Under determinant regularization L is the mean over both branches, in a batch of
    two draws the mean over both (`sampling.draws`, with or without graph consistency), so that its
    scale, and with it the meaning of each lambda, is that of the loss alone. The other regularizers
    act on the first branch, the one that is kept.

    Args:
        job: its loss and regularizers.
        classes: number of training classes C.
        dim: length D of an embedding.
    """

    def __init__(self, job: Job, classes: int, dim: int) -> None:
        super().__init__()
        self.settings = settings = job.regularizers
        self.draws = job.sampling.parts
        self.loss = build_loss(job.loss, classes, dim)
        self.second_loss: nn.Module | None = None
        self.determinant: DeterminantRegularizer | None = None
        if settings.determinant is not None:
            self.determinant = DeterminantRegularizer(settings.determinant, dim)
            if settings.determinant.proxies == "separate":
                self.second_loss = build_loss(job.loss, classes, dim)
        self.skewed_mean: SkewedMeanRegularizer | None = None
        if (skewed := settings.skewed_mean) is not None:
            self.skewed_mean = SkewedMeanRegularizer(skewed)
        self.non_isotropy: NonIsotropyRegularizer | None = None
        if (nir := settings.non_isotropy) is not None:
            self.non_isotropy = NonIsotropyRegularizer(nir, dim)
        self.graph_consistency: GraphConsistency | None = None
        if (graph := settings.graph_consistency) is not None:
            self.graph_consistency = GraphConsistency(graph)
        used = {name: value.share for name, value in settings if value is not None}
        self.shares = Shares(used)

    def forward(self, net: EmbeddingNet, features: Tensor, labels: Tensor) -> Terms:
        """Features (B, D) of `net` before its flow and labels (B,) to the terms."""
        with torch.autocast(features.device.type, enabled=False):
            penalties, watched = {}, {}
            if self.determinant is None or net.flow is None:
                branches = [net.transform(features)]  # (B, D) each
            else:
                duel = self.determinant(features, labels, net.flow)
                branches = [duel.first, duel.second]
                penalties = {"determinant": duel.penalty}
                watched = {"r_first": duel.r_first, "r_second": duel.r_second}
            losses = [self.loss, self.second_loss or self.loss]
            loss = torch.stack(
                [self._over_draws(f, x, labels) for f, x in zip(losses, branches, strict=False)]
            ).mean()
            penalties |= self._regularize(F.normalize(branches[0], dim=1), labels)
            if self.training and self.shares.is_due():
                sites = self._sites(net, features)
                self.shares.measure(self._loss_weight * loss, penalties, sites)
            penalties = self.shares.scaled(penalties)
            total = self._loss_weight * loss + sum(penalties.values())
        parts = {"loss": loss, **penalties, **watched}
        return Terms(total, {name: value.detach() for name, value in parts.items()})

    def checkpoint(self) -> dict[str, Tensor]:
        """Parameters, buffers and shares, for `restore`."""
        shares = {f"shares.{name}": value for name, value in self.shares.state_dict().items()}
        return {**self.state_dict(), **shares}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `checkpoint` gave. Raises: RuntimeError for other parameters."""
        own = {name: value for name, value in state.items() if not name.startswith("shares.")}
        self.load_state_dict(own)
        self.shares.load_state_dict(
            {name.removeprefix("shares."): state[name] for name in state.keys() - own.keys()}
        )

    def begin_epoch(self, epoch: int) -> None:
        """To be told after how many finished epochs the next one starts."""
        if (nir := self.settings.non_isotropy) is not None and self.non_isotropy is not None:
            self.non_isotropy.fitting = epoch < nir.fit_epochs

    def _sites(self, net: EmbeddingNet, features: Tensor) -> dict[str, list[Tensor]]:
        """Where the gradient of each penalty is compared with that of the loss."""
        sites = {name: [features] for name in self.shares.terms}
        if net.flow is not None:
            sites["determinant"] = list(net.flow.parameters())
        skewed = self.settings.skewed_mean
        if skewed is not None and skewed.centres == "proxies":
            sites["skewed_mean"] = [self._proxies().proxies]
        return sites

    @property
    def _loss_weight(self) -> float:
        nir = self.settings.non_isotropy
        return 1.0 if nir is None else nir.loss_weight

    def _over_draws(self, loss: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
        """The loss of one branch, the mean over the draws of the batch."""
        if getattr(loss, "normalized", True):
            vectors = F.normalize(vectors, dim=1)
        parts = zip(vectors.chunk(self.draws), labels.chunk(self.draws), strict=True)
        return torch.stack([loss(x, y) for x, y in parts]).mean()

    def _regularize(self, embeddings: Tensor, labels: Tensor) -> Parts:
        """The weighted penalties on unit embeddings (B, D) and on centres."""
        penalties: Parts = {}
        if (skewed := self.settings.skewed_mean) is not None and self.skewed_mean is not None:
            if skewed.centres == "batch":
                centres = class_means(embeddings, labels)
            else:
                centres = self._proxies().class_centres()
            penalties["skewed_mean"] = skewed.weight * self.skewed_mean(centres)
        if (nir := self.settings.non_isotropy) is not None and self.non_isotropy is not None:
            own = self._proxies().centre_of(embeddings, labels)
            penalties["non_isotropy"] = nir.weight * self.non_isotropy(embeddings, own)
        graph = self.settings.graph_consistency
        if graph is not None and self.graph_consistency is not None:
            first, second = embeddings.chunk(2)
            penalties["graph_consistency"] = graph.weight * self.graph_consistency(first, second)
        return penalties

    def _proxies(self) -> ProxyLoss:
        if not isinstance(self.loss, ProxyLoss):
            raise TypeError(f"{type(self.loss).__name__} has no proxies")  # the job forbids it
        return self.loss


class TrainingStep(nn.Module):
    """Network and objective as one module: what one backward pass, on any ranks, covers."""

    def __init__(self, net: EmbeddingNet, objective: Objective) -> None:
        super().__init__()
        self.net = net
        self.objective = objective

    def forward(self, images: Tensor, labels: Tensor) -> Terms:
        """This rank's uint8 images (B, 3, S, S) and labels (B,) to the terms of all ranks."""
        features = gather(self.net.features(images))
        if not features.requires_grad:  # all of the network rests
            features = features.detach().requires_grad_()
        terms: Terms = self.objective(self.net, features, gather(labels))
        return terms
