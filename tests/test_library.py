"""The library without a service; CI runs the same walk on macOS and Windows."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("rules", [(), ("--as-windows",)], ids=["own", "windows"])
def test_a_gallery_is_made_changed_and_searched(tmp_path: Path, rules: tuple[str, ...]) -> None:
    command = (
        sys.executable,
        "-X",
        "warn_default_encoding",
        "-m",
        "tests.support.library_walk",
        tmp_path,
        *rules,
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("walked\n")
