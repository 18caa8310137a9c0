"""API keys: stored as hashes in one file, compared in constant time, re-read when it changes.

    rule: key ─► Binding ─► context of the request ─► registry: which gallery, and which view of it

The admission sets the binding once per request. The registry applies it to every gallery lease, so
a route cannot forget it. Background work has no binding.
"""

import contextlib
import functools
import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kinlens.embedder.durable import exclusive, is_settled, make_folder, stamp, write_whole
from kinlens.embedder.errors import (
    FilterError,
    InvalidParameterError,
    KeyNotFoundError,
    StateError,
    disk_errors_as,
)
from kinlens.embedder.programs.faults import fault_text, path_of
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import checked_name
from kinlens.models import Scope
from kinlens.service.access.rates import DAY_S, Rate, parse_rates
from kinlens.service.concurrency import KeyedThreads

_IMPLIED: dict[Scope, frozenset[Scope]] = {
    "search": frozenset(("search",)),
    "write": frozenset(("search", "write")),
    "admin": frozenset(("search", "write", "admin", "embed")),
    "embed": frozenset(("embed",)),  # vectors leave the service, so no other scope has it by chance
}
SCOPES: tuple[Scope, ...] = tuple(_IMPLIED)
"""The scopes of keys."""

_ID_BYTES = 4
_SECRET_BYTES = 32
_TEXT = re.compile(rf"kl_([0-9a-f]{{{2 * _ID_BYTES}}})_([0-9a-f]{{{2 * _SECRET_BYTES}}})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NO_DIGEST = "0" * 64
_STEP = "keys"
KEYS_FILE = "keys.json"
_SHOWN = 80
_PARSED_FILTERS = 100_000  # one for each key, so that a changed file costs only the new ones
_MAX_GALLERIES = 1_000
_MAX_FILTER = 2_000
MAX_DAILY_UNITS = 999_999_999
OVERLAP = timedelta(hours=24)
"""How long the old secret of a rotated key stays valid."""

MAX_OVERLAP = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Binding:
    """The galleries and items that the key named `key` can see.

    Attributes:
        galleries: names of galleries; None for all.
        where: the key only sees items that match this filter; None for all.
    """

    key: str = ""
    galleries: tuple[str, ...] | None = None
    where: Filter | None = None

    @property
    def is_bound(self) -> bool:
        """Whether the key is restricted at all."""
        return self.galleries is not None

    def permits(self, *names: str) -> bool:
        """Whether the caller can see all these galleries."""
        return self.galleries is None or all(name in self.galleries for name in names)


EVERYTHING = Binding()
"""The binding of callers without a key, of unbound keys and of background work."""

CALLER: ContextVar[Binding] = ContextVar("kinlens_binding", default=EVERYTHING)
"""The binding of a request and of the pool calls that it starts."""


class Limits(BaseModel):
    """The binding and the rate limits of a key; None means no limit, as an empty `rate` does."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    galleries: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=_MAX_GALLERIES,
        description="The only galleries that the key can see.",
    )
    filter: str | None = Field(
        default=None,
        max_length=_MAX_FILTER,
        description="The key only sees items of these galleries that match this filter.",
    )
    rate: str | None = Field(
        default=None, max_length=200, description="Replaces KINLENS_RATE_LIMIT_PER_KEY."
    )
    daily_units: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=MAX_DAILY_UNITS,
        description="Maximum units of work in a day.",
    )

    @field_validator("galleries")
    @classmethod
    def _are_names(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        with _as_value_error():
            return names and tuple(dict.fromkeys(map(checked_name, names)))

    @field_validator("filter")
    @classmethod
    def _is_filter(cls, text: str | None) -> str | None:
        if text is not None:
            with _as_value_error():
                _parsed(text)
        return text

    @field_validator("rate")
    @classmethod
    def _is_rate(cls, text: str | None) -> str | None:
        if text is not None:
            parse_rates(text)
        return text

    @model_validator(mode="after")
    def _has_galleries(self) -> "Limits":
        if self.filter is not None and self.galleries is None:
            raise ValueError("filter needs galleries; name the galleries that it applies to")
        return self


NO_LIMITS = Limits()


class OldSecret(BaseModel):
    """The previous secret of a rotated key; it stays valid until `until`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    digest: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    until: datetime


class Key(BaseModel):
    """One API key. `digest` is the sha256 of its secret, in hex.

    A rotated key keeps its id, so its rate, log lines and metrics continue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{8}$")
    name: str = Field(pattern=rf"^{_NAME.pattern}$")
    scopes: tuple[Scope, ...] = Field(min_length=1)
    digest: str = Field(pattern=r"^[0-9a-f]{64}$", repr=False)
    created_at: datetime
    expires_at: datetime | None = None
    revoked_at: datetime | None = None
    limits: Limits = NO_LIMITS
    rotated_at: datetime | None = None
    old: OldSecret | None = None

    def state(self, now: datetime) -> Literal["active", "expired", "revoked"]:
        """`active`, `expired` or `revoked`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and now >= self.expires_at else "active"

    def old_valid_until(self, now: datetime) -> datetime | None:
        """The expiry of the previous secret; None if it is not valid."""
        return self.old.until if self.old is not None and now < self.old.until else None

    def binding(self) -> Binding:
        """The galleries and items that the key can see."""
        given = self.limits
        if given.galleries is None:
            return EVERYTHING
        where = None if given.filter is None else _parsed(given.filter)
        return Binding(self.name, given.galleries, where)

    def rates(self, default: str) -> tuple[Rate, ...]:
        """The rates of the key, or `default` without its own rate; then its daily units."""
        given = self.limits
        rates = parse_rates(default if given.rate is None else given.rate)
        return rates if given.daily_units is None else (*rates, Rate(given.daily_units, DAY_S))


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1]
    keys: tuple[Key, ...] = ()


class KeyStore:
    """The keys in the file at `path`; a missing file has no keys.

    All methods raise StateError if the file cannot be read; no key is accepted then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(
        self,
        name: str,
        scopes: Iterable[Scope],
        expires_at: datetime | None = None,
        limits: Limits = NO_LIMITS,
    ) -> str:
        """Add a key and return its text, which is not stored and not shown again.

        Raises: InvalidParameterError, StateError.
        """
        if not _NAME.fullmatch(name):
            raise InvalidParameterError(
                f"name = {name[:80]!r} is not a valid name; use up to 64 letters, digits, dots, "
                "dashes and underscores, beginning with a letter or digit."
            )
        secret = secrets.token_hex(_SECRET_BYTES)
        with self._changing() as known:
            if any(key.name == name and key.revoked_at is None for key in known):
                raise InvalidParameterError(
                    f"A key {name!r} exists already. Revoke it first, or choose another name."
                )
            taken = {key.id for key in known}
            while (identity := secrets.token_hex(_ID_BYTES)) in taken:
                pass
            key = Key(
                id=identity,
                name=name,
                scopes=tuple(dict.fromkeys(scopes)),
                digest=_digest(secret),
                created_at=_now(),
                expires_at=expires_at,
                limits=limits,
            )
            known.append(key)
        return f"kl_{key.id}_{secret}"

    def revoke(self, name: str) -> Key:
        """Revoke the key `name`; its entry is kept, so old log entries can be understood.

        Raises: KeyNotFoundError, StateError.
        """
        with self._changing() as known:
            place = _place_of(name, known, "revoke")
            # The previous secret is no longer needed.
            known[place] = known[place].model_copy(update={"revoked_at": _now(), "old": None})
        return known[place]

    def rotate(self, name: str, overlap: timedelta = OVERLAP) -> str:
        """Give the key `name` a new secret and return its text, which is not shown again.

        The previous secret stays valid for `overlap`; older ones expire now.

        Raises: InvalidParameterError, KeyNotFoundError, StateError.
        """
        if not timedelta() <= overlap <= MAX_OVERLAP:
            hours, most = overlap / timedelta(hours=1), MAX_OVERLAP // timedelta(hours=1)
            raise InvalidParameterError(
                f"overlap = {hours:g} hours is outside its range. Use 0 to {most}."
            )
        now, secret = _now(), secrets.token_hex(_SECRET_BYTES)
        with self._changing() as known:
            place = _place_of(name, known, "rotate")
            key = known[place]
            if key.state(now) == "expired":
                raise InvalidParameterError(
                    f"The key {name!r} has expired, so a new secret would not be accepted. Revoke "
                    "it, and create another one."
                )
            old = OldSecret(digest=key.digest, until=now + overlap) if overlap else None
            changes = {"digest": _digest(secret), "old": old, "rotated_at": now}
            known[place] = key.model_copy(update=changes)
        return f"kl_{key.id}_{secret}"

    def list(self) -> tuple[Key, ...]:
        """All keys, including revoked and expired ones, oldest first. Raises: StateError."""
        try:
            return _KeyFile.model_validate_json(self.path.read_bytes()).keys
        except FileNotFoundError:
            return ()
        except NotADirectoryError as error:
            raise StateError(
                f"state = {self.path.parent} is not a folder. Choose another folder for the keys."
            ) from error
        except OSError as error:
            raise self._unreadable(error.strerror or type(error).__name__) from error
        except ValidationError as error:
            fault = error.errors(include_input=False, include_url=False)[0]
            text = fault_text(fault, path_of(fault["loc"]) or "the file")
            raise self._unreadable(text.rstrip(".")) from None

    def active(self) -> int:
        """The number of active keys. Raises: StateError."""
        now = _now()
        return sum(key.state(now) == "active" for key in self.list())

    @contextlib.contextmanager
    def _changing(self) -> Iterator[MutableSequence[Key]]:
        """The current keys under the lock of the file, into which the block's changes are written.

        Raises: StateError.
        """
        # The file itself: on Kubernetes `path` is a link into the folder of a mounted Secret.
        target = self.path.resolve()
        known: list[Key] = []
        outcome = functools.partial(self._outcome, known)
        with disk_errors_as(StateError, target, outcome, "The file of keys"):
            make_folder(target.parent, _STEP)
            with exclusive(target.with_name(f".{target.name}.lock"), wait=True):
                known += self.list()
                yield known
                # Fields without a value are omitted, so older releases without limits can read the
                # file. A key with limits must not be readable there: it would see everything.
                content = _KeyFile(schema_version=1, keys=tuple(known)).model_dump_json(
                    indent=2, exclude_none=True, exclude_defaults=True
                )
                write_whole(target, content.encode(), _STEP)

    def _outcome(self, wanted: Sequence[Key]) -> str:
        """What a failed change has written: it may have failed after the rename."""
        with contextlib.suppress(StateError):
            if wanted and self.list() == tuple(wanted):
                return "The change was written, but a loss of power may undo it."
        return "No key was created or changed."

    def _unreadable(self, reason: str) -> StateError:
        return StateError(
            f"The file of keys {self.path} cannot be read ({reason}), so no key is accepted. "
            "Restore it from a copy, or remove it and create its keys again."
        )


class FreshKeys:
    """The keys of a store for an event loop, found by id. At most every `max_age_s`, and only while
    keys are used, a thread asks the disk whether the file has changed, and reads it then.

    A read that takes longer than `limit_s` is a StateError; it only blocks its own thread.
    """

    def __init__(self, store: KeyStore, max_age_s: float = 1.0, limit_s: float = 2.0) -> None:
        self._store = store
        self._max_age_s = max_age_s
        self._limit_s = limit_s
        self._keys: Mapping[str, Key] = {}
        self._stamp: tuple[int, ...] | None = None
        self._read_at = -math.inf
        self._threads = KeyedThreads(1)

    async def known(self, text: str) -> Key | None:
        """The active key with this text among the cached keys. Raises: StateError."""
        return _matching(await self._recent(), text)

    async def by_id(self, identity: str) -> Key | None:
        """The active key with this id. Raises: StateError."""
        key = (await self._recent()).get(identity)
        return key if key is not None and key.state(_now()) == "active" else None

    async def created(self, text: str) -> Key | None:
        """The active key with this text after another look at the file, for keys that are not
        cached. The caller must limit the rate of these calls. Raises: StateError.
        """
        return _matching(await self._read(), text)

    async def has_active(self) -> bool:
        """Whether any key is active. Raises: StateError."""
        now = _now()
        return any(key.state(now) == "active" for key in (await self._recent()).values())

    async def _recent(self) -> Mapping[str, Key]:
        is_old = time.monotonic() - self._read_at > self._max_age_s
        return await self._read() if is_old else self._keys

    async def _read(self) -> Mapping[str, Key]:
        asked_at = time.monotonic()
        try:
            self._keys, self._stamp = await self._threads.run("", self._changed, self._limit_s)
        except TimeoutError:
            raise StateError(
                f"The file of keys {self._store.path} was not read within {self._limit_s:g} s, "
                "which is the limit. Check its disk."
            ) from None
        self._read_at = asked_at
        return self._keys

    def _changed(self) -> tuple[Mapping[str, Key], tuple[int, ...] | None]:
        found = stamp(str(self._store.path))
        if found == self._stamp and is_settled(found):
            return self._keys, found
        return {key.id: key for key in self._store.list()}, found


def open_keys(state: Path) -> KeyStore:
    """The key store in the folder `state`. Raises: StateError."""
    store = KeyStore(state / KEYS_FILE)
    store.list()
    return store


def allowed(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """These scopes and the ones they imply: write implies search, admin implies all."""
    return frozenset(implied for scope in scopes for implied in _IMPLIED[scope])


def _matching(keys: Mapping[str, Key], text: str) -> Key | None:
    match, now = _TEXT.fullmatch(text), _now()
    key = keys.get(match[1]) if match else None
    # Constant time: all keys cost two comparisons, including unknown and malformed ones.
    digest = _digest(match[2] if match else "")
    is_new = hmac.compare_digest(digest, key.digest if key else _NO_DIGEST)
    old = key.old if key and key.old_valid_until(now) else None
    is_old = hmac.compare_digest(digest, old.digest if old else _NO_DIGEST)
    return key if key and is_new | is_old and key.state(now) == "active" else None


def _place_of(name: str, keys: Sequence[Key], what: str) -> int:
    """The index of the key with this name that was not revoked. Raises: KeyNotFoundError."""
    places = {key.name: place for place, key in enumerate(keys) if key.revoked_at is None}
    if name not in places:
        raise KeyNotFoundError(
            f"There is no key {name[:_SHOWN]!r} to {what}. Existing keys: "
            f"{', '.join(sorted(places)) or 'none'}."
        )
    return places[name]


@contextlib.contextmanager
def _as_value_error() -> Iterator[None]:
    """Raise the errors of the block as those of a field."""
    try:
        yield
    except (InvalidParameterError, FilterError) as error:
        raise ValueError(str(error).rstrip(".")) from error


@functools.lru_cache(_PARSED_FILTERS)
def _parsed(text: str) -> Filter:
    """The filter of a key. Raises: FilterError."""
    return parse_filter(text)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _now() -> datetime:
    return datetime.now(UTC)
