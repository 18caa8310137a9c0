"""Load on a service: connections that send one search after another, over bare sockets.

`load(URL, FOLDER, ...)` is a process of its own; benchmarks/search.py uses it.

Every request is a new file (an image of FOLDER with other bytes after its end), or with `repeat`
the same files again and again. QPS and latencies are of responses with status 200 only; `cpu_ms` is
the CPU time of this process per request. Plain asyncio on prebuilt bytes, since it shares the cores
with the service.
"""

import asyncio
import json
import subprocess
import sys
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
    """The requests to one service and their results; `start` is the number of the first file."""

    url: str
    images: list[bytes]
    repeat: bool = False
    start: int = 0
    sent: int = 0
    latencies: list[float] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One search."""
        self.sent += 1
        data = self.images[self.sent % len(self.images)]
        if not self.repeat:
            data += b"%016d" % (self.start + self.sent)
        body = HEAD + data + TAIL
        head = (
            f"POST /search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
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
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
        while time.monotonic() < ends:
            await self.ask(reader, writer)
        writer.close()

    async def run(self, connections: int, seconds: float) -> dict[str, float]:
        """Run all connections at once; returns the figures."""
        started, cpu = time.perf_counter(), time.process_time()
        ends = time.monotonic() + seconds
        await asyncio.gather(*(self.keep_asking(ends) for _ in range(connections)))
        seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        ordered = sorted(self.latencies) or [float("inf")]
        return {
            "errors": sum(n for status, n in self.statuses.items() if status != "200"),
            "qps": len(self.latencies) / seconds,
            "p50_ms": 1e3 * ordered[len(ordered) // 2],
            "p99_ms": 1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
            "sent": self.sent,
            "cpu_ms": 1e3 * cpu_s / max(1, self.sent),
        }


def load(
    url: str, images: Path, connections: int, seconds: float, start: int = 0, repeat: bool = False
) -> dict[str, float]:
    """The figures of such a process."""
    words = json.dumps([url, str(images), connections, seconds, start, repeat])
    done = subprocess.run([sys.executable, __file__, words], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    url, folder, connections, seconds, start, repeat = json.loads(sys.argv[1])
    files = [path.read_bytes() for path in sorted(Path(folder).glob("*.jpg"))]
    print(json.dumps(asyncio.run(Load(url, files, repeat, start).run(connections, seconds))))
