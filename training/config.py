"""A training job: one frozen, typed page. An unknown key is an error that names its neighbours."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from embedder.errors import JobError
from embedder.manifest import Interpolation, Preprocessing

JOBS = Path(__file__).parent / "jobs"


class Section(BaseModel):
    """A frozen table of the job file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FolderData(Section):
    """A folder with one sub-folder per class; the classes are split into train and test."""

    kind: Literal["folder"]
    root: str
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    small_classes: Literal["refuse", "drop"] = "refuse"


class CsvData(Section):
    """A CSV with the columns path, label and, optionally, split (train or test)."""

    kind: Literal["csv"]
    root: str
    file: str = "images.csv"
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    small_classes: Literal["refuse", "drop"] = "refuse"


class Cars196Data(Section):
    """Cars196 in its official layout: `car_ims/` and `cars_annos.mat`."""

    kind: Literal["cars196"]
    root: str
    allow_partial: bool = False


class RenderedData(Section):
    """A catalogue of rendered products, drawn into `root` if it is not there yet."""

    kind: Literal["rendered"]
    root: str
    products: int = 90
    views: int = 16
    size_px: int = 160
    train_fraction: float = Field(0.5, gt=0, lt=1)
    split_seed: int = Field(0, ge=0)
    seed: int = 0


Data = Annotated[FolderData | CsvData | Cars196Data | RenderedData, Field(discriminator="kind")]


class Model(Section):
    """The network: trunk, pooling, projection to `dim`; without `dim` the pooled features.

    `batch_norm`: "frozen" fixes statistics, scale and shift; "folded" folds all three into the
    convolutions before training, which is faster, and fixes statistics and shift; "train" lets
    everything move, as a trunk without pretrained weights needs.
    """

    backbone: Literal["mobilenet_v2", "resnet50", "googlenet"] = "mobilenet_v2"
    weights: str = "imagenet"
    dim: int | None = Field(512, ge=2)
    pooling: Literal["gap", "gmp", "gap+gmp"] = "gap+gmp"
    batch_norm: Literal["frozen", "folded", "train"] = "frozen"


class Input(Section):
    """Sizes in pixels; `min_crop_area` is the smallest part of an image that a crop may keep.

    Training views have `size_px`. Evaluation, index and service cut `test_px` (default `size_px`)
    from the image resized to `resize_px`; random crops enlarge objects, so a somewhat larger
    `test_px` shows them at the size that was trained on.
    """

    size_px: int = Field(224, ge=16)
    resize_px: int = Field(256, ge=16)
    test_px: int | None = Field(None, ge=16)
    interpolation: Interpolation = "bilinear"
    min_crop_area: float = Field(0.16, gt=0, le=1)
    flip: bool = True

    @model_validator(mode="after")
    def _check(self) -> "Input":
        self.preprocessing()
        return self

    def preprocessing(self) -> Preprocessing:
        """What evaluation, index and service do with an image."""
        return Preprocessing(
            resize_px=self.resize_px,
            crop_px=self.test_px or self.size_px,
            interpolation=self.interpolation,
        )


class ProxyAnchor(Section):
    """See training.losses.proxy_anchor."""

    name: Literal["proxy_anchor"] = "proxy_anchor"
    alpha: float = 32.0
    margin: float = 0.1


class Flow(Section):
    """Shape of a Real-NVP flow."""

    layers: int = Field(12, ge=1)
    hidden: int = Field(256, ge=1)
    clamp: float = Field(2.0, gt=0)


class Determinant(Section):
    """See training.regularizers.determinant; `input_norm` is the norm of what enters the flows."""

    flow: Flow = Flow()
    activation: Literal["leaky_relu", "none"] = "leaky_relu"
    input_norm: float = Field(5.0, gt=0)
    lambda1: float = Field(0.05, ge=0)
    lambda2: float = Field(0.05, ge=0)
    eps: float = 0.4
    neighbours: int = Field(1, ge=1)
    same_class: bool = False
    direction: Literal["between", "beyond"] = "between"
    normalize_depth: bool = True
    proxies: Literal["shared", "separate"] = "shared"


class Regularizers(Section):
    """The regularizers to add to the loss; a missing table is one that is off."""

    determinant: Determinant | None = None


class Optimizer(Section):
    """AdamW with a learning rate for each parameter group.

    All rates are constant until `decay_start`, a part of the run, then follow `schedule` to 0.
    """

    epochs: int = Field(30, ge=1)
    batch_size: int = Field(90, ge=2)
    lr_trunk: float = Field(1e-4, ge=0)
    lr_head: float = Field(1e-4, ge=0)
    lr_proxies: float = Field(1e-2, ge=0)
    lr_flows: float = Field(1e-3, ge=0)
    weight_decay: float = Field(1e-4, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    decay_start: float = Field(0.0, ge=0, lt=1)
    warmup_epochs: int = Field(0, ge=0)
    clip_norm: float | None = None
    steps_per_epoch: int | None = Field(None, ge=1)


class Runtime(Section):
    """How to run; does not change what is learnt, save for rounding."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    workers: int = Field(2, ge=0)
    eval_every_epochs: int = Field(1, ge=0)
    tensorboard: bool = False


class Job(Section):
    """One training job."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    description: str = ""
    licence: str = "unspecified"
    seed: int = Field(0, ge=0)
    recall_at: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8), min_length=1)
    data: Data
    model: Model = Model()
    input: Input = Input()
    loss: ProxyAnchor = ProxyAnchor()
    regularizers: Regularizers = Regularizers()
    optimizer: Optimizer = Optimizer()
    runtime: Runtime = Runtime()

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints, manifests and reports."""
        return self.model_dump(mode="json")


def load_job(source: str | Path, overrides: Sequence[str] = ()) -> Job:
    """Read a job from a TOML file, or by the name of one in `training/jobs/`.

    `overrides` are `table.key=value` with TOML values (a bare word is a string).

    Raises: JobError.
    """
    path = _find(source)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise JobError(f"{path} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(content, override)
    return parse_job(content, origin=str(path))


def parse_job(content: dict[str, Any], origin: str = "job") -> Job:
    """A job from plain data. Raises: JobError naming each key that does not fit."""
    try:
        return Job.model_validate(content)
    except ValidationError as error:
        lines = [_explain(dict(problem)) for problem in error.errors()]
        raise JobError(f"{origin} is not a valid job:\n  " + "\n  ".join(lines)) from error


def expand_path(value: str, setting: str) -> Path:
    """`value` with ~ and $VARIABLES replaced. Raises: JobError if a variable is not set."""
    expanded = os.path.expandvars(value)
    missing = re.findall(r"\$\{?(\w+)\}?", expanded)
    if missing:
        raise JobError(
            f"{setting} = {value!r} needs the environment variable {missing[0]}, which is not set. "
            f"Export it, or pass --set {setting}=/path."
        )
    return Path(expanded).expanduser()


def _find(source: str | Path) -> Path:
    for candidate in (Path(source), JOBS / f"{source}.toml"):
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(p.stem for p in JOBS.glob("*.toml")))
    raise JobError(f"No job {str(source)!r}. Give the path of a TOML file or one of: {known}.")


def apply_override(content: dict[str, Any], override: str) -> None:
    """Set `table.key=value` in plain data, in place. Raises: JobError."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise JobError(f"--set {override!r} is not of the form table.key=value.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *tables, last = key.split(".")
    for table in tables:
        content = content.setdefault(table, {})
        if not isinstance(content, dict):
            raise JobError(f"--set {override!r}: {table} is a value, not a table.")
    content[last] = value


def _explain(problem: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        given = json.dumps(problem["input"], default=str)[:80]
        return f"{where}: {problem['msg']} (given: {given})"
    close = difflib.get_close_matches(str(problem["loc"][-1]), _known_keys(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{where}: unknown key{hint}"


def _known_keys() -> list[str]:
    tables: list[type[BaseModel]] = [Job, *Section.__subclasses__()]
    return sorted({name for table in tables for name in table.model_fields})
