"""A load process: connections that send one search after another, over bare sockets.

    python benchmarks/load.py HOST:PORT FOLDER --connections 16 --seconds 10 [--repeat]

Every request is a new file (an image of FOLDER with other bytes after its end), unless --repeat
sends the same files again and again. Prints JSON: answered requests, errors, qps, p50 and p99
latency in milliseconds, all for responses with status 200 only, and its own CPU time per request.
Plain asyncio on prebuilt bytes, since it shares the cores with the service.
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
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Load:
    """The requests to one service and their results. `address` is HOST:PORT."""

    address: str
    images: list[bytes]
    repeat: bool = False
    start: int = 0
    sent: int = 0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    async def connected(self) -> Connection:
        host, port = self.address.rsplit(":", 1)
        return await asyncio.open_connection(host, int(port), limit=2**20)

    async def ask(self, connection: Connection) -> None:
        """One search."""
        reader, writer = connection
        self.sent += 1
        data = self.images[self.sent % len(self.images)]
        if not self.repeat:
            data += b"%016d" % (self.start + self.sent)
        body = HEAD + data + TAIL
        head = (
            f"POST /search HTTP/1.1\r\nHost: {self.address}\r\nContent-Length: {len(body)}\r\n"
            "Content-Type: multipart/form-data; boundary=part\r\n\r\n"
        )
        started = time.perf_counter()
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        status = lines[0].split()[1].decode()
        self.statuses[status] += 1
        if status == "200":
            self.latencies.append(time.perf_counter() - started)

    async def keep_asking(self, ends: float) -> None:
        """Use one connection until the time is over; a running request is completed."""
        connection = await self.connected()
        try:
            while time.monotonic() < ends:
                await self.ask(connection)
        finally:
            connection[1].close()

    async def run(self, connections: int, seconds: float) -> dict[str, object]:
        """Run all connections at once; returns the figures."""
        started, cpu = time.perf_counter(), time.process_time()
        ends = time.monotonic() + seconds
        await asyncio.gather(*(self.keep_asking(ends) for _ in range(connections)))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        ordered = sorted(self.latencies) or [float("inf")]
        return {
            "requests": len(self.latencies),
            "errors": sum(n for status, n in self.statuses.items() if status != "200"),
            "qps": len(self.latencies) / seconds,
            "p50_ms": 1e3 * ordered[len(ordered) // 2],
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "sent": self.sent,
            "cpu_ms": 1e3 * cpu_s / max(1, self.sent),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", help="HOST:PORT")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--repeat", action="store_true", help="send the same files again")
    parser.add_argument("--start", type=int, default=0, help="number of the first new file")
    asked = parser.parse_args()
    images = [path.read_bytes() for path in sorted(asked.folder.glob("*.jpg"))]
    load = Load(asked.address, images, asked.repeat, asked.start)
    print(json.dumps(asyncio.run(load.run(asked.connections, asked.seconds))))


if __name__ == "__main__":
    main()
