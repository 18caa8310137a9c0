"""Logs: JSON lines of everything in the process, and no secret in any of them."""

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from service.observe.logs import Repeats, masked

ROOT = Path(__file__).parents[3]
SAY = """
import asyncio, logging, sys, warnings
import structlog, uvicorn
from service.observe.logs import configure_logs

configure_logs(sys.argv[1])
log = structlog.get_logger()
log.info("ours", detail="redis://user:hunter2@cache:6379/0")
log.debug("small \\ud800")
uvicorn.Config(lambda: None, log_config=None)
logging.getLogger("uvicorn.error").info("Started server process [%d]", 7)
logging.getLogger("uvicorn.access").info("GET /?password=hunter2")
logging.getLogger("elsewhere").warning("a key: %s", "kl_0123456789abcdef_" + "0f" * 32)
warnings.warn("old")
try:
    raise ValueError('Authorization: Bearer hunter2')
except ValueError:
    log.exception("failed", headers={"x-api-key": "hunter2"})
"""


def said(level: str) -> list[dict[str, object]]:
    done = subprocess.run(
        [sys.executable, "-c", SAY, level],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == ""
    assert "hunter2" not in done.stderr
    assert "0f0f" not in done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()]


def test_every_line_is_json_whoever_logs_it() -> None:
    events = said("debug")
    levels = ["info", "debug", "info", "warning", "warning", "error"]
    assert [event["level"] for event in events] == levels
    ours, _, uvicorn, key, warning, failed = events
    assert ours["detail"] == "redis://***@cache:6379/0"
    assert (uvicorn["logger"], uvicorn["event"]) == ("uvicorn.error", "Started server process [7]")
    assert str(key["event"]).endswith("kl_0123456789abcdef_***")
    assert "old" in str(warning["event"])
    assert "ValueError" in str(failed["exception"])
    assert all(str(event["timestamp"]).endswith("Z") for event in events)


def test_the_level_leaves_out_what_is_less_important() -> None:
    assert [event["level"] for event in said("warning")] == ["warning", "warning", "error"]


MANY = """
import sys, time
import structlog
from service.observe.logs import configure_logs

configure_logs("info")
started = time.monotonic()
for number in range(30_000):
    structlog.get_logger().info("request", number=number)
print(time.monotonic() - started, flush=True)
sys.stdin.read()
"""


def test_a_reader_of_the_log_that_hangs_holds_up_nobody_and_learns_what_it_missed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", MANY],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stderr is not None
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "logging waits for its reader"
        told: list[int] = []
        dropped = 0
        while len(told) + dropped < 30_000:
            event = json.loads(process.stderr.readline())
            if event["event"] == "log lines dropped":
                dropped += event["times"]
            else:
                told.append(event["number"])
        process.stdin.close()
        assert process.wait(60) == 0
    assert dropped > 0
    assert told == sorted(told)


@pytest.mark.parametrize(
    "line",
    [
        '{"authorization": "Bearer hunter2"}',
        '{"X-API-Key": "hunter2"}',
        '{"Cookie": "a=hunter2; b=\\"hunter2\\""}',
        '{"detail": "rediss://:hunter2@cache/0 is away"}',
        '{"detail": "redis://user:hunter2@[::1]:6379/0"}',
        '{"event": "Authorization: Bearer hunter2"}',
        '{"token": 1234567, "password": "hunter2"}',
    ],
)
def test_a_masked_line_holds_no_secret_and_is_json_still(line: str) -> None:
    shown = masked(line)
    assert "hunter2" not in shown
    assert "1234567" not in shown
    json.loads(shown)


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "request", "route": "/search", "ms": 3.5, "key": "shoes/0017.jpg"}',
        '{"event": "serving", "detail": "http://127.0.0.1:8000/", "mail": "a@b"}',
    ],
)
def test_what_is_no_secret_stays(line: str) -> None:
    assert masked(line) == line


def test_what_repeats_is_told_at_once_then_rarely_and_counted() -> None:
    now = [0.0]
    repeats = Repeats(30.0, lambda: now[0])
    assert repeats.due() == 0
    told = []
    for second in range(61):
        now[0] = float(second)
        repeats.add()
        told.append(repeats.due())
    assert [count for count in told if count] == [1, 30, 30]
