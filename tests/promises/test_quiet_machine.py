"""Kinlens contacts nobody, imports nothing from the working directory, and needs no home folder."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from tests.support.job_shops import write_photos
from tests.training.jobs import calibrated_weights

SCRIPT = Path(__file__).parents[1] / "support" / "quiet_machine.py"
NETWORK = ["unshare", "--net"] if os.name == "posix" and not os.getuid() else ["unshare", "-rn"]


@pytest.fixture
def place(tiny_bundle: Bundle) -> Iterator[Path]:
    """A folder with a shop, a bundle and weights, where anyone may write."""
    trial = subprocess.run([*NETWORK, "true"], capture_output=True, text=True)
    if trial.returncode:
        pytest.skip(f"no network namespace can be made here: {trial.stderr.strip()}")
    place = Path(tempfile.mkdtemp())  # not in that of pytest, which only this user may read
    write_photos(place / "shop")
    shutil.copytree(tiny_bundle.path, place / "bundle")
    calibrated_weights(place / "weights.pt")
    (place / "work").mkdir()
    for path in (place, *place.rglob("*")):
        path.chmod(0o777)
    yield place
    shutil.rmtree(place)


def test_nothing_is_contacted_no_file_of_the_working_directory_is_run_and_no_home_is_needed(
    place: Path,
) -> None:
    """All that a user does in a network of its own, see the script; as root, the service and a
    build with a user id without a name and a home folder.
    """
    command = [*NETWORK, sys.executable, SCRIPT, place]
    command += ["--user", "12345"] if not os.getuid() else []
    command += ["--train"] if os.environ.get("KINLENS_LONG_TESTS") else []  # a minute
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["proxied"] == []
    assert found["direct"] == 0
    assert found["ran"] == ""
    assert not [path for path in found["home"] if "/.cache/" not in path]
