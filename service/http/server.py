"""uvicorn with this service's limits and signals, by its public interface alone."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp

from kinlens.service.http.edge import HEAD_BYTES
from kinlens.service.settings import Settings

KEEP_ALIVE_S = 20
GRACE_S = 10.0
"""Time that the end takes in addition to the drain and the shutdown timeout."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_INTERRUPTED = 130
_QUEUE = 1024
_SWITCH_S = 5e-4
_START_POLL_S = 0.05
_WANTED_FILES = 2**14


def config_of(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """The uvicorn configuration for `app`."""
    return uvicorn.Config(
        app,
        # With httptools the body of a request with `Upgrade:` would be read as the next request.
        http="h11",
        h11_max_incomplete_event_size=HEAD_BYTES,
        ws="none",
        # A task of an earlier request may call the protocol, whose context the next would inherit.
        reset_contextvars=True,
        loop="asyncio",
        backlog=_QUEUE,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # the service reads them itself, only from trusted_proxies
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=settings.shutdown_timeout_s,
    )


def serve_on(
    app: FastAPI,
    listener: socket.socket,
    settings: Settings,
    on_start: Callable[[], None] = lambda: None,
) -> None:
    """Serve on `listener` until a signal arrives; call `on_start` once it accepts requests.

    1. SIGTERM starts the drain, if there is one: for `drain_s` seconds requests are answered, while
       /ready returns 503.
    2. SIGINT, a SIGTERM without a drain, or the end of the drain: running requests are finished.
    3. A signal after that ends the process at once.
    """
    # Each request with `Upgrade:` would log the advice to install another package.
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    _allow_open_files()
    _share_the_interpreter()
    asyncio.run(_serve(app, listener, settings, on_start))


async def _serve(
    app: FastAPI, listener: socket.socket, settings: Settings, on_start: Callable[[], None]
) -> None:
    server = uvicorn.Server(config_of(app, settings))
    loop = asyncio.get_running_loop()
    is_draining = is_ending = False

    def end() -> None:
        nonlocal is_ending
        is_ending = server.should_exit = True

    def drain() -> None:
        app.state.runtime.health.end()
        loop.call_later(settings.drain_s, end)

    def receive(number: int, _: object) -> None:
        nonlocal is_draining
        if is_ending:
            signal.signal(number, signal.SIG_DFL)  # a third signal does not wait for the log
            logging.shutdown()  # `os._exit` would lose buffered lines
            os._exit(_INTERRUPTED)
        elif number == signal.SIGTERM and settings.drain_s and not is_draining:
            is_draining = True
            loop.call_soon_threadsafe(drain)
        else:
            end()

    def handle_signals() -> None:
        for number in _SIGNALS:
            signal.signal(number, receive)

    async def announce() -> None:
        while not server.started:
            await asyncio.sleep(_START_POLL_S)
        handle_signals()  # uvicorn has set its own, which know no drain
        on_start()

    handle_signals()  # uvicorn raises a signal that came during the start again
    announcing = asyncio.create_task(announce())
    await server.serve(sockets=[listener])
    announcing.cancel()


def _share_the_interpreter() -> None:
    """Reduce the effect of one request on others, in a process that only serves.

    Threads release the GIL after 0.5 ms instead of 5 ms, so a long parse delays other requests
    less. The objects of the start are frozen, which halves the time of a full garbage collection.
    """
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()


def _allow_open_files() -> None:
    """Raise the limit of open files as far as allowed: each connection needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(hard, _WANTED_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises: OSError with a message that includes what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol, asyncio sets TCP_NODELAY on every connection. Otherwise answers on
    # kept-alive connections wait 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_QUEUE)
    except OSError as error:
        listener.close()
        raise OSError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Choose another --port or --host."
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of the service for a browser."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
