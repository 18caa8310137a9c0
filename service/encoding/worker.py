"""A worker process: decodes images in a sandbox, and embeds them if it was forked with a model.

Its protocol with the service over one socket:

first:   READY, length, the layers of its sandbox (JSON)
request: lengths of order and image, order (`Order` as JSON), image
reply:   status, length of the content, content (pixels; or vectors and the decoding time in ms, as
         float32, after the boxes if the order has to find them; or a JPEG; or JSON: class name and
         text of an error)

The service never executes or unpickles what a worker sends. A worker ends when the service closes
the socket or dies. If it is busy with an image, its alarm ends it, which no damaged image can
delay. It enters its sandbox before its first image, and can open no file there.
"""

import io
import json
import os
import resource
import signal
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Thread
from time import perf_counter
from typing import Annotated

import numpy as np
from PIL import Image
from pydantic import PlainSerializer, TypeAdapter

from kinlens.embedder import errors
from kinlens.embedder.errors import BundleError, ImageError, InvalidParameterError
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import Box, ImageLimits, ImageParts, render_jpeg
from kinlens.embedder.types import Embed
from kinlens.embedder.views.boxes import Detector
from kinlens.service.encoding.sandbox import Layer, enter, enter_again

REQUEST = struct.Struct("<II")
REPLY = struct.Struct("<BxxxI")
DONE, REFUSED, ENDING, READY, FAILED = range(5)
"""Status of a reply. After ENDING the process exits, since it may be out of memory; FAILED means
that the model could not run.
"""

ERROR_BYTES = 4096
_TEXT_CHARACTERS = 500
_CACHED_ORDERS = 64

EMBED_S = 30.0
"""Time limit of the model for the parts of an image in one order."""

LAYERS = TypeAdapter(list[Layer])


def _with_colour(spec: Preprocessing | None) -> dict[str, object] | None:
    """All fields: as a manifest it would omit a `colour` that readers of manifests know."""
    return None if spec is None else dict(spec)


@dataclass(frozen=True, slots=True)
class Order:
    """What to do with an image: decode the parts in `boxes` by `spec`, and `embed` them; or `find`
    the boxes of up to that many objects, of which the first `parts` are embedded after the whole
    image if it has to `embed`; or render a JPEG of at most `side_px` a side.
    """

    limits: ImageLimits
    spec: Annotated[Preprocessing | None, PlainSerializer(_with_colour)] = None
    boxes: tuple[Box | None, ...] = (None,)
    embed: bool = False
    find: int = 0
    parts: int = 0
    side_px: int = 0


COUNT = struct.Struct("<Q")
BOX = struct.Struct("<6d")
"""Boxes in a reply: their number, then left, top, width, height, score and class of each."""

NO_ANSWER = 2**64 - 1
"""In place of the number of boxes, if the detector failed on the image."""


pack_order = lru_cache(_CACHED_ORDERS)(TypeAdapter(Order).dump_json)
_unpack_order = lru_cache(_CACHED_ORDERS)(TypeAdapter(Order).validate_json)


def pack_error(error: Exception) -> bytes:
    """Class name and text of an error as JSON, at most ERROR_BYTES."""
    return json.dumps([type(error).__name__, str(error)[:_TEXT_CHARACTERS]]).encode()


def unpack_error(packed: bytes) -> Exception:
    """The error that `pack_error` packed; a RuntimeError unless the image or its box caused it.

    Raises: ValueError, TypeError if `packed` is damaged.
    """
    name, text = json.loads(packed)
    cls = getattr(errors, str(name), None)
    if isinstance(cls, type) and issubclass(cls, ImageError | InvalidParameterError):
        return cls(str(text))
    return RuntimeError(f"{name}: {text}")


def serve(
    connection: socket.socket,
    memory_bytes: int,
    alarm_s: float,
    layers: Sequence[str] = (),
    embed: Embed | None = None,
    detector: Detector | None = None,
) -> None:
    """Serve until the process may be out of memory, in at most `memory_bytes` of address space. The
    sandbox has the active `layers` of an earlier process, or by default those that pass a
    rehearsal.

    Raises: ConnectionError when `connection` is closed.
    """
    silence = os.open(os.devnull, os.O_WRONLY)
    _limit(memory_bytes)
    entered = LAYERS.dump_json(enter_again(layers) if layers else enter(_rehearse))
    os.dup2(silence, 2)  # C libraries write warnings about images to stderr
    connection.sendall(REPLY.pack(READY, len(entered)) + entered)
    worker = _Work(alarm_s, embed, detector)
    while _serve(connection, worker):
        pass


def _limit(memory_bytes: int) -> None:
    """Limit the memory, and forbid core dumps and growing files. The sandbox forbids the rest."""
    for kind, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _rehearse() -> None:
    """Decode and encode an image in a thread, as the libraries of some formats do."""
    png, rendered = io.BytesIO(), []
    Image.new("RGB", (8, 8)).save(png, "PNG")
    thread = Thread(target=lambda: rendered.append(render_jpeg(png.getvalue(), ImageLimits())))
    thread.start()
    thread.join()
    rendered.pop()


@dataclass(frozen=True, slots=True)
class _Work:
    """What a worker was forked with."""

    alarm_s: float
    embed: Embed | None
    detector: Detector | None

    def content(self, image: bytes, packed: bytes) -> bytes | memoryview:
        """The content of the reply to an order."""
        order = _unpack_order(packed)
        if order.spec is None:
            return render_jpeg(image, order.limits, order.side_px)
        started = perf_counter()
        parts, boxes, found = ImageParts(image, order.limits, order.spec.colour), order.boxes, b""
        if order.find:
            boxes, found = self._found(parts, order)
            if not order.embed:
                return found
        pixels = parts.pixels(boxes, order.spec)
        if not order.embed:
            return pixels.data.cast("B")
        decode_ms = 1e3 * (perf_counter() - started)
        assert self.embed is not None
        signal.setitimer(signal.ITIMER_REAL, EMBED_S)  # replaces the alarm for decoding
        return found + np.append(self.embed(pixels), np.float32(decode_ms)).tobytes()

    def _found(self, parts: ImageParts, order: Order) -> tuple[tuple[Box | None, ...], bytes]:
        """The whole image and the boxes to search with, and all boxes as in a reply."""
        assert self.detector is not None
        upright = parts.part(min_side_px=self.detector.side_px)
        signal.setitimer(signal.ITIMER_REAL, EMBED_S)
        try:
            found = self.detector.find(upright, order.find)
        except BundleError:  # another image may be no trouble to it
            return (None,), COUNT.pack(NO_ANSWER)
        finally:
            signal.setitimer(signal.ITIMER_REAL, self.alarm_s)  # for the decoding of the parts
        rows = [BOX.pack(*one.box, one.score, one.kind) for one in found]
        boxes = (None, *(one.box for one in found[: order.parts]))
        return boxes, COUNT.pack(len(rows)) + b"".join(rows)


def _serve(connection: socket.socket, work: _Work) -> bool:
    """Answer one request; False if the process must end afterwards."""
    order_bytes, image_bytes = REQUEST.unpack(_receive(connection, REQUEST.size))
    signal.setitimer(signal.ITIMER_REAL, work.alarm_s)
    status, content = _answer(connection, order_bytes, image_bytes, work)
    sent = connection.sendmsg([REPLY.pack(status, len(content)), content])
    connection.sendall(content[max(0, sent - REPLY.size) :])
    signal.setitimer(signal.ITIMER_REAL, 0)
    return status != ENDING


def _answer(
    connection: socket.socket, order_bytes: int, image_bytes: int, work: _Work
) -> tuple[int, bytes | memoryview]:
    try:
        order, image = _receive(connection, order_bytes), _receive(connection, image_bytes)
        return DONE, work.content(image, order)
    except ConnectionError:
        raise
    except MemoryError as error:
        return ENDING, pack_error(error)
    except BundleError as error:
        return FAILED, pack_error(error)
    except Exception as error:
        # Whatever it is, this image caused it, so its caller gets the error.
        return REFUSED, pack_error(error)


def _receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises: ConnectionError if the service has closed the socket."""
    data = connection.recv(count, socket.MSG_WAITALL) if count else b""
    if len(data) < count:
        raise ConnectionError
    return data
