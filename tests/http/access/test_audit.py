"""The audit log: each change is one line with its author, and without secrets."""

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.support.seams import AuditLog, Change, KeyStore
from tests.support.shops import Shop, assert_problem, start_shop
from tests.tiny import encoded, photo

KEY = "audit-item-key"
SECRET = "audit-attribute-value"


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with contextlib.closing(start_shop(tmp_path / "state")) as made:
        yield made


def entries(shop: Shop, **query: Any) -> list[dict[str, Any]]:
    answer = shop.client.get("/audit", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


def test_each_change_is_one_line_with_its_author(shop) -> None:
    store = KeyStore(shop.state / "keys.json")
    feed = {"authorization": f"Bearer {store.create('feed', ['write'])}"}
    client, items = shop.client, f"{shop.url}/items"
    files = [("image", ("x.png", encoded(photo(n)), "image/png")) for n in range(3)]
    files += [("key", (None, f"{KEY}/{n}")) for n in range(3)]
    files += [("attributes", (None, json.dumps({"note": SECRET})))] * 3
    sent = {"x-request-id": "from-the-feed", **feed}
    client.put(items, files=files, headers=sent).raise_for_status()
    change = {"changes": {f"{KEY}/0": {"note": f"{SECRET}!"}}}
    client.patch(items, json=change, headers=feed).raise_for_status()
    client.delete(f"{items}/by-key/{KEY}/0", headers=feed).raise_for_status()
    client.post(f"{items}/restore", json={"keys": [f"{KEY}/0"]}).raise_for_status()
    client.post(f"{items}/delete", json={"filter": "note exists"}).raise_for_status()
    label = {"label": (None, '{"no_match": true}'), "image": files[0][1]}
    sha = client.post(f"{shop.url}/golden", files=label, headers=feed).json()["sha256"]
    client.delete(f"{shop.url}/golden/{sha}").raise_for_status()
    job = client.post(f"{shop.url}/compact").json()["id"]
    text = client.post("/keys", json={"name": "till", "scopes": ["search"]}).json()["text"]
    rotated = client.post("/keys/till/rotate").json()["text"]
    client.delete("/keys/till").raise_for_status()
    shop.create("other")
    client.delete("/galleries/other").raise_for_status()

    found = list(reversed(entries(shop)))
    shown = [
        (one["by"], one["action"], one["gallery"], one["target"], one["affected"], one["status"])
        for one in found
    ]
    g, i = "/galleries/{name}", "/galleries/{name}/items"
    assert shown == [
        ("anonymous", "POST /galleries", "shop", None, None, 201),
        ("feed", f"PUT {i}", "shop", None, 3, 200),
        ("feed", f"PATCH {i}", "shop", None, 1, 200),
        ("feed", f"DELETE {i}/by-key/{{key:path}}", "shop", None, 1, 200),
        ("anonymous", f"POST {i}/restore", "shop", None, 1, 200),
        ("anonymous", f"POST {i}/delete", "shop", None, 3, 200),
        ("feed", f"POST {g}/golden", "shop", None, 1, 200),
        ("anonymous", f"DELETE {g}/golden/{{sha256}}", "shop", None, 1, 204),
        ("anonymous", f"POST {g}/compact", "shop", job, None, 202),
        ("anonymous", "POST /keys", None, "till", 1, 201),
        ("anonymous", "POST /keys/{name}/rotate", None, "till", 1, 200),
        ("anonymous", "DELETE /keys/{name}", None, "till", 1, 200),
        ("anonymous", "POST /galleries", "other", None, None, 201),
        ("anonymous", f"DELETE {g}", "other", None, None, 204),
    ]
    assert found[1]["request_id"] == "from-the-feed"
    assert found[1]["key_id"] == store.list()[0].id
    assert {one["client"] for one in found} == {"127.0.0.1"}
    file = shop.state / "audit.jsonl"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for secret in (text, text.split("_")[2], rotated.split("_")[2], KEY, SECRET):
        assert secret not in file.read_text()


def test_refusals_with_403_are_logged_and_other_refusals_and_reads_are_not(shop) -> None:
    store = KeyStore(shop.state / "keys.json")
    till = {"authorization": f"Bearer {store.create('till', ['search'])}"}
    before = len(entries(shop))
    for method, path in (("DELETE", "/keys/till"), ("POST", f"{shop.url}/compact")):
        assert_problem(shop.client.request(method, path, headers=till), 403, "scope-needed")
    shop.client.get("/keys", headers=till)
    shop.search(encoded(photo(1)))
    assert shop.client.delete(f"{shop.url}/items/77").status_code == 404
    assert shop.client.delete("/keys/till", headers={"x-api-key": "wrong"}).status_code == 401
    assert shop.client.patch(f"{shop.url}/items", json={}).status_code == 422
    found = entries(shop)[: len(entries(shop)) - before]
    assert [(one["by"], one["action"], one["status"]) for one in found] == [
        ("till", "POST /galleries/{name}/compact", 403),
        ("till", "DELETE /keys/{name}", 403),
    ]


def test_refused_requests_cannot_flood_the_log(shop) -> None:
    """By foreign pages and with a public key: 120 lines an hour in total."""
    store = KeyStore(shop.state / "keys.json")
    public = {"authorization": f"Bearer {store.create('front', ['search'])}"}
    before = len(entries(shop))
    for headers in ({"origin": "https://evil.example"}, public):
        for _ in range(70):
            assert shop.client.delete(shop.url, headers=headers).status_code == 403
    found = entries(shop, limit=1_000)
    assert len(found) - before in range(120, 123), "and one more every half minute"
    assert {one["by"] for one in found} == {"anonymous", "front"}


def test_a_full_disk_loses_no_change_and_logs_its_line_elsewhere(shop, monkeypatch) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if b'"action"' in data:
            write(descriptor, data[:9])  # some of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    before = entries(shop)
    with structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(os, "write", full)
        assert shop.put({"a": encoded(photo(1))})["added"] == 1
        monkeypatch.undo()
    [line] = [log for log in logs if log["event"] == "audit log not written"]
    assert line["reason"] == "No space left on device"
    assert line["change_action"] == "PUT /galleries/{name}/items"
    assert line["change_affected"] == 1
    assert entries(shop) == before
    shop.put({"b": encoded(photo(2))})
    assert len(entries(shop)) == len(before) + 1


def test_pages_are_read_newest_first_across_rotated_files(tmp_path) -> None:
    log = AuditLog(tmp_path, file_bytes=2_000, kept_files=4)
    for number in range(1, 201):
        log.add(Change(action=f"action {number}", by="feed", status=200))
    files = sorted(path.name for path in tmp_path.glob("audit.jsonl*"))
    assert files == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2", "audit.jsonl.3"]
    assert sum(path.stat().st_size for path in tmp_path.glob("audit.jsonl*")) < 9_000
    read: list[int] = []
    while page := log.newest(7, read[-1] if read else None):
        read += [entry.number for entry in page]
    assert read == list(range(200, read[-1] - 1, -1)), "the newest without a gap"
    assert len(read) > 60


def test_a_truncated_line_costs_no_other_line(tmp_path) -> None:
    log = AuditLog(tmp_path)
    log.add(Change(action="first", by="feed", status=200))
    with log.path.open("ab") as file:
        file.write(b'{"number": 2, "time": "20')
    log.add(Change(action="second", by="feed", status=200))
    assert [entry.action for entry in log.newest(10)] == ["second", "first"]
