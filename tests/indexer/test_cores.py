"""Cores and memory: what this process may use, not what the machine has."""

import os

import pytest

from kinlens.embedder import machine as cores
from kinlens.embedder.machine import core_count, memory_mb
from tests.support.seams import EmbedSettings


def test_threads_are_as_many_as_the_cores_of_this_process(monkeypatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 4, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(cores, "quota_of", lambda group: None)
    assert core_count() == 3
    assert EmbedSettings().worker_count == 3
    assert EmbedSettings(workers=5).worker_count == 5


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "garbage"}, 8),
        ({"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_the_share_of_time_of_a_container_counts_rounded_up(
    monkeypatch, tmp_path, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert core_count(tmp_path) == expected


@pytest.mark.parametrize("name", ["memory.max", "memory/memory.limit_in_bytes"])
def test_the_memory_limit_of_a_container_is_respected(tmp_path, name: str) -> None:
    whole = memory_mb(tmp_path)
    assert whole > 1
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(f"{2**20}\n")
    assert memory_mb(tmp_path) == 1
    (tmp_path / name).write_text("max\n")
    assert memory_mb(tmp_path) == whole
