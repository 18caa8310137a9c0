"""Processes that listen on one socket: each gets its part of the connections."""

import asyncio
import socket
import threading

from fastapi import FastAPI

from service.http.server import Server, config_of, listen
from service.settings import Settings
from tests.support.waiting import until

CONNECTIONS = 16


def test_connections_are_shared_and_wait_in_a_queue_of_full_length() -> None:
    first = listen("127.0.0.1", 0)
    listeners = [first, first.dup()]
    servers = [Server(config_of(FastAPI(), Settings())) for _ in listeners]
    threads = [
        threading.Thread(target=asyncio.run, args=(server.serve([listener]),), daemon=True)
        for server, listener in zip(servers, listeners, strict=True)
    ]
    for thread in threads:
        thread.start()
    until(lambda: all(server.started for server in servers))
    clients = [socket.create_connection(first.getsockname()) for _ in range(CONNECTIONS)]
    counts = [server.server_state.connections for server in servers]
    until(lambda: sum(map(len, counts)) == CONNECTIONS)
    assert min(map(len, counts)) >= 2, [len(each) for each in counts]
    for client in clients:
        client.close()
    for server, thread in zip(servers, threads, strict=True):
        server.should_exit = True
        thread.join()
