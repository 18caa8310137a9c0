"""The search space of a hyper-parameter search: a range, or a list of values, for each setting."""

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from embedder.errors import JobError

Scalar = bool | int | float | str
_TOLERANCE = 1e-9


class _Strict(BaseModel):
    # Strict: 3 stays an integer, 3.0 a real number, "x100" a word.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Integers(_Strict):
    """Integers from `low` to `high`, both included."""

    low: int
    high: int
    step: int = Field(1, ge=1)
    log: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Integers":
        _check_range(self.low, self.high, None if self.step == 1 else self.step, self.log)
        return self


class Numbers(_Strict):
    """Real numbers from `low` to `high`; with `step` only low, low + step, ..."""

    low: float
    high: float
    step: float | None = Field(None, gt=0)
    log: bool = False

    @model_validator(mode="after")
    def _check(self) -> "Numbers":
        _check_range(self.low, self.high, self.step, self.log)
        return self


class Choices(_Strict):
    """One of some values."""

    values: tuple[Scalar, ...] = Field(min_length=1, strict=False)


Setting = Integers | Numbers | Choices


def load_space(path: Path) -> dict[str, Setting]:
    """Read a space: `table.key = {low = 1e-5, high = 1e-3, log = true}` or `{values = [...]}`.

    Integers as bounds give integers; write 1.0 for real numbers. A `[space]` table may hold it all.

    Raises: JobError.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"The search space {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not valid TOML: {error}") from error
    space = parse_space(content.get("space", content))
    if not space:
        raise JobError(f"{path} names no setting to search.")
    return space


def parse_space(content: dict[str, Any], prefix: str = "") -> dict[str, Setting]:
    """A space from plain data, with the full name of each setting. Raises: JobError."""
    space: dict[str, Setting] = {}
    for key, value in content.items():
        name = prefix + key
        if not isinstance(value, dict) or not value:
            raise JobError(
                f"{name} = {value!r}: give a range, {{low = 0.1, high = 0.5}}, or a list, "
                "{values = [0.1, 0.2]}."
            )
        words = value.keys() & {"low", "high", "values"}
        if any(not isinstance(value[word], dict) for word in words):
            space[name] = _setting(name, value)
        else:
            space |= parse_space(value, f"{name}.")
    return space


def values_to_try(setting: Setting) -> tuple[Scalar, ...]:
    """Every value of a list, the two ends of a range: what a job must accept."""
    return setting.values if isinstance(setting, Choices) else (setting.low, setting.high)


def _setting(name: str, value: dict[str, Any]) -> Setting:
    kind: type[Setting] = Numbers
    if "values" in value:
        kind = Choices
    elif not any(isinstance(value.get(word), float) for word in ("low", "high", "step")):
        kind = Integers
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join((name, *map(str, first["loc"])))
        raise JobError(f"{where}: {first['msg']} (given: {value})") from error


def _check_range(low: float, high: float, step: float | None, log: bool) -> None:
    if low >= high:
        raise ValueError(f"low = {low} must be below high = {high}")
    if log and low <= 0:
        raise ValueError(f"low = {low} must be above 0 on a logarithmic scale")
    if log and step is not None:
        raise ValueError("log and step exclude each other")
    if step is not None:
        steps = (high - low) / step
        if abs(steps - round(steps)) > _TOLERANCE * max(steps, 1.0):
            raise ValueError(f"high - low = {high - low:g} must be a multiple of step = {step}")
