"""Determinant regularization: two opposed flows, one pushed to contract, one to expand."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.training.parts.fields import Count, Flow, NotNegative
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.flows import FlowOutput, build_flow

Direction = Literal["between", "beyond", "tangent"]
FLOW = Flow()

Product = Callable[[Tensor], Tensor]

_PENALTY_STEPS = 5
_SMALLEST_LENGTH = 1e-6


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
    R = log 2. This is `depth = "composed"`; docs/methods/regularizers.md has the other readings.

    R bounds no Lipschitz constant, since shifts are free, and a constant scale lowers it although
    no cosine moves. `penalty = "lipschitz"` has neither fault: log(1 + largest stretch), where a
    stretch is relative to the lengths of input and output, see `local_lipschitz`.

    References:
        Determinant Regularization for Deep Metric Learning, eq. 7 and 10 (R) and 11 (the duel);
        ICLR 2023 submission, https://openreview.net/forum?id=NUBuJsAq1U

    Args:
        flow: kind and shape of both flows.
        penalty: what is pressed down and up: R as printed (`r`), the log-determinant of eq. 6 and
            the squared Frobenius norm of eq. 5, both per dimension, or the largest stretch.
        activation: activation before the flows; the slope of `leaky_relu` is 0.1.
        input_norm: norm of the inputs of the flows.
        lambda1: weight of the penalty on the first flow, which contracts.
        lambda2: weight of the penalty on the second flow, which expands.
        eps: augmented points: step towards a neighbour, as a fraction of the distance.
        neighbours: augmented points of each image, one for each of its nearest neighbours in the
            batch.
        same_class: only neighbours of the same class.
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
        penalty: Literal["r", "log_det", "frobenius", "lipschitz"] = "r",
        activation: Literal["leaky_relu", "none"] = "leaky_relu",
        input_norm: Annotated[float, Field(gt=0)] = 5.0,
        lambda1: NotNegative = 0.05,
        lambda2: NotNegative = 0.05,
        eps: float = 0.4,
        neighbours: Count = 1,
        same_class: bool = False,
        direction: Direction = "between",
        depth: Literal["composed", "mean"] = "composed",
        proxies: Literal["shared", "separate"] = "shared",
    ) -> None:
        super().__init__()
        del activation, input_norm, proxies  # of the network and the objective
        self.lambda1, self.lambda2 = lambda1, lambda2
        self.eps, self.neighbours, self.direction = eps, neighbours, direction
        self.penalty, self.same_class, self.depth = penalty, same_class, depth
        self.second_flow = build_flow(flow, dim)

    @classmethod
    def idle(cls, options: Any) -> Mapping[str, str]:
        return {} if options.penalty == "r" else {"depth": "set penalty = 'r'"}

    def forward(self, z: Tensor, labels: Tensor, first_flow: nn.Module) -> DuelOutput:
        among = labels if self.same_class else None
        points = torch.cat([z, augment(z, self.eps, self.neighbours, self.direction, among)])
        first, second = first_flow(points), self.second_flow(points)  # (B + k B, D) each
        r1 = self._r(first_flow, points, first)
        r2 = self._r(self.second_flow, points, second)
        penalty = self.lambda1 * r1 - self.lambda2 * r2
        count = len(z)
        return DuelOutput(first.y[:count], second.y[:count], penalty, r1.detach(), r2.detach())

    def _r(self, flow: nn.Module, points: Tensor, output: FlowOutput) -> Tensor:
        if self.penalty == "log_det":
            return 2 * output.log_det.mean() / points.shape[1]
        if self.penalty == "frobenius":  # E |J v|^2 is the squared norm of J
            push, _ = linearized(flow, points)
            return push(torch.randn(points.shape).to(points)).square().mean()
        if self.penalty == "lipschitz":
            start = torch.randn(points.shape).to(points)
            norms = local_lipschitz(flow, points, start, _PENALTY_STEPS)
            lengths = points.norm(dim=1) / output.y.norm(dim=1).clamp(min=_SMALLEST_LENGTH)
            stretch: Tensor = norms * lengths
            return stretch.log1p().mean()
        composed = self.depth == "composed"
        scales = output.log_diagonal if composed else output.log_scales  # (B, D) or (L, B, D)
        return F.softplus(scales).mean()  # log(l + 1), l = exp(scales)


def augment(
    z: Tensor,
    eps: float = 0.4,
    neighbours: int = 1,
    direction: Direction = "between",
    labels: Tensor | None = None,
) -> Tensor:
    """z_i + eps e_ij for the k nearest z_j of each z_i: (B, D) to (k B, D), with gradients to both.

    e_ij is z_j - z_i for "between", the paper's description in words; its negative for "beyond",
    the printed formula; its part orthogonal to z_i for "tangent" (section 5.4). With `labels` z_j
    is of the same class; where a class has too few others, a point is z_i itself.
    """
    k = min(neighbours, max(len(z) - 1, 0))
    with torch.no_grad():
        distances = torch.cdist(z, z)
        distances.fill_diagonal_(torch.inf)
        if labels is not None:
            distances.masked_fill_(labels[:, None] != labels, torch.inf)
        found = distances.topk(k, largest=False)
        i = torch.arange(len(z), device=z.device).repeat_interleave(k)
        j = found.indices.flatten().where(found.values.flatten().isfinite(), i)  # (k B,)
    step = z[j] - z[i]  # (k B, D)
    if direction == "beyond":
        step = -step
    elif direction == "tangent":
        radius = F.normalize(z[i], dim=1)
        step = step - (step * radius).sum(1, keepdim=True) * radius
    return z[i] + eps * step


def local_lipschitz(
    flow: nn.Module, z: Tensor, start: Tensor | None = None, steps: int = 50
) -> Tensor:
    """Largest singular value of the full Jacobian of `flow` at each row of z: (B, D) to (B,).

    The local Lipschitz constant, by `steps` of power iteration from the directions `start` (B, D),
    always the same without it. It is approached from below. The gradient is that at the direction
    found, which is the gradient of the singular value once the direction is right.
    """
    if start is None:
        start = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z)
    direction = F.normalize(start, dim=1)
    with torch.enable_grad():
        push, pull = linearized(flow, z)
        for _ in range(steps):
            direction = F.normalize(pull(push(direction).detach()), dim=1)
        norms: Tensor = push(direction).norm(dim=1)
        return norms


def linearized(flow: nn.Module, z: Tensor) -> tuple[Product, Product]:
    """Products of vectors (B, D) with the Jacobian of `flow` at each row of z, and its transpose.

    The product with the Jacobian itself is the derivative of that with its transpose, so both come
    from one pass through the flow.
    """
    x = z if z.requires_grad else z.detach().requires_grad_()
    y = flow(x).y
    zero = torch.zeros_like(y, requires_grad=True)
    (of_zero,) = torch.autograd.grad(y, x, zero, create_graph=True)

    def push(vectors: Tensor) -> Tensor:
        return torch.autograd.grad(of_zero, zero, vectors, create_graph=True)[0]

    def pull(vectors: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, vectors, retain_graph=True)[0]

    return push, pull
