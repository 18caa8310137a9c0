from pathlib import Path

import pytest

from tests.training.jobs import calibrated_weights


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with weights of the tiny trunk; do not change it."""
    return calibrated_weights(tmp_path_factory.mktemp("weights") / "weights.pth")
