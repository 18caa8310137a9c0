"""Two levels of cache: in this process and, if there is one, Redis. It can only ever save work.

Keys hold everything that the value depends on, so nothing needs to be flushed:

    embeddings   bundle_id + sha256 of the bytes
    answers      bundle_id + gallery + its version + sha256 of the bytes + k + min_score
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, Protocol, TypeVar
from urllib.parse import quote

from service.payloads import seal, unseal

T = TypeVar("T")
Kind = Literal["embedding", "answer"]
Level = Literal["local", "redis", "miss", "invalid"]

_PREFIX = "kinlens:1"
_MAX_PENDING_WRITES = 64


class RemoteStore(Protocol):
    """The shared level. Neither call raises; `get` gives None whenever it cannot answer in time."""

    @property
    def state(self) -> str: ...

    async def get(self, key: str) -> bytes | None: ...

    async def set(self, key: str, value: bytes) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class LruCache:
    """The least recently used values go first when entries or bytes exceed their bounds."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[str, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values."""
        return self._bytes

    def get(self, key: str) -> bytes | None:
        """The value, which becomes the most recently used."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def set(self, key: str, value: bytes) -> None:
        """Keep a value, at the expense of older ones; one above the bound is not kept."""
        self.remove(key)
        if len(key) + len(value) > self._max_bytes:
            return
        self._values[key] = value
        self._bytes += len(key) + len(value)
        while len(self._values) > self._max_entries or self._bytes > self._max_bytes:
            self.remove(next(iter(self._values)))

    def remove(self, key: str) -> None:
        """Forget a value."""
        value = self._values.pop(key, None)
        if value is not None:
            self._bytes -= len(key) + len(value)


class Cache:
    """Looks in `local` first, then in `remote`; a value that does not decode counts as missing."""

    def __init__(self, local: LruCache, remote: RemoteStore | None = None) -> None:
        self._local = local
        self._remote = remote
        self._writes: set[asyncio.Task[None]] = set()
        self._observe: Callable[[Kind, Level], None] = lambda _kind, _level: None

    @property
    def remote_state(self) -> str:
        """`off`, `up` or `down`."""
        return "off" if self._remote is None else self._remote.state

    @property
    def pending_writes(self) -> int:
        """Values on their way to the remote level."""
        return len(self._writes)

    def observe(self, callback: Callable[[Kind, Level], None]) -> None:
        """Call back with kind and level at each lookup."""
        self._observe = callback

    async def start(self) -> None:
        """Connect; a remote level that is away is no error."""
        if self._remote is not None:
            await self._remote.start()

    async def close(self) -> None:
        """Finish what is being written, and disconnect."""
        await asyncio.gather(*self._writes)
        if self._remote is not None:
            await self._remote.close()

    async def get(self, kind: Kind, key: str, decode: Callable[[bytes], T]) -> T | None:
        """The decoded value, or None; `decode` raises ValueError for a value it does not accept."""
        payload = self._local.get(key)
        if payload is not None:
            self._observe(kind, "local")
            return decode(payload)
        sealed = None if self._remote is None else await self._remote.get(key)
        if sealed is None:
            self._observe(kind, "miss")
            return None
        try:
            payload = unseal(key, sealed)
            value = decode(payload)
        except ValueError:
            self._observe(kind, "invalid")
            return None
        self._local.set(key, payload)
        self._observe(kind, "redis")
        return value

    def set(self, key: str, payload: bytes) -> None:
        """Keep a value in both levels; nobody waits for the remote one."""
        self._local.set(key, payload)
        if self._remote is not None and len(self._writes) < _MAX_PENDING_WRITES:
            write = asyncio.create_task(self._remote.set(key, seal(key, payload)))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)


def embedding_key(bundle_id: str, digest: str) -> str:
    """Key of the vector of an upload."""
    return f"{_PREFIX}:e:{bundle_id}:{digest}"


def answer_key(
    bundle_id: str, gallery: str, version: str, digest: str, k: int, min_score: float | None
) -> str:
    """Key of the hits of an upload in one version of a gallery."""
    name = quote(gallery, safe="")
    return f"{_PREFIX}:a:{bundle_id}:{name}:{version}:{digest}:{k}:{min_score!r}"
