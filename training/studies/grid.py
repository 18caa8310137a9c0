"""The grid of a tournament: losses x regularizers x backbones x sizes x seeds, each a job."""

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    model_validator,
)

from embedder.errors import JobError
from training.config.job import Job, apply_override, load_job, parse_job
from training.config.layers import read_file
from training.folder import settings

_AXES = ("loss", "regularizer", "backbone", "dim", "seed")


class _Entry(BaseModel):
    """A loss, regularizer or backbone: its name, and the settings that it lays over the base."""

    model_config = ConfigDict(frozen=True, extra="allow")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # that of a folder

    @model_validator(mode="before")
    @classmethod
    def _word(cls, given: Any) -> Any:
        """A mere word stands for the entry of that name with default settings."""
        return {"name": given} if isinstance(given, str) else given


def _unique(given: list[Any]) -> list[Any]:
    names = [getattr(item, "name", item) for item in given]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice; give each entry a name of its own")
    return given


_Entries = Annotated[list[_Entry], Field(min_length=1), AfterValidator(_unique)]
_Integers = Annotated[list[StrictInt], Field(min_length=1), AfterValidator(_unique)]


class _Grid(BaseModel):
    """The file as it stands; a list that is missing is the base job's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    job: str | dict[str, Any]
    losses: _Entries | None = None
    regularizers: _Entries | None = None
    backbones: _Entries | None = None
    dims: _Integers | None = None
    seeds: _Integers | None = None
    exclude: list[dict[str, Any]] = []
    only: list[dict[str, Any]] = []


@dataclass(frozen=True)
class Combination:
    """One run of the tournament; `dim` None stands for the pooled features."""

    loss: str
    regularizer: str
    backbone: str
    dim: int | None
    seed: int
    job: Job

    @property
    def axes(self) -> dict[str, str | int | None]:
        """What `exclude` and `only` speak of, and the first columns of a row."""
        return {axis: getattr(self, axis) for axis in _AXES}

    @property
    def folder(self) -> Path:
        """Where its run lies, below the folder of the tournament."""
        network = f"{self.backbone}-{_size(self.dim)}"
        return Path("runs", network, self.loss, self.regularizer, f"seed-{self.seed}")


def load_grid(path: Path, overrides: Sequence[str] = ()) -> list[Combination]:
    """The runs that the TOML file `path` asks for; `overrides` change its base job.

    Settings of an entry are laid over the base job in the order backbone, loss, regularizer, size,
    seed; the `loss` table of a loss and the `regularizers` of a regularizer replace the base's.

    Raises: JobError for a grid that cannot be read, for a combination that is no valid job, and for
        two that are the same job.
    """
    grid = _read(path)
    base = _base(grid.job, path, overrides)
    used = [name for name, value in base.regularizers if value is not None]
    trunk = re.sub(r"[^A-Za-z0-9._]+", "-", base.model.backbone)
    losses = grid.losses or [_entry(base.loss.name, loss=base.as_dict()["loss"])]
    off = base.as_dict()["regularizers"]
    regularizers = grid.regularizers or [_entry("-".join(used) or "none", regularizers=off)]
    backbones = grid.backbones or [_entry(trunk, model={})]
    dims: list[Any] = grid.dims or [base.model.dim]
    seeds = grid.seeds or [base.seed]
    names = [[entry.name for entry in entries] for entries in (losses, regularizers, backbones)]
    known: dict[str, list[Any]] = dict(zip(_AXES, [*names, dims, seeds], strict=True))
    exclude, only = (_limits(key, getattr(grid, key), known) for key in ("exclude", "only"))
    found = []
    # Seeds outermost: an unfinished tournament has whole tables, of fewer seeds.
    for seed, backbone, dim, loss, regularizer in itertools.product(
        seeds, backbones, dims, losses, regularizers
    ):
        values = (loss.name, regularizer.name, backbone.name, dim, seed)
        axes = dict(zip(_AXES, values, strict=True))
        if not _covered(axes, exclude) and (not only or _covered(axes, only)):
            found.append(Combination(*values, _job(base, backbone, loss, regularizer, dim, seed)))
    if not found:
        raise JobError(f"{path}: `exclude` and `only` leave no combination.")
    _require_different(found)
    return found


def _entry(name: str, **settings: Any) -> _Entry:
    return _Entry.model_validate({"name": name, **settings})


def _read(path: Path) -> _Grid:
    try:
        return _Grid.model_validate(read_file(path))
    except ValidationError as error:
        first = error.errors()[0]
        where, said = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            said = f"unknown key; a grid has {', '.join(_Grid.model_fields)}"
        raise JobError(f"{path}: {where}: {said} (given: {first['input']!r})") from error


def _base(source: str | dict[str, Any], grid: Path, overrides: Sequence[str]) -> Job:
    if isinstance(source, dict):
        for override in overrides:
            apply_override(source, override)
        return parse_job(source, origin=f"the job in {grid}")
    beside = grid.parent / source
    return load_job(beside if beside.is_file() else source, overrides)


def _limits(
    key: str, tables: Sequence[Mapping[str, Any]], known: Mapping[str, Sequence[Any]]
) -> list[dict[str, list[Any]]]:
    """Tables of `exclude` or `only`, {loss = "triplet", dim = [64, 128]}, with lists throughout."""
    found = [{k: v if isinstance(v, list) else [v] for k, v in t.items()} for t in tables]
    for axis, values in (item for table in found for item in table.items()):
        if axis not in known:
            raise JobError(f"{key}: unknown axis {axis!r}; there are {', '.join(known)}.")
        for value in values:
            if value not in known[axis]:
                there = ", ".join(map(str, known[axis]))
                raise JobError(f"{key}: no {axis} {value!r} in this grid; there are {there}.")
    return found


def _covered(axes: Mapping[str, Any], limits: Sequence[Mapping[str, Sequence[Any]]]) -> bool:
    """Whether some table has the value of every axis that it names."""
    return any(all(axes[name] in values for name, values in t.items()) for t in limits)


def _job(
    base: Job, backbone: _Entry, loss: _Entry, regularizer: _Entry, dim: int | None, seed: int
) -> Job:
    named: dict[str, Any] = {} if regularizer.name == "none" else {regularizer.name: {}}
    content = base.as_dict()
    _merge(content, {"model": {"backbone": backbone.name}} | (backbone.model_extra or {}))
    content["loss"] = {"name": loss.name}
    _merge(content, loss.model_extra or {})
    content["regularizers"] = {}
    _merge(content, {"regularizers": named} | (regularizer.model_extra or {}))
    content["model"]["dim"] = dim
    name = f"{loss.name}-{regularizer.name}-{backbone.name}-{_size(dim)}-s{seed}"
    return parse_job(content | {"seed": seed, "name": name}, origin=name)


def _merge(content: dict[str, Any], settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        inner = content.get(key)
        if isinstance(value, Mapping) and isinstance(inner, dict):
            _merge(inner, value)
        else:
            content[key] = value


def _size(dim: int | None) -> str:
    return "pooled" if dim is None else str(dim)


def _require_different(combinations: Sequence[Combination]) -> None:
    seen: dict[str, str] = {}
    for job in (combination.job for combination in combinations):
        twin = seen.setdefault(json.dumps(settings(job.as_dict())), job.name)
        if twin != job.name:
            raise JobError(
                f"{twin} and {job.name} are the same job, so one would count twice. "
                "Give their entries different settings, or drop one of them."
            )
