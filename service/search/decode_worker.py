"""A decoding process: reads images from its standard input, a socket, and answers with pixels.

It ends when the service closes the socket or dies; in the middle of an image at the latest when
its alarm goes off, which no decoder can hold up. It imports nothing that it does not need.
"""

import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Sequence

from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from embedder.preprocess import preprocess, render_jpeg
from service.search.decode_wire import (
    DONE,
    ENDING,
    READY,
    REFUSED,
    REPLY,
    REQUEST,
    Order,
    Rendering,
    pack_error,
    unpack_order,
)

PLUGINS = (
    BmpImagePlugin,
    GifImagePlugin,
    JpegImagePlugin,
    MpoImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
"""Loaded now; Pillow would load those of all its formats with the first image."""

_MIB = 2**20


def main(arguments: Sequence[str]) -> None:
    """Serve until the socket is closed; `arguments` are memory in MB and alarm in seconds."""
    memory_mb, alarm_s = int(arguments[0]), float(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides when this ends
    warnings.simplefilter("ignore")
    connection = socket.socket(fileno=0)
    _limit(memory_mb * _MIB)
    connection.sendall(REPLY.pack(READY, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # C libraries talk about the images they decode
    while _serve(connection, alarm_s):
        pass


def _limit(memory_bytes: int) -> None:
    """No more memory than this, no core dumps, no files."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _serve(connection: socket.socket, alarm_s: float) -> bool:
    """Answer one request; whether there may be another."""
    head = _receive(connection, REQUEST.size)
    if head is None:
        return False
    signal.setitimer(signal.ITIMER_REAL, alarm_s)
    order_bytes, image_bytes = REQUEST.unpack(head)
    status, content = _answer(connection, order_bytes, image_bytes)
    sent = connection.sendmsg([REPLY.pack(status, len(content)), content])
    connection.sendall(content[max(0, sent - REPLY.size) :])
    signal.setitimer(signal.ITIMER_REAL, 0)
    return status != ENDING


def _answer(
    connection: socket.socket, order_bytes: int, image_bytes: int
) -> tuple[int, bytes | memoryview]:
    try:
        order = _receive(connection, order_bytes)
        image = _receive(connection, image_bytes)
        if order is None or image is None:
            sys.exit()
        return DONE, _content(image, unpack_order(order))
    except MemoryError as error:
        return ENDING, pack_error(error)
    except Exception as error:
        # Whatever it is, it is about this image and goes to its caller.
        return REFUSED, pack_error(error)


def _content(image: bytes, order: Order | Rendering) -> bytes | memoryview:
    if len(order) == 2:
        return render_jpeg(image, *order)
    spec, limits, box = order
    return preprocess(image, spec, limits, box).data.cast("B")


def _receive(connection: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes; None if the other side has gone."""
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    return data if len(data) == count else None
