"""Two levels of cache: in this process and, if there is one, Redis. It can only ever save work.

Keys hold everything that the value depends on, so nothing needs to be flushed:

    embeddings   bundle_id + precision + sha256 of the bytes + box
    answers      bundle_id + precision + gallery + its generation and version + digest of the query
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar
from urllib.parse import quote

from embedder.manifest import Precision
from embedder.preprocess import Box
from service.observe.tracing import span
from service.search.payloads import seal, unseal

T = TypeVar("T")
Kind = Literal["embedding", "answer"]
Level = Literal["local", "redis", "miss", "invalid"]

_PREFIX = "kinlens:2"
_MAX_PENDING_WRITES = 64


class RemoteStore(Protocol):
    """The shared level. No call raises; `get` gives None for what it cannot answer in time."""

    @property
    def state(self) -> str: ...

    def begin(self) -> None: ...

    async def get(self, keys: Sequence[str]) -> list[bytes | None]: ...

    async def set(self, key: str, value: bytes) -> None: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Lookup(Generic[T]):
    """What to look for. `accept`, if given, stands for `decode` where others may have written.

    Both raise ValueError for a payload that is not accepted.
    """

    kind: Kind
    key: str
    decode: Callable[[bytes], T]
    accept: Callable[[bytes], T] | None = None


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

    def begin(self) -> None:
        """A request begins; its lookups, also in tasks that it makes, wait no longer than one."""
        if self._remote is not None:
            self._remote.begin()

    def get_local(self, lookup: Lookup[T]) -> T | None:
        """The decoded value if this process has it; what it has not is not counted as missing."""
        payload = self._local.get(lookup.key)
        if payload is None:
            return None
        self._observe(lookup.kind, "local")
        return lookup.decode(payload)

    async def get(self, lookup: Lookup[T]) -> T | None:
        """The decoded value, or None."""
        [value] = await self.get_all([lookup])
        found: T | None = value
        return found

    async def get_all(self, lookups: Sequence[Lookup[Any]]) -> list[Any]:
        """The decoded value of each, or None; all that is missing here costs one remote call."""
        values = [self.get_local(lookup) for lookup in lookups]
        missing = [place for place, value in enumerate(values) if value is None]
        if not missing:
            return values
        keys = [lookups[place].key for place in missing]
        with span("cache"):
            sealed = [None] * len(keys) if self._remote is None else await self._remote.get(keys)
        for place, found in zip(missing, sealed, strict=True):
            values[place] = self._unsealed(lookups[place], found)
        return values

    def set(self, key: str, payload: bytes) -> None:
        """Keep a value in both levels; nobody waits for the remote one."""
        self._local.set(key, payload)
        if self._remote is not None and len(self._writes) < _MAX_PENDING_WRITES:
            write = asyncio.create_task(self._remote.set(key, seal(key, payload)))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    def _unsealed(self, lookup: Lookup[T], sealed: bytes | None) -> T | None:
        if sealed is None:
            self._observe(lookup.kind, "miss")
            return None
        try:
            payload = unseal(lookup.key, sealed)
            value = (lookup.accept or lookup.decode)(payload)
        except ValueError:
            self._observe(lookup.kind, "invalid")
            return None
        self._local.set(lookup.key, payload)
        self._observe(lookup.kind, "redis")
        return value


def embedding_key(bundle_id: str, precision: Precision, digest: str, box: Box | None) -> str:
    """Key of the vector of an image, or of its part in `box`."""
    part = "" if box is None else ",".join(map(repr, box))
    return f"{_PREFIX}:e:{bundle_id}:{precision}:{digest}:{part}"


def answer_key(
    bundle_id: str,
    precision: Precision,
    gallery: str,
    generation: str,
    version: str,
    digest: str,
) -> str:
    """Key of the answer to a query in one version of a gallery."""
    name = quote(gallery, safe="")
    return f"{_PREFIX}:a:{bundle_id}:{precision}:{name}:{generation}:{version}:{digest}"
