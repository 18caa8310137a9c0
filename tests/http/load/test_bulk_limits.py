"""Each kind of bulk work has a limit of its own, so none blocks another."""

import json
import time
from contextlib import closing

from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.types import Embeddings, Images
from tests.support.shops import base64_of, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

CLIENTS, QUERIES = 12, 32
EMBED_S = 0.04


class SlowEmbedder(FakeEmbedder):
    """Takes its time for each call, and counts the images."""

    count = 0

    def embed(self, images: Images) -> Embeddings:
        self.count += len(images)
        time.sleep(EMBED_S)
        return super().embed(images)


def test_a_put_waits_for_a_few_queries_of_batches(tmp_path) -> None:
    embedder = SlowEmbedder()
    image = encoded(photo(1))
    with closing(start_shop(tmp_path, embedder, request_timeout_ms=60_000)) as shop:
        shop.put({"first": image})
        for client in range(CLIENTS):
            shop.running.connect(batch(image, client * QUERIES))
        until(lambda: shop.running.metric("kinlens_searches_in_flight") == CLIENTS)
        before = embedder.count
        shop.put({"second": encoded(photo(2))})
        embedded = embedder.count - before
        assert shop.running.metric("kinlens_searches_in_flight") == CLIENTS, "the batches had ended"
    assert embedded < CLIENTS * QUERIES / 4


def batch(image: bytes, first: int) -> bytes:
    """A request with QUERIES images that are in no cache."""
    contents = [image + number.to_bytes(4, "big") for number in range(first, first + QUERIES)]
    queries = [{"images": [{"data": base64_of(one)}], "k": 1} for one in contents]
    body = json.dumps({"queries": queries}).encode()
    head = (
        "POST /search/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
