"""Publishing to Milvus: several processes compared with one, and the cost of the server itself.

    python benchmarks/milvus_publish.py [--items 100000] [--dim 512] [--rounds 2]

The baseline is the earlier method: one process that inserts pages of up to 16 MB, then an exact
index. The new method is that of `kinlens-index import`. `rows` is the time of the inserts, `index`
the time to create the index and load it. `client` and `server` are CPU seconds during the inserts:
no client can reduce the server's part. The server is that of the package `milvus`, on the same
cores.
"""

import contextlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from harness import heading, options, random_units, row, skip
from milvus_search import entry, own_server

from kinlens.embedder.machine import core_count
from kinlens.indexer.exchange.milvus_collection import (
    Collection,
    Connection,
    MilvusFacts,
    batches,
    row_of,
)
from kinlens.indexer.exchange.milvus_index import planned
from kinlens.indexer.exchange.milvus_load import load
from kinlens.indexer.types import Entry


def main() -> None:
    args = options(__doc__, items=100_000, dim=512, rounds=2)
    if importlib.util.find_spec("milvus") is None:
        skip("needs the group `milvus-server`, which is for Linux on x86-64")
    vectors = chain.from_iterable(random_units(args.items, args.dim))
    entries = [entry(number, vector) for number, vector in enumerate(vectors)]
    cores = core_count()
    found: dict[str, list[tuple[float, ...]]] = {}
    with own_server() as uri, contextlib.closing(Connection(uri)) as connection:
        server = str(connection.call("get_server_version"))
        for number in range(args.rounds):
            for name, fill in (
                ("one process, pages of 16 MB", one_process),
                ("one process, resumable", lambda made, rows: several(made, rows, 1)),
                (f"{cores} processes", lambda made, rows: several(made, rows, cores)),
            ):
                found.setdefault(name, []).append(
                    timed(connection, server, entries, args.dim, number, fill)
                )
    print(f"server {server}, {args.items:,} x {args.dim}")
    heading("", "rows, s", "client, s", "server, s", "index, s", "items/s", "times the peer")
    first = statistics.median(sum(each[:2]) for each in found["one process, pages of 16 MB"])
    for name, times in found.items():
        rows_s, index_s, client_s, server_s = map(statistics.median, zip(*times, strict=True))
        total = statistics.median(sum(each[:2]) for each in times)
        row(name, rows_s, client_s, server_s, index_s, args.items / total, f"{first / total:.2f}")


def timed(
    connection: Connection,
    server: str,
    entries: list[Entry],
    dim: int,
    number: int,
    fill: Callable[[Collection, list[Entry]], object],
) -> tuple[float, ...]:
    """Seconds of the inserts and of the index, and CPU seconds of client and server."""
    facts = MilvusFacts(
        name="bench",
        generation=f"{abs(hash((fill, number))) % 16**12:012x}",
        bundle_id="b" * 64,
        dim=dim,
        created_at="2026-01-01T00:00:00.000+00:00",
    )
    made = Collection.create(connection, facts)
    client, busy, started = cpu_s(), server_s(), time.perf_counter()
    fill(made, entries)
    client, busy = cpu_s() - client, server_s() - busy
    rows_s, started = time.perf_counter() - started, time.perf_counter()
    made.make_index(planned(len(entries), dim, "flat", None, server), server)
    assert made.strong().count() == len(entries)
    index_s = time.perf_counter() - started
    connection.call("drop_collection", made.collection)
    return rows_s, index_s, client, busy


def cpu_s() -> float:
    """CPU time of this process and its children that have ended."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def server_s() -> float:
    """CPU seconds of the server."""
    ticks = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if "run\0standalone" in (process / "cmdline").read_text():
                fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def one_process(made: Collection, entries: list[Entry]) -> None:
    for batch in batches(entries, made.page_rows):
        made.connection.call("insert", made.collection, [row_of(e, e.vector) for e in batch])


def several(made: Collection, entries: list[Entry], processes: int) -> None:
    load(made, entries, None, "", processes, False, lambda _: None)


if __name__ == "__main__":
    main()
