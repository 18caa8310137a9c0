"""Determinant regularization: two duelling flows, one pressed to contract, one to expand."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.flows.build import FlowKind, build_flow
from training.flows.coupling import FlowOutput

Direction = Literal["between", "beyond", "tangent"]
Depth = Literal["composed", "mean", "sum"]


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
        dim: length D of an embedding.
        kind: of the second flow, "real_nvp" or "nice"; NICE says what R can press in it.
        layers, hidden, clamp: of the second flow, see RealNVP.
        lambda1, lambda2: weights of contraction and expansion.
        eps: how far an augmented point lies from its sample, as a part of the way to z_j.
        neighbours: k, augmented points per sample.
        same_class: take neighbours of the same class only.
        direction: "between", "beyond" or "tangent", see above.
        depth: how R joins the layers: "composed", "mean" or "sum", see above.
    """

    def __init__(
        self,
        dim: int,
        kind: FlowKind = "real_nvp",
        layers: int = 12,
        hidden: int = 256,
        clamp: float = 2.0,
        lambda1: float = 0.05,
        lambda2: float = 0.05,
        eps: float = 0.4,
        neighbours: int = 1,
        same_class: bool = False,
        direction: Direction = "between",
        depth: Depth = "composed",
    ) -> None:
        super().__init__()
        self.second_flow = build_flow(kind, dim, layers, hidden, clamp)
        self.lambda1 = lambda1
        self.lambda2 = lambda2
        self.eps = eps
        self.neighbours = neighbours
        self.same_class = same_class
        self.direction = direction
        self.depth = depth

    def forward(self, z: Tensor, labels: Tensor, first_flow: nn.Module) -> DuelOutput:
        """Features z (B, D) and labels (B,) through both flows."""
        added = augment(z, labels, self.eps, self.neighbours, self.same_class, self.direction)
        points = torch.cat([z, added])
        first: FlowOutput = first_flow(points)
        second: FlowOutput = self.second_flow(points)
        r1, r2 = self._r(first), self._r(second)
        return DuelOutput(
            first.y[: len(z)],
            second.y[: len(z)],
            self.lambda1 * r1 - self.lambda2 * r2,
            r1.detach(),
            r2.detach(),
        )

    def _r(self, output: FlowOutput) -> Tensor:
        scales = output.log_scales  # (L, B, D)
        if self.depth == "composed":
            scales = output.log_diagonal[None]  # one layer: (1, B, D)
        per_layer = log_scale_penalty(scales)  # (L, B)
        over_layers = per_layer.sum(0) if self.depth == "sum" else per_layer.mean(0)  # (B,)
        return over_layers.mean()


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
) -> Tensor:
    """z_i + eps e_ij for the k nearest z_j of each z_i: (B, D) to (M, D), M <= k B.

    e_ij is z_j - z_i "between", its negative "beyond", its part orthogonal to z_i "tangent".
    Fewer than k B where a sample has fewer candidates; gradients flow to z_i and z_j.
    """
    with torch.no_grad():
        distances = torch.cdist(z, z)
        distances.fill_diagonal_(torch.inf)
        if same_class:
            distances.masked_fill_(labels[:, None] != labels[None, :], torch.inf)
        nearest, j = distances.topk(min(neighbours, len(z) - 1), largest=False)  # (B, k)
        i = torch.arange(len(z), device=z.device)[:, None].expand_as(j)
        if same_class:  # how many there are, a GPU has to tell
            valid = nearest.isfinite()
            i, j = i[valid], j[valid]
    i, j = i.flatten(), j.flatten()  # (M,)
    step = z[j] - z[i]  # (M, D)
    if direction == "beyond":
        step = -step
    elif direction == "tangent":
        radius = F.normalize(z[i], dim=1)
        step = step - (step * radius).sum(1, keepdim=True) * radius
    return z[i] + eps * step


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
