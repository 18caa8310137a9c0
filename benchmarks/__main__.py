"""Run every benchmark once, at its smallest size, to check that it works.

    python benchmarks [NAME ...]        or: make bench

The figures of such a run are meaningless; the command at the top of each script produces its table
of docs/benchmarks.md, docs/results.md, docs/scaling.md or docs/models.md. Benchmarks that lack
something (a GPU, real images, a package) are skipped with the reason. Exits with 1 if one failed.
"""

import resource
import shlex
import subprocess
import sys
from pathlib import Path

from harness import SKIPPED, heading, row

HERE = Path(__file__).parent
SMALLEST = (
    "additions.py --seeds 1 --additions none --images groceries --trunks MobileNetV2",
    "clutter.py --queries 4",
    "clutter.py --cost --rounds 1",
    "copies.py --sizes 2k --dim 32 --rounds 2",
    "databases.py --sizes 2k --dims 32 --rounds 1",
    "gallery.py --sizes 2k --dims 32 --rounds 2",
    "gallery_gpu.py --rows 20000 --dims 32",
    "guarantee.py --sources drawn --products 24 --draws 4 --shops 2",
    "growth.py --sizes 2k --dims 32 --adds 200 --vector-type fp16 "
    "--parts build write search filters catch-up attributes",
    "scaling.py --items 500 --dim 16 --searches 5",
    "search.py --backbone mobilenet_v2 --items 500 --start-items 500 --seconds 0.5 --rounds 1 "
    "--connections 1",
    "search_path.py",
    "regularizers.py --seeds 2 --losses triplet --conditions '5 epochs, half of the classes' "
    "--classes 30",
    "regularizers.py --folds --seeds 1 --losses margin --conditions 'network, 5 epochs' "
    "--classes 18",
    "imported.py --seeds 1 --photos 2 --shops groceries",
    "small_shops.py --seeds 1 --shops 1 --methods adapt",
    "tenants.py --galleries 1 4 --keys 2 20 --seconds 1 --rounds 1",
    "training_step.py --rounds 1 --batch 10 --size-px 64",
    "engines.py --rounds 1 --trunks mobilenet_v2",
    "words.py --sources drawn --products 30",
    "engines.py trunks --rounds 2 --only mobilenetv4_conv_small",
    "peers/plain_loop.py --steps 1 --batch-size 4 --size-px 64 --dim 16 --test-images 64",
)


def main() -> None:
    known = {line.split()[0] for line in SMALLEST}
    if unknown := [name for name in sys.argv[1:] if name not in known]:
        raise SystemExit(
            f"{', '.join(unknown)}: no such benchmark; there are {', '.join(sorted(known))}"
        )
    results = {}
    for line in SMALLEST:
        script, *words = shlex.split(line)
        if sys.argv[1:] and script not in sys.argv[1:]:
            continue
        print(f"\n$ python benchmarks/{line}", flush=True)
        before, last = work_s(), ""
        command = [sys.executable, HERE / script, *words]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            for last in process.stdout or ():
                print(last, end="", flush=True)
        ended = {0: "ran", SKIPPED: f"skipped: {last.strip().removeprefix('skipped: ')}"}
        status = ended.get(process.returncode, f"FAILED with status {process.returncode}")
        results[line] = status, work_s() - before
    heading("benchmark", "", "CPU seconds")
    for line, (status, seconds) in results.items():
        row(line, status, f"{seconds:.0f}")
    raise SystemExit(any(status.startswith("FAILED") for status, _ in results.values()))


def work_s() -> float:
    """CPU time of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
