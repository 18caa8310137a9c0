"""What a job can be told, by kind: names and numbers, never a path; and the places they mean."""

import importlib.util
import math
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from embedder.errors import (
    GalleryConflictError,
    GalleryNotFoundError,
    InvalidParameterError,
    JobConflictError,
)
from embedder.session import SessionSettings
from embedder.types import SHORT
from indexer.gallery import current_manifest
from service.galleries.locations import GalleryLocation, Locations, id_of
from service.jobs.store import JobFolders, Kind
from service.settings import START_WORDS, Settings, split_gallery

Scalar = bool | int | float | str
Override = Scalar | list[Scalar]

BUNDLE_DIGITS = 16
"""Of the id of a bundle, in the name of its folder in the state folder."""

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
_JOB_ID = r"^[0-9a-f]{12}$"
_TABLES = ("optimizer", "sampling", "input", "loss", "regularizers", "model", "protocol", "runtime")
_KEYS = ("seed", "recall_at", "data.train_fraction", "data.split_seed", "data.small_classes")
_KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_CURE = "Name it in KINLENS_TRAINING_{} wherever jobs are taken and done, as NAME={}."
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


class SwapParams(Params):
    """Either another gallery, or the job whose candidate is to be put in place."""

    other: str | None = Field(None, alias="with", pattern=_NAME)
    job: str | None = Field(None, pattern=_JOB_ID)


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


_MODELS: dict[Kind, type[Params]] = {
    "compact": Params,
    "swap": SwapParams,
    "rebuild": RebuildParams,
    "train": TrainParams,
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


class Plan(BaseModel):
    """Everything that the process of a job needs, beside its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gallery: Path
    image_root: Path | None = None
    other: Path | None = None
    other_root: Path | None = None
    bundle: Path | None = None
    command: tuple[str, ...] = ()
    data_root: Path | None = None
    weights: Path | None = None
    session: SessionSettings


def plan_of(params: Params, gallery: str, settings: Settings, *, is_done_here: bool = True) -> Plan:
    """The plan of a job by the settings of this process; the same call refuses what cannot work.

    The training command is looked for only where the job `is_done_here`.

    Raises: GalleryNotFoundError, GalleryConflictError; InvalidParameterError naming the known
        training jobs, data sets, weights or bundles; JobConflictError without a training command.
    """
    place = _place_of(gallery, settings)
    found: dict[str, Any] = {"gallery": place.path, "image_root": place.image_root}
    if isinstance(params, SwapParams) and params.other is not None:
        if params.other == gallery:
            raise GalleryConflictError(
                f"Gallery {gallery} cannot be swapped with itself. Name another one."
            )
        other = _place_of(params.other, settings)
        found |= {"other": other.path, "other_root": other.image_root}
    if isinstance(params, SwapParams) and params.job is not None:
        assert settings.state is not None
        found["other"] = JobFolders(settings.state.absolute(), params.job).candidate
    if isinstance(params, RebuildParams):
        found["bundle"] = _bundle_folder(params.bundle_id, settings)
    if isinstance(params, TrainParams):
        found |= _training(params, place, settings)
        if is_done_here:
            found["command"] = _training_command(settings)
    options = (settings.device, settings.threads, settings.allow_cpu_fallback, settings.precision)
    return Plan(**found, session=SessionSettings(*options))


def training_jobs() -> dict[str, Path]:
    """The training jobs that come with Kinlens, by name, and the file that begins each.

    Every file is a job, and every method with every data set; what they do is not loaded.
    """
    spec = importlib.util.find_spec("training")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found: dict[str, Path] = {}
    for folder in (Path(name) / "jobs" for name in folders):
        methods = [path.stem for path in folder.glob("methods/*.toml")]
        for path in folder.glob("data/*.toml"):
            found |= {f"{path.stem}-{method}": path for method in methods}
        found |= {path.stem: path for path in folder.glob("*.toml")}
    return found


def data_kind(job: str) -> str:
    """The kind of data that a shipped training job names, itself or by its base."""
    content = tomllib.loads(training_jobs()[job].read_text(encoding="utf-8"))
    kind: str = content["data"]["kind"] if "data" in content else data_kind(content["base"])
    return kind


def _place_of(name: str, settings: Settings) -> GalleryLocation:
    places = {place.name: place for place in Locations(settings).list_galleries()}
    if name not in places or not places[name].exists:
        raise GalleryNotFoundError(
            f"gallery = {name[:80]!r} is unknown. Known are: {', '.join(places) or 'none'}."
        )
    if places[name].path is None:
        raise GalleryConflictError(
            f"Gallery {name} lies on Milvus, where this service does no jobs. Make the new gallery "
            "in a folder (kinlens-index rebuild) and publish it there: kinlens-index import FOLDER "
            "--out milvus://HOST:PORT/NAME. Milvus compacts by itself."
        )
    return places[name]


def _bundle_folder(bundle_id: str, settings: Settings) -> Path:
    """The folder of a bundle that a service can open, by its id or 12 and more digits of it."""
    folders = [] if settings.state is None else sorted(settings.state.glob("bundles/*"))
    if settings.bundle is not None:
        folders.append(settings.bundle)
    known = {other: folder for folder in folders if (other := id_of(folder)) is not None}
    fitting = [folder for other, folder in known.items() if other.startswith(bundle_id)]
    if len(fitting) == 1:
        return fitting[0].resolve()
    raise InvalidParameterError(
        f"bundle_id = {bundle_id[:SHORT]} is unknown. Known are: "
        f"{', '.join(other[:SHORT] for other in known) or 'none'}. Put the bundle into the folder "
        "bundles of --state under the first 16 digits of its id."
    )


def _training(params: TrainParams, place: GalleryLocation, settings: Settings) -> dict[str, Path]:
    """The data set and the weights of a training that have names in the settings."""
    found = {}
    _refuse_unknown("job", params.job, training_jobs(), "Name one of these.")
    if params.data is not None:
        known = _named(settings.training_data)
        _refuse_unknown("data", params.data, known, _CURE.format("DATA", "DIR"))
        found["data_root"] = known[params.data]
    weights = str(params.overrides.get("model.weights", "imagenet"))
    known = _named(settings.training_weights)
    if weights == "current":
        assert place.path is not None
        found["weights"] = _bundle_folder(current_manifest(place.path).bundle_id, settings)
    elif weights not in START_WORDS:
        words = known | dict.fromkeys(START_WORDS, Path())
        _refuse_unknown("model.weights", weights, words, _CURE.format("WEIGHTS", "PATH"))
        found["weights"] = known[weights]
    return found


def _named(entries: tuple[str, ...]) -> dict[str, Path]:
    """Paths of the settings by name: NAME=PATH each."""
    pairs = [split_gallery(entry) for entry in entries]
    return {name or path.name: path.resolve() for name, path in pairs}


def _training_command(settings: Settings) -> tuple[str, ...]:
    """The command that trains, its program as a path."""
    words = shlex.split(settings.training_command)
    beside = str(Path(sys.executable).parent)
    program = (shutil.which(words[0]) or shutil.which(words[0], path=beside)) if words else None
    if program is None:
        raise JobConflictError(
            f"Nothing can be trained here: the command {settings.training_command!r} is not "
            "installed. Install the extra `training`, name the command with "
            "KINLENS_TRAINING_COMMAND, or let another container do the jobs (KINLENS_JOBS="
            "elsewhere and kinlens-serve work)."
        )
    return (program, *words[1:])


def _refuse_unknown(what: str, name: str, known: Mapping[str, object], cure: str) -> None:
    if name not in known:
        raise InvalidParameterError(
            f"{what} = {name!r} is unknown. Known are: {', '.join(sorted(known)) or 'none'}. {cure}"
        )
