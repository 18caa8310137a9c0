"""Hooks of schemathesis for this service: values that exist, and real images.

Loaded by schemathesis itself, which is started by test_schemathesis.py.
"""

import zlib
from typing import Any

import schemathesis
from hypothesis import strategies as st
from schemathesis.core.failures import AcceptedNegativeData, ServerError

from tests.tiny import encoded, photo

_PNG = encoded(photo(0))
_FILES = (
    _PNG,
    encoded(photo(1), "JPEG"),
    encoded(photo(2), "WEBP"),
    encoded(photo(3), "GIF"),
    _PNG[: len(_PNG) // 2],
    _PNG[:-1] + b"\0",
    b"",
    b"GIF89a",
    b"\xff\xd8\xff\xe0\x00\x10JFIF",
    b"http://127.0.0.1/x.png",
)
_KNOWN = {"name": ("shop", "live", "live"), "item_id": (1, 2, 3, 4, 5, 6), "number": (0, 1, 2)}

schemathesis.openapi.format("binary", st.one_of(st.sampled_from(_FILES), st.binary(max_size=64)))


@schemathesis.hook
def map_path_parameters(_context: Any, path_parameters: Any) -> Any:
    """Mostly of things that are there; what does not fit the document stays."""
    if not isinstance(path_parameters, dict):
        return path_parameters
    return {name: _known(name, value) for name, value in path_parameters.items()}


@schemathesis.hook
def before_call(_context: Any, case: Any, _sent: Any) -> None:
    """Not the key that all of this is sent with, whose name GET /keys has shown."""
    if (case.path_parameters or {}).get("name") == "fuzz":
        case.path_parameters["name"] = "spare"


@schemathesis.hook
def filter_failure(_context: Any, failure: Any, case: Any, response: Any) -> bool:
    """A batch is answered although a query of it is wrong; 503 is documented. A head of more than
    16 KiB is refused before there is an operation.
    """
    if response.status_code == 431:
        return False
    if isinstance(failure, ServerError):
        return bool(response.status_code != 503)
    return not (isinstance(failure, AcceptedNegativeData) and case.path == "/search/batch")


def _known(name: str, value: Any) -> Any:
    choices = _KNOWN.get(name, ())
    if not choices or type(value) is not type(choices[0]) or (type(value) is int and value < 0):
        return value
    chance = zlib.crc32(repr(value).encode("utf-8", "surrogatepass"))
    return value if chance % 4 == 0 else choices[chance // 4 % len(choices)]
