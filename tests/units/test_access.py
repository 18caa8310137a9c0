"""Keys in one file, kept as hashes; the address that a request comes from."""

import asyncio
import hashlib
import hmac
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import InvalidParameterError, StateError
from kinlens.service.access import keys
from tests.support.seams import Addresses, FreshKeys, KeyStore, Limits


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "state" / "keys.json")


def find(store: KeyStore, text: str) -> Any:
    """The key that a service finds which has just started."""
    return asyncio.run(FreshKeys(store).known(text))


def test_a_key_is_found_only_by_its_exact_text(store) -> None:
    text = store.create("till", ["search"])
    key = find(store, text)
    assert (key.name, key.scopes) == ("till", ("search",))
    kl, identity, secret = text.split("_")
    assert (kl, identity) == ("kl", key.id)
    assert len(bytes.fromhex(secret)) == 32
    assert secret not in store.path.read_text() + repr(store.list())
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    near = (text[:-1], text + "0", text.upper(), f" {text}", f"{text}\n", secret, identity)
    mixed = (f"kl_{identity}_{'0' * 64}", f"kl_ffffffff_{secret}")
    for wrong in ("", "kl", "kl_ä_€", *near, *mixed):
        assert find(store, wrong) is None


def test_secrets_are_compared_in_constant_time(store, monkeypatch) -> None:
    text = store.create("till", ["search"])
    compared: list[tuple[Any, Any]] = []

    def compare(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert find(store, text) is not None
    store.create("rotated", ["search"])
    old = store.rotate("rotated")
    for wrong in (text[:-8] + "0" * 8, old[:-8] + "0" * 8, "kl_ffffffff_" + "0" * 64, "garbage"):
        compared.clear()
        assert find(store, wrong) is None
        assert len(compared) == 2, "the secret, and the one before a rotation"
        assert all(len(a) == len(b) == 64 for a, b in compared)


def test_a_disk_that_hangs_refuses_keys_and_blocks_one_thread(store, monkeypatch) -> None:
    text = store.create("till", ["search"])
    mount = threading.Event()
    original = store.list
    blocked: list[str] = []

    def read() -> Any:
        blocked.append(threading.current_thread().name)
        return mount.wait(20) and original()

    monkeypatch.setattr(store, "list", read)

    async def use() -> None:
        fresh = FreshKeys(store, limit_s=0.1)
        found = await asyncio.gather(
            *(fresh.known(text) for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(error, StateError) for error in found)
        assert len(blocked) == 1
        mount.set()
        while isinstance(found[0], StateError):
            found = await asyncio.gather(fresh.known(text), return_exceptions=True)
        assert found[0].name == "till"

    asyncio.run(use())


def test_the_file_is_read_when_it_changes_and_each_filter_is_parsed_once(
    store, monkeypatch
) -> None:
    counts = {"reads": 0, "parses": 0}

    def counted(name: str, work: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return work(*args)

        return call

    monkeypatch.setattr(keys, "parse_filter", counted("parses", keys.parse_filter))
    limits = [Limits(galleries=("shop",), filter=f"counted = {n}") for n in range(20)]
    texts = [store.create(f"key-{n}", ["search"], limits=each) for n, each in enumerate(limits)]
    monkeypatch.setattr(store, "list", counted("reads", store.list))

    async def use(fresh: FreshKeys) -> list[str | None]:
        found = [await fresh.known(text) for text in texts * 3]
        assert await fresh.has_active()
        assert all(key is None or key.binding().where for key in found)
        return [key and key.limits.filter for key in found]

    async def run() -> None:
        fresh = FreshKeys(store, max_age_s=0)
        os.utime(store.path, (0, 0))  # an old file: its time can be trusted
        assert await use(fresh) == [limit.filter for limit in limits] * 3
        assert counts == {"reads": 1, "parses": 20}
        KeyStore(store.path).revoke("key-0")
        assert await fresh.known(texts[0]) is None
        os.utime(store.path, (0, 0))
        assert (await use(fresh)).count(None) == 3
        reads = counts["reads"]
        await use(fresh)
        assert counts == {"reads": reads, "parses": 20}

    asyncio.run(run())


def test_files_of_releases_without_limits_are_compatible(store) -> None:
    """An old release must not read a key with limits, since it would ignore them."""
    known = {"id", "name", "scopes", "digest", "created_at", "expires_at", "revoked_at"}
    old = {
        "id": "0123abcd",
        "name": "old",
        "scopes": ["search"],
        "digest": hashlib.sha256(b"f" * 64).hexdigest(),
        "created_at": "2026-01-01T00:00:00Z",
        "expires_at": None,
        "revoked_at": None,
    }
    store.path.parent.mkdir()
    store.path.write_text(json.dumps({"schema_version": 1, "keys": [old]}))
    assert find(store, f"kl_0123abcd_{'f' * 64}").name == "old"
    store.create("plain", ["search"])
    written = json.loads(store.path.read_text())["keys"]
    assert [one["name"] for one in written] == ["old", "plain"]
    assert all(one.keys() <= known for one in written)
    store.create("bound", ["search"], limits=Limits(galleries=("shop",)))
    assert "limits" in json.loads(store.path.read_text())["keys"][2]


def test_the_old_secret_of_a_rotated_key_ends(store) -> None:
    first = store.create("till", ["search"], limits=Limits(galleries=("shop",), rate="9/second"))
    second = store.rotate("till", timedelta(hours=2))
    key = find(store, first)
    assert key == find(store, second)
    until = key.old_valid_until(datetime.now(UTC))
    assert timedelta(hours=1.9) < until - datetime.now(UTC) <= timedelta(hours=2)
    assert key.old_valid_until(until) is None
    store.create("expired", ["search"], datetime.now(UTC) - timedelta(days=1))
    with pytest.raises(InvalidParameterError, match="has expired"):
        store.rotate("expired")
    for overlap in (timedelta(seconds=-1), timedelta(days=31)):
        with pytest.raises(InvalidParameterError, match=r"overlap = .* hours"):
            store.rotate("till", overlap)


def test_a_change_through_a_link_changes_the_file_that_it_names(
    store: KeyStore, tmp_path: Path
) -> None:
    store.create("till", ["search"])
    (tmp_path / "link").mkdir()
    (tmp_path / "link/keys.json").symlink_to(store.path)
    linked = KeyStore(tmp_path / "link/keys.json")
    linked.revoke("till")
    assert linked.path.is_symlink()
    assert store.active() == 0


def test_keys_made_at_the_same_time_are_all_kept(store) -> None:
    names = {f"key-{number}" for number in range(8)}
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda name: KeyStore(store.path).create(name, ["search"]), names))
    assert {key.name for key in store.list()} == names


PROXIES = ("10.0.0.0/8",)


@pytest.mark.parametrize(
    ("peer", "forwarded", "expected"),
    [
        ("203.0.113.9", ["10.1.1.1"], "203.0.113.9"),  # what a client claims is ignored
        ("10.0.0.5", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.5", ["6.6.6.6", "198.51.100.7"], "198.51.100.7"),
        ("10.0.0.5", ["198.51.100.7, 10.0.0.9"], "198.51.100.7"),
        ("10.0.0.5", ["198.51.100.7, junk, 10.0.0.9"], "10.0.0.9"),
        ("10.0.0.5", ["6.6.6.6, 198.51.100.7:443, 10.0.0.9:80"], "198.51.100.7"),
        ("10.0.0.5", ["[2001:db8:1:2::7]:443"], "2001:db8:1:2::/64"),
        ("10.0.0.5", ["junk"], "10.0.0.5"),
        ("10.0.0.5", [""], "10.0.0.5"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("2001:db8:1:2:aaaa::1", [], "2001:db8:1:2::/64"),  # an IPv6 client is its network
        ("2001:db8:1:2:bbbb::2", [], "2001:db8:1:2::/64"),
        ("::ffff:203.0.113.9", [], "203.0.113.9"),
        ("::1", [], "::1"),
        ("testclient", [], "local"),
    ],
)
def test_the_client_is_the_nearest_untrusted_address(peer, forwarded, expected) -> None:
    headers = [(b"x-forwarded-for", text.encode("latin-1")) for text in forwarded]
    scope = {"type": "http", "headers": headers, "client": (peer, 1234)}
    assert Addresses(PROXIES).of(scope) == expected
