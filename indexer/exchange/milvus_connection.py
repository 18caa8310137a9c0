"""The border to Milvus: every request goes through here, and its errors become ours."""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from embedder.errors import EngineUnavailableError, FilterError, GalleryNotFoundError

_COLLECTION_NOT_FOUND = 100
_BAD_EXPRESSION = "cannot parse expression"


class Connection:
    """A Milvus server; a request that takes longer than `timeout_s` fails. Thread safe."""

    def __init__(self, uri: str, token: str = "", timeout_s: float = 10.0) -> None:
        """Connect to `uri`, as in http://127.0.0.1:19530. Raises: EngineUnavailableError."""
        self.uri = uri
        self._timeout_s = timeout_s
        client_class = _client_class()
        with _translated(uri):
            self._client = client_class(uri=uri, token=token, timeout=timeout_s)

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """What `method` of the client answers.

        Raises: EngineUnavailableError; GalleryNotFoundError for a collection that is not there;
            FilterError for an expression that the server does not understand.
        """
        with _translated(self.uri):
            request = getattr(self._client, method)
            return request(*args, timeout=timeout_s or self._timeout_s, **options)

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()


def _client_class() -> Any:
    try:
        from pymilvus import MilvusClient
    except ImportError as exc:
        raise EngineUnavailableError(
            f"pymilvus cannot be imported ({exc}), and galleries on Milvus need it. Install it: "
            "pip install 'kinlens[milvus]'."
        ) from exc
    # Every error is raised; the log would repeat it with a traceback.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    return MilvusClient


@contextlib.contextmanager
def _translated(uri: str) -> Iterator[None]:
    from grpc import FutureTimeoutError, RpcError  # type: ignore[import-untyped]
    from pymilvus.exceptions import MilvusException

    try:
        yield
    except MilvusException as exc:
        raise _translation(uri, exc.code, str(exc.message)) from exc
    except RpcError as exc:
        details = getattr(exc, "details", lambda: "")() or type(exc).__name__
        raise _translation(uri, 0, str(details)) from exc
    except (FutureTimeoutError, ValueError) as exc:
        raise _translation(uri, 0, str(exc) or "no answer in time") from exc


def _translation(
    uri: str, code: object, message: str
) -> EngineUnavailableError | GalleryNotFoundError | FilterError:
    if code == _COLLECTION_NOT_FOUND:
        return GalleryNotFoundError(
            f"Milvus at {uri} does not have it: {message}. Check the name and the database."
        )
    if _BAD_EXPRESSION in message:
        return FilterError(f"Milvus does not understand the filter: {message:.500}. Simplify it.")
    return EngineUnavailableError(
        f"Milvus at {uri} does not answer, or refuses: {message:.500}. Check that the address is "
        "right and that the server is running and healthy."
    )
