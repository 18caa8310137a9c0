"""The `regularizers` tables of a job."""

from typing import Literal

from pydantic import Field

from training.config.section import Section


class Flow(Section):
    """Shape of a Real-NVP flow."""

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
    direction: Literal["between", "beyond"] = "between"
    normalize_depth: bool = True
    proxies: Literal["shared", "separate"] = "shared"


class Regularizers(Section):
    """The regularizers to add to the loss; a missing table is one that is off."""

    determinant: Determinant | None = None
