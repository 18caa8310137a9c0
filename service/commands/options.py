"""The options that several commands share, and the settings that come from them."""

import contextlib
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from kinlens.embedder.errors import KinlensError, StateError
from kinlens.service.problems import fault_text, path_of
from kinlens.service.settings import Settings

State = Annotated[
    Path | None,
    typer.Option(help="Folder for keys, galleries that the service makes, bundles and jobs."),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error (default info).")]

_HELP = {
    "bundle": "Folder of the model bundle.",
    "gallery": "Gallery as NAME=PATH or PATH, NAME=milvus://HOST:PORT/GALLERY, or the address of a "
    "published one such as NAME=s3://bucket/shop; repeat for more, the first is default.",
    "image_root": "NAME=DIR, where the images of a gallery are now; repeat for more.",
    "pictures": "NAME=ADDRESS, a folder or an address of fsspec such as s3://bucket/shop for the "
    "uploaded pictures of a gallery on Milvus; repeat for more.",
    "follow": "How often the addresses of followed galleries are looked at: 5s, 2m (default 5s).",
    "replica_folder": "Folder for the copies of followed galleries (default STATE/replicas).",
    "host": "Address to listen on (default 127.0.0.1).",
    "port": "Port; 0 picks a free one (default 8000).",
    "workers": "Processes that answer (default 1).",
    "device": "Where the model runs and galleries are searched: cpu or cuda (default cpu).",
    "index_device": "Where galleries are searched, if not with the model: cpu or cuda.",
    "precision": "How the model computes: fp32, bf16, int8, fp16 or auto, the fastest that "
    "holds here (default fp32).",
    "engine": "What runs the model: onnxruntime, openvino or auto, the faster one that the export "
    "measured (default auto).",
    "threads": "Threads for one batch (default 1).",
    "no_match_prior": "Share of searches for a product that no gallery has (default 0.1).",
    "redis_url": "Redis as second cache level, and to count rates: redis://HOST:PORT/0.",
}
_HARMLESS = ("greater_", "less_", "int_", "float_", "bool_", "literal_")
"""Types of faults that only settings without a secret have: numbers and choices."""

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
            "--allow-cpu-fallback", help="With cuda: run the model on the CPU if it must be."
        ),
    ],
}


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options of the service in place of its `**given`."""
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
    """The settings of the environment and the options; options that were not given are left out.

    Raises: ValidationError.
    """
    plural = {"gallery": "galleries", "image_root": "image_roots"}
    given = {name: value for name, value in options.items() if value not in (None, [])}
    return Settings(**{plural.get(name, name): value for name, value in given.items()})


def make_state(folder: Path | None) -> None:
    """Make the folder of --state, if there is one, and write there. Raises: StateError."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise StateError(f"state = {folder} is not a folder. Name another one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise StateError(
            f"state = {folder} cannot be written ({error.strerror}). Let this user write there, or "
            "name another folder."
        ) from error


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """End the command with one line and code 1 at a fault of the settings, or of what they name."""
    try:
        yield
    except ValidationError as error:
        refuse(faults(error))
    except (KinlensError, OSError) as error:
        refuse(str(error))


def faults(error: ValidationError) -> str:
    """Each setting that does not fit, by name; a text may hold a password, so it is not shown."""
    texts = []
    for each in error.errors(include_url=False):
        hidden = {} if each["type"].startswith(_HARMLESS) else {"input"}
        told = {name: value for name, value in each.items() if name not in hidden}
        texts.append(fault_text(told, path_of(each["loc"]) or "settings"))
    return " ".join(texts)


def refuse(message: str) -> NoReturn:
    """End the command with one line and code 1."""
    typer.echo(f"kinlens-serve: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)
