"""The objective to minimise: a loss plus the regularizers of the job."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job
from kinlens.training.distributed import gather
from kinlens.training.losses.base import matryoshka
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.parts.fields import OwnRegularizer
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.shares import Shares
from kinlens.training.terms import build_loss, build_regularizer

Parts = dict[str, Tensor]


class Terms(NamedTuple):
    """The scalar to minimise and its named parts, for the log."""

    total: Tensor
    parts: Parts


class Objective(nn.Module):
    r"""Loss and regularizers with their own parameters (proxies, flows that are not exported).

    .. math:: w L + c_d (\lambda_1 R_{g_1} - \lambda_2 R_{g_2}) + \sum_r c_r \lambda_r R_r

    The scales c are 1 for fixed weights. For a regularizer with a `share` they are measured, see
    `kinlens.training.regularizers.shares`.

    Under determinant regularization L is the mean over both branches; in a batch of two draws it is
    the mean over both (`sampling.draws`). So the scale of L, and the meaning of each lambda, is the
    same as for the loss alone. The other regularizers act on the first branch, which is kept.
    Everything is computed in float32, whatever the precision of the trunk.
    """

    def __init__(self, job: Job, classes: int, dim: int) -> None:
        super().__init__()
        tables, with_flow = job.regularizers.wanted(), job.regularizers.with_flow
        self.draws = job.sampling.parts
        self.dims = job.loss.matryoshka
        if max(self.dims, default=0) > dim:
            raise JobError(
                f"loss.matryoshka = {list(self.dims)} has a number above model.dim = {dim}."
            )
        self.loss = build_loss(job.loss, classes, dim)
        if self.dims and any(x.ndim > 1 and x.shape[-1] == dim for x in self.loss.buffers()):
            raise JobError(
                f"loss.matryoshka cuts embeddings, but {job.loss.name} keeps vectors of all {dim} "
                "numbers in a buffer. Make them parameters, or omit loss.matryoshka."
            )
        self.terms: dict[str, Regularizer] = {}
        for name, options in tables.items():
            self.terms[name] = build_regularizer(name, options, classes, dim)
            own = "own_" * isinstance(options, OwnRegularizer)
            self.add_module(f"{own}{name}", self.terms[name])
        self.loss_weight = math.prod(term.loss_weight for term in self.terms.values())
        separate = with_flow is not None and with_flow.proxies == "separate"
        self.second_loss = build_loss(job.loss, classes, dim) if separate else None
        self.shares = Shares({name: options.share for name, options in tables.items()})

    def forward(self, net: EmbeddingNet, features: Tensor, labels: Tensor) -> Terms:
        """Features (B, D) of `net` before its flow and labels (B,) to the terms."""
        with torch.autocast(features.device.type, enabled=False):
            penalties: Parts = {}
            watched: Parts = {}
            if net.flow is None:
                embeddings = net.transform(features)  # (B, D)
                loss = self._over_draws(self.loss, embeddings, labels)
            else:
                name, term = self._of_flow()
                duel = term(features, labels, net.flow)
                embeddings = duel.first
                first = self._over_draws(self.loss, duel.first, labels)
                second = self._over_draws(self.second_loss or self.loss, duel.second, labels)
                loss = torch.stack([first, second]).mean()
                penalties[name] = term.weight * duel.penalty
                watched = {"r_first": duel.r_first, "r_second": duel.r_second}
            watched["feature_norm"] = embeddings.square().sum(dim=1).mean()
            unit = F.normalize(embeddings, dim=1)
            for name, term in self.terms.items():
                if "flow" not in term.needs:
                    penalties[name] = term.weight * term(unit, labels, self.loss)
            loss_term = self.loss_weight * loss
            if penalties:
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
        for term in self.terms.values():
            term.begin_epoch(epoch)

    def _over_draws(self, loss: nn.Module, vectors: Tensor, labels: Tensor) -> Tensor:
        parts = zip(vectors.chunk(self.draws), labels.chunk(self.draws), strict=True)
        return torch.stack([matryoshka(loss, x, y, self.dims) for x, y in parts]).mean()

    def _of_flow(self) -> tuple[str, Regularizer]:
        return next(item for item in self.terms.items() if "flow" in item[1].needs)

    def _sites(self, net: EmbeddingNet) -> dict[str, list[Tensor]]:
        """The tensors at which the gradient of a penalty is compared, if not at the features."""
        sites: dict[str, list[Tensor]] = {}
        if net.flow is not None:
            sites[self._of_flow()[0]] = list(net.flow.parameters())
        for name, term in self.terms.items():
            if found := term.sites(self.loss):
                sites[name] = found
        return sites


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
