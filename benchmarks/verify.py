"""How long `kinlens-index verify` takes, and how long it took when it asked one query at a time.

    git worktree add /tmp/before 2734a50^
    python benchmarks/verify.py --against /tmp/before

The commit 2734a50 made batches of its queries; the one before it is the old way. Each code builds a
gallery of its own of the same vectors, since a catalogue of then is not one of now, and then runs
its own command in a process of its own: what is timed is the whole command, hashes included.
The seconds of the clock depend on what else the machine does, those of the cores hardly. The best
of two runs counts; one that takes a minute runs once.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[1]
SAMPLES = (1, 1_000)
"""Items to check, before all of them: 1 shows what files and catalogue alone cost, 1,000 are the
default of a gallery of this size."""

BUILD = """
import sys
from clustered import clustered_batches
from indexer.gallery import Gallery
from indexer.types import Entry
folder, n, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gallery = Gallery.create(folder, name="verified", bundle_id="0" * 64, dim=dim)
number = 0
for batch in clustered_batches(n, dim, batch=10_000):
    rows = [(number + row, vector) for row, vector in enumerate(batch)]
    gallery.add(Entry(f"{row:09d}", vector, f"{row:064x}", {"n": row % 50}) for row, vector in rows)
    number += len(batch)
gallery.compact()
gallery.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="A checkout of the code to compare with.")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=128)
    given = parser.parse_args()
    codes = [HERE] if given.against is None else [given.against, HERE]
    samples = (*SAMPLES, given.items)
    with tempfile.TemporaryDirectory() as folder:
        columns = []
        for number, code in enumerate(codes):
            gallery = Path(folder) / str(number)
            run(code, "-c", BUILD, gallery, given.items, given.dim)
            columns.append([best_s(code, gallery, sample) for sample in samples])
    print_table(samples, columns)


Times = tuple[float, float]
"""Seconds of the clock, and of the cores."""


def best_s(code: Path, gallery: Path, sample: int) -> Times:
    times: list[Times] = []
    while len(times) < 2 and sum(clock for clock, _ in times) < 60:
        started, before = time.perf_counter(), cores_s()
        words = ("-m", "indexer", "verify", gallery, "--sample", sample, "--json")
        report = json.loads(run(code, *words))
        times.append((time.perf_counter() - started, cores_s() - before))
        assert report["checked"] == sample, report
        assert not report["problems"], report
    print(f"{code}: {sample:,} items, {min(times)}", file=sys.stderr)
    return min(times)


def cores_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run(code: Path, *words: object) -> str:
    path = os.pathsep.join(map(str, (code, HERE / "benchmarks")))
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path},
        cwd=code,
        stdout=subprocess.PIPE,
        check=True,
    )
    return done.stdout.decode()


def print_table(samples: tuple[int, ...], columns: list[list[Times]]) -> None:
    names = ["before", "now"][-len(columns) :]
    head = [f"{name}, s ({kind})" for kind in ("clock", "cores") for name in names]
    print("| items checked |", " | ".join(head), "| faster (clock, cores) |")
    print("|---" * (len(head) + 2) + "|")
    for row, sample in enumerate(samples):
        times = list(zip(*(column[row] for column in columns), strict=True))
        shown = " | ".join(f"{one:.1f}" for kind in times for one in kind)
        faster = ", ".join(f"{kind[0] / kind[-1]:.1f} times" for kind in times)
        print(f"| {sample:,} | {shown} | {faster} |")


if __name__ == "__main__":
    main()
