"""What the service and its decoding processes say to each other, as bytes over one socket.

request: lengths of order and image, order (JSON: spec, limits, box; or limits, side), image
reply:   status, length of the content, content (pixels, a JPEG, or JSON: class name and text of an
         error)

Nothing that a decoding process sends is executed or unpickled.
"""

import json
import struct
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from embedder import errors
from embedder.errors import ImageError, InvalidParameterError
from embedder.manifest import Preprocessing
from embedder.preprocess import Box, ImageLimits

REQUEST = struct.Struct("<II")
REPLY = struct.Struct("<BxxxI")
DONE, REFUSED, ENDING, READY = range(4)
"""Status of a reply; after ENDING the process ends, since it may be out of memory."""

ERROR_BYTES = 4096
_TEXT_CHARACTERS = 500
_KNOWN_ORDERS = 64

Order = tuple[Preprocessing, ImageLimits, Box | None]
Rendering = tuple[ImageLimits, int]
"""A JPEG is asked for: limits, longest side in pixels."""


@lru_cache(_KNOWN_ORDERS)
def pack_order(spec: Preprocessing, limits: ImageLimits, box: Box | None) -> bytes:
    """How an image is to be decoded, as JSON."""
    sizes = (limits.max_bytes, limits.max_megapixels, limits.max_side_px)
    order = {"spec": spec.model_dump(), "limits": sizes, "box": box}
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
    )


def pack_error(error: Exception) -> bytes:
    """Class name and text of an error, at most ERROR_BYTES."""
    return json.dumps([type(error).__name__, str(error)[:_TEXT_CHARACTERS]]).encode()


def unpack_error(packed: bytes) -> Exception:
    """The error of `pack_error`; one that is no fault of an image or its box is a RuntimeError.

    Raises: ValueError if it is damaged.
    """
    name, text = json.loads(packed)
    cls = getattr(errors, str(name), None)
    if isinstance(cls, type) and issubclass(cls, ImageError | InvalidParameterError):
        return cls(str(text))
    return RuntimeError(f"{name}: {text}")


def reply_buffer(crop_px: int) -> NDArray[np.uint8]:
    """Room for the largest reply to a request for (3, S, S), or for a JPEG of S pixels a side."""
    return np.empty(REPLY.size + max(3 * crop_px**2, ERROR_BYTES), dtype=np.uint8)
