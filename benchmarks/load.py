"""A load process: so many connections that ask one search after another, over bare sockets.

    python benchmarks/load.py HOST:PORT FOLDER --connections 16 --seconds 10 [--repeat]

Every request is a new file (a picture of FOLDER with other bytes behind its end), unless --repeat:
then the same files are asked for again and again. Prints JSON: answered requests, errors, seconds,
qps, the p50 and p99 of the latency in milliseconds, all of answers with 200 alone, and its own CPU
time a request. Plain asyncio on prebuilt bytes, since it shares the cores with what it measures.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HEAD = (
    b'--part\r\nContent-Disposition: form-data; name="k"\r\n\r\n20\r\n'
    b'--part\r\nContent-Disposition: form-data; name="image"; filename="q.jpg"\r\n'
    b"Content-Type: image/jpeg\r\n\r\n"
)
TAIL = b"\r\n--part--\r\n"


@dataclass
class Load:
    """What is asked, until when, and what came of it."""

    host: str
    port: int
    images: list[bytes]
    repeat: bool
    ends: float
    sent: int = 0
    start: int = 0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    def next_request(self) -> bytes:
        """The bytes of one request."""
        self.sent += 1
        data = self.images[self.sent % len(self.images)]
        if not self.repeat:
            data += b"%016d" % (self.start + self.sent)
        body = HEAD + data + TAIL
        return (
            f"POST /search HTTP/1.1\r\nHost: {self.host}\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: multipart/form-data; boundary=part\r\n\r\n"
        ).encode() + body


async def connection(load: Load) -> None:
    """Ask one after another until the time is over."""
    reader, writer = await asyncio.open_connection(load.host, load.port, limit=2**20)
    try:
        while time.monotonic() < load.ends:
            request = load.next_request()
            started = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            status, length = parse(head)
            await reader.readexactly(length)
            load.statuses[status] += 1
            if status == "200":
                load.latencies.append(time.perf_counter() - started)
    finally:
        writer.close()


def parse(head: bytes) -> tuple[str, int]:
    """Status and length of an answer."""
    lines = head.lower().split(b"\r\n")
    length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
    return lines[0].split()[1].decode(), length


async def measure(load: Load, connections: int) -> dict[str, object]:
    """Run the load. What is under way at its end is waited for and counts."""
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(connection(load) for _ in range(connections)))
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    ordered = sorted(load.latencies) or [float("inf")]
    return {
        "requests": len(load.latencies),
        "errors": sum(n for status, n in load.statuses.items() if status != "200"),
        "statuses": dict(load.statuses),
        "seconds": seconds,
        "qps": len(load.latencies) / seconds,
        "p50_ms": 1e3 * ordered[len(ordered) // 2],
        "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
        "sent": load.sent,
        "cpu_ms": 1e3 * cpu_s / max(1, load.sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--repeat", action="store_true", help="ask for the same files again")
    parser.add_argument("--start", type=int, default=0, help="number of the first new file")
    options = parser.parse_args()
    host, port = options.address.rsplit(":", 1)
    images = [path.read_bytes() for path in sorted(options.folder.glob("*.jpg"))]
    ends = time.monotonic() + options.seconds
    load = Load(host, int(port), images, options.repeat, ends, start=options.start)
    print(json.dumps(asyncio.run(measure(load, options.connections))))


if __name__ == "__main__":
    main()
