"""A server that answers from memory: what the load itself costs, without anything that searches.

python benchmarks/peers/bare_server.py PORT BYTES
"""

import asyncio
import sys

HEAD_END = b"\r\n\r\n"


class Answering(asyncio.Protocol):
    """Answers every request with the same bytes once its body is complete."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._got = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        while (end := self._got.find(HEAD_END)) >= 0:
            head = bytes(self._got[:end]).lower()
            length = 0
            if b"content-length:" in head:
                length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
            total = end + len(HEAD_END) + length
            if len(self._got) < total:
                return
            del self._got[:total]
            self._transport.write(self._answer)  # type: ignore[attr-defined]


async def main(port: int, size: int) -> None:
    body = b"x" * size
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size + body
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Answering(answer), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
