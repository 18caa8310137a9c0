"""kinlens-serve check and keys: their findings, output and exit status."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kinlens.embedder.bundle import Bundle
from kinlens.service.__main__ import app
from kinlens.service.access.keys import FreshKeys
from tests.support.seams import KeyStore

CREATE = ("create", "k", "--scope", "search")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb"})


def findings(*arguments: str, code: int) -> dict[str, dict[str, str]]:
    """The findings of `check --json`, by part."""
    result = call("check", "--json", "--port", "0", *arguments)
    assert result.exit_code == code, result.output
    report = json.loads(result.stdout)
    assert report["starts"] is (code == 0)
    return {finding["subject"]: finding for finding in report["findings"]}


@pytest.fixture
def paths(tiny_bundle: Bundle, tiny_gallery: Path) -> list[str]:
    return ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]


def test_a_set_up_that_would_start_exits_with_0_and_serves_nothing(paths, tmp_path) -> None:
    found = findings(*paths, "--state", str(tmp_path / "new"), code=0)
    parts = ["settings", "bundle", "gallery shop", "state", "keys", "decoder", "redis", "port"]
    assert list(found) == parts
    others = {finding["verdict"] for part, finding in found.items() if part != "decoder"}
    assert others == {"ok"}
    assert found["decoder"]["text"].startswith("sandbox: ")  # the layers depend on the kernel
    assert found["bundle"]["text"].endswith("on CPUExecutionProvider in fp32: asked for")
    assert "8 items" in found["gallery shop"]["text"]
    assert list((tmp_path / "new").iterdir()) == []


def test_one_fault_does_not_hide_the_next(tmp_path) -> None:
    (tmp_path / "keys.json").write_text("{")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = call(
            *("check", "--json", "--bundle", str(tmp_path / "nowhere"), "--port", port),
            *("--gallery", f"a={tmp_path / 'a'}", "--gallery", f"b={tmp_path / 'b'}"),
            *("--state", str(tmp_path)),
        )
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    faults = {f["subject"]: f for f in report["findings"] if f["verdict"] == "fault"}
    assert faults.keys() >= {"bundle", "gallery a", "gallery b", "keys", "port"}
    assert str(tmp_path / "nowhere") in faults["bundle"]["text"]
    assert faults["gallery a"]["text"].endswith("`kinlens-index build ... --out` wrote.")


def test_a_redis_that_is_away_is_a_warning_that_hides_its_password(paths, redis_server) -> None:
    assert findings(*paths, "--redis-url", redis_server.url, code=0)["redis"]["text"] == "answers"
    redis_server.kill()
    url = redis_server.url.replace("redis://", "redis://user:hunter2@")
    found = findings(*paths, "--redis-url", url, code=0)
    assert found["redis"]["verdict"] == "warning"
    assert "hunter2" not in str(found)


def test_keys_are_created_listed_rotated_revoked_and_audited(tmp_path) -> None:
    state = ["--state", str(tmp_path)]
    bound = ["--gallery", "shop-7", "--gallery", "shop-8", "--filter", "tenant in (7, 8)"]
    limits = ["--rate", "600/minute", "--daily-units", "100000"]
    scopes = ["--scope", "search", "--scope", "write"]
    made = call("keys", "create", "shop7", *scopes, *bound, *limits, *state)
    assert made.exit_code == 0, made.output
    assert "not shown again" in made.stderr
    week = call("keys", "create", "office", "--scope", "admin", "--expires-days", "7", *state)
    assert week.exit_code == 0
    store = KeyStore(tmp_path / "keys.json")
    key = asyncio.run(FreshKeys(store).known(made.stdout.strip()))
    assert key.scopes == ("search", "write")
    assert key.limits.galleries == ("shop-7", "shop-8")
    assert key.binding().where is not None
    rotated = call("keys", "rotate", "shop7", "--overlap-hours", "2", *state)
    assert rotated.exit_code == 0, rotated.output
    assert "valid for 2 hours" in rotated.stderr
    for text in (made.stdout, rotated.stdout):
        assert asyncio.run(FreshKeys(store).known(text.strip())) is not None
    listed = call("keys", "list", *state).stdout
    for shown in ("shop-7,shop-8", "tenant in (7, 8)", "600/minute; 100,000 units/day"):
        assert shown in listed
    assert "active, two secrets" in listed
    assert "revoked" in call("keys", "revoke", "shop7", *state).stdout
    shop7, office = (line.split() for line in call("keys", "list", *state).stdout.splitlines()[1:])
    assert shop7[:3] == ["shop7", "search,write", "revoked"]
    assert office[:3] == ["office", "admin", "active"]
    audit = call("audit", "--json", *state).stdout
    entries = [json.loads(line) for line in audit.splitlines()]
    changes = [("revoke", "shop7"), ("rotate", "shop7"), ("create", "office"), ("create", "shop7")]
    assert [(one["action"], one["target"]) for one in entries] == [
        (f"keys {action}", name) for action, name in changes
    ]
    assert {one["by"] for one in entries} == {"command line"}
    table = call("audit", "--limit", "1", *state).stdout
    assert "keys revoke" in table
    assert "keys rotate" not in table
    for secret in (made.stdout, rotated.stdout):
        assert secret.strip().split("_")[2] not in audit + listed
    assert key.digest not in audit + listed


def test_check_warns_where_callers_without_a_key_see_more_than_a_bound_key(paths, tmp_path) -> None:
    state = ["--state", str(tmp_path)]
    call("keys", "create", "shop7", "--scope", "search", "--gallery", "shop-7", *state)
    found = findings(*paths, *state, code=0)
    assert found["exposure"]["verdict"] == "warning"
    assert "KINLENS_ANONYMOUS_SCOPES" in str(found["exposure"])
    call("keys", "revoke", "shop7", *state)
    assert "exposure" not in findings(*paths, *state, code=0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([*CREATE, "--gallery", "a/b"], "a/b"),
        ([*CREATE, "--gallery", "a", "--filter", "a ="], "cannot be parsed"),
        ([*CREATE, "--rate", "often"], "600/minute"),
        (["rotate", "nobody"], "There is no key 'nobody'"),
        (["create", "till", "--scope", "owner"], "'owner' is unknown; use search"),
        (["create", "no name", "--scope", "search"], "name = 'no name'"),
    ],
)
def test_a_wrong_call_ends_with_one_line(tmp_path, arguments: list[str], expected: str) -> None:
    result = call("keys", *arguments, "--state", str(tmp_path))
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert expected in line


def test_a_decoder_without_isolation_is_a_warning_with_its_cure(paths, monkeypatch) -> None:
    monkeypatch.setenv("KINLENS_DECODE_ISOLATION", "false")
    found = findings(*paths, code=0)["decoder"]
    assert found["verdict"] == "warning"
    assert found["text"].endswith(" Set KINLENS_DECODE_ISOLATION to true.")
