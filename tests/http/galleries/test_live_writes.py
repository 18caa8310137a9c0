"""Writes while searches go on, and processes that are killed: nothing acknowledged is lost."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import httpx

from tests.support.live_writes import live_writes
from tests.support.servers import WAIT_S
from tests.support.shops import start_shop
from tests.tiny import encoded, picture

ADDS = 120
DELETES = 120
SEARCHES_PER_S = 50
KILLS = 2


def test_adds_and_deletes_under_searches_are_seen_at_once_and_cause_no_error(tmp_path) -> None:
    shop = start_shop(tmp_path)
    kept = {f"kept/{n}": encoded(picture(10_000 + n)) for n in range(20)}
    shop.put(kept)
    live = live_writes(shop.running.url, "shop", ADDS, DELETES, SEARCHES_PER_S)
    assert live.faults == []
    assert live.searches > 0
    assert shop.items()["total"] == len(kept) + ADDS - DELETES
    assert len(shop.pictures()) == len(kept) + ADDS - DELETES
    shop.close()


class Served:
    """A service in a process of its own."""

    def __init__(self, bundle: Path, state: Path) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "service", "--bundle", str(bundle)]
        command += ["--state", str(state), "--port", str(port)]
        self.process = subprocess.Popen(
            command,
            env=os.environ | {"KINLENS_ANONYMOUS_SCOPES": "admin", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S)
        end = time.monotonic() + 60
        while not self._is_live():
            assert self.process.poll() is None, "the service ended"
            assert time.monotonic() < end, "the service never answered"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.client.close()

    def _is_live(self) -> bool:
        try:
            return self.client.get("/live").is_success
        except httpx.TransportError:
            return False


def test_a_service_that_is_killed_loses_no_acknowledged_item_or_picture(
    tmp_path, tiny_bundle
) -> None:
    acknowledged: dict[str, bytes] = {}
    for round_ in range(KILLS):
        served = Served(tiny_bundle.path, tmp_path)
        served.client.post("/galleries", json={"name": "shop"})
        writer = threading.Thread(target=_put_until_killed, args=(served, round_, acknowledged))
        before = len(acknowledged)
        writer.start()
        end = time.monotonic() + WAIT_S
        while len(acknowledged) < before + 5 + 7 * round_:
            assert time.monotonic() < end
            time.sleep(0.002)
        served.kill()
        writer.join(WAIT_S)
    served = Served(tiny_bundle.path, tmp_path)
    try:
        items = {}
        while len(items) < served.client.get("/galleries/shop").json()["size"]:
            query = {"limit": 200, "offset": len(items)}
            page = served.client.get("/galleries/shop/items", params=query).json()
            items |= {item["key"]: item for item in page["items"]}
        assert acknowledged.keys() <= items.keys()
        for key in items:
            number = int(key.rpartition("/")[2])
            assert served.client.get(items[key]["image"]).content == _picture(number), key
    finally:
        served.kill()


def _put_until_killed(served: Served, round_: int, acknowledged: dict[str, bytes]) -> None:
    for number in range(10_000 * round_, 10_000 * (round_ + 1)):
        key, data = f"k/{number}", _picture(number)
        parts = [("image", ("x", data)), ("key", (None, key))]
        try:
            response = served.client.put("/galleries/shop/items", files=parts)
        except (httpx.TransportError, RuntimeError):
            return
        assert response.status_code == 200, response.text
        acknowledged[key] = data


def _picture(number: int) -> bytes:
    return encoded(picture(number, (24, 20)))
