"""The hourly sweep continues after a step that fails, and logs it."""

import threading

import structlog

from kinlens.embedder.errors import StateError
from kinlens.service.galleries.uploads import Sweeper
from tests.support.waiting import until


def test_a_failing_step_is_logged_and_the_next_one_runs(tmp_path) -> None:
    done = threading.Event()

    def fail() -> None:
        raise StateError("feedback.sqlite is damaged")

    with structlog.testing.capture_logs() as events:
        sweeper = Sweeper(tmp_path, list, [fail, done.set])
        sweeper.start()
        until(done.is_set)
        sweeper.stop()
    [event] = [event for event in events if event["event"] == "tidying failed"]
    assert (event["error"], event["detail"]) == ("StateError", "feedback.sqlite is damaged")
