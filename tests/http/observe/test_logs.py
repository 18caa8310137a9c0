"""Logs: JSON lines of the whole process, without secrets."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kinlens.service.observe.logs import masked

ROOT = Path(__file__).parents[3]
SAY = """
import asyncio, logging, warnings
import structlog, uvicorn
from kinlens.service.observe.logs import configure_logs

configure_logs("debug")
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


def run(code: str, status: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    return done


def test_every_line_is_json_whoever_logs_it() -> None:
    done = run(SAY)
    assert done.stdout == ""
    assert "hunter2" not in done.stderr
    assert "0f0f" not in done.stderr
    events = [json.loads(line) for line in done.stderr.splitlines()]
    levels = ["info", "debug", "info", "warning", "warning", "error"]
    assert [event["level"] for event in events] == levels
    ours, _, uvicorn, key, warning, failed = events
    assert ours["detail"] == "redis://***@cache:6379/0"
    assert (uvicorn["logger"], uvicorn["event"]) == ("uvicorn.error", "Started server process [7]")
    assert str(key["event"]).endswith("kl_0123456789abcdef_***")
    assert "old" in str(warning["event"])
    assert "ValueError" in str(failed["exception"])
    assert all(str(event["timestamp"]).endswith("Z") for event in events)


MANY = """
import sys, time
import structlog
from kinlens.service.observe.logs import configure_logs

configure_logs("info")
started = time.monotonic()
for number in range(30_000):
    structlog.get_logger().info("request", number=number)
print(time.monotonic() - started, flush=True)
sys.stdin.read()
"""


def test_a_log_reader_that_hangs_blocks_nothing_and_learns_what_it_missed() -> None:
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", MANY]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready, "logging waits for its reader"
        reported: list[int] = []
        dropped = 0
        while len(reported) + dropped < 30_000:
            event = json.loads(process.stderr.readline())
            if event["event"] == "log lines dropped":
                dropped += event["times"]
            else:
                reported.append(event["number"])
        process.stdin.close()
        assert process.wait(60) == 0
    assert dropped > 0
    assert reported == sorted(reported)


ENDING = """
import signal
import structlog
from kinlens.service.http.server import Server, config_of
from kinlens.service.observe.logs import configure_logs
from kinlens.service.settings import Settings

server = Server(config_of(lambda: None, Settings()))
configure_logs("info")
for number in range(1_000):
    structlog.get_logger().info("request", number=number)
"""
TWO_SIGNALS = "server.handle_exit(signal.SIGTERM, None)\n" * 2


@pytest.mark.parametrize(("ending", "status"), [("", 0), (TWO_SIGNALS, 130)])
def test_no_line_is_lost_at_the_exit(ending: str, status: int) -> None:
    done = run(ENDING + ending, status=status)
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert [json.loads(line)["number"] for line in lines] == list(range(1_000))


SHARING = """
import sys
import structlog
from kinlens.service.observe.logs import configure_logs

configure_logs("info")
for number in range(3_000):
    structlog.get_logger().info("request", process=sys.argv[1], number=number, text="x" * 50)
sys.stdin.read()
"""


def test_processes_that_share_a_pipe_do_not_mix_their_lines() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader:
        options: dict[str, Any] = {"cwd": ROOT, "stdin": subprocess.PIPE, "stderr": writing}
        commands = ([sys.executable, "-c", SHARING, name] for name in "ab")
        processes = [subprocess.Popen(command, **options) for command in commands]
        os.close(writing)
        time.sleep(2)  # both wait for space in the pipe, where a longer write would be cut
        events = [json.loads(reader.readline()) for _ in range(6_000)]
        for process in processes:
            process.communicate()
            assert process.returncode == 0
    for name in "ab":
        numbers = [event["number"] for event in events if event["process"] == name]
        assert numbers == list(range(3_000))


def test_a_masked_line_holds_no_secret_and_is_json_still() -> None:
    for line in (
        '{"authorization": "Bearer hunter2"}',
        '{"X-API-Key": "hunter2"}',
        '{"Cookie": "a=hunter2; b=\\"hunter2\\""}',
        '{"detail": "redis://user:hunter2@[::1]:6379/0"}',
        '{"token": 1234567, "password": "hunter2"}',
    ):
        shown = masked(line)
        assert "hunter2" not in shown
        assert "1234567" not in shown
        json.loads(shown)
    line = '{"event": "serving", "route": "/search", "detail": "http://127.0.0.1:8000/"}'
    assert masked(line) == line
