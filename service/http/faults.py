"""What is wrong with a request, with the name of the parameter and a message that helps."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")
_SHOWN = 80
_KEPT = 20


def checked(model: type[M], value: Any, context: object) -> M:
    """`value` as a model. Raises: RequestValidationError."""
    try:
        return model.model_validate(value, context=context)
    except ValidationError as error:
        raise as_faults(error) from None


def checking(name: str, check: Callable[[], None]) -> None:
    """Call `check`; a ValueError is a fault of parameter `name`."""
    try:
        check()
    except ValueError as error:
        raise fault(name, str(error)) from error


def as_faults(error: ValidationError, name: str = "") -> RequestValidationError:
    """What pydantic found, about parameter `name` or those that it names itself."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    return RequestValidationError([_readable(each, name) for each in found[:_KEPT]])


def _readable(fault: ErrorDetails, name: str) -> dict[str, Any]:
    for part in () if name else fault["loc"]:
        name += f"[{part}]" if isinstance(part, int) else f"{'.' if name else ''}{part[:_SHOWN]}"
    name = name or "request"
    message = fault["msg"]
    if fault["type"] == "missing":
        message = f"{name} is missing."
    elif fault["type"] == "extra_forbidden":
        message = f"{name} is no parameter here; /docs lists them."
    elif fault["type"] != "out_of_range":
        message = f"{name}: {message}."
    return {"type": "out_of_range", "loc": (name,), "msg": message}


def fault(name: str, message: str) -> RequestValidationError:
    """One parameter that does not fit, and what to do."""
    return RequestValidationError([{"type": "out_of_range", "loc": (name,), "msg": message}])
