"""A training job: frozen, typed tables. The error for an unknown key suggests similar keys."""

import difflib
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, get_args

import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from kinlens.embedder.errors import JobError
from kinlens.embedder.programs.faults import TABLES, fault_text
from kinlens.training.config.layers import read_layers
from kinlens.training.config.settings import (
    Data,
    Input,
    Model,
    Optimizer,
    Protocol,
    Runtime,
    Sampling,
    Start,
)
from kinlens.training.parts.fields import Count, Options, OwnRegularizer, Section, options_of
from kinlens.training.parts.own import absolute_path, is_own, own_part, own_paths


class Loss(Section):
    """Name and options of a loss of `kinlens.training.terms`.

    Options, defaults, bounds and meaning come from the constructor of the loss and its docstring.
    They are read with the first job, not on import, since the losses import torch.
    """

    model_config = ConfigDict(defer_build=True)

    name: str
    matryoshka: tuple[Count, ...] = ()
    """The loss is the mean over the whole embeddings and their first n numbers, for each n here. So
    a gallery may keep the first n, `kinlens-index build --dims`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls is not Loss:
            return handler(source)
        # A job names the loss, and its name decides on the options: one table for each loss, of
        # which pydantic takes the one whose `name` it finds. A path that is no known name is a
        # loss of the user. What is written back are the options of the table that was taken.
        choices = {name: handler.generate_schema(kind) for name, kind in _settings().items()}
        return core_schema.no_info_wrap_validator_function(
            _own_loss_or,
            core_schema.tagged_union_schema(choices, discriminator="name"),
            serialization=core_schema.plain_serializer_function_ser_schema(
                lambda loss, info: loss.model_dump(mode=info.mode), info_arg=True
            ),
        )


class OwnLoss(Loss):
    """A user's own loss, by its import path. `require_own` checks its options."""

    model_config = ConfigDict(extra="allow")


def _own_loss_or(value: Any, known: Callable[[Any], Loss]) -> Loss:
    name = value.get("name") if isinstance(value, Mapping) else None
    return OwnLoss.model_validate(value) if is_own(name) else known(value)


def proxy_anchor() -> Loss:
    return _settings()["proxy_anchor"](name="proxy_anchor")


@cache
def _settings() -> dict[str, type[Loss]]:
    from kinlens.training.terms import GIVEN, LOSSES

    return {
        name: options_of(name, kind, Loss, GIVEN, name=(str, name)) for name, kind in LOSSES.items()
    }


class Regularizers(Section):
    """The regularizers to add to the loss, one or several; a missing table turns one off.

    Weights (`lambda1`, `lambda2`, `weight`) are fixed, as in the papers. With `share`, for example
    0.2, they are initial values: after 50 steps they are scaled once, by at most 100 in either
    direction, so that the gradient of the regularizer is that fraction of the gradient of the loss.
    """

    model_config = ConfigDict(defer_build=True)  # built with the first job, see Loss

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return handler(source) if cls is not Regularizers else handler.generate_schema(_tables())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def wanted(self) -> dict[str, Options]:
        """The tables that a job has, by the name of the regularizer."""
        tables = {name: table for name, table in self if isinstance(table, Options)}
        own: dict[str, OwnRegularizer] = self.own
        return tables | own

    @property
    def with_flow(self) -> Options | None:
        """The table of the regularizer that adds a flow to the network."""
        found: Options | None = self.determinant
        return found


def no_regularizers() -> Regularizers:
    return _tables()()


@cache
def _tables() -> type[Regularizers]:
    from kinlens.training.terms import GIVEN, REGULARIZERS

    tables: dict[str, Any] = {
        name: (options_of(name, kind, Options, GIVEN) | None, None)
        for name, kind in REGULARIZERS.items()
    }
    tables["own"] = (dict[Word, OwnRegularizer], Field({}, description=_OF_YOUR_OWN))
    return create_model(
        "Regularizers", __base__=Regularizers, __doc__=Regularizers.__doc__, **tables
    )


Word = Annotated[str, Field(pattern="^[a-z][a-z0-9_]*$")]
_OF_YOUR_OWN = "Regularizers of your own, each in a table `regularizers.own.NAME`."


class Job(Section):
    """One training job."""

    model_config = ConfigDict(defer_build=True)  # built with the first job, see Loss

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the job; the default run folder is `runs/NAME`."""
    description: str = ""
    """A sentence for the report."""
    licence: str = "unspecified"
    """Licence of the model, for the manifest of its bundle."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of initial weights, batches and views."""
    recall_at: tuple[Annotated[int, Field(ge=1)], ...] = Field((1, 2, 4, 8), min_length=1)
    """The K of R@K."""
    data: Data
    """The images. `kind`, which is required, decides on the other keys."""
    model: Model = Model()
    start: Start = Start()
    input: Input = Input()
    loss: Loss = Field(default_factory=proxy_anchor)
    """The loss, Proxy-Anchor without this table. `name` decides on the other keys."""
    regularizers: Regularizers = Field(default_factory=no_regularizers)
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer()
    protocol: Protocol = Protocol()
    runtime: Runtime = Runtime()

    @model_validator(mode="after")
    def _check(self) -> "Job":
        from kinlens.training.terms import REGULARIZERS, WITH_PROXIES  # imports torch

        choose_by = self.protocol.choose_by
        if not is_own(self.loss.name):
            known = self.regularizers.wanted().keys() & REGULARIZERS.keys()
            self.check_needs(
                {name: REGULARIZERS[name] for name in known}, self.loss.name in WITH_PROXIES
            )
        if self.start.projection != "random" and self.model.dim is None:
            raise ValueError(
                f'start.projection = "{self.start.projection}" needs a projection; set model.dim'
            )
        if choose_by != "last" and 1 not in self.recall_at:
            raise ValueError(f"recall_at = {list(self.recall_at)} lacks 1; R@1 chooses the model")
        if choose_by in ("validation", "test") and not self.runtime.eval_every_epochs:
            raise ValueError(
                f'choose_by = "{choose_by}" compares epochs; set runtime.eval_every_epochs = 1'
            )
        return self

    def check_needs(self, kinds: Mapping[str, Any], has_proxies: bool) -> None:
        """Raises: ValueError if a regularizer, by its class, needs what this job lacks."""
        from kinlens.training.terms import WITH_PROXIES

        on_proxies = {}
        if self.start.proxies == "class_means":
            on_proxies['start.proxies = "class_means"'] = 'start.proxies = "random"'
        wanted = self.regularizers.wanted()
        for name in sorted(kinds, key=list(wanted).index):
            needs, key = kinds[name].needs_with(wanted[name]), f"regularizers.{name}"
            if (without := needs.get("proxies")) is not None:
                on_proxies[f"{key} without {without}" if without else key] = (
                    f"{key}.{without}" if without else ""
                )
            if "flow" in needs and isinstance(wanted[name], OwnRegularizer):
                raise ValueError(f"{key} needs a flow, which only regularizers of Kinlens get")
            if "draws" in needs and self.sampling.kind != "paired":
                raise ValueError(
                    f'{key} compares two draws of the same classes; set sampling.kind = "paired"'
                )
        if on_proxies and not has_proxies:
            setting, cure = next(iter(on_proxies.items()))
            pairs = 'sampling.kind = "balanced" and sampling.per_class = 4'
            random = f" (and {pairs}, for pairs in each batch)"
            cure = cure and f"set {cure}{random * (self.sampling.kind == 'random')}, or "
            raise ValueError(
                f"{setting} acts on proxies, and the loss {self.loss.name} has no proxies; "
                f"{cure}use one of {', '.join(WITH_PROXIES)}"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for checkpoints, manifests and reports."""
        return self.model_dump(mode="json")


def load_job(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    options: Mapping[str, str] = MappingProxyType({}),
) -> Job:
    """A job of a TOML file, of its tables as a dict, or a shipped one, with overrides.

    Overrides are `table.key=value`. `options` maps settings to the words by which a user gave them,
    if not by `--set`. Raises: JobError.
    """
    content, origin = read_layers(source)
    for override in overrides:
        apply_override(content, override)
    loss = content.get("loss")
    if isinstance(loss, dict):
        loss.setdefault("name", "proxy_anchor")
    given = {override.partition("=")[0]: f"--set {override}" for override in overrides}
    job = parse_job(content, origin, {**given, **options})
    require_own(job)
    return job


def require_own(job: Job) -> None:
    """Import a job's own parts and check their options. Raises: JobError.

    A stored job is read without this: a run can be evaluated where its loss is not installed.
    """
    from kinlens.training.terms import GIVEN, has_proxies, loss_kind, regularizer_kind

    for path in own_paths(job.as_dict()):
        own_part(path)
    own = [(f"regularizers.own.{name}", table) for name, table in job.regularizers.own.items()]
    for key, table in [("loss", job.loss), *own]:
        if not is_own(table.name) or not inspect.isclass(kind := own_part(table.name)):
            continue
        options = options_of(kind.__name__, kind, Section, GIVEN)
        try:
            options.model_validate(table.model_dump(exclude={"name", "matryoshka", "share"}))
        except ValidationError as error:
            found = ({**fault, "loc": (*key.split("."), *fault["loc"])} for fault in error.errors())
            raise JobError(" ".join(explain(fault) for fault in found)) from error
    kinds = {
        name: regularizer_kind(name, options) for name, options in job.regularizers.wanted().items()
    }
    try:
        job.check_needs(kinds, has_proxies(loss_kind(job.loss.name)))
    except ValueError as error:
        raise JobError(f"{error}.") from error


def with_absolute_paths(job: Job) -> Job:
    """`job` with absolute paths, so its run can be evaluated and exported from another folder."""
    content = job.as_dict()
    data, model = content["data"], content["model"]
    data["root"] = _absolute(job.data.root)
    data["feedback"] = [*map(_absolute, job.data.feedback)]
    if model["weights"] not in ("imagenet", "none") and Path(_absolute(model["weights"])).exists():
        model["weights"] = _absolute(model["weights"])
    absolute = {path: absolute_path(path) for path in own_paths(content)}
    return parse_job(_replaced(content, absolute))


def _replaced(value: Any, texts: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _replaced(item, texts) for key, item in value.items()}
    return texts.get(value, value) if isinstance(value, str) else value


def _absolute(path: str) -> str:
    """An absolute path, unless a variable in it is not set: only reading it is an error then."""
    expanded = os.path.expandvars(path)
    return path if "$" in expanded else str(Path(expanded).expanduser().absolute())


_RETIRED: dict[str, Any] = {
    "loss.beta_per_class": False,
    "loss.farthest": 1.4,
    "loss.learn_beta": True,
    "loss.normalize": False,
    "loss.nu": 0.0,
    "loss.over_batch": "sum",
    "loss.pairs": "all",
}
"""Settings that older jobs have and this version has not, with the value that is left."""

_OF_TRAINED = ("optimizer.chunk", "sampling.confused")
"""Settings that are gone whatever their value: those of a trained network no longer matter."""


def parse_job(
    content: dict[str, Any], origin: str = "job", given: Mapping[str, str] = MappingProxyType({})
) -> Job:
    """A job from plain data, also of an older version. Raises: JobError naming each invalid key.

    `given` maps settings to the options that set them: a fault of these is not one of `origin`.
    """
    try:
        return Job.model_validate(_without_retired(content))
    except ValidationError as error:
        faults = error.errors()
        lines = " ".join(explain(fault, given) for fault in faults)
        if given and all(_option(_key(fault), given) or not fault["loc"] for fault in faults):
            raise JobError(lines) from error
        raise JobError(f"{origin} is not a valid job: {lines}") from error


def stored_job(content: Mapping[str, Any], origin: str) -> Job:
    """The job of a run or a bundle, also of an older version. Raises: JobError."""
    return parse_job(_without(content, lambda name, _: name in _OF_TRAINED), origin)


def _without_retired(content: Mapping[str, Any]) -> dict[str, Any]:
    """`content` without settings that it has only because an older version wrote them."""
    return _without(content, lambda name, value: name in _RETIRED and _RETIRED[name] == value)


def _without(
    content: Mapping[str, Any], is_gone: Callable[[str, Any], bool], prefix: str = ""
) -> dict[str, Any]:
    found = {}
    for key, value in content.items():
        if not is_gone(name := prefix + key, value):
            is_table = isinstance(value, Mapping)
            found[key] = _without(value, is_gone, f"{name}.") if is_table else value
    return found


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


_TAGGED = ("loss", "data")
"""Tables with a key that decides on the others; faults in them have its value in their place."""


def explain(fault: Any, given: Mapping[str, str] = MappingProxyType({})) -> str:
    """A sentence on a fault of a job; `given` maps settings to the options that set them."""
    where, key = ".".join(map(str, fault["loc"])), _key(fault)
    option = _option(key, given)
    about = option or where
    match fault["type"]:
        case "extra_forbidden":
            return f"{about}: unknown key{_hint(key) or '.'}"
        case "union_tag_invalid":
            tag, known = str(fault["ctx"]["tag"]), fault["ctx"]["expected_tags"]
            near = difflib.get_close_matches(tag, re.findall("'(.+?)'", known), 1)
            hint = f"did you mean {near[0]}? Known are" if near else "use"
            return f"{key} {tag!r} is unknown; {hint} {known}."
        case "missing":
            return f"{where} is missing; add it."
        case kind if kind in TABLES:
            value = json.dumps(fault["input"], default=str)[:80]
            below = f"{key}.{'kind' if key == 'data' else 'name'}={fault['input']}"
            how = f"write {below}" if key in _TAGGED else "set one of its keys"
            return f"{key} is a table (given: {value}): {how}."
    if not key:
        return f"{str(fault['msg']).removeprefix('Value error, ')}."
    text = fault_text(dict(fault), where)
    if option and fault["type"] == "value_error":
        return option + text.removeprefix(f"{where}: {fault['input']}")
    return text if option is None or option.endswith(text) else f"{option}: {text}"


def _key(fault: Any) -> str:
    """The setting that a fault is about, as in a job file."""
    place = [str(part) for part in fault["loc"]]
    has_tag = len(place) > 2 and place[0] in _TAGGED
    return ".".join(place[:1] + place[2:] if has_tag else place)


def _option(key: str, given: Mapping[str, str]) -> str | None:
    """The option that set `key`, or a table around it, or a key in it."""
    fitting = (x for x in given if f"{key}.".startswith(f"{x}.") or f"{x}.".startswith(f"{key}."))
    return next((given[name] for name in fitting if key), None)


def _hint(key: str) -> str:
    """The setting that was meant: in the same table if one is near, otherwise anywhere."""
    table, _, last = key.rpartition(".")
    known = sorted(set(_dotted(Job)) - {key})
    own = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == table]
    if close := difflib.get_close_matches(last, own, 1):
        return f"; did you mean {close[0]!r}?"
    lasts = [name.rpartition(".")[2] for name in known]
    close = difflib.get_close_matches(last, lasts, 1)
    return f"; did you mean {known[lasts.index(close[0])]}?" if close else ""


def _dotted(table: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All settings below a table by their dotted names."""
    for name, field in table.model_fields.items():
        tables = [*_tables_in(field.annotation)]
        if Loss in tables:
            tables = [*_settings().values()]
        if Regularizers in tables:
            tables = [_tables()]
        yield prefix + name
        for kind in tables:
            yield from _dotted(kind, f"{prefix}{name}.")


def _tables_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _tables_in(part)


def job_toml(job: Job, *comments: str) -> str:
    """`job` as TOML, after comments. Raises: JobError if it needs a none, which TOML lacks."""
    content = job.as_dict()
    text = "".join(f"# {line}\n" for line in comments) + toml(content)
    if parse_job(_without_none(content)) != job:
        raise JobError(f"TOML has no none: {job.name} needs a value where the default is not none.")
    return text


def toml(content: Mapping[str, Any]) -> str:
    """Plain data as TOML; keys that are None are omitted."""
    return tomli_w.dumps(_without_none(content))


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value
