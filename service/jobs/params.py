"""The parameters of jobs by kind, which are names and numbers, and the paths that they refer to.

Clients never send paths.
"""

import contextlib
import json
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator

from kinlens.embedder.bundle import MANIFEST
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import (
    GalleryConflictError,
    InvalidParameterError,
    JobConflictError,
)
from kinlens.embedder.types import SHORT
from kinlens.indexer.galleries import current_manifest
from kinlens.indexer.ingest.sync import MaxRemoved
from kinlens.indexer.types import GALLERY_NAME
from kinlens.models import BundleModel, JobKind, JobOptions
from kinlens.quality.gate import LOSS_TEXT, Gate, Part
from kinlens.service.access.keys import CALLER
from kinlens.service.galleries.locations import (
    GalleryLocation,
    Locations,
    intact,
    known_bundles,
    list_bundles,
    session_of,
    unknown_gallery,
    vectors_id,
)
from kinlens.service.settings import START_WORDS, Settings, split_named

Scalar = bool | int | FiniteFloat | str
Override = Scalar | list[Scalar]

NAME = rf"^{GALLERY_NAME}$"

_TABLES = ("optimizer", "sampling", "input", "loss", "regularizers", "model", "protocol", "runtime")
_KEYS = ("seed", "recall_at", "data.train_fraction", "data.split_seed", "data.small_classes")
_KEY = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9 +:._-]{0,127}")


class Params(BaseModel):
    """Parameters of a job of one `kind`; an unknown name is an error."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, strict=True)
    kind: ClassVar[JobKind]


class CompactParams(Params):
    """The parameters of a compaction: none."""

    kind = "compact"


class SwapParams(Params):
    """The parameters of a swap: another gallery, or a job whose candidate to publish."""

    kind = "swap"
    other: str | None = Field(None, alias="with", pattern=NAME)
    job: str | None = Field(None, pattern=r"^[0-9a-f]{12}$")


class SyncParams(Params):
    """The parameters of a sync, which makes a gallery equal to a folder or list."""

    kind = "sync"
    folder: str | None = Field(
        None,
        pattern=NAME,
        description="A folder or list of the settings; null: the image root of the gallery.",
    )
    max_removed: str = Field(
        "10%",
        pattern=r"^\d+(\.\d+)?%$|^\d+$",
        max_length=20,
        description="With more items to remove, a percentage or a number, the job fails and "
        "changes nothing.",
    )
    uploads: bool = Field(
        False, description="Also remove items without a file, such as uploaded ones."
    )
    checksum: bool = Field(
        False, description="Read every file, not only those with another size or date."
    )
    dry_run: bool = Field(False, description="Change nothing; the report has what would be.")


class ModelParams(Params):
    """The parameters that a rebuild and a training share."""

    swap: Literal["auto", "never"] = Field(
        "auto",
        description="auto: the new gallery replaces the old one if it passes the gate. never: it "
        "waits for POST /jobs/{id}/swap.",
    )
    class_attribute: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="A hit is right if it has the query's value of this attribute; null: class, "
        "or product in a gallery without class.",
    )
    max_missing: Part = Field(
        0.01,
        description="Part of the items that may be omitted as their image is missing; above it "
        "the job fails.",
    )


class RebuildParams(ModelParams):
    """The parameters of a rebuild with another bundle."""

    kind = "rebuild"
    bundle_id: str = Field(
        pattern=r"^[0-9a-f]{12,64}$",
        description="Id of a bundle that the service knows, or its first 12 or more digits.",
    )
    max_recall_loss: Part = Field(0.01, description=LOSS_TEXT)


class TrainParams(ModelParams):
    """The parameters of a training, after which the gallery is rebuilt with the new model."""

    kind = "train"
    job: str = Field(
        "shop",
        pattern=NAME,
        description="A job that comes with Kinlens: shop, the recommended one, trains the whole "
        "network, in ten minutes up to 1,200 images; adapt whitens the features of the untrained "
        "network in one or two, if that is proven to help.",
    )
    data: str | None = Field(
        None,
        pattern=NAME,
        description="A data set of the settings; null: the gallery's images, except GIFs, with "
        "class_attribute as their class.",
    )
    overrides: dict[str, Override] = Field(
        {},
        max_length=64,
        description="Settings of the job, such as optimizer.epochs, as in `kinlens-train fit "
        "--set`; paths are refused. model.weights is imagenet (downloaded), none (random), "
        "current (continue from the gallery's own model) or a name of the settings.",
    )
    gate: Gate = Gate()
    feedback: bool = Field(False, description="Also learn from the feedback on the gallery.")

    @field_validator("overrides")
    @classmethod
    def _change_no_paths(cls, value: dict[str, Override]) -> dict[str, Override]:
        for key, setting in value.items():
            may_change = key in _KEYS or (key.split(".")[0] in _TABLES and "." in key)
            if not _KEY.fullmatch(key) or not may_change:
                raise ValueError(
                    f"{key[:80]!r} cannot be changed here; known are {', '.join(_KEYS)} and the "
                    f"settings of the tables {', '.join(_TABLES)}, such as optimizer.epochs"
                )
            for scalar in setting if isinstance(setting, list) else [setting]:
                if not isinstance(scalar, str):
                    continue
                # MODULE:NAME would import code; only the backbone has a colon, in timm:NAME.
                names_code = ":" in scalar.removeprefix("timm:" * (key == "model.backbone"))
                if not _WORD.fullmatch(scalar) or ".." in scalar or names_code:
                    raise ValueError(
                        f"{key} = {scalar[:80]!r} must be a plain word; paths are not allowed"
                    )
        return value


_MODELS = {
    model.kind: model
    for model in (CompactParams, SwapParams, SyncParams, RebuildParams, TrainParams)
}


def params_of(kind: JobKind, stored: dict[str, Any]) -> Params:
    """The parameters of a stored job. Raises: ValidationError."""
    return _MODELS[kind].model_validate(stored)


class Plan(BaseModel):
    """Everything that the process of a job needs in addition to its parameters."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gallery: Path
    image_root: str | None = None
    other: Path | None = None
    other_root: str | None = None
    folder: Path | None = None
    bundle: Path | None = None
    old_bundle: Path | None = None
    command: tuple[str, ...] = ()
    data_root: Path | None = None
    weights: Path | None = None
    session: SessionSettings


def plan_of(params: Params, gallery: str, settings: Settings) -> Plan:
    """The plan of a job by the settings of this process. It also validates the parameters.

    The training command is looked up only if this process does jobs.

    Raises: GalleryNotFoundError, GalleryConflictError; InvalidParameterError naming the known
        training jobs, data sets, weights or bundles; JobConflictError without a training command.
    """
    location = _location_of(gallery, settings)
    if location.follows is not None:
        raise GalleryConflictError(
            f"Gallery {gallery} is a copy that follows {location.follows}. Run the job at the "
            "service that publishes it."
        )
    found: dict[str, Any] = {"gallery": location.path, "image_root": location.image_root}
    if isinstance(params, SwapParams) and params.other is not None:
        if params.other == gallery:
            raise GalleryConflictError(
                f"Gallery {gallery} cannot be swapped with itself. Name another one."
            )
        other = _location_of(params.other, settings)
        found |= {"other": other.path, "other_root": other.image_root}
    if isinstance(params, SyncParams):
        found |= _syncing(params, location, settings)
    if isinstance(params, RebuildParams):
        found["bundle"] = _bundle_folder(params.bundle_id, settings)
    if isinstance(params, ModelParams):
        with contextlib.suppress(InvalidParameterError):  # the old model is optional
            found["old_bundle"] = _own_bundle(location, settings)
    if isinstance(params, TrainParams):
        found |= _training(params, location, settings)
        if settings.jobs == "here":
            found["command"] = _training_command(settings)
    session = replace(session_of(settings), callers=settings.search_threads)
    return Plan(**found, session=session)


def options_of(settings: Settings) -> JobOptions:
    """The names that the parameters of jobs can have in this process; newest bundle first.

    For a key that is bound to galleries these are the bundles of its galleries: it cannot train,
    and other names can be those of other shops.
    """
    binding = CALLER.get()
    known = known_bundles(settings.state, settings.bundle)
    if binding.is_bound:
        locations = Locations(settings)
        permitted = [one for one in locations.list_unread() if binding.permits(one.name)]
        existing = [one for one in map(locations.read, permitted) if one.exists]
        used = {current_manifest(one.path).bundle_id for one in existing if one.path is not None}
        return JobOptions(
            training_jobs=[],
            no_training=f"The key {binding.key} is bound to galleries, so it cannot train. Send a "
            "key that was created without --gallery.",
            data=[],
            weights=[],
            bundles=_newest(manifest for name, (_, manifest) in known.items() if name in used),
        )
    recommended = TrainParams.model_fields["job"].default
    jobs = sorted(training_jobs(), key=lambda name: (name != recommended, name))
    no_training = None if jobs else "The training jobs of Kinlens are not installed here."
    if jobs and settings.jobs == "here":
        try:
            _training_command(settings)
        except JobConflictError as error:
            no_training = str(error)
    return JobOptions(
        training_jobs=jobs,
        no_training=no_training,
        data=sorted(_named(settings.training_data)),
        folders=sorted(_named(settings.sync_folders)),
        weights=[*START_WORDS, *sorted(_named(settings.training_weights))],
        bundles=_newest(manifest for _, manifest in known.values()),
    )


def _newest(manifests: Iterable[Mapping[str, Any]]) -> list[BundleModel]:
    """The bundles of these manifests, newest first."""
    names = BundleModel.model_fields
    bundles = [
        BundleModel(**{name: one.get(name, "") for name in names} | {"bundle_id": vectors_id(one)})
        for one in manifests
    ]
    return sorted(bundles, key=lambda bundle: bundle.created_at, reverse=True)


def training_jobs() -> dict[str, Path]:
    """The training jobs that come with Kinlens: their files by name.

    Every file in jobs/ is a job, and so is each pair of a data set and a method (DATA-METHOD). The
    files are not read.
    """
    spec = find_spec("kinlens.training")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found: dict[str, Path] = {}
    for folder in (Path(name) / "jobs" for name in folders):
        methods = [path.stem for path in folder.glob("methods/*.toml")]
        for path in folder.glob("data/*.toml"):
            found |= {f"{path.stem}-{method}": path for method in methods}
        found |= {path.stem: path for path in folder.glob("*.toml")}
    return found


def data_kind(job: str) -> str:
    """The kind of data of a shipped training job, from its file or the file of its base."""
    return str(_table_of(job, "data")["kind"])


def _table_of(job: str, name: str) -> dict[str, Any]:
    """A table of a shipped training job, from its file over those of its bases."""
    content = tomllib.loads(training_jobs()[job].read_text(encoding="utf-8"))
    below = _table_of(content["base"], name) if "base" in content else {}
    return {**below, **content.get(name, {})}


def _location_of(name: str, settings: Settings) -> GalleryLocation:
    locations, permits = Locations(settings), CALLER.get().permits
    location = locations.find(name) if permits(name) else None
    location = location and locations.read(location)  # no other: it may hang
    if location is None or not location.exists:
        names = [other.name for other in locations.list_unread()]
        raise unknown_gallery(name, filter(permits, names))
    if location.path is None:
        raise GalleryConflictError(
            f"Gallery {name} is on Milvus, where this service runs no jobs. Build the new gallery "
            "in a folder (kinlens-index build) and publish it there: kinlens-index import FOLDER "
            "--out milvus://HOST:PORT/NAME. Milvus compacts automatically."
        )
    return location


def _bundle_folder(bundle_id: str, settings: Settings) -> Path:
    """The folder of a known bundle, by its id, that of its manifest, or the first 12 or more digits
    of one. Raises: InvalidParameterError.
    """
    known = known_bundles(settings.state, settings.bundle)
    fitting = [
        (vectors_id(one), folder)
        for folder, one in list_bundles(settings.state, settings.bundle)
        if any(one.get(name, "").startswith(bundle_id) for name in ("base_id", "bundle_id"))
    ]
    if len({name for name, _ in fitting}) == 1:
        return intact([folder for _, folder in fitting], settings.bundle).resolve()
    raise InvalidParameterError(
        f"bundle_id = {bundle_id[:SHORT]} is unknown. Known are: "
        f"{', '.join(other[:SHORT] for other in known) or 'none'}. Put the bundle into the folder "
        "bundles of --state."
    )


def _own_bundle(location: GalleryLocation, settings: Settings) -> Path:
    """The folder of the bundle of a gallery. Raises: InvalidParameterError; GalleryError."""
    assert location.path is not None
    return _bundle_folder(current_manifest(location.path).bundle_id, settings)


def _syncing(params: SyncParams, location: GalleryLocation, settings: Settings) -> dict[str, Any]:
    """The paths of a sync: a folder by its name in the settings, and the bundle of the gallery."""
    MaxRemoved.parse(params.max_removed)
    found: dict[str, Any] = {"bundle": _own_bundle(location, settings)}
    if params.folder is not None:
        folders = _named(settings.sync_folders)
        cure = f"Add it to KINLENS_SYNC_FOLDERS of the service, as {params.folder}=DIR."
        _check_known("folder", params.folder, folders, cure)
        found["folder"] = folders[params.folder]
    return found


def _training(params: TrainParams, location: GalleryLocation, settings: Settings) -> dict[str, Any]:
    """The paths of the data set and the weights of a training, by their names in the settings."""
    found: dict[str, Any] = {}
    _check_known("job", params.job, training_jobs(), "Choose one of these.")
    cure = "Add it to KINLENS_TRAINING_{} of the service and of its workers, as NAME={}."
    data = _named(settings.training_data)
    if params.data is not None:
        _check_known("data", params.data, data, cure.format("DATA", "DIR"))
        found["data_root"] = data[params.data]
    named = _named(settings.training_weights)
    weights = str(params.overrides.get("model.weights", "imagenet"))
    words = (*named, *START_WORDS)
    _check_known("model.weights", weights, words, cure.format("WEIGHTS", "PATH"))
    if weights == "current":
        found["weights"] = _own_bundle(location, settings)
        is_trained = json.loads((found["weights"] / MANIFEST).read_bytes()).get("job")
        if is_trained and not _trains(params):
            raise InvalidParameterError(
                "model.weights = 'current' would change nothing: the gallery's model is trained, "
                f"and {params.job} trains no model further. Choose the job shop with its own "
                "settings, which trains the whole network, or start from other weights."
            )
    elif weights in named:
        found["weights"] = named[weights]
    return found


def _trains(params: TrainParams) -> bool:
    """Whether the job trains after its start, by its file and the overrides; see `Protocol`."""
    changes = {name.removeprefix("protocol."): x for name, x in params.overrides.items()}
    protocol = _table_of(params.job, "protocol") | changes
    return protocol.get("choose_by") != "alpha" or protocol.get("alpha") != 0


def _named(entries: tuple[str, ...]) -> dict[str, Path]:
    """The paths of entries NAME=PATH of a setting, by name."""
    return {str(name): Path(text).resolve() for name, text in map(split_named, entries)}


def _check_known(what: str, name: str, known: Collection[str], cure: str) -> None:
    if name not in known:
        raise InvalidParameterError(
            f"{what} = {name!r} is unknown. Known are: {', '.join(sorted(known)) or 'none'}. {cure}"
        )


def _training_command(settings: Settings) -> tuple[str, ...]:
    """The training command, its program as a path. Raises: JobConflictError if it cannot run."""
    try:
        program, *words = shlex.split(settings.training_command)
    except ValueError as error:
        raise JobConflictError(
            f"Nothing can be trained here: KINLENS_TRAINING_COMMAND cannot be read ({error})."
        ) from error
    ours = Path(sys.executable).with_name("kinlens-train")
    found = shutil.which(program) or shutil.which(program, path=str(ours.parent))
    lacks_torch = (
        found is not None and Path(found).resolve() == ours.resolve() and find_spec("torch") is None
    )
    if found is None or lacks_torch:
        raise JobConflictError(
            f"Nothing can be trained here: {'torch' if lacks_torch else program} is not "
            "installed. Run pip install 'kinlens[training]', set the command in "
            "KINLENS_TRAINING_COMMAND, or let another container do the jobs (KINLENS_JOBS="
            "elsewhere and kinlens-serve work)."
        )
    return (found, *words)
