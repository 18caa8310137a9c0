"""kinlens-serve: open a bundle and its galleries and answer over HTTP."""

import contextlib
import socket
from pathlib import Path
from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError

from embedder.errors import KinlensError
from service.app import create_app
from service.logs import configure_logs
from service.resources import missing_image_roots
from service.settings import Settings

app = typer.Typer(add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)

_EXAMPLE = (
    "Example: [bold]kinlens-serve --bundle runs/shop/bundle --gallery shop=galleries/shop[/bold]"
)


@app.command(epilog=_EXAMPLE)
def serve(
    bundle: Annotated[Path | None, typer.Option(help="Folder of the model bundle.")] = None,
    gallery: Annotated[
        list[str] | None,
        typer.Option(help="Gallery as NAME=PATH or PATH; repeat for more, the first is default."),
    ] = None,
    image_root: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIR, where the images of a gallery are now; repeat for more."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on [127.0.0.1].")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 picks a free one [8000].")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda [cpu].")] = None,
    allow_cpu_fallback: Annotated[
        bool | None,
        typer.Option("--allow-cpu-fallback", help="With cuda: run on the CPU if it must be."),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for one batch [1].")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis as second cache level, redis://HOST:PORT/0.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="debug, info, warning or error [info].")
    ] = None,
) -> None:
    """Serve a model bundle and its galleries: POST /search and a page to try it.

    Every setting can also come from the environment as KINLENS_NAME; options win.
    """
    given: dict[str, Any] = {
        "bundle": bundle,
        "galleries": gallery or None,
        "image_roots": image_root or None,
        "host": host,
        "port": port,
        "device": device,
        "allow_cpu_fallback": allow_cpu_fallback,
        "threads": threads,
        "redis_url": redis_url,
        "log_level": log_level,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        settings = Settings(**given)
        configure_logs(settings.log_level)
        service = create_app(settings)
        listener = _listen(settings.host, settings.port)
    except ValidationError as error:
        _refuse(_faults(error))
    except (KinlensError, OSError) as error:
        _refuse(str(error))
    typer.echo(f"Kinlens is at {_address(listener)} (Ctrl-C ends it)")
    for warning in missing_image_roots(service.state.runtime.galleries):
        typer.echo(f"Warning: {warning}")
    _run(service, listener, settings.shutdown_timeout_s)


def _run(service: FastAPI, listener: socket.socket, shutdown_timeout_s: int) -> None:
    config = uvicorn.Config(
        service,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=20,
        timeout_graceful_shutdown=shutdown_timeout_s,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named so that asyncio sets TCP_NODELAY on every connection; otherwise answers
    # on a kept-alive connection wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Choose another --port or --host."
        ) from error
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _faults(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'settings'}: {fault['msg']}"
        for fault in error.errors(include_input=False, include_url=False)
    )


def _refuse(message: str) -> None:
    typer.echo(f"kinlens-serve: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
