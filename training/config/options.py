"""Tables of a job whose keys are the options of a class: of its constructor and its docstring."""

import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from pydantic import Field, create_model, model_validator

from kinlens.training.fields import Section

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
        __validators__={"checked": model_validator(mode="after")(checked)},  # type: ignore[dict-item]
        **fields,
        **options,
    )


def _docstring(kind: type) -> tuple[str, dict[str, str]]:
    """The first line of the docstring of a class, and the meaning of each of its arguments."""
    text = inspect.getdoc(kind) or ""
    arguments = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", text.partition("\nArgs:\n")[2], re.M)
    return text.partition("\n")[0], {name: " ".join(of.split()) for name, of in arguments}
