"""Hours of load: searches, changes, rebuilds, faults, killed decoders; memory must not grow.

    make soak HOURS=1              or: python scripts/soak.py --hours 1 [--workers 2]

Starts redis-server (if installed) and kinlens-serve with a model of random weights, then runs all
of these concurrently: searches with new and repeated images, crops, filters, likes and damaged
files; adding and deleting items; rebuilding, reloading and compacting galleries; every half minute
a fault (Redis paused, Redis killed, a decoding process killed). At the end it prints requests by
status, wrong answers, and the memory slope of the whole process tree after its first third, with
its range.

Exit code 1 if an answer was wrong or unexpected, if more than 1 in 20 requests was refused, if the
service did not become ready again, or if memory certainly grows by more than the limit. Runs of
less than half an hour print the slope without judging it.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from demo_steps import DemoError, show
from soak_load import KINDS, SEARCHERS, Tally, changes, faults, rebuilds, samples, searches
from soak_memory import slope, slope_range
from soak_shop import Plan, Shop, open_shop

JUDGED_S = 1200.0
"""Minimum duration of the last two thirds for their slope to count."""

MOST_REFUSED = 0.05
READY_S = 60.0


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        plan = Plan(Path(name), options.workers, options.images, options.bundle)
        try:
            with open_shop(plan) as shop:
                tally = run(shop, 3600 * options.hours, options.period_s)
        except (DemoError, subprocess.CalledProcessError, httpx.HTTPError) as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    if shop.process.returncode != 0:
        tally.fault(f"the service exited with status {shop.process.returncode}")
    return report(tally, options.limit_mb_per_hour)


def run(shop: Shop, seconds: float, period: float) -> Tally:
    """Run all threads for `seconds`, then check that the service is ready."""
    tally = Tally(period)
    jobs: list[Callable[[Shop, Tally], None]] = [searches] * SEARCHERS
    jobs += [changes, rebuilds, faults, samples]
    threads = [threading.Thread(target=job, args=(shop, tally)) for job in jobs]
    for thread in threads:
        thread.start()
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0 and shop.process.poll() is None:
        time.sleep(min(60.0, left))
        mb = tally.memory[-1][1] if tally.memory else 0
        print(
            f"  {tally.statuses.total():,} answers, {len(tally.wrong)} wrong, {mb:.0f} MB",
            flush=True,
        )
    tally.over.set()
    for thread in threads:
        thread.join(120)
        if thread.is_alive():
            tally.fault("a request hangs")
    if not _is_ready(shop):
        tally.fault(f"not ready {READY_S:g} s after the load")
    return tally


def _is_ready(shop: Shop) -> bool:
    deadline = time.monotonic() + READY_S
    with shop.client() as client:
        while time.monotonic() < deadline:
            try:
                if client.get("/ready").status_code == 200:
                    return True
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
    return False


def report(tally: Tally, limit: float) -> int:
    """Print the results; 1 if there was a failure."""
    for what in (*KINDS, "put", "delete", "find"):
        if not tally.answered(what):
            tally.fault(f"no {what} request was answered")
    if tally.refused() > MOST_REFUSED:
        tally.fault(f"{tally.refused():.0%} of all requests were refused")
    show("answers")
    for (what, status), count in sorted(tally.statuses.items()):
        print(f"  {what:10} {status} {count:8,}")
    for text in tally.wrong[:20]:
        print(f"  WRONG: {text}")
    good = not tally.wrong and not _grows(tally, limit)
    show("passed" if good else "FAILED")
    return 0 if good else 1


def _grows(tally: Tally, limit: float) -> bool:
    """Whether memory certainly grows by more than `limit` MB an hour."""
    kept = tally.memory[len(tally.memory) // 3 :]
    if len(kept) < 12:
        print("  too short for a memory slope")
        return False
    low, high = slope_range(kept)
    is_judged = kept[-1][0] - kept[0][0] >= JUDGED_S
    show(f"memory {kept[0][1]:.0f} MB, at the end {kept[-1][1]:.0f} MB")
    print(f"  slope {slope(kept):+.1f} MB an hour, range {low:+.1f} to {high:+.1f}", end="")
    print("" if is_judged else " (not judged: too short)")
    return is_judged and low > limit


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--period-s", type=float, default=30.0, help="seconds between faults")
    parser.add_argument("--limit-mb-per-hour", type=float, default=5.0)
    parser.add_argument("--images", type=Path, help="folders of images; default: rendered")
    parser.add_argument("--bundle", type=Path, help="a model bundle; default: random weights")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
