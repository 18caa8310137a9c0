"""Determinant regularization: two opposed flows, one pushed to contract, one to expand."""

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.training.fields import Count, Flow, NotNegative
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.flows import FlowOutput, build_flow

Direction = Literal["between", "beyond", "tangent"]
FLOW = Flow()


class DuelOutput(NamedTuple):
    """`first` and `second`: the outputs of the flows (B, D), of any length; `penalty`: a scalar."""

    first: Tensor
    second: Tensor
    penalty: Tensor
    r_first: Tensor
    r_second: Tensor


class DeterminantRegularizer(Regularizer):
    r"""Push flow g1 to contract and flow g2 to expand; only g1 is kept after training.

    With l_i the diagonal of the Jacobian of a flow, composed over its layers,

    .. math:: R_g = \operatorname{mean}_i \log(l_i + 1), \qquad
        l_i = \prod_{layers} \exp(s_i), \qquad
        \text{penalty} = \lambda_1 \operatorname{mean}_{z \in Z} R_{g_1}(z)
                       - \lambda_2 \operatorname{mean}_{z \in Z} R_{g_2}(z)

    where Z is the batch and, for each sample, a point on the line to each of its k nearest z_j. The
    metric loss is applied to both branches, never to the augmented points. An untrained flow has
    R = log 2. This is `depth = "composed"`; docs/methods.md has the other readings.

    References:
        Determinant Regularization for Deep Metric Learning, eq. 7 and 10 (R) and 11 (the duel);
        ICLR 2023 submission, https://openreview.net/forum?id=NUBuJsAq1U

    Args:
        flow: shape of both flows.
        activation: activation before the flows; the slope of `leaky_relu` is 0.1.
        input_norm: norm of the inputs of the flows.
        lambda1: weight of the penalty on the first flow, which contracts.
        lambda2: weight of the penalty on the second flow, which expands.
        eps: augmented points: step towards a neighbour, as a fraction of the distance.
        neighbours: augmented points of each image, one for each of its nearest neighbours in the
            batch.
        direction: augmented points: towards the neighbour, away from it, or orthogonal to the
            features.
        depth: penalise the diagonal of the composed flow, or average the penalties of its layers.
        proxies: proxies of the loss on the second branch.
    """

    needs = {"flow": ""}

    def __init__(
        self,
        dim: int,
        flow: Flow = FLOW,
        activation: Literal["leaky_relu", "none"] = "leaky_relu",
        input_norm: Annotated[float, Field(gt=0)] = 5.0,
        lambda1: NotNegative = 0.05,
        lambda2: NotNegative = 0.05,
        eps: float = 0.4,
        neighbours: Count = 1,
        direction: Direction = "between",
        depth: Literal["composed", "mean"] = "composed",
        proxies: Literal["shared", "separate"] = "shared",
    ) -> None:
        super().__init__()
        del activation, input_norm, proxies  # of the network and the objective
        self.lambda1, self.lambda2 = lambda1, lambda2
        self.eps, self.neighbours, self.direction = eps, neighbours, direction
        self.depth = depth
        self.second_flow = build_flow(flow, dim)

    def forward(self, z: Tensor, first_flow: nn.Module) -> DuelOutput:
        points = torch.cat([z, augment(z, self.eps, self.neighbours, self.direction)])
        first, second = first_flow(points), self.second_flow(points)  # (B + k B, D) each
        r1, r2 = self._r(first), self._r(second)
        penalty = self.lambda1 * r1 - self.lambda2 * r2
        count = len(z)
        return DuelOutput(first.y[:count], second.y[:count], penalty, r1.detach(), r2.detach())

    def _r(self, output: FlowOutput) -> Tensor:
        composed = self.depth == "composed"
        scales = output.log_diagonal if composed else output.log_scales  # (B, D) or (L, B, D)
        return F.softplus(scales).mean()  # log(l + 1), l = exp(scales)


def augment(
    z: Tensor, eps: float = 0.4, neighbours: int = 1, direction: Direction = "between"
) -> Tensor:
    """z_i + eps e_ij for the k nearest z_j of each z_i: (B, D) to (k B, D), with gradients to both.

    e_ij is z_j - z_i for "between", the paper's description in words; its negative for "beyond",
    the printed formula; its part orthogonal to z_i for "tangent" (section 5.4).
    """
    k = min(neighbours, max(len(z) - 1, 0))
    with torch.no_grad():
        distances = torch.cdist(z, z)
        distances.fill_diagonal_(torch.inf)
        j = distances.topk(k, largest=False).indices.flatten()  # (k B,)
        i = torch.arange(len(z), device=z.device).repeat_interleave(k)
    step = z[j] - z[i]  # (k B, D)
    if direction == "beyond":
        step = -step
    elif direction == "tangent":
        radius = F.normalize(z[i], dim=1)
        step = step - (step * radius).sum(1, keepdim=True) * radius
    return z[i] + eps * step


def local_lipschitz(flow: nn.Module, z: Tensor) -> Tensor:
    """Largest singular value of the full Jacobian of `flow` at each row of z: (B, D) to (B,).

    The exact local Lipschitz constant, by automatic differentiation; the cost grows with D^2. The
    penalty cannot replace it: R measures volume, and not the shear of the shifts.
    """
    jacobian = torch.func.jacrev(lambda row: flow(row[None]).y[0])
    jacobians: Tensor = torch.func.vmap(jacobian)(z)  # (B, D, D)
    norms: Tensor = torch.linalg.matrix_norm(jacobians, ord=2)
    return norms
