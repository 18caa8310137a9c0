"""The soak test for some seconds, and whether its arithmetic finds a leak."""

import importlib
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.job_shops import write_photos

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
HOUR_S = 3600.0
LIMIT = 5.0
"""MB an hour, as the script has it."""

Noise = Callable[[random.Random], float]


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, imported as when it runs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("soak")
    for name in ("demo", "harness", "soak"):
        sys.modules.pop(name, None)


def memory(
    leak_mb_per_hour: float, noise: Noise, hours: float = 1.0, seed: int = 1
) -> list[tuple[float, float]]:
    """A sample every five seconds, from 200 MB on."""
    rng = random.Random(seed)
    count = int(hours * HOUR_S / 5)
    return [(5.0 * n, 200 + leak_mb_per_hour * n * 5 / HOUR_S + noise(rng)) for n in range(count)]


def jitter(rng: random.Random) -> float:
    return rng.gauss(0, 4)


def peaks(rng: random.Random) -> float:
    """Now and then a large image."""
    return 150.0 if rng.random() < 0.1 else rng.gauss(0, 2)


class Wandering:
    """Autocorrelated, as allocators are."""

    state = 0.0

    def __call__(self, rng: random.Random) -> float:
        self.state = 0.95 * self.state + rng.gauss(0, 1)
        return self.state


NOISES = {"jitter": lambda: jitter, "peaks": lambda: peaks, "wandering": Wandering}


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("leak", [20.0, 60.0])
def test_a_leak_is_found_with_its_size(soak, leak: float, noise: str) -> None:
    points = memory(leak, NOISES[noise]())
    low, high = soak.slope_range(points)
    assert low < soak.slope(points) < high
    assert low > LIMIT
    assert soak.slope(points) == pytest.approx(leak, abs=LIMIT + 3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("noise", NOISES)
def test_noise_is_not_taken_for_a_leak(soak, noise: str, seed: int) -> None:
    low, _ = soak.slope_range(memory(0.0, NOISES[noise](), seed=seed))
    assert low < LIMIT


def test_a_single_step_is_no_slope(soak) -> None:
    """A cache that is filled once."""
    points = [(5.0 * n, 200.0 if n < 60 else 260.0) for n in range(720)]
    assert soak.slope(points) == 0


def test_memory_of_a_tree_counts_its_children(soak) -> None:
    code = "x = bytearray(64 * 2**20); print('there', flush=True); input()"
    before = soak.tree_mb(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        assert child.pid in soak.tree(os.getpid())
        assert 60 < soak.tree_mb(os.getpid()) - before < 120
        child.kill()


def full_tally(soak: ModuleType) -> Any:
    """One of each request, all answered."""
    tally = soak.Tally(30.0)
    for what in (*soak.KINDS, "put", "delete", "find"):
        tally.count(what, 422 if what == "damaged" else 200)
    return tally


@pytest.mark.parametrize(
    ("what", "spoil"),
    [
        ("an error", lambda tally: tally.count("again", 500)),
        ("a wrong answer", lambda tally: tally.fault("it did not find itself")),
        ("too many refusals", lambda tally: [tally.count("again", 503) for _ in range(2)]),
        ("a kind without an answer", lambda tally: tally.statuses.pop(("put", 200))),
        ("a leak", lambda tally: tally.memory.extend(memory(40.0, jitter))),
    ],
)
def test_each_kind_of_failure_makes_the_exit_code_1(soak, what, spoil) -> None:
    tally = full_tally(soak)
    tally.memory.extend(memory(0.0, jitter, 0.1))
    assert soak.report(tally, LIMIT) == 0
    spoil(tally)
    assert soak.report(tally, LIMIT) == 1, what


def test_ten_seconds_of_mixed_load_pass(tiny_bundle, tmp_path) -> None:
    write_photos(tmp_path / "pictures")
    command = [sys.executable, str(SCRIPTS / "soak.py"), "--hours", str(10 / HOUR_S)]
    command += ["--period-s", "2.5", "--images", str(tmp_path / "pictures")]
    command += ["--bundle", str(tiny_bundle.path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    counts = {
        (what, int(status)): int(count.replace(",", ""))
        for what, status, count in re.findall(r"^  (\w+) +(\d{3}) +([\d,]+)$", done.stdout, re.M)
    }
    for what in ("again", "new", "crop", "filter", "like", "put", "delete", "rebuild"):
        assert counts[what, 200] > 0
    assert counts["damaged", 422] > 0
    assert ("damaged", 200) not in counts
    assert counts["find", 200] >= counts["delete", 200]
    assert "passed" in done.stdout
    assert shutil.which("redis-server") is None or "--redis-url" in done.stdout
