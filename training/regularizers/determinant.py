"""Determinant regularization: two duelling flows, one pressed to contract, one to expand."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.config.settings import Determinant, Direction
from training.flows import FlowOutput, build_flow


class DuelOutput(NamedTuple):
    """`first` and `second`: what the flows give (B, D), of any length; `penalty`: a scalar."""

    first: Tensor
    second: Tensor
    penalty: Tensor
    r_first: Tensor
    r_second: Tensor


class DeterminantRegularizer(nn.Module):
    r"""Press flow g1 to contract and flow g2 to expand; only g1 is kept after training.

    With l_i the diagonal of the Jacobian of a flow, composed of its layers,

    .. math:: R_g = \operatorname{mean}_i \log(l_i + 1), \qquad
        l_i = \prod_{layers} \exp(s_i), \qquad
        \text{penalty} = \lambda_1 \operatorname{mean}_{z \in Z} R_{g_1}(z)
                       - \lambda_2 \operatorname{mean}_{z \in Z} R_{g_2}(z)

    where Z is the batch and, for each sample, a point on the way to each of its k nearest z_j. The
    metric loss is applied to both branches, never to the augmented points. An untrained flow has
    R = log 2.

    **Readings.** Eq. 8 to 10 treat the whole flow as one triangular map. `depth = "composed"` does
    too: l_i is the product of a dimension's scales in all layers, the diagonal of the product of
    the layers' Jacobians were each triangular in the same order of dimensions. Couplings alternate
    that order, so it is not the diagonal of the full Jacobian; but the product of the l_i is
    exactly its |det|, which is what the paper presses. The layers of RealNVP and NICE keep the
    order of the dimensions; a flow that permutes them would have to bring its scales back to one
    order first. `depth = "mean"` has the mean of log(l_i + 1) over layers, each with a diagonal of
    its own: at the identity its gradient is L times smaller, 12 times for 12 layers. "sum" adds
    them up: the gradient of "composed" at the identity, and R = L log 2.

    The paper writes e_ij = z_i - z_j but says that the new point lies between: here z_i +
    eps (z_j - z_i) ("between"); "beyond" is the formula as printed. Both lie on a chord, inside or
    outside the sphere of the z. Section 5.4 says that the points lie in the tangent hyperplane of
    that sphere: "tangent" steps by eps times the part of z_j - z_i that is orthogonal to z_i, and
    the point stays in the hyperplane, a little outside the sphere, instead of being brought back.
    The paper speaks of the unit sphere of the flows' outputs; the augmented points enter the flows,
    so here it is the sphere of their inputs.

    References:
        Determinant Regularization for Deep Metric Learning, eq. 7 and 10 (R) and 11 (the duel);
        ICLR 2023 submission, https://openreview.net/forum?id=NUBuJsAq1U

    Args:
        settings: weights, augmented points and depth of R; the shape of the second flow.
        dim: length D of an embedding.
    """

    def __init__(self, settings: Determinant, dim: int) -> None:
        super().__init__()
        self.settings = settings
        self.second_flow = build_flow(settings.flow, dim)

    def forward(self, z: Tensor, labels: Tensor, first_flow: nn.Module) -> DuelOutput:
        """Features z (B, D) and labels (B,) through both flows."""
        own = self.settings
        added, real = augment(z, labels, own.eps, own.neighbours, own.same_class, own.direction)
        points = torch.cat([z, added])
        weights = torch.cat([real.new_ones(len(z)), real]).to(z.dtype)  # (B + k B,)
        first: FlowOutput = first_flow(points)
        second: FlowOutput = self.second_flow(points)
        r1, r2 = self._r(first, weights), self._r(second, weights)
        return DuelOutput(
            first.y[: len(z)],
            second.y[: len(z)],
            own.lambda1 * r1 - own.lambda2 * r2,
            r1.detach(),
            r2.detach(),
        )

    def _r(self, output: FlowOutput, weights: Tensor) -> Tensor:
        scales = output.log_scales  # (L, B, D)
        if self.settings.depth == "composed":
            scales = output.log_diagonal[None]  # one layer: (1, B, D)
        per_layer = log_scale_penalty(scales)  # (L, B)
        summed = self.settings.depth == "sum"
        over_layers = per_layer.sum(0) if summed else per_layer.mean(0)  # (B,)
        return (over_layers * weights).sum() / weights.sum()


def log_scale_penalty(log_scales: Tensor) -> Tensor:
    """mean over dimensions of log(l + 1), l = exp(log_scales): (L, B, D) to (L, B)."""
    return F.softplus(log_scales).mean(dim=2)


def augment(
    z: Tensor,
    labels: Tensor,
    eps: float,
    neighbours: int,
    same_class: bool,
    direction: Direction = "between",
) -> tuple[Tensor, Tensor]:
    """z_i + eps e_ij for the k nearest z_j of each z_i: (B, D) to (k B, D).

    e_ij is z_j - z_i "between", its negative "beyond", its part orthogonal to z_i "tangent".
    Gradients flow to z_i and z_j. The second result, (k B,), is False where a sample has fewer
    candidates of its class: such a point is none.
    """
    k = min(neighbours, max(len(z) - 1, 0))
    with torch.no_grad():
        distances = torch.cdist(z, z)
        distances.fill_diagonal_(torch.inf)
        if same_class:
            distances.masked_fill_(labels[:, None] != labels[None, :], torch.inf)
        nearest, j = (found.flatten() for found in distances.topk(k, largest=False))  # (k B,)
        i = torch.arange(len(z), device=z.device).repeat_interleave(k)
    step = z[j] - z[i]  # (k B, D)
    if direction == "beyond":
        step = -step
    elif direction == "tangent":
        radius = F.normalize(z[i], dim=1)
        step = step - (step * radius).sum(1, keepdim=True) * radius
    return z[i] + eps * step, nearest.isfinite()


def local_lipschitz(flow: nn.Module, z: Tensor) -> Tensor:
    """Largest singular value of the full Jacobian of `flow` at each row of z: (B, D) to (B,).

    The exact local Lipschitz constant, by automatic differentiation; its cost grows with D^2, so
    use it for small D or few rows. A diagnostic that the penalty cannot replace: R sees the
    diagonal of each layer's Jacobian, that is volume, and not how strongly the shifts shear.
    """

    def transform(row: Tensor) -> Tensor:
        output: FlowOutput = flow(row[None])
        return output.y[0]

    jacobians: Tensor = torch.func.vmap(torch.func.jacrev(transform))(z)  # (B, D, D)
    norms: Tensor = torch.linalg.matrix_norm(jacobians, ord=2)
    return norms
