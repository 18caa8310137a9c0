"""The `regularizers` tables of a job. A missing table is a regularizer that is off.

Weights (`lambda1`, `lambda2`, `weight`) are fixed, as in the papers, or with `share` = 0.2, say, a
start: over the first epoch they are scaled, by at most 100, until the regularizer makes that part
of the gradient that the loss makes, and then held.
"""

import math
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from training.config.section import Section

Direction = Literal["between", "beyond", "tangent"]
Share = Annotated[float, Field(gt=0, le=10)]
"""The part of the loss's gradient that a regularizer is to make; its weight is calibrated to it."""


class Flow(Section):
    """Shape of a flow of coupling layers."""

    kind: Literal["real_nvp", "nice"] = "real_nvp"
    layers: int = Field(12, ge=1)
    hidden: int = Field(256, ge=1)
    clamp: float = Field(2.0, gt=0)


class Determinant(Section):
    """See training.regularizers.determinant; `input_norm` is the norm of what enters the flows."""

    flow: Flow = Flow()
    activation: Literal["leaky_relu", "none"] = "leaky_relu"
    input_norm: float = Field(5.0, gt=0)
    lambda1: float = Field(0.05, ge=0)
    lambda2: float = Field(0.05, ge=0)
    eps: float = 0.4
    neighbours: int = Field(1, ge=1)
    same_class: bool = False
    direction: Direction = "between"
    depth: Literal["composed", "mean", "sum"] = "composed"
    proxies: Literal["shared", "separate"] = "shared"
    share: Share | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_old_name(cls, content: Any) -> Any:
        """Jobs stored before `depth` say `normalize_depth`, and keep what it meant."""
        if not isinstance(content, dict) or "normalize_depth" not in content:
            return content
        if "depth" in content:
            raise ValueError("normalize_depth is the old name of depth; remove it")
        rest = {name: value for name, value in content.items() if name != "normalize_depth"}
        return rest | {"depth": "mean" if content["normalize_depth"] else "sum"}


class SkewedMean(Section):
    """See training.regularizers.skewed_mean.

    `centres`: the proxies of the loss, or the class means of the batch for a loss without any.
    Only "r1" reads `gamma`, `delta` and `hinge`, only "r2" and "distance" read `exponent`.
    """

    weight: float = Field(1.0, gt=0)
    kind: Literal["r1", "r2", "distance", "uniform_face", "mhe0", "mhe1", "mhe2"] = "r1"
    gamma: float = 16.0
    delta: float = Field(0.55, allow_inf_nan=False)
    exponent: float = 8.0
    subset: int | None = Field(None, ge=2)
    hinge: bool = False
    centres: Literal["proxies", "batch"] = "proxies"
    share: Share | None = None

    @model_validator(mode="after")
    def _check(self) -> "SkewedMean":
        if self.gamma == 0 or math.isnan(self.gamma) or math.isnan(self.exponent):
            raise ValueError("gamma must not be 0; gamma and exponent must be numbers")
        if self.hinge and not 0 < self.gamma < math.inf:
            raise ValueError(f"hinge = true needs a finite gamma above 0, not {self.gamma}")
        read = {"r1": {"gamma", "delta", "hinge"}, "r2": {"exponent"}, "distance": {"exponent"}}
        options = {"gamma", "delta", "hinge", "exponent"} - read.get(self.kind, set())
        idle = sorted(
            name for name in options if getattr(self, name) != type(self).model_fields[name].default
        )
        if idle:
            raise ValueError(f'kind = "{self.kind}" does not read {", ".join(idle)}; remove it')
        return self


class NonIsotropy(Section):
    """See training.regularizers.non_isotropy.

    `loss_weight` multiplies the loss beside it: the authors weight the loss, not the regularizer.
    In the first `fit_epochs` the flow alone learns from it, on detached embeddings and proxies.
    """

    weight: float = Field(1.0, gt=0)
    loss_weight: float = Field(1.0, gt=0)
    exponentiate: bool = True
    fit_epochs: int = Field(0, ge=0)
    blocks: int = Field(5, ge=1)
    hidden: int = Field(128, ge=1)
    layers: int = Field(8, ge=2)
    clamp: float = Field(2.0, gt=0)
    share: Share | None = None


class GraphConsistency(Section):
    """See training.regularizers.graph_consistency; needs `sampling.kind = "paired"`."""

    weight: float = Field(0.001, gt=0)
    sigma: float = Field(1.0, gt=0, allow_inf_nan=False)
    form: Literal["bound", "graph"] = "bound"
    share: Share | None = None


class Regularizers(Section):
    """The regularizers to add to the loss, one or several."""

    determinant: Determinant | None = None
    skewed_mean: SkewedMean | None = None
    non_isotropy: NonIsotropy | None = None
    graph_consistency: GraphConsistency | None = None
