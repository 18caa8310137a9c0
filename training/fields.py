"""Bounded numbers and frozen tables, for the settings of a job and the options of a loss."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, WrapValidator

from kinlens.training.own import is_own

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Cosine = Annotated[float, Field(ge=-1, le=1)]

OR_OWN = (
    WrapValidator(lambda value, known: value if is_own(value) else known(value)),
    PlainSerializer(lambda value: value),
)
"""Annotations of a choice that may also be the import path of a user's own part."""


class Section(BaseModel):
    """A frozen table of the job file; the docstring below a field describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


Share = Annotated[float, Field(gt=0, le=10)]
"""Target norm of a regularizer's gradient relative to the loss's; its weight is scaled once."""


class Flow(Section):
    """Shape of both flows."""

    kind: Literal["real_nvp", "nice"] = "real_nvp"
    """Couplings that scale and shift, or (`nice`) couplings that shift and one scaling at the end.
    """
    layers: int = Field(12, ge=1)
    """Number of coupling layers."""
    hidden: int = Field(256, ge=1)
    """Width of the two hidden layers of each coupling."""
    clamp: float = Field(2.0, gt=0)
    """Bound of the logarithm of each scale."""


class Options(Section):
    """A regularizer and its options, see `kinlens.training.regularizers.table`."""

    share: Share | None = None
    """Target share of the gradient; without it the weights are fixed."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class OwnRegularizer(Options):
    """A regularizer of your own; its options are the arguments of its constructor."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Import path of its class, `my_package.terms:KoLeo` or `/path/terms.py:KoLeo`."""
