"""A decoding process, and the bytes that it exchanges with the service over one socket.

first:   READY, length, the layers of its sandbox (JSON)
request: lengths of order and image, order (JSON: spec, limits, box, whether to embed; or limits,
         side), image
reply:   status, length of the content, content (pixels; a vector, and how long decoding took, as
         float32; a JPEG; or JSON: class name and text of an error)

Only a process that a fork server started has a model and can embed.

Nothing that a decoding process sends is executed or unpickled. The process ends when the service
closes the socket or dies; in the middle of an image at the latest when its alarm goes off, which
no damaged image can hold up. It imports nothing that it does not need, and all of that before it
enters its sandbox, where it can open no file.
"""

import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from threading import Thread
from time import perf_counter

import numpy as np
from PIL import Image

from kinlens.embedder import errors
from kinlens.embedder.errors import BundleError, ImageError, InvalidParameterError
from kinlens.embedder.formats import load_all
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import Box, ImageLimits, preprocess, render_jpeg
from kinlens.embedder.types import Embeddings, Images
from kinlens.service.encoding.sandbox import Layer, enter, enter_again

REQUEST = struct.Struct("<II")
REPLY = struct.Struct("<BxxxI")
DONE, REFUSED, ENDING, READY, FAILED = range(5)
"""Status of a reply. After ENDING the process ends, since it may be out of memory; FAILED says that
the model could not run.
"""

ERROR_BYTES = 4096
_TEXT_CHARACTERS = 500
_KNOWN_ORDERS = 64
_MIB = 2**20

EMBED_S = 30.0
"""How long the model may take for an image, after it was decoded."""

Embed = Callable[[Images], Embeddings]
Order = tuple[Preprocessing, ImageLimits, Box | None, bool]
Rendering = tuple[ImageLimits, int]
"""A JPEG is asked for: limits, longest side in pixels."""


@lru_cache(_KNOWN_ORDERS)
def pack_order(
    spec: Preprocessing, limits: ImageLimits, box: Box | None, embed: bool = False
) -> bytes:
    """How an image is to be decoded, and whether its vector is the answer, as JSON."""
    sizes = (limits.max_bytes, limits.max_megapixels, limits.max_side_px)
    order = {"spec": spec.model_dump(), "limits": sizes, "box": box, "embed": embed}
    return json.dumps(order).encode()


@lru_cache(_KNOWN_ORDERS)
def pack_rendering(limits: ImageLimits, side_px: int) -> bytes:
    """How an image is to become a JPEG, as JSON."""
    sizes = (limits.max_bytes, limits.max_megapixels, limits.max_side_px)
    return json.dumps({"limits": sizes, "side": side_px}).encode()


@lru_cache(_KNOWN_ORDERS)
def unpack_order(packed: bytes) -> Order | Rendering:
    """The order of `pack_order` or `pack_rendering`."""
    order = json.loads(packed)
    if "side" in order:
        return ImageLimits(*order["limits"]), int(order["side"])
    box = order["box"]
    return (
        Preprocessing(**order["spec"]),
        ImageLimits(*order["limits"]),
        None if box is None else (box[0], box[1], box[2], box[3]),
        bool(order["embed"]),
    )


def pack_error(error: Exception) -> bytes:
    """Class name and text of an error, at most ERROR_BYTES."""
    return json.dumps([type(error).__name__, str(error)[:_TEXT_CHARACTERS]]).encode()


def unpack_error(packed: bytes) -> Exception:
    """The error of `pack_error`; one that is no fault of an image or its box is a RuntimeError.

    Raises: ValueError, TypeError if it is damaged.
    """
    name, text = json.loads(packed)
    cls = getattr(errors, str(name), None)
    if isinstance(cls, type) and issubclass(cls, ImageError | InvalidParameterError):
        return cls(str(text))
    return RuntimeError(f"{name}: {text}")


def pack_layers(layers: Sequence[Layer]) -> bytes:
    """The layers of the sandbox, as JSON."""
    return json.dumps(layers).encode()


def unpack_layers(packed: bytes) -> list[Layer]:
    """The layers of `pack_layers`. Raises: ValueError, TypeError if it is damaged."""
    return [
        Layer(str(name), bool(holds), str(absence)) for name, holds, absence in json.loads(packed)
    ]


def main(arguments: Sequence[str]) -> None:
    """Serve until the socket is closed; `arguments` are memory in MB, alarm in seconds, and of a
    process that replaces another the layers that held for that one.
    """
    memory_mb, alarm_s = int(arguments[0]), float(arguments[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the service decides when this ends
    warnings.simplefilter("ignore")
    load_all()
    held = arguments[2].split() if len(arguments) > 2 else None
    serve(socket.socket(fileno=0), memory_mb * _MIB, alarm_s, held)


def serve(
    connection: socket.socket,
    memory_bytes: int,
    alarm_s: float,
    held: Sequence[str] | None = None,
    embed: Embed | None = None,
) -> None:
    """Serve until `connection` is closed, in at most `memory_bytes` of address space. The sandbox
    has the layers that `held` for an earlier process, or those that a rehearsal proves.
    """
    silence = os.open(os.devnull, os.O_WRONLY)
    _limit(memory_bytes)
    layers = pack_layers(enter(_rehearse) if held is None else enter_again(held))
    connection.sendall(REPLY.pack(READY, len(layers)) + layers)
    os.dup2(silence, 2)  # C libraries talk about the images they decode
    while _serve(connection, alarm_s, embed):
        pass


def _limit(memory_bytes: int) -> None:
    """No more memory than this, no core dumps, no growing file. The sandbox refuses the rest."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def known_image() -> bytes:
    """A small PNG, to see whether anything can be decoded."""
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def _rehearse() -> None:
    """Decode and encode an image in a thread, as the libraries of some formats do."""
    image, made = known_image(), []
    thread = Thread(target=lambda: made.append(render_jpeg(image, ImageLimits())))
    thread.start()
    thread.join()
    made.pop()


def _serve(connection: socket.socket, alarm_s: float, embed: Embed | None) -> bool:
    """Answer one request; whether there may be another."""
    head = _receive(connection, REQUEST.size)
    if head is None:
        return False
    signal.setitimer(signal.ITIMER_REAL, alarm_s)
    order_bytes, image_bytes = REQUEST.unpack(head)
    status, content = _answer(connection, order_bytes, image_bytes, embed)
    sent = connection.sendmsg([REPLY.pack(status, len(content)), content])
    connection.sendall(content[max(0, sent - REPLY.size) :])
    signal.setitimer(signal.ITIMER_REAL, 0)
    return status != ENDING


def _answer(
    connection: socket.socket, order_bytes: int, image_bytes: int, embed: Embed | None
) -> tuple[int, bytes | memoryview]:
    try:
        order = _receive(connection, order_bytes)
        image = _receive(connection, image_bytes)
        if order is None or image is None:
            sys.exit()
        return DONE, _content(image, unpack_order(order), embed)
    except MemoryError as error:
        return ENDING, pack_error(error)
    except BundleError as error:
        return FAILED, pack_error(error)
    except Exception as error:
        # Whatever it is, it is about this image and goes to its caller.
        return REFUSED, pack_error(error)


def _content(image: bytes, order: Order | Rendering, embed: Embed | None) -> bytes | memoryview:
    if len(order) == 2:
        return render_jpeg(image, *order)
    spec, limits, box, wants_vector = order
    started = perf_counter()
    pixels = preprocess(image, spec, limits, box)
    if not wants_vector:
        return pixels.data.cast("B")
    assert embed is not None
    decode_ms = 1e3 * (perf_counter() - started)
    signal.setitimer(signal.ITIMER_REAL, EMBED_S)  # the alarm so far was for decoding
    [vector] = embed(pixels[np.newaxis])
    return np.append(vector, np.float32(decode_ms)).tobytes()


def _receive(connection: socket.socket, count: int) -> bytes | None:
    """Exactly `count` bytes; None if the other side has gone."""
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    return data if len(data) == count else None
