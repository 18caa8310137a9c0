"""Workers that decode and embed: crashes of workers and of their server cost no answer."""

import itertools
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.seams import Workers
from tests.support.servers import Running, run
from tests.support.waiting import until
from tests.tiny import encoded, photo

pytestmark = pytest.mark.skipif(not Workers.can_run(), reason="fork servers need Linux")
PHOTOS = [encoded(photo(number)) for number in range(8)]
NUMBERS = itertools.count()


@pytest.fixture
def bundle_copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


@pytest.fixture
def service(bundle_copy: Path, tiny_gallery: Path) -> Iterator[Running]:
    settings: dict[str, Any] = {"bundle": bundle_copy, "galleries": f"shop={tiny_gallery}"}
    running = run(create_app(Settings(**settings, search_threads=3)))
    until(lambda: embedding(running))
    yield running
    running.close()


def embedding(service: Running) -> list[int]:
    """The workers that searches use: no children of the service, but of its fork server."""
    search(service, [0] * 6)
    return [pid for pid in service.runtime.search_threads.pids if parent(pid) != os.getpid()]


def parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return os.getpid()


def search(service: Running, numbers: Sequence[int]) -> list[Any]:
    """What is found for these images at the same time, each in a file that no cache knows."""

    def found(number: int) -> Any:
        answer = service.search(PHOTOS[number] + next(NUMBERS).to_bytes(4, "big"), k=3)
        answer.raise_for_status()
        return answer.json()["hits"]

    with ThreadPoolExecutor(8) as clients:
        return list(clients.map(found, numbers))


def keys(answers: Sequence[Any]) -> list[str]:
    return [hits[0]["key"] for hits in answers]


def test_killed_workers_and_a_killed_server_cost_no_answer(service) -> None:
    until(lambda: 0 < len(embedding(service)) == len(service.runtime.search_threads.pids))
    [server] = {parent(pid) for pid in embedding(service)}
    with ThreadPoolExecutor(1) as clients:
        answers = clients.submit(search, service, [*range(8)] * 12)
        while not answers.done():
            for pid in embedding(service)[:1]:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.2)  # an image during which two workers end is refused
        assert keys(answers.result()) == [f"{number}.png" for number in range(8)] * 12
        answers = clients.submit(search, service, [*range(8)] * 12)
        os.kill(server, signal.SIGKILL)
        assert keys(answers.result()) == [f"{number}.png" for number in range(8)] * 12
    assert service.runtime.search_threads.restarts > 1
    until(lambda: {parent(pid) for pid in embedding(service)} - {server, os.getpid()})


def test_without_its_bundle_the_service_embeds_in_process(service, bundle_copy) -> None:
    [server] = {parent(pid) for pid in embedding(service)}
    shutil.rmtree(bundle_copy)
    os.kill(server, signal.SIGKILL)
    for _ in range(3):
        assert keys(search(service, range(8))) == [f"{number}.png" for number in range(8)]
    assert service.client.get("/ready").status_code == 200
