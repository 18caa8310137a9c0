"""Tables of a job: frozen, with bounded numbers, also made from the constructor of a class."""

import inspect
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    WrapValidator,
    create_model,
    model_validator,
)

from kinlens.training.parts.own import is_own

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
    """A regularizer and its options, see `kinlens.training.terms`."""

    share: Share | None = None
    """Target share of the gradient; without it the weights are fixed."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class OwnRegularizer(Options):
    """A regularizer of your own; its options are the arguments of its constructor."""

    model_config = ConfigDict(extra="allow")

    name: str
    """Import path of its class, `my_package.terms:KoLeo` or `/path/terms.py:KoLeo`."""


T = TypeVar("T", bound=Section)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def options_of(
    table: str, kind: type, base: type[T], given: Collection[str], **fields: Any
) -> type[T]:
    """The table of a job with the options of `kind`, and `fields` besides.

    Options are all arguments of the constructor of `kind` but `given`. Bounds are in their
    annotations, meanings below "Args:" in the docstring. The class method `check` of `kind`, if it
    has one, gets the table and raises ValueError on options that contradict each other.
    """
    summary, meaning = _docstring(kind)
    options: dict[str, Any] = {
        name: (
            Any if parameter.annotation is parameter.empty else parameter.annotation,
            Field(
                ... if parameter.default is parameter.empty else parameter.default,
                description=meaning.get(name),
            ),
        )
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in given and parameter.kind not in _ANY
    }
    check: Callable[[Any], None] | None = getattr(kind, "check", None)

    def checked(options: T) -> T:
        if check is not None:
            check(options)
        return options

    return create_model(
        table,
        __base__=base,
        __doc__=summary,
        __cls_kwargs__={"use_attribute_docstrings": False},  # it would read sources, and find none
        __validators__={"checked": model_validator(mode="after")(checked)},  # type: ignore[dict-item]
        **fields,
        **options,
    )


def _docstring(kind: type) -> tuple[str, dict[str, str]]:
    """The first line of the docstring of a class, and the meaning of each of its arguments."""
    text = inspect.getdoc(kind) or ""
    arguments = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text.partition("\nArgs:\n")[2], re.M)
    return text.partition("\n")[0], {name: " ".join(of.split()) for name, of in arguments}
