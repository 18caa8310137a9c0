"""Parts of benchmarks/gallery.py that run in a process of their own, and how they are started."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from clustered import clustered_queries
from gallery_make import K, Setting, build, later_entries, segment_folder

from indexer.gallery import Gallery
from indexer.index.segment import INDEX, VECTORS

FRESH = "--fresh"
_QUERIES = 1000
_PATIENCE_S = 60


def fresh(part: Callable[..., dict[str, Any]], setting: Setting, **arguments: Any) -> Any:
    """What `part` returns in a process that has done nothing but import."""
    done = subprocess.run(
        _command(part.__name__, setting, arguments), stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def beside(
    part: Callable[..., dict[str, Any]], setting: Setting, **arguments: Any
) -> Iterator["subprocess.Popen[str]"]:
    """`part` in a process beside this one, its output to be read by lines."""
    process = subprocess.Popen(
        _command(part.__name__, setting, arguments), stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
        if process.wait(timeout=_PATIENCE_S):
            raise SystemExit(f"{part.__name__} failed; its message is above")
    finally:
        process.kill()
        process.wait()


def serve(words: list[str]) -> None:
    """The other end of `fresh` and `beside`."""
    name, setting, arguments = words[0], json.loads(words[1]), json.loads(words[2])
    setting["folder"] = Path(setting["folder"])
    print(json.dumps(PARTS[name](Setting(**setting), **arguments)), flush=True)


def answer(setting: Setting) -> dict[str, float]:
    """Open the gallery, answer queries one by one: seconds to the first answer, and memory."""
    queries = clustered_queries(setting.n, setting.dim, queries=_QUERIES)
    before = memory_mb()
    started = time.perf_counter()
    gallery = Gallery.open(setting.path)
    gallery.search(queries[:1], K)
    seconds = time.perf_counter() - started
    for row in range(1, len(queries)):
        gallery.search(queries[row : row + 1], K)
    growth = {name: value - before[name] for name, value in memory_mb().items()}
    # Of a flat index the vectors are the codes.
    is_flat = not (segment_folder(setting) / INDEX).exists()
    vectors = 0.0 if is_flat else resident_mb(segment_folder(setting) / VECTORS)
    return {"first_answer_s": seconds, "vectors": vectors, **growth}


def memory_mb() -> dict[str, float]:
    """Resident memory of this process, in MB: all, its own, and pages of files."""
    names = ("VmRSS", "RssAnon", "RssFile")
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {name: int(fields[name].split()[0]) * 1024 / 1e6 for name in names}


def resident_mb(file: Path) -> float:
    """Pages of a mapped file that count as memory of this process, in MB."""
    inside, kib = False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            inside = line.endswith(str(file.resolve()))
        elif inside and first == "Rss:":
            kib += int(line.split()[1])
    return kib * 1024 / 1e6


def drop_cached_pages(folder: Path) -> None:
    """Let the next reader find the files of a gallery on the disk, not in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def follow(setting: Setting, vectors: str, first: int) -> dict[str, Any]:
    """Search for items that another process is about to add; say when each was found."""
    gallery = Gallery.open(setting.path)
    rows = np.load(vectors)
    for entry, row in zip(later_entries(first, rows), rows, strict=True):
        found = gallery.search(row[None], 1)
        print("ready", flush=True)
        deadline = time.monotonic() + _PATIENCE_S
        while not found[0] or found[0][0].key != entry.key:
            found = gallery.search(row[None], 1)
            if time.monotonic() > deadline:
                raise SystemExit(f"{entry.key} was added and cannot be found")
        # The clock is the same in all processes.
        print(time.monotonic(), flush=True)
    return {}


def compact(setting: Setting) -> dict[str, float]:
    """Compact the gallery."""
    return {"seconds": Gallery.open(setting.path).compact(setting.settings).elapsed_s}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    part.__name__: part for part in (build, answer, follow, compact)
}


def _command(name: str, setting: Setting, arguments: dict[str, Any]) -> list[str]:
    facts = {field: getattr(setting, field) for field in Setting.__dataclass_fields__}
    facts["folder"] = str(setting.folder)
    main = Path(__file__).with_name("gallery.py")
    return [sys.executable, str(main), FRESH, name, json.dumps(facts), json.dumps(arguments)]
