"""What a job can be told, by kind: names and numbers, never a path."""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from embedder.errors import FilterError, InvalidParameterError
from indexer.filters.json import filter_from_json
from indexer.filters.text import parse_filter
from indexer.filters.tree import Filter
from service.jobs.record import Kind

Scalar = bool | int | float | str
Override = Scalar | list[Scalar]

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_JOB_ID = r"^[0-9a-f]{12}$"
_TABLES = ("optimizer", "sampling", "input", "loss", "regularizers", "model", "protocol", "runtime")
_KEYS = ("seed", "recall_at", "data.train_fraction", "data.split_seed", "data.small_classes")
_KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 +:._-]{0,127}")

Part = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Swap = Annotated[
    Literal["auto", "never"],
    Field(
        description="auto: the new gallery replaces the old one if it passes the gate. never: it "
        "waits for POST /jobs/{id}/swap."
    ),
]
ClassAttribute = Annotated[
    str,
    Field(min_length=1, max_length=200, description="Answers with the query's value are right."),
]
MaxMissing = Annotated[
    Part, Field(description="Part of the items whose pictures may be missing; they are left out.")
]


class Params(BaseModel):
    """Parameters of a job; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


def filter_of(value: str | dict[str, Any]) -> Filter:
    """A filter in either of its written forms. Raises: FilterError."""
    return parse_filter(value) if isinstance(value, str) else filter_from_json(value)


class CompactParams(Params):
    """Nothing to choose."""


class SwapParams(Params):
    """Either another gallery, or the job whose candidate is to be put in place."""

    other: str | None = Field(None, alias="with", pattern=_NAME)
    job: str | None = Field(None, pattern=_JOB_ID)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.other is None) == (self.job is None):
            raise ValueError("name the other gallery with `with`")
        return self


class Gate(Params):
    """What the new gallery must reach to replace the old one; recalls are parts in [0, 1].

    `min_queries`: after a training on fewer photographs that it did not see nothing is decided.
    """

    max_recall_loss: Part = 0.0
    min_recall_at_1: Part | None = None
    min_queries: Annotated[int, Field(ge=0, le=1000)] = 50


class RebuildParams(Params):
    """Make the gallery again with another bundle."""

    bundle_id: Annotated[
        str,
        Field(
            pattern=r"^[0-9a-f]{12,64}$",
            description="Id of a bundle that the service knows, or 12 and more digits of it.",
        ),
    ]
    swap: Swap = "auto"
    max_recall_loss: Part = 0.01
    class_attribute: ClassAttribute = "class"
    max_missing: MaxMissing = 0.01


class TrainParams(Params):
    """Train a model, then make the gallery again with it."""

    job: Annotated[
        str,
        Field(pattern=_NAME, description="A job that comes with Kinlens; shop is the recommended."),
    ] = "shop"
    data: Annotated[
        str | None,
        Field(pattern=_NAME, description="A data set of the settings; null: the gallery's images."),
    ] = None
    overrides: Annotated[
        dict[str, Override],
        Field(
            max_length=64,
            description="Settings of the job, such as optimizer.epochs; model.weights is imagenet, "
            "none, current (go on from the gallery's own model) or a name of the settings.",
        ),
    ] = {}
    gate: Gate = Gate()
    swap: Swap = "auto"
    class_attribute: ClassAttribute = "class"
    max_missing: MaxMissing = 0.01

    @field_validator("overrides")
    @classmethod
    def _change_no_paths(cls, value: dict[str, Override]) -> dict[str, Override]:
        for key, setting in value.items():
            _check_override(key, setting)
        return value


class DeleteParams(Params):
    """Remove the items that fit a filter."""

    filter: str | dict[str, Any]

    @field_validator("filter")
    @classmethod
    def _is_a_filter(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        try:
            filter_of(value)
        except FilterError as error:
            raise ValueError(str(error)) from error
        return value


_MODELS: dict[Kind, type[Params]] = {
    "compact": CompactParams,
    "swap": SwapParams,
    "rebuild": RebuildParams,
    "train": TrainParams,
    "delete_where": DeleteParams,
}


def checked(kind: Kind, params: dict[str, Any]) -> Params:
    """Parameters of a kind. Raises: InvalidParameterError naming each that does not fit."""
    try:
        return _MODELS[kind].model_validate(params)
    except ValidationError as error:
        faults = [
            f"{'.'.join(map(str, fault['loc'])) or kind}: {fault['msg']}"
            for fault in error.errors(include_url=False, include_context=False)
        ]
        raise InvalidParameterError("; ".join(faults) + ".") from error


def _check_override(key: str, value: Override) -> None:
    may_change = key in _KEYS or (key.split(".")[0] in _TABLES and "." in key)
    if not _KEY.fullmatch(key) or not may_change:
        raise ValueError(
            f"{key[:80]!r} cannot be changed here; known are {', '.join(_KEYS)} and the settings "
            f"of the tables {', '.join(_TABLES)}, such as optimizer.epochs"
        )
    for scalar in value if isinstance(value, list) else [value]:
        if isinstance(scalar, str) and (not _WORD.fullmatch(scalar) or ".." in scalar):
            raise ValueError(f"{key} = {scalar[:80]!r} is no plain word; paths are not taken")
        if isinstance(scalar, float) and not math.isfinite(scalar):
            raise ValueError(f"{key} = {scalar} is no finite number")
