"""The grid of a tournament: losses x regularizers x backbones x sizes x seeds, each a job."""

import itertools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.errors import JobError
from training.config.job import Job, apply_override, load_job, parse_job
from training.stamp import identity
from training.tournament.entries import Entry, Limits, entries, integers, limits

_KEYS = ("job", "losses", "regularizers", "backbones", "dims", "seeds", "exclude", "only")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._]+")


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
        return {
            "loss": self.loss,
            "regularizer": self.regularizer,
            "backbone": self.backbone,
            "dim": self.dim,
            "seed": self.seed,
        }

    @property
    def folder(self) -> Path:
        """Where its run lies, below the folder of the tournament."""
        network, seed = f"{self.backbone}-{_size(self.dim)}", f"seed-{self.seed}"
        return Path("runs", network, self.loss, self.regularizer, seed)


def load_grid(path: Path, overrides: Sequence[str] = ()) -> list[Combination]:
    """The runs that the TOML file `path` asks for; `overrides` change its base job.

    Settings of an entry are laid over the base job in the order backbone, loss, regularizer, size,
    seed; the `loss` table of a loss and the `regularizers` of a regularizer replace the base's.

    Raises: JobError for a grid that cannot be read, for every combination that is no valid job, and
        for two combinations that are the same job.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JobError(f"The grid {path} cannot be read: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not valid TOML: {error}") from error
    unknown = sorted(content.keys() - set(_KEYS))
    if unknown:
        raise JobError(f"{path}: unknown key {unknown[0]!r}; a grid has {', '.join(_KEYS)}.")
    base = _base(content.get("job"), path, overrides)
    combinations = _combine(content, base, str(path))
    _require_different(combinations)
    return combinations


def _base(source: Any, grid: Path, overrides: Sequence[str]) -> Job:
    if isinstance(source, dict):
        for override in overrides:
            apply_override(source, override)
        return parse_job(source, origin=f"the job in {grid}")
    if not isinstance(source, str):
        raise JobError(f"{grid} needs a base: job = NAME or PATH, or a [job] table.")
    beside = grid.parent / source
    return load_job(beside if beside.is_file() else source, overrides)


def _combine(content: dict[str, Any], base: Job, origin: str) -> list[Combination]:
    losses = entries(content, "losses", base.loss.name, {"loss": base.as_dict()["loss"]})
    off = {"regularizers": base.as_dict()["regularizers"]}
    regularizers = entries(content, "regularizers", _regularizers_of(base), off)
    trunk = _NOT_IN_NAMES.sub("-", base.model.backbone)
    backbones = entries(content, "backbones", trunk, {})
    dims: list[int | None] = [*integers(content, "dims")] or [base.model.dim]
    seeds = integers(content, "seeds") or [base.seed]
    names: dict[str, set[Any]] = {
        "loss": {entry.name for entry in losses},
        "regularizer": {entry.name for entry in regularizers},
        "backbone": {entry.name for entry in backbones},
        "dim": set(dims),
        "seed": set(seeds),
    }
    limited = Limits(limits(content, "exclude", names), limits(content, "only", names))
    # Seeds outermost: an unfinished tournament has whole tables, of fewer seeds.
    product = itertools.product(seeds, backbones, dims, losses, regularizers)
    found, wrong = [], []
    for seed, backbone, dim, loss, regularizer in product:
        values = (loss.name, regularizer.name, backbone.name, dim, seed)
        if not limited.allow(dict(zip(names, values, strict=True))):
            continue
        try:
            job = _job(base, (backbone, loss, regularizer), dim, seed)
            found.append(Combination(loss.name, regularizer.name, backbone.name, dim, seed, job))
        except JobError as error:
            wrong.append(str(error))
    if wrong:
        raise JobError(f"{origin}: {len(wrong)} combinations are no valid jobs.\n" + wrong[0])
    if not found:
        raise JobError(f"{origin}: `exclude` and `only` leave no combination.")
    return found


def _job(base: Job, parts: Sequence[Entry], dim: int | None, seed: int) -> Job:
    content = base.as_dict()
    for part in parts:
        part.lay_over(content)
    content["model"]["dim"] = dim
    content["seed"] = seed
    backbone, loss, regularizer = (part.name for part in parts)
    content["name"] = f"{loss}-{regularizer}-{backbone}-{_size(dim)}-s{seed}"
    return parse_job(content, origin=content["name"])


def _size(dim: int | None) -> str:
    return "pooled" if dim is None else str(dim)


def _regularizers_of(base: Job) -> str:
    used = [name for name, value in base.regularizers if value is not None]
    return "-".join(used) or "none"


def _require_different(combinations: Sequence[Combination]) -> None:
    seen: dict[str, str] = {}
    for combination in combinations:
        job = combination.job
        twin = seen.setdefault(identity(job.as_dict()), job.name)
        if twin != job.name:
            raise JobError(
                f"{twin} and {job.name} are the same job, so one would count twice. "
                "Give their entries different settings, or drop one of them."
            )
