"""A shop with a job manager, without HTTP."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.seen import Seen
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
