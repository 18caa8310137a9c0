"""The options that several commands share, and the settings that come from them."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from pydantic import ValidationError

from service.settings import Settings

State = Annotated[
    Path | None,
    typer.Option(help="Folder for keys, galleries that the service makes, bundles and jobs."),
]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error (default info).")]

_SHARED: dict[str, Any] = {
    "bundle": Annotated[Path | None, typer.Option(help="Folder of the model bundle.")],
    "gallery": Annotated[
        list[str] | None,
        typer.Option(
            help="Gallery as NAME=PATH or PATH, or NAME=milvus://HOST:PORT/GALLERY; repeat for "
            "more, the first is default."
        ),
    ],
    "image_root": Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIR, where the images of a gallery are now; repeat for more."),
    ],
    "pictures": Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=ADDRESS, a folder or an address of fsspec such as s3://bucket/shop for the "
            "uploaded pictures of a gallery on Milvus; repeat for more."
        ),
    ],
    "state": State,
    "samples": Annotated[
        Path | None, typer.Option(help="Folder of pictures that the page offers to search with.")
    ],
    "host": Annotated[str | None, typer.Option(help="Address to listen on (default 127.0.0.1).")],
    "port": Annotated[int | None, typer.Option(help="Port; 0 picks a free one (default 8000).")],
    "workers": Annotated[int | None, typer.Option(help="Processes that answer (default 1).")],
    "device": Annotated[str | None, typer.Option(help="cpu or cuda (default cpu).")],
    "allow_cpu_fallback": Annotated[
        bool | None,
        typer.Option("--allow-cpu-fallback", help="With cuda: run on the CPU if it must be."),
    ],
    "precision": Annotated[
        str | None,
        typer.Option(help="Model of the bundle: fp32, fp16, int8 or auto (default fp32)."),
    ],
    "threads": Annotated[int | None, typer.Option(help="Threads for one batch (default 1).")],
    "redis_url": Annotated[
        str | None,
        typer.Option(help="Redis as second cache level, and to count rates: redis://HOST:PORT/0."),
    ],
    "log_level": LogLevel,
}


def with_shared(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` the options of the service in place of its `**given`."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        command(*arguments, **options)

    own = inspect.signature(command).parameters.values()
    keyword = inspect.Parameter.KEYWORD_ONLY
    kept = [p.replace(kind=keyword) for p in own if p.kind is not p.VAR_KEYWORD]
    shared = [
        inspect.Parameter(name, keyword, default=None, annotation=annotation)
        for name, annotation in _SHARED.items()
    ]
    run.__signature__ = inspect.Signature([*kept, *shared])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*kept, *shared)}
    return run


def read_settings(**options: Any) -> Settings:
    """The settings of the environment and the options; options that were not given are left out.

    Raises: ValidationError.
    """
    plural = {"gallery": "galleries", "image_root": "image_roots"}
    return Settings(
        **{plural.get(name, name): value for name, value in options.items() if _is_given(value)}
    )


def settings_or_refuse(**options: Any) -> Settings:
    """The settings; wrong ones end the command with one line and code 1."""
    try:
        return read_settings(**options)
    except ValidationError as error:
        refuse(faults(error))


def faults(error: ValidationError) -> str:
    """Each setting that does not fit, by name, without its value."""
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'settings'}: {fault['msg']}"
        for fault in error.errors(include_input=False, include_url=False)
    )


def refuse(message: str) -> NoReturn:
    """End the command with one line and code 1."""
    typer.echo(f"kinlens-serve: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)


def _is_given(value: object) -> bool:
    return value is not None and value != []
