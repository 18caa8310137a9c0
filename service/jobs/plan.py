"""What the process of a job is told: the names of its parameters turned into places."""

import importlib.util
import shlex
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from embedder.errors import (
    GalleryConflictError,
    GalleryNotFoundError,
    InvalidParameterError,
    JobConflictError,
)
from embedder.manifest import AskedPrecision
from embedder.types import SHORT
from indexer.gallery import current_manifest
from service.galleries.locations import GalleryLocation, Locations, id_of
from service.jobs.folders import JobFolders
from service.jobs.params import RebuildParams, SwapParams, TrainParams, checked
from service.jobs.record import Job
from service.settings import START_WORDS, Settings, split_gallery

BUNDLE_DIGITS = 16
"""Of the id of a bundle, in the name of its folder in the state folder."""


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
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1
    allow_cpu_fallback: bool = False
    precision: AskedPrecision = "fp32"


def plan_of(job: Job, settings: Settings) -> Plan:
    """The plan of a job by the settings of the process that starts it.

    Raises: GalleryNotFoundError, InvalidParameterError, JobConflictError.
    """
    params = checked(job.kind, job.params)
    place = place_of(job.gallery, settings)
    found: dict[str, Any] = {"gallery": place.path, "image_root": place.image_root}
    if isinstance(params, SwapParams) and params.other is not None:
        other = place_of(params.other, settings)
        found |= {"other": other.path, "other_root": other.image_root}
    if isinstance(params, SwapParams) and params.job is not None:
        assert settings.state is not None
        found["other"] = JobFolders(settings.state, params.job).candidate
    if isinstance(params, RebuildParams):
        found["bundle"] = bundle_folder(params.bundle_id, settings)
    if isinstance(params, TrainParams):
        _check_training(params, settings)
        found["command"] = training_command(settings)
        if params.data is not None:
            found["data_root"] = training_data(settings)[params.data]
        found["weights"] = _weights(params, place, settings)
    names = ("device", "threads", "allow_cpu_fallback", "precision")
    return Plan(**found, **{name: getattr(settings, name) for name in names})


def place_of(name: str, settings: Settings) -> GalleryLocation:
    """A gallery on the disk. Raises: GalleryNotFoundError."""
    places = {place.name: place for place in Locations(settings).list_galleries()}
    if name not in places or places[name].generation is None:
        raise GalleryNotFoundError(
            f"gallery = {name[:80]!r} is unknown. Known are: {', '.join(places) or 'none'}."
        )
    return places[name]


def bundle_folder(bundle_id: str, settings: Settings) -> Path:
    """The folder of a bundle, by its id or 12 and more digits of it.

    Raises: InvalidParameterError naming the known ones.
    """
    known = known_bundles(settings)
    fitting = [other for other in known if other.startswith(bundle_id)]
    if len(fitting) == 1:
        return known[fitting[0]]
    raise InvalidParameterError(
        f"bundle_id = {bundle_id[:SHORT]} is unknown. Known are: "
        f"{', '.join(other[:SHORT] for other in known) or 'none'}. Put the bundle into the folder "
        "bundles of --state under the first 16 digits of its id."
    )


def known_bundles(settings: Settings) -> Mapping[str, Path]:
    """The folders of the bundles that a service can open, by id."""
    known: dict[str, Path] = {}
    if settings.bundle is not None and (primary := id_of(settings.bundle)) is not None:
        known[primary] = settings.bundle
    stored = None if settings.state is None else settings.state / "bundles"
    for folder in sorted(stored.iterdir()) if stored is not None and stored.is_dir() else []:
        bundle_id = id_of(folder)
        if bundle_id is not None and folder.name == bundle_id[:BUNDLE_DIGITS]:
            known.setdefault(bundle_id, folder)
    return known


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


def training_data(settings: Settings) -> dict[str, Path]:
    """The data sets that the settings allow, by name: NAME=DIR each."""
    pairs = [split_gallery(entry) for entry in settings.training_data]
    return {name or path.name: path.resolve() for name, path in pairs}


def training_weights(settings: Settings) -> dict[str, Path]:
    """The weight files and bundles that the settings allow, by name: NAME=PATH each."""
    pairs = [split_gallery(entry) for entry in settings.training_weights]
    return {name or path.name: path.resolve() for name, path in pairs}


def training_command(settings: Settings) -> tuple[str, ...]:
    """The command that trains, its program as a path. Raises: JobConflictError."""
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


def check_start(job: Job, settings: Settings) -> None:
    """Refuse what cannot work before a job waits for its turn.

    Raises: InvalidParameterError naming the known training jobs, data sets or bundles;
        GalleryNotFoundError, GalleryConflictError; JobConflictError without a training command.
    """
    params = checked(job.kind, job.params)
    if isinstance(params, TrainParams):
        _check_training(params, settings)
        if settings.jobs == "here":
            training_command(settings)
    if isinstance(params, RebuildParams):
        bundle_folder(params.bundle_id, settings)
    place = place_of(job.gallery, settings)
    if isinstance(params, TrainParams):
        _weights(params, place, settings)
    if isinstance(params, SwapParams) and params.other is not None:
        place_of(params.other, settings)
        if params.other == job.gallery:
            raise GalleryConflictError(
                f"Gallery {job.gallery} cannot be swapped with itself. Name another one."
            )


def _check_training(params: TrainParams, settings: Settings) -> None:
    """Again where the job is done: a worker may have other settings than the service."""
    _refuse_unknown("job", params.job, training_jobs(), "Name one of these.")
    if params.data is not None:
        cure = "Name it in KINLENS_TRAINING_DATA wherever jobs are taken and done, as NAME=DIR."
        _refuse_unknown("data", params.data, training_data(settings), cure)


def _weights(params: TrainParams, place: GalleryLocation, settings: Settings) -> Path | None:
    """The file or bundle that a training starts from, if it has one by name."""
    name = params.overrides.get("model.weights", "imagenet")
    if name == "current":
        bundle_id = current_manifest(place.path).bundle_id
        return bundle_folder(bundle_id, settings).resolve()
    files = training_weights(settings)
    cure = "Name it in KINLENS_TRAINING_WEIGHTS wherever jobs are taken and done, as NAME=PATH."
    known = files | dict.fromkeys(START_WORDS, Path())
    _refuse_unknown("model.weights", str(name), known, cure)
    return files.get(str(name))


def _refuse_unknown(what: str, name: str, known: Mapping[str, object], cure: str) -> None:
    if name not in known:
        raise InvalidParameterError(
            f"{what} = {name!r} is unknown. Known are: {', '.join(sorted(known)) or 'none'}. {cure}"
        )
