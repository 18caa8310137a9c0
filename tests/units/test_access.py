"""Keys in one file, kept as hashes; the address that a request comes from."""

import asyncio
import hashlib
import hmac
import json
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import InvalidParameterError, KeyNotFoundError, StateError
from tests.support.seams import Addresses, FreshKeys, KeyStore, Limits, open_keys
from tests.support.waiting import WAIT_S


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
    near = (text[:-1], text + "0", text.upper(), f" {text}", f"{text}\n", secret, identity)
    mixed = (f"kl_{identity}_{'0' * 64}", f"kl_ffffffff_{secret}")
    for wrong in ("", "kl", "kl_ä_€", *near, *mixed):
        assert find(store, wrong) is None


def test_the_file_has_no_secret_and_is_readable_by_its_owner_alone(store) -> None:
    text = store.create("till", ["write"])
    content = store.path.read_text()
    assert text.rsplit("_", 1)[1] not in content
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert "digest" not in repr(store.list())


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


def test_a_revoked_key_is_unknown_to_a_store_that_is_open(store) -> None:
    text = store.create("till", ["search"])
    other = KeyStore(store.path)
    assert find(other, text) is not None
    store.revoke("till")
    assert find(other, text) is None
    assert [key.state(datetime.now(UTC)) for key in other.list()] == ["revoked"]
    again = store.create("till", ["search"])
    assert find(other, again) is not None
    assert find(other, text) is None


def test_keys_are_cached_and_read_again_for_an_unknown_key(store, monkeypatch) -> None:
    text = store.create("till", ["search"])
    reads = []
    original = store.list
    monkeypatch.setattr(store, "list", lambda: reads.append(threading.get_ident()) or original())

    async def use() -> None:
        fresh = FreshKeys(store, max_age_s=60)
        for _ in range(50):
            assert await fresh.known(text) is not None
        assert len(reads) == 1
        assert threading.get_ident() not in reads, "the event loop reads no file"
        assert await fresh.created(KeyStore(store.path).create("new", ["search"])) is not None
        shorter = FreshKeys(store, max_age_s=0.2)
        assert await shorter.known(text) is not None
        KeyStore(store.path).revoke("till")
        async with asyncio.timeout(WAIT_S):
            while await shorter.known(text) is not None:
                await asyncio.sleep(0.01)
        assert await fresh.known(text) is not None, "it reads no more often than its interval"

    asyncio.run(use())


def test_a_disk_that_hangs_refuses_keys_and_blocks_one_thread(store, monkeypatch) -> None:
    text = store.create("till", ["search"])
    mount = threading.Event()
    original = store.list
    monkeypatch.setattr(store, "list", lambda: mount.wait(20) and original())

    async def use() -> None:
        fresh = FreshKeys(store, limit_s=0.1)
        before = threading.active_count()
        found = await asyncio.gather(
            *(fresh.known(text) for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(error, StateError) for error in found)
        assert threading.active_count() == before + 1
        mount.set()
        while isinstance(found[0], StateError):
            found = await asyncio.gather(fresh.known(text), return_exceptions=True)
        assert found[0].name == "till"

    asyncio.run(use())


@pytest.mark.parametrize(
    ("name", "scopes", "message"),
    [
        *((name, ["search"], "name = ") for name in ("", " a", "a b", "a\n", "ä", "-a", "a" * 65)),
        ("../a", ["search"], "name = "),
        ("till", ["write"], "already"),
        ("other", [], "scope"),
    ],
)
def test_invalid_names_and_scopes_are_refused(store, name, scopes, message) -> None:
    store.create("till", ["search"])
    with pytest.raises(InvalidParameterError, match=message):
        store.create(name, scopes)
    with pytest.raises(KeyNotFoundError, match="Existing keys: till"):
        store.revoke("nobody")


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


def test_a_rotated_key_has_two_secrets_until_the_old_one_ends(store) -> None:
    first = store.create("till", ["search"], limits=Limits(galleries=("shop",), rate="9/second"))
    second = store.rotate("till", timedelta(hours=2))
    keys = [find(store, first), find(store, second)]
    assert keys[0] == keys[1]
    assert keys[0].limits.galleries == ("shop",)
    until = keys[0].old_valid_until(datetime.now(UTC))
    assert timedelta(hours=1.9) < until - datetime.now(UTC) <= timedelta(hours=2)
    assert keys[0].old_valid_until(until) is None
    third = store.rotate("till", timedelta())
    known = [find(store, text) is not None for text in (first, second, third)]
    assert known == [False, False, True]
    store.rotate("till")
    store.revoke("till")
    assert find(store, third) is None
    assert "old" not in json.loads(store.path.read_text())["keys"][0]
    with pytest.raises(KeyNotFoundError, match="nobody"):
        store.rotate("nobody")
    store.create("expired", ["search"], datetime.now(UTC) - timedelta(days=1))
    with pytest.raises(InvalidParameterError, match="has expired"):
        store.rotate("expired")
    for overlap in (timedelta(seconds=-1), timedelta(days=31)):
        with pytest.raises(InvalidParameterError, match=r"overlap = .* hours"):
            store.rotate("till", overlap)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b'{"keys": [{}]}', b'{"schema_version": 2}', b"\xff\xfe"],
)
def test_a_damaged_file_is_named_and_closes_access(store, content: bytes) -> None:
    text = store.create("till", ["admin"])
    kept = store.path.read_bytes()
    store.path.write_bytes(content)
    calls = (lambda: find(store, text), lambda: store.create("b", ["admin"]))
    for call in (store.list, store.active, *calls, lambda: open_keys(store.path.parent)):
        with pytest.raises(StateError, match=r"keys\.json"):
            call()
    assert store.path.read_bytes() == content  # a file that can be repaired is not overwritten
    store.path.write_bytes(kept)
    assert find(store, text) is not None


def test_an_unwritable_folder_is_named(tmp_path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StateError, match=rf"{tmp_path}/state.*(cannot be|not be)"):
        KeyStore(tmp_path / "state" / "keys.json").create("till", ["search"])


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
        ("127.0.0.1", ["10.1.1.1"], "127.0.0.1"),
        ("10.0.0.5", ["198.51.100.7"], "198.51.100.7"),
        ("10.0.0.5", ["6.6.6.6, 198.51.100.7"], "198.51.100.7"),
        ("10.0.0.5", ["6.6.6.6", "198.51.100.7"], "198.51.100.7"),
        ("10.0.0.5", ["198.51.100.7, 10.0.0.9"], "198.51.100.7"),
        ("10.0.0.5", ["198.51.100.7, junk, 10.0.0.9"], "10.0.0.9"),
        ("10.0.0.5", ["198.51.100.7:5555"], "198.51.100.7"),
        ("10.0.0.5", ["6.6.6.6, 198.51.100.7:443, 10.0.0.9:80"], "198.51.100.7"),
        ("10.0.0.5", ["[2001:db8:1:2::7]:443"], "2001:db8:1:2::/64"),
        ("10.0.0.5", ['"[2001:db8:1:2::7]"'], "2001:db8:1:2::/64"),
        ("10.0.0.5", ["2001:db8:1:2::7"], "2001:db8:1:2::/64"),
        ("10.0.0.5", ["198.51.100.7:port"], "10.0.0.5"),
        ("10.0.0.5", ["junk"], "10.0.0.5"),
        ("10.0.0.5", [""], "10.0.0.5"),
        ("10.0.0.5", [], "10.0.0.5"),
        ("2001:db8:1:2:aaaa::1", [], "2001:db8:1:2::/64"),  # an IPv6 client is its network
        ("2001:db8:1:2:bbbb::2", [], "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", [], "2001:db8:1:3::/64"),
        ("::ffff:203.0.113.9", [], "203.0.113.9"),
        ("fe80::1%eth0", [], "fe80::/64"),
        ("::1", [], "::1"),
        ("testclient", [], "local"),
        (None, [], "local"),
    ],
)
def test_the_client_is_the_nearest_untrusted_address(peer, forwarded, expected) -> None:
    headers = [(b"x-forwarded-for", text.encode("latin-1")) for text in forwarded]
    client = None if peer is None else (peer, 1234)
    scope = {"type": "http", "headers": headers, "client": client}
    assert Addresses(PROXIES).of(scope) == expected


@pytest.mark.parametrize("text", ["proxy", "10.0.0.0/33", "", "0.0.0.0/0", "::/0"])
def test_an_invalid_or_universal_proxy_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        Addresses([text])
