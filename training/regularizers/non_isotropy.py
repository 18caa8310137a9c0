"""Non-isotropy regularization (NIR): embeddings uniquely determined by a flow from their proxy."""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from kinlens.training.losses.base import ProxyLoss
from kinlens.training.parts.fields import Count, Positive
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.flows import ConditionalGlow, FlowOutput

LARGEST_EXPONENT = 30.0


class NonIsotropyRegularizer(Regularizer):
    r"""The mean exponentiated negative log-likelihood of embeddings, given their proxies.

    A flow maps the embedding e_i, given the proxy p of its class, to a residual z_i that is to be
    normally distributed:

    .. math::
        z_i = \tau^{-1}(e_i \mid p_{y_i}), \qquad
        \mathrm{NLL}_i = \tfrac12 \lVert z_i \rVert^2
            - \log \lvert \det \partial z_i / \partial e_i \rvert, \qquad
        \mathrm{NIR} = \operatorname{mean}_i \exp(\mathrm{NLL}_i)

    The constant (D / 2) log 2 pi is omitted. The exponential weighs a sample's gradient by
    exp(NLL_i): the least likely samples dominate, and the gradient vanishes once the flow fits. The
    gradient reaches flow, embeddings and proxies; the flow is not needed after training.

    Unit embeddings lie on a sphere, which has no volume, so the likelihood has no upper bound: a
    flow that stretches space along the radius raises it without end. With `noise` = s > 0, Gaussian
    noise of that standard deviation is added to the embeddings in training (dequantization). The
    expected NLL is then at least D (1/2 + log s). The paper has no noise (s = 0).

    While `fitting` is set, embeddings and centres enter detached. The gradient of an unfitted flow
    is hundreds of times that of the loss. The authors detach nothing. The paper prints the plain
    NLL (`exponentiate = False`), their code uses the exponential.

    References:
        Non-isotropy Regularization for Proxy-based Deep Metric Learning (Roth et al., 2022).
        https://arxiv.org/abs/2203.08547

    Args:
        weight: weight of the regularizer.
        loss_weight: weight of the loss, which the authors vary instead of that of the regularizer.
        exponentiate: minimise the exponential of the negative log-likelihood, as the authors' code
            does, instead of the negative log-likelihood, as the paper prints.
        noise: standard deviation of noise on each coordinate of the embeddings: with `exponentiate
            = false` it gives the likelihood an upper bound, such as 0.05. The paper has none.
        fit_epochs: first epochs, in which the flow is fitted and the rest learns from the loss
            alone.
        blocks: blocks of the flow.
        hidden: width of the hidden layers of its networks.
        layers: linear layers of each of its networks.
        clamp: bound of the logarithm of each scale.
    """

    needs = {"proxies": ""}

    def __init__(
        self,
        dim: int,
        weight: Positive = 1.0,
        loss_weight: Positive = 1.0,
        exponentiate: bool = True,
        noise: Annotated[float, Field(ge=0, le=1)] = 0.0,
        fit_epochs: Annotated[int, Field(ge=0)] = 0,
        blocks: Count = 5,
        hidden: Count = 128,
        layers: Annotated[int, Field(ge=2)] = 8,
        clamp: Positive = 2.0,
    ) -> None:
        super().__init__()
        self.weight, self.loss_weight = weight, loss_weight
        self.exponentiate, self.noise, self.fit_epochs = exponentiate, noise, fit_epochs
        self.fitting = False
        self.flow = ConditionalGlow(dim, dim, blocks, layers, hidden, clamp)

    def begin_epoch(self, epoch: int) -> None:
        self.fitting = epoch < self.fit_epochs

    def forward(self, embeddings: Tensor, labels: Tensor, loss: ProxyLoss) -> Tensor:
        return self.around(embeddings, loss.centre_of(embeddings, labels))

    def around(self, embeddings: Tensor, centres_of_samples: Tensor) -> Tensor:
        """Unit embeddings and the centre of each one's class, both (B, D), to a scalar."""
        if self.fitting:
            embeddings, centres_of_samples = embeddings.detach(), centres_of_samples.detach()
        if self.training and self.noise:
            embeddings = embeddings + self.noise * torch.randn_like(embeddings)
        nll = self.negative_log_likelihood(embeddings, centres_of_samples)  # (B,)
        if self.exponentiate:
            nll = bounded_exp(nll)
        return nll.sum() / max(len(nll), 1)

    def negative_log_likelihood(self, embeddings: Tensor, centres_of_samples: Tensor) -> Tensor:
        """NLL_i of each sample, (B,), without the constant (D / 2) log 2 pi."""
        dtype = next(self.flow.parameters()).dtype
        with torch.autocast(embeddings.device.type, enabled=False):
            output: FlowOutput = self.flow(embeddings.to(dtype), centres_of_samples.to(dtype))
            return output.y.square().sum(dim=1) / 2 - output.log_det


def bounded_exp(exponents: Tensor) -> Tensor:
    """exp, continued by its tangent above LARGEST_EXPONENT.

    Neither it nor its gradient overflows float32, and the samples beyond keep the largest weight,
    where a hard clamp would drop them.
    """
    excess = (exponents - LARGEST_EXPONENT).relu()
    return exponents.clamp(max=LARGEST_EXPONENT).exp() * (1 + excess)
