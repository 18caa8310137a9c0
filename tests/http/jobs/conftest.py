"""A shop with a job manager, without HTTP."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.seen import Seen
from kinlens.service.jobs.__main__ import run_job
from tests.support.job_shops import JobShop
from tests.support.seams import JobStore


@pytest.fixture(scope="session")
def new_bundle(make_tiny_bundle: Callable[..., Bundle]) -> Bundle:
    """Its model was trained on half of the classes of the shop."""
    return make_tiny_bundle(seed=1, seen=Seen.of(f"class-{number}" for number in range(3)))


@pytest.fixture
def shop(tmp_path: Path, tiny_bundle: Bundle, new_bundle: Bundle) -> Iterator[JobShop]:
    made = JobShop(tmp_path, tiny_bundle, new_bundle)
    made.reopen()
    yield made
    made.close()


@pytest.fixture
def slow(shop: JobShop) -> JobShop:
    """A shop whose training would take an hour."""
    shop.reopen(training_command=shop.trainer(seconds=36, epochs=100))
    return shop


@pytest.fixture
def store(shop: JobShop) -> JobStore:
    return shop.manager.store


class InThisProcess:
    """A job in a thread of this process, which has loaded all that one of its own would load."""

    def __init__(self, command: list[str], pass_fds: tuple[int, ...], **_: object) -> None:
        *_, state, job_id = command
        self.lock = os.dup(pass_fds[0])
        self.thread = threading.Thread(target=self.work, args=(Path(state), job_id), daemon=True)
        self.thread.start()

    def work(self, state: Path, job_id: str) -> None:
        try:
            run_job(state, job_id)
        finally:
            os.close(self.lock)

    def wait(self) -> None:
        self.thread.join()


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs run in threads of this process."""
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(subprocess, "Popen", InThisProcess)
