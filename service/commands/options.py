"""Options shared by several commands, and the settings that they produce."""

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from kinlens.embedder.errors import KinlensError, StateError
from kinlens.embedder.programs.console import print_error
from kinlens.embedder.programs.faults import fault_text, path_of
from kinlens.service.settings import Settings

State = Annotated[
    Path | None,
    typer.Option(help="State folder: keys, bundles, jobs, and galleries created over HTTP."),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error (default info).")]

_HELP = {
    "bundle": "Folder of the model bundle.",
    "gallery": "Gallery as NAME=PATH or PATH, NAME=milvus://HOST:PORT/GALLERY, or the URL of a "
    "published gallery such as NAME=s3://bucket/shop; repeatable, the first is the default.",
    "image_root": "NAME=DIR, the current folder of a gallery's images; repeatable.",
    "pictures": "NAME=URL, a folder or an fsspec URL such as s3://bucket/shop for the uploaded "
    "images of a gallery on Milvus; repeatable.",
    "follow": "Interval to check the URLs of followed galleries: 5s, 2m (default 5s).",
    "replica_folder": "Folder for the copies of followed galleries (default STATE/replicas).",
    "host": "Address to listen on (default 127.0.0.1).",
    "port": "Port; 0 picks a free one (default 8000).",
    "device": "Device for the model and the searches: cpu or cuda (default cpu).",
    "index_device": "Device for the searches, if not that of the model: cpu or cuda.",
    "precision": "Precision of the model: fp32, bf16, int8, fp16 or auto, the fastest that is "
    "accurate on this machine (default fp32).",
    "engine": "Engine of the model: onnxruntime, openvino or auto, the faster one in the "
    "measurement of the export (default auto).",
    "threads": "Threads for one batch (default 1).",
    "no_match_prior": "Share of searches for a product that is in no gallery (default 0.1).",
    "redis_url": "Redis as second cache level and for rate limits: redis://HOST:PORT/0.",
}
_HARMLESS = ("greater_", "less_", "int_", "float_", "bool_", "literal_")
"""Error types of numbers and choices, whose values are never secret."""

_REPEATED = ("gallery", "image_root", "pictures")
_SHARED: dict[str, Any] = {
    name: Annotated[list[str] if name in _REPEATED else str, typer.Option(help=text)]
    for name, text in _HELP.items()
} | {
    "state": State,
    "log_level": LogLevel,
    "allow_cpu_fallback": Annotated[
        bool,
        typer.Option(
            "--allow-cpu-fallback", help="With cuda: run the model on the CPU if CUDA fails."
        ),
    ],
}


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the `**given` of `command` by the options of the service."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = list(inspect.signature(command).parameters.values())[:-1]
    shared = [
        inspect.Parameter(name, keyword, default=None, annotation=annotation)
        for name, annotation in _SHARED.items()
    ]
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in (*own, *shared)}
    return command


def read_settings(**options: Any) -> Settings:
    """The settings from the environment and the options; options that were not given are ignored.

    Raises: ValidationError.
    """
    plural = {"gallery": "galleries", "image_root": "image_roots"}
    given = {name: value for name, value in options.items() if value not in (None, [])}
    return Settings(**{plural.get(name, name): value for name, value in given.items()})


def make_state(folder: Path | None) -> None:
    """Create the folder of --state, if set, and check that it is writable. Raises: StateError."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise StateError(f"state = {folder} is not a folder. Choose another one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StateError(
            f"state = {folder} cannot be written ({error.strerror}). Allow this user to write "
            "there, or choose another folder."
        ) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn errors of the settings and of their files into one line and exit status 1."""
    try:
        yield
    except ValidationError as error:
        refuse(faults(error))
    except (KinlensError, OSError) as error:
        refuse(str(error))


def faults(error: ValidationError) -> str:
    """Describe each invalid setting by name; texts may contain passwords and are not shown."""
    texts = []
    for each in error.errors(include_url=False):
        hidden = {} if each["type"].startswith(_HARMLESS) else {"input"}
        visible = {name: value for name, value in each.items() if name not in hidden}
        texts.append(fault_text(visible, path_of(each["loc"]) or "settings"))
    return " ".join(texts)


def refuse(message: str) -> NoReturn:
    """Print one line and exit with status 1."""
    print_error(message)
    raise typer.Exit(1)
