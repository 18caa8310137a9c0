"""What all tests share: a tiny model bundle, and where real data may lie."""

import contextlib
import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import create_ssl_context
from typer.main import get_command

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.seen import Seen
from tests.tiny import write_tiny_bundle

gc.disable()  # what the imports of all test modules make stays; to look through it takes seconds
pytest_plugins = ["tests.support.servers", "tests.support.stores"]

LONGEST_FIRST = (
    "promises/test_documents.py",
    "indexer/test_conformance.py",
    "promises/test_notebooks.py",
    "jobs/test_api.py",
    "jobs/test_manager.py",
    "http/test_schemathesis.py",
    "training/test_imported.py",
    "training/test_export.py",
    "training/test_adapt.py",
    "promises/test_quiet_machine.py",
    "galleries/test_reload.py",
    "galleries/test_milvus_served.py",
    "training/test_own.py",
    "training/test_library.py",
    "promises/test_shop_words.py",
    "training/test_two_towers.py",
    "indexer/test_publish.py",
    "indexer/test_guarantee.py",
    "training/test_cli.py",
    "cli/test_backup.py",
    "training/test_jobs.py",
    "training/test_from_bundle.py",
    "load/test_stuck_files.py",
    "http/test_agents.py",
    "indexer/test_crash.py",
    "load/test_redis.py",
    "training/test_trainer.py",
    "cli/test_main.py",
    "tests/test_demos.py",
    "tests/test_installs.py",
    "units/test_workers.py",
    "load/test_hostile_clients.py",
    "cli/test_replicas.py",
)
"""Files that take long, most of it in other processes; begun last, one would keep all waiting."""


def pytest_configure() -> None:
    """Ctrl-C as in a terminal: a shell that starts the suite in the background has it ignored, also
    by every process that a test starts and wants to end so.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What tests measure of engines is not for the user who runs them; what uv has fetched is.
    cached = os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")
    os.environ.setdefault("UV_CACHE_DIR", str(Path(cached) / "uv"))
    # As kinlens-serve, whose jobs inherit it: each process looks through all packages for them.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="kinlens-tests-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then those with a browser, then the others as they come."""

    def place(item: pytest.Item) -> int:
        name = "/".join(item.path.parts[-2:])
        if name in LONGEST_FIRST:
            return LONGEST_FIRST.index(name)
        return len(LONGEST_FIRST) + (item.get_closest_marker("browser") is None)

    items.sort(key=place)
    for item in items:
        if item.get_closest_marker("long") and not os.environ.get("KINLENS_LONG_TESTS"):
            item.add_marker(pytest.mark.skip(reason="long, and rarely fails: make soak runs it"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def quick_exports() -> Iterator[None]:
    """Each export parses all functions that torch has for ONNX, which takes half a second.

    The names are private to torch. Where it has others, exports only take longer.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "torch" in sys.modules:
            with contextlib.suppress(ImportError, AttributeError):
                from torch.onnx._internal.exporter import _registration

                functions = functools.cache(_registration.onnxscript_apis.get_torchlib_ops)
                patch.setattr(_registration.onnxscript_apis, "get_torchlib_ops", functions)
        yield


@pytest.fixture(scope="session", autouse=True)
def quick_tools() -> Iterator[None]:
    """Each HTTP client reads all certificates of the machine, and each call of a command builds the
    whole program, which takes longer than most tests.

    The names are private to httpx and typer. Where they have others, tests only take longer.
    """
    named = "SSL_CERT_FILE", "SSL_CERT_DIR"
    made = functools.cache(lambda _, **given: create_ssl_context(**given))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "httpx._transports.default.create_ssl_context",
            lambda **given: made(tuple(map(os.environ.get, named)), **given),
            raising=False,
        )
        build = functools.cache(get_command)
        patch.setattr("typer.testing._get_command", build, raising=False)
        yield


@pytest.fixture(scope="session")
def make_tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A function that writes a new tiny bundle; another `seed` is another model."""

    def make(seed: int = 0, seen: Seen | None = None, **more: Any) -> Bundle:
        return write_tiny_bundle(tmp_path_factory.mktemp("bundle"), seed, seen, **more)

    return make


@pytest.fixture(scope="session")
def tiny_bundle(make_tiny_bundle: Callable[..., Bundle]) -> Bundle:
    """One tiny bundle; do not change its files."""
    return make_tiny_bundle()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with real photos and weights; the test is skipped where there is none."""
    root = Path(os.environ.get("KINLENS_SHARED", Path(__file__).parents[2] / "shared"))
    if not (root / "data" / "cars196-half").is_dir():
        pytest.skip("real data absent: set KINLENS_SHARED to the folder that holds data/, weights/")
    return root
