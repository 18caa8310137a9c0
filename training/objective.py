"""The objective to minimise: a loss plus the regularizers of the job."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.training.config.job import Job
from kinlens.training.distributed import gather
from kinlens.training.losses.base import MetricLoss, ProxyLoss
from kinlens.training.losses.table import build_loss
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.regularizers.determinant import DeterminantRegularizer
from kinlens.training.regularizers.graph_consistency import graph_consistency
from kinlens.training.regularizers.non_isotropy import NonIsotropyRegularizer
from kinlens.training.regularizers.shares import Shares
from kinlens.training.regularizers.skewed_mean import class_means, skewed_mean

Parts = dict[str, Tensor]


class Terms(NamedTuple):
    """The scalar to minimise and its named parts, for the log."""

    total: Tensor
    parts: Parts


class Objective(nn.Module):
    r"""Loss and regularizers with their own parameters (proxies, flows that are not exported).

    .. math:: w L + c_d (\lambda_1 R_{g_1} - \lambda_2 R_{g_2}) + \sum_r c_r \lambda_r R_r

    The scales c are 1 for fixed weights. For a regularizer with a `share` they are calibrated, see
    `kinlens.training.regularizers.shares`.

    Under determinant regularization L is the mean over both branches; in a batch of two draws it is
    the mean over both (`sampling.draws`). So the scale of L, and the meaning of each lambda, is the
    same as for the loss alone. The other regularizers act on the first branch, which is kept.
    Everything is computed in float32, whatever the precision of the trunk.
    """

    def __init__(self, job: Job, classes: int, dim: int) -> None:
        super().__init__()
        self.tables = tables = job.regularizers
        duel, nir = tables.determinant, tables.non_isotropy
        self.draws = job.sampling.parts
        self.loss_weight = 1.0 if nir is None else nir.loss_weight
        self.loss = build_loss(job.loss, classes, dim)
        self.determinant = None if duel is None else DeterminantRegularizer(duel, dim)
        separate = duel is not None and duel.proxies == "separate"
        self.second_loss = build_loss(job.loss, classes, dim) if separate else None
        self.non_isotropy = None if nir is None else NonIsotropyRegularizer(nir, dim)
        self.shares = Shares({name: table.share for name, table in tables if table is not None})

    def forward(self, net: EmbeddingNet, features: Tensor, labels: Tensor) -> Terms:
        """Features (B, D) of `net` before its flow and labels (B,) to the terms."""
        with torch.autocast(features.device.type, enabled=False):
            penalties, watched = {}, {}
            if self.determinant is None or net.flow is None:
                embeddings = net.transform(features)  # (B, D)
                loss = self._over_draws(self.loss, embeddings, labels)
            else:
                duel = self.determinant(features, net.flow)
                embeddings = duel.first
                first = self._over_draws(self.loss, duel.first, labels)
                second = self._over_draws(self.second_loss or self.loss, duel.second, labels)
                loss = torch.stack([first, second]).mean()
                penalties = {"determinant": duel.penalty}
                watched = {"r_first": duel.r_first, "r_second": duel.r_second}
            unit = F.normalize(embeddings, dim=1)
            penalties |= self._regularize(unit, labels)
            loss_term = self.loss_weight * loss
            if self.training and self.shares.is_due():
                self.shares.measure(loss_term, penalties, features, self._sites(net))
            penalties = self.shares.scaled(penalties)
            total = loss_term + sum(penalties.values())
        parts = {"loss": loss, **penalties, **watched}
        return Terms(total, {name: value.detach() for name, value in parts.items()})

    def checkpoint(self) -> dict[str, Tensor]:
        shares = {f"shares.{name}": value for name, value in self.shares.state_dict().items()}
        return {**self.state_dict(), **shares}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        shares = {name for name in state if name.startswith("shares.")}
        self.load_state_dict({name: state[name] for name in state if name not in shares})
        self.shares.load_state_dict({n.removeprefix("shares."): state[n] for n in shares})

    def begin_epoch(self, epoch: int) -> None:
        """Set the number of finished epochs; call it before each epoch."""
        if self.non_isotropy is not None:
            self.non_isotropy.fitting = epoch < self.non_isotropy.settings.fit_epochs

    def _over_draws(self, loss: MetricLoss, vectors: Tensor, labels: Tensor) -> Tensor:
        if loss.normalized:
            vectors = F.normalize(vectors, dim=1)
        parts = zip(vectors.chunk(self.draws), labels.chunk(self.draws), strict=True)
        return torch.stack([loss(x, y) for x, y in parts]).mean()

    def _regularize(self, embeddings: Tensor, labels: Tensor) -> Parts:
        penalties: Parts = {}
        if (skewed := self.tables.skewed_mean) is not None:
            of_batch = skewed.centres == "batch"
            centres = class_means(embeddings, labels) if of_batch else self._proxies.class_centres()
            penalties["skewed_mean"] = skewed.weight * skewed_mean(centres, skewed)
        if (nir := self.non_isotropy) is not None:
            own = self._proxies.centre_of(embeddings, labels)
            penalties["non_isotropy"] = nir.settings.weight * nir(embeddings, own)
        if (graph := self.tables.graph_consistency) is not None:
            first, second = embeddings.chunk(2)
            penalties["graph_consistency"] = graph.weight * graph_consistency(first, second, graph)
        return penalties

    def _sites(self, net: EmbeddingNet) -> dict[str, list[Tensor]]:
        """The tensors at which the gradient of a penalty is compared, if not at the features."""
        sites: dict[str, list[Tensor]] = {}
        if net.flow is not None:
            sites["determinant"] = list(net.flow.parameters())
        skewed = self.tables.skewed_mean
        if skewed is not None and skewed.centres == "proxies":
            sites["skewed_mean"] = [self._proxies.proxies]
        return sites

    @property
    def _proxies(self) -> ProxyLoss:
        assert isinstance(self.loss, ProxyLoss)  # the job forbids others here
        return self.loss


class TrainingStep(nn.Module):
    """Network and objective as one module, so that one backward pass covers both on all ranks."""

    def __init__(self, net: EmbeddingNet, objective: Objective) -> None:
        super().__init__()
        self.net = net
        self.objective = objective

    def forward(self, images: Tensor, labels: Tensor) -> Terms:
        """This rank's images, or pooled features (B, C), and labels (B,) to all terms."""
        net = self.net
        features = gather(net.features(images) if images.ndim == 4 else net.project(images))
        if not features.requires_grad:  # the whole network is frozen
            features = features.detach().requires_grad_()
        terms: Terms = self.objective(net, features, gather(labels))
        return terms
