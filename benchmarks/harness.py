"""Shared code of the benchmarks: options, tables, turns, fresh processes, a real service.

A benchmark is a script: its command is at the top of its docstring, its defaults are those of the
table in docs/ that it makes, and `python benchmarks` runs each of them once at its smallest size.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import httpx
import numpy as np
from PIL import Image

from kinlens.embedder.types import Embeddings
from kinlens.indexer.entries import Entry
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.ingest.build import import_gallery
from kinlens.indexer.types import AttributeValue, GalleryExport, Ids, VectorType
from kinlens.training.folder import replace_json

BIN = Path(sys.executable).parent
SKIPPED = 77
"""The exit status of a benchmark that was skipped."""

READY_S = 180
T = TypeVar("T")
Seconds = dict[str, list[float]]
"""Seconds by contestant and round."""


def options(doc: str | None, *positional: str, **defaults: Any) -> argparse.Namespace:
    """The command line of a benchmark: an option for each default, of its type.

    A list takes any number of values. None means no path. Names in `positional` become positional
    arguments, which may be omitted.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        flag = name if name in positional else f"--{name.replace('_', '-')}"
        first = default[0] if isinstance(default, list) else default
        more: dict[str, Any] = {"type": Path if first is None else type(first)}
        if isinstance(default, bool):
            more = {"action": argparse.BooleanOptionalAction}
        elif isinstance(default, list):
            more["nargs"] = "*"
        elif name in positional:
            more["nargs"] = "?"
        parser.add_argument(
            flag, default=default, help=f"default: {default}".replace("%", "%%"), **more
        )
    return parser.parse_args()


def count_of(size: str) -> int:
    """10k is 10,000."""
    return int(size.rstrip("km")) * {"k": 1000, "m": 1_000_000}.get(size[-1], 1)


def recall_at(found: Ids, truth: Ids) -> float:
    """Share of the true neighbours (Q, k) that are among those found (Q, any width)."""
    if not truth.size:
        return 1.0
    hits = sum(len(np.intersect1d(*rows)) for rows in zip(found, truth, strict=True))
    return hits / truth.size


def skip(reason: str) -> NoReturn:
    """Exit without a figure, and print the reason."""
    print(f"skipped: {reason}", flush=True)
    raise SystemExit(SKIPPED)


# The table


def records(path: Path | None) -> dict[str, Any]:
    """The records of earlier calls, which are not repeated, by their names."""
    if path is None or not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def keep(found: Mapping[str, Any], path: Path | None) -> None:
    """Write the records so far, in the order of their names, if there is a file for them."""
    if path is not None:
        replace_json(path, dict(sorted(found.items())))


def heading(*names: str) -> None:
    """Print the head of a Markdown table."""
    print(f"\n| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)


def row(*cells: object) -> None:
    """Print a row of the table; numbers have the significant digits."""
    print(f"| {' | '.join(map(shown, cells))} |", flush=True)


def columns(figures: Mapping[str, Mapping[str, object]]) -> None:
    """Print a table with a column for each setting and a row for each figure."""
    heading("", *figures)
    for name in dict.fromkeys(itertools.chain.from_iterable(figures.values())):
        row(name, *(found.get(name, "") for found in figures.values()))


def shown(value: object) -> str:
    if isinstance(value, (float, np.floating)):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, (int, np.integer)) else str(value)


def verdict(text: str, value: float, bound: float, at_most: bool = False) -> None:
    """Print one line: the figure, and whether it meets its target."""
    is_met = value <= bound if at_most else value >= bound
    sign = "at most" if at_most else "at least"
    print(f"{value:7.2f}  {'met   ' if is_met else 'MISSED'}  {text}, target {sign} {bound:g}")


# Turns


def in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 0,
) -> Seconds:
    """Seconds of each call in each round, in a new random order each time.

    So noise on the machine affects all alike; compare within a round (`ratio`). With
    `time.process_time` or `time.thread_time` as the clock, times are CPU time.
    """
    seconds: Seconds = {name: [] for name in calls}
    for number in range(warm_up + rounds):
        for name in random.sample(list(calls), len(calls)):
            started = clock()
            calls[name]()
            if number >= warm_up:
                seconds[name].append(clock() - started)
    return seconds


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def timed_ms(work: Callable[[], object]) -> float:
    """Milliseconds that `work` takes."""
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


# Processes


def fresh(part: Callable[..., T], *arguments: object) -> T:
    """The result of a function of the benchmark in a new process that has only imported it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(part, *arguments).result()


def memory_mb() -> dict[str, float]:
    """MB of this process: RssAnon is its own memory, VmHWM its peak.

    `ru_maxrss` would include the memory of the parent.
    """
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 / 1e6 for name in ("RssAnon", "VmHWM")}


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def tree_mb(pid: int) -> float:
    """MB of the tree: shared pages count once, file pages do not count."""
    total_kb = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/smaps_rollup").read_text()
            total_kb += int(text.split("Pss_Anon:")[1].split()[0])
    return total_kb * 1024 / 1e6


def tree_cpu_s(pid: int) -> float:
    """Seconds of CPU time that the processes of the tree, and those that they waited for, used."""
    ticks = 0
    for process in tree(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def kinlens(command: str, *arguments: object, accepted: Sequence[int] = (0,)) -> None:
    """Print and run one of the console scripts, such as `train`.

    Raises: CalledProcessError for an exit status that is not `accepted`.
    """
    words = [str(argument) for argument in arguments]
    print(f"\n$ kinlens-{command} {shlex.join(words)}", flush=True)
    done = subprocess.run([BIN / f"kinlens-{command}", *words], check=False)
    if done.returncode not in accepted:
        done.check_returncode()


def free_port() -> int:
    """A port that no process uses, outside of those that systems give to connections."""
    with socket.socket() as probe:
        while True:
            try:
                probe.bind(("127.0.0.1", port := random.SystemRandom().randrange(2**10, 2**15)))
            except OSError:
                continue
            return port


class Server(NamedTuple):
    """A process that serves a URL."""

    url: str
    process: "subprocess.Popen[bytes]"


def serving(
    bundle: Path, gallery: Path, *flags: str, every_s: float = 0.1
) -> contextlib.AbstractContextManager[Server]:
    """A `kinlens-serve` that is ready."""
    port = free_port()
    words = ["--bundle", bundle, "--gallery", f"g={gallery}", "--port", port, *flags]
    command = [BIN / "kinlens-serve", *map(str, words)]
    return started(command, port, every_s)


@contextlib.contextmanager
def started(
    command: Sequence[Path | str], port: int, every_s: float = 0.1, is_quiet: bool = True
) -> Iterator[Server]:
    """A service that answers /ready at this port; stopped at the end of the block."""
    errors = subprocess.DEVNULL if is_quiet else None
    process = subprocess.Popen(command, stderr=errors, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while not _is_ready(url):
            if time.monotonic() > deadline or process.poll() is not None:
                text = shlex.join(map(str, command))
                raise SystemExit(f"{text} did not become ready; run it manually to find out why")
            time.sleep(every_s)
        yield Server(url, process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=30)
        finally:
            with contextlib.suppress(ProcessLookupError):  # peers may leave processes running
                os.killpg(process.pid, signal.SIGKILL)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/ready").status_code == 200
    return False


# Data


def shared_folder() -> Path | None:
    """The folder with real images and weights, if this machine has it."""
    root = Path(os.environ.get("KINLENS_SHARED", Path(__file__).parents[2] / "shared"))
    return root if (root / "data").is_dir() else None


def grocery_photos(shared: Path) -> list[tuple[Path, str]]:
    """All photos of groceries with their product, which has a folder in each part of the data."""
    root = shared / "data/grocery-store"
    photos = [path for path in sorted(root.rglob("*.jpg")) if "conic" not in path.name]
    return [(path, path.parent.name) for path in photos]


def sample_images(folder: Path, count: int) -> Path:
    """`folder` with JPEG files: photos of groceries if this machine has them, else smooth noise."""
    folder.mkdir(parents=True)
    shared = shared_folder()
    found = sorted((shared / "data/grocery-store/test").rglob("*.jpg")) if shared else []
    for number, path in enumerate(found[:: max(1, len(found) // count)][:count]):
        shutil.copyfile(path, folder / f"{number:04d}.jpg")
    for number in range(min(len(found), count), count):
        rng = np.random.default_rng(number)
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        large = small.resize((400, 300), Image.Resampling.BICUBIC)
        large.save(folder / f"{number:04d}.jpg", quality=75)
    return folder


def made_gallery(
    path: Path,
    batches: Callable[[], Iterable[Embeddings]],
    count: int,
    dim: int,
    attributes: Callable[[int], dict[str, AttributeValue]] = lambda number: {"n": number},
    bundle_id: str = "b" * 64,
    settings: IndexSettings | None = None,
    vector_type: VectorType = "fp32",
) -> Path:
    """A gallery of `count` vectors, published as by an import; keys count from 0."""

    def entries() -> Iterator[Entry]:
        for number, vector in enumerate(itertools.chain.from_iterable(batches())):
            yield Entry(f"{number:09d}", vector, f"{number:064x}", attributes(number))

    facts = {"name": "g", "bundle_id": bundle_id}
    dump = GalleryExport(facts, dim, count, entries)
    import_gallery(dump, path, settings=settings, vector_type=vector_type)
    return path
