"""The soak test for some seconds, and whether its arithmetic finds a leak."""

import importlib
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.job_shops import write_photos

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
HOUR_S = 3600.0
LIMIT = 5.0
"""MB an hour, as the script has it."""


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script as a module, imported as when it runs."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("soak")
    for name in ("harness", "soak"):
        sys.modules.pop(name, None)


def memory(leak_mb_per_hour: float, seed: int = 1) -> list[tuple[float, float]]:
    """A sample every five seconds of an hour, from 200 MB on, with the noise of an allocator: it
    wanders, and now and then a large image is in memory.
    """
    rng = random.Random(seed)
    wandered, points = 0.0, []
    for n in range(720):
        wandered = 0.95 * wandered + rng.gauss(0, 1)
        peak = 150.0 if rng.random() < 0.1 else rng.gauss(0, 2)
        points.append((5.0 * n, 200 + leak_mb_per_hour * n * 5 / HOUR_S + wandered + peak))
    return points


def test_a_leak_or_a_wrong_answer_makes_the_exit_code_1(soak) -> None:
    """A leak differs from noise, and from a cache that is filled once."""

    def passed(points: list[tuple[float, float]], *faults: str) -> bool:
        tally = soak.Tally(30.0)
        for what in (*soak.KINDS, "put", "delete", "find"):
            tally.count(what, 422 if what == "damaged" else 200)
        tally.memory.extend(points)
        for fault in faults:
            tally.fault(fault)
        return bool(soak.report(tally, LIMIT) == 0)

    for seed in range(5):
        assert passed(memory(0.0, seed))
        assert not passed(memory(20.0, seed))
    assert soak.slope(memory(20.0))[0] == pytest.approx(20, abs=8)
    assert passed([(5.0 * n, 200.0 if n < 60 else 260.0) for n in range(720)])
    assert not passed(memory(0.0), "it did not find itself")


@pytest.mark.long
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
    assert shutil.which("redis-server") is None or "Redis runs" in done.stdout
