"""Keys in one file, kept as hashes; the address that a request comes from."""

import asyncio
import hmac
import json
import os
import stat
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from embedder.errors import InvalidParameterError, StateError
from service.access import keys
from service.access.keys import FreshKeys, Key, open_keys
from service.access.rates import parse_network
from tests.support.seams import Addresses, KeyStore


@pytest.fixture
def store(tmp_path: Path) -> KeyStore:
    return KeyStore(tmp_path / "state" / "keys.json")


def find(store: KeyStore, text: str) -> Key | None:
    """The key that a service finds which has just started."""
    return asyncio.run(FreshKeys(store).identify(text))


def test_a_key_is_known_by_its_text_and_by_nothing_else(store: KeyStore) -> None:
    text = store.create("till", ["search"])
    key = find(store, text)
    assert key is not None
    assert (key.name, key.scopes) == ("till", ("search",))
    kl, identity, secret = text.split("_")
    assert (kl, identity) == ("kl", key.id)
    assert len(bytes.fromhex(secret)) == 32
    other = "0" * 64
    for wrong in ("", "kl", text[:-1], text + "0", text.upper(), f" {text}", secret, identity):
        assert find(store, wrong) is None
    assert find(store, f"kl_{identity}_{other}") is None
    assert find(store, f"kl_ffffffff_{secret}") is None
    assert find(store, f"{text}\n") is None
    assert find(store, "kl_ä_€") is None


def test_the_file_has_no_secret_and_is_readable_by_its_owner_alone(store: KeyStore) -> None:
    text = store.create("till", ["write"])
    content = store.path.read_text()
    assert text.rsplit("_", 1)[1] not in content
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert "digest" not in repr(store.list())


def test_secrets_are_compared_in_constant_time_also_for_keys_that_do_not_exist(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = store.create("till", ["search"])
    compared: list[tuple[Any, Any]] = []

    def compare(a: Any, b: Any) -> bool:
        compared.append((a, b))
        return real(a, b)

    real = hmac.compare_digest
    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    assert find(store, text) is not None
    for wrong in (text[:-8] + "0" * 8, "kl_ffffffff_" + "0" * 64, "garbage"):
        compared.clear()
        assert find(store, wrong) is None
        assert len(compared) == 2
        assert all(len(a) == len(b) == 64 for a, b in compared)


def test_a_revoked_key_is_unknown_to_a_store_that_is_open(store: KeyStore) -> None:
    text = store.create("till", ["search"])
    other = KeyStore(store.path)
    assert find(other, text) is not None
    store.revoke("till")
    assert find(other, text) is None
    assert [key.state(datetime.now(UTC)) for key in other.list()] == ["revoked"]
    again = store.create("till", ["search"])
    assert find(other, again) is not None
    assert find(other, text) is None


def test_a_service_reads_the_file_once_a_second_and_looks_again_for_a_key_that_it_does_not_know(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = store.create("till", ["search"])
    reads = []
    original = store.list
    monkeypatch.setattr(store, "list", lambda: reads.append(threading.get_ident()) or original())

    async def use() -> None:
        fresh = FreshKeys(store, max_age_s=0.2)
        for _ in range(50):
            assert await fresh.identify(text) is not None
        assert len(reads) == 1
        assert threading.get_ident() not in reads, "the event loop reads no file"
        assert await fresh.identify(KeyStore(store.path).create("new", ["search"])) is not None
        KeyStore(store.path).revoke("till")
        ends = time.monotonic() + 0.2
        while await fresh.identify(text) is not None:
            assert time.monotonic() < ends + 0.1

    asyncio.run(use())


def test_a_disk_that_hangs_refuses_keys_and_holds_up_nothing_else(
    store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = store.create("till", ["search"])
    mount = threading.Event()
    original = store.list
    monkeypatch.setattr(store, "list", lambda: mount.wait(20) and original())

    async def use() -> None:
        fresh = FreshKeys(store, limit_s=0.1)
        before = threading.active_count()
        found = await asyncio.gather(
            *(fresh.identify(text) for _ in range(20)), return_exceptions=True
        )
        assert all(isinstance(error, StateError) for error in found)
        assert threading.active_count() == before + 1
        mount.set()
        assert await fresh.identify(text) is not None

    asyncio.run(use())


def test_a_key_ends_at_its_time(store: KeyStore) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert find(store, store.create("a", ["search"], soon)) is not None
    past = datetime.now(UTC) - timedelta(seconds=1)
    assert find(store, store.create("b", ["search"], past)) is None
    assert store.active() == 1


@pytest.mark.parametrize("name", ["", " a", "a b", "a\n", "ä", "-a", "a" * 65, "../a"])
def test_a_name_that_does_not_fit_is_refused(store: KeyStore, name: str) -> None:
    with pytest.raises(InvalidParameterError, match="name = "):
        store.create(name, ["search"])


def test_a_name_that_is_taken_and_a_key_without_scopes_are_refused(store: KeyStore) -> None:
    store.create("till", ["search"])
    with pytest.raises(InvalidParameterError, match="already"):
        store.create("till", ["write"])
    with pytest.raises(InvalidParameterError, match="scope"):
        store.create("other", [])
    with pytest.raises(InvalidParameterError, match="Known are: till"):
        store.revoke("nobody")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b'{"keys": [{}]}', b'{"schema_version": 2}', b"\xff\xfe", b"{}x"],
)
def test_a_damaged_file_is_an_error_that_names_it_and_lets_nobody_in(
    store: KeyStore, content: bytes
) -> None:
    text = store.create("till", ["admin"])
    kept = store.path.read_bytes()
    store.path.write_bytes(content)
    for call in (store.list, store.active, lambda: find(store, text)):
        with pytest.raises(StateError, match=r"keys\.json"):
            call()
    with pytest.raises(StateError):
        store.create("other", ["admin"])  # nothing is written over what may be mended
    assert store.path.read_bytes() == content
    with pytest.raises(StateError):
        open_keys(store.path.parent)
    store.path.write_bytes(kept)
    assert find(store, text) is not None


def test_a_digest_is_not_shown_in_the_error_of_a_damaged_file(store: KeyStore) -> None:
    store.create("till", ["admin"])
    content = json.loads(store.path.read_text())
    digest = content["keys"][0]["digest"]
    content["keys"][0]["scopes"] = ["owner"]
    store.path.write_text(json.dumps(content))
    with pytest.raises(StateError) as error:
        store.list()
    assert digest not in str(error.value)
    assert "scopes" in str(error.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StateError, match="cannot be written"):
        KeyStore(tmp_path / "keys.json").create("till", ["search"])


def test_keys_made_at_the_same_time_are_all_kept(store: KeyStore) -> None:
    def create(number: int) -> None:
        KeyStore(store.path).create(f"key-{number}", ["search"])

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in store.list()} == {f"key-{number}" for number in range(8)}


def seen(peer: str | None, *forwarded: str, trusted: tuple[str, ...] = ()) -> str:
    headers = [(b"x-forwarded-for", text.encode("latin-1")) for text in forwarded]
    client = None if peer is None else (peer, 1234)
    return Addresses(trusted).of({"type": "http", "headers": headers, "client": client})


def test_what_a_client_claims_is_ignored() -> None:
    assert seen("203.0.113.9", "10.1.1.1") == "203.0.113.9"
    assert seen("127.0.0.1", "10.1.1.1") == "127.0.0.1"
    assert seen("203.0.113.9", "10.1.1.1", trusted=("10.0.0.0/8",)) == "203.0.113.9"


@pytest.mark.parametrize(
    ("forwarded", "expected"),
    [
        (("198.51.100.7",), "198.51.100.7"),
        (("6.6.6.6, 198.51.100.7",), "198.51.100.7"),
        (("6.6.6.6", "198.51.100.7"), "198.51.100.7"),
        (("198.51.100.7, 10.0.0.9",), "198.51.100.7"),
        (("198.51.100.7, junk, 10.0.0.9",), "10.0.0.9"),
        (("junk",), "10.0.0.5"),
        (("",), "10.0.0.5"),
        ((), "10.0.0.5"),
    ],
)
def test_behind_a_trusted_proxy_the_nearest_address_that_is_none_counts(
    forwarded: tuple[str, ...], expected: str
) -> None:
    assert seen("10.0.0.5", *forwarded, trusted=("10.0.0.0/8",)) == expected


def test_an_ipv6_client_is_its_network() -> None:
    assert seen("2001:db8:1:2:aaaa::1") == seen("2001:db8:1:2:bbbb::2") == "2001:db8:1:2::/64"
    assert seen("2001:db8:1:3::1") == "2001:db8:1:3::/64"
    assert seen("::ffff:203.0.113.9") == "203.0.113.9"
    assert seen("fe80::1%eth0") == "fe80::/64"
    assert seen("::1") == "::1"


def test_a_client_without_an_address_is_local() -> None:
    assert seen(None) == "local"
    assert seen("testclient") == "local"


@pytest.mark.parametrize("text", ["proxy", "10.0.0.0/33", "", "0.0.0.0/0", "::/0"])
def test_a_proxy_that_is_no_address_or_is_everybody_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write"):
        parse_network(text)
