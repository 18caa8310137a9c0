"""Many tenants in one service: what galleries that nobody uses and thousands of keys cost.

    python benchmarks/tenants.py

- idle       CPU of all processes as a share of one core, and threads of the service, without a
             request, with few and with many empty galleries in the state folder
- a request  CPU of a request with a bound and filtered key, among few and among many such keys

Rounds alternate between the two services of a comparison.
"""

import hashlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import httpx
from harness import (
    BIN,
    Server,
    free_port,
    heading,
    options,
    ratio,
    row,
    started,
    tree_cpu_s,
    verdict,
)
from search import small_bundle

from kinlens.embedder.bundle import Bundle
from kinlens.indexer.gallery import Gallery
from kinlens.service.access.keys import Key, Limits

SECRET = "0" * 64
SETTLE_S = 10.0


def main() -> None:
    given = options(__doc__, galleries=[2, 300], keys=[10, 10_000], seconds=20.0, rounds=5)
    with tempfile.TemporaryDirectory(prefix="kinlens-tenants-") as made:
        bundle = small_bundle(Path(made), "mobilenet_v2", "cpu")
        idle = {
            n: idle_cost(bundle, Path(made) / f"g{n}", n, given.seconds) for n in given.galleries
        }
        heading("galleries", "idle, % of a core", "threads")
        for count, (share, threads) in idle.items():
            row(count, share, threads)
        most = max(given.galleries)
        verdict(f"% of a core with {most:,} empty galleries, idle", idle[most][0], 1.0, True)
        seconds = costs(bundle, Path(made), given.keys, given.rounds)
        heading("keys", "CPU ms of a request")
        for count, taken in seconds.items():
            row(count, 1e3 * statistics.median(taken))
        few, many = given.keys
        verdict("times the CPU of a request", ratio(seconds[many], seconds[few]), 1.1, True)


def idle_cost(bundle: Path, state: Path, galleries: int, seconds: float) -> tuple[float, int]:
    """Percent of a core, and threads, of a service without requests."""
    with serving_tenants(bundle, state, galleries, 1) as server:
        time.sleep(SETTLE_S)
        before = tree_cpu_s(server.process.pid)
        time.sleep(seconds)
        used = tree_cpu_s(server.process.pid) - before
        return 100 * used / seconds, len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))


def costs(bundle: Path, folder: Path, counts: list[int], rounds: int) -> dict[int, list[float]]:
    """CPU seconds of a request in each round, by the number of keys."""
    taken: dict[int, list[float]] = {count: [] for count in counts}
    with ExitStack() as stack:
        servers = {
            count: stack.enter_context(serving_tenants(bundle, folder / f"k{count}", 1, count))
            for count in counts
        }
        client = stack.enter_context(httpx.Client(headers={"X-API-Key": f"kl_{0:08x}_{SECRET}"}))
        for _ in range(rounds):
            for count, server in servers.items():
                before = tree_cpu_s(server.process.pid)
                for _ in range(500):
                    client.get(f"{server.url}/galleries/tenant0").raise_for_status()
                taken[count].append((tree_cpu_s(server.process.pid) - before) / 500)
    return taken


@contextmanager
def serving_tenants(bundle: Path, state: Path, galleries: int, keys: int) -> Iterator[Server]:
    """A service with empty galleries, and keys that are bound to the first one and have filters."""
    opened = Bundle.open(bundle)
    facts = {"bundle_id": opened.bundle_id, "dim": opened.manifest.dim, "source": "uploads"}
    for number in range(galleries):
        name = f"tenant{number}"
        Gallery.create(state / "galleries" / name, name=name, **facts).close()
    digest, now = hashlib.sha256(SECRET.encode()).hexdigest(), datetime.now(UTC)
    made = [
        Key(
            id=f"{number:08x}",
            name=f"tenant{number}",
            scopes=("search",),
            digest=digest,
            created_at=now,
            limits=Limits(galleries=("tenant0",), filter=f"tenant = {number}"),
        ).model_dump(mode="json", by_alias=True, exclude_none=True)
        for number in range(keys)
    ]
    (state / "keys.json").write_text(json.dumps({"schema_version": 1, "keys": made}))
    port = free_port()
    words = ["--bundle", bundle, "--state", state, "--port", port]
    with started([BIN / "kinlens-serve", *map(str, words)], port) as server:
        yield server


if __name__ == "__main__":
    main()
