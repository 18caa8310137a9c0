"""Processes that listen on one socket: none takes all connections that wait there at once."""

import asyncio
import itertools
import socket
import threading
import time

from fastapi import FastAPI

from service.http.server import Server, config_of, listen
from service.settings import Settings

CONNECTIONS = 16
LIMIT_S = 10


def test_a_server_accepts_a_connection_a_turn_and_lets_the_others_wait() -> None:
    listener = listen("127.0.0.1", 0)
    server = Server(config_of(FastAPI(), Settings()))

    async def counts() -> list[int]:
        """Connections after each turn of the event loop, all of which came before the first."""
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0)
        clients = [socket.create_connection(listener.getsockname()) for _ in range(CONNECTIONS)]
        found, ends = [0], time.monotonic() + LIMIT_S
        while found[-1] < CONNECTIONS and time.monotonic() < ends:
            await asyncio.sleep(0)
            found.append(len(server.server_state.connections))
        for client in clients:
            client.close()
        server.should_exit = True
        await serving
        return found

    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(asyncio.run(counts())), daemon=True)
    thread.start()
    thread.join(3 * LIMIT_S)
    assert found[-1] >= CONNECTIONS
    assert max(after - before for before, after in itertools.pairwise(found)) <= 2
