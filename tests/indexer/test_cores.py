"""Cores and memory: what this process may use, not what the machine has."""

import os
from pathlib import Path

import faiss
import numpy as np
import pytest

from kinlens.embedder import machine as cores
from kinlens.embedder.machine import core_count, memory_mb
from tests.support.seams import Effort, EmbedSettings, SegmentIndex


@pytest.fixture
def three_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "quota_of", lambda group: None)


@pytest.mark.usefixtures("three_of_many")
def test_threads_are_as_many_as_the_cores_of_this_process() -> None:
    assert core_count() == 3
    assert EmbedSettings().worker_count == 3
    assert EmbedSettings(workers=5).worker_count == 5


@pytest.mark.usefixtures("three_of_many")
def test_a_search_takes_no_more_threads_than_cores_or_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(faiss, "omp_set_num_threads", taken.append)
    index = SegmentIndex.open("flat", np.eye(2, dtype=np.float32), None)
    for count in (1, 2, 10):
        index.search(np.ones((count, 2), np.float32), 1, Effort(0))
        index.exact(np.ones((count, 2), np.float32), 1)
    assert taken == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("found", "expected"), [(8, 8), (None, 1)])
def test_a_system_without_affinity_counts_all_cores(
    monkeypatch: pytest.MonkeyPatch, found: int | None, expected: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: found)
    monkeypatch.setattr(cores, "quota_of", lambda group: None)
    assert core_count() == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "garbage"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu.max": "100000 0"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000\n"}, 8),
        ({}, 8),
    ],
)
def test_the_share_of_time_of_a_container_counts_rounded_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert core_count(tmp_path) == expected


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_limit_of_a_container_is_respected(tmp_path: Path, name: str) -> None:
    whole = memory_mb(tmp_path)
    assert whole > 1
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{2**20}\n")
    assert memory_mb(tmp_path) == 1
    (tmp_path / name).write_text("max\n")
    assert memory_mb(tmp_path) == whole
