"""Rate limits: per key and per address, in this process or in Redis."""

import asyncio
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import structlog

from kinlens.embedder.errors import RateLimitedError
from kinlens.embedder.preprocess import windows
from tests.support.seams import (
    FIRST,
    Account,
    Charge,
    KeyStore,
    LocalCounts,
    RateLimits,
    SharedRedis,
    parse_rates,
)
from tests.support.shops import assert_problem, base64_of, start_shop
from tests.support.waiting import until


def test_a_rate_is_a_bucket_that_is_filled_evenly() -> None:
    """GCRA is the leaky bucket: here by counting drops, a drop for each request."""
    rate, amount, period_s = "5/minute", 5, 60
    now_us = 10**12
    limits = RateLimits({"key": rate}, local=LocalCounts(lambda: now_us * 1_000))
    interval_us = period_s * 10**6 // amount
    random = np.random.default_rng(0)
    drops, allowed = Fraction(amount), 0

    async def main() -> None:
        nonlocal now_us, drops, allowed
        for wait_us in random.exponential(interval_us, 500).astype(int).tolist():
            now_us += wait_us
            drops = min(Fraction(amount), drops + Fraction(wait_us, interval_us))
            fits = drops >= 1
            drops -= fits
            allowed += fits
            verdict = await limits.hit("key", "till")
            assert verdict.allowed == fits
            assert verdict.remaining == int(drops)
            missing_s = (1 - drops % 1) * interval_us / 10**6
            assert verdict.retry_after_s == max(1, math.ceil(missing_s))
        assert 100 < allowed < 500

    asyncio.run(main())


def test_concurrent_requests_cannot_all_owe_units() -> None:
    limits = RateLimits({"key": "10/hour"}, local=LocalCounts(lambda: 10**15))

    async def main() -> None:
        group = [Account(limits, "key", "till") for _ in range(5)]
        for account in group:
            await account.open()
        await group[0].owe(64)
        for account in group[1:]:
            with pytest.raises(RateLimitedError, match="counts as 64"):
                await account.owe(64)

    asyncio.run(main())


def test_callers_who_owe_nothing_are_forgotten() -> None:
    now_ns = 0
    counts = LocalCounts(lambda: now_ns)
    rates = parse_rates("1/second")
    for number in range(20_000):
        now_ns += 10**7
        counts.hit(rates, "address", str(number), FIRST)
    assert len(counts) < 3_000


def test_an_address_above_its_rate_is_refused_until_a_time(start_service, photos) -> None:
    service = start_service(rate_limit_per_address="3/minute")
    found = [service.search(photos[0]) for _ in range(5)]
    assert [answer.status_code for answer in found] == [200, 200, 200, 429, 429]
    assert found[0].headers["ratelimit-limit"] == "3"
    assert [answer.headers["ratelimit-remaining"] for answer in found] == list("21000")
    assert 1 <= int(found[3].headers["retry-after"]) <= 60
    assert "This address" in assert_problem(found[3], 429, "rate-limited")["detail"]
    for path in ("/live", "/ready", "/metrics", "/", "/ui/shared/icon.svg"):
        answer = service.client.get(path)
        assert answer.status_code == 200
        assert "ratelimit-limit" not in answer.headers
    assert service.client.get("/nowhere").status_code == 429


def test_a_batch_counts_as_each_of_its_queries(start_service, photos) -> None:
    service = start_service(rate_limit_per_address="100/day")
    query = {"images": [{"data": base64_of(photos[0])}]}

    def batch() -> Any:
        return service.client.post("/search/batch", json={"queries": [query] * 64})

    first, second, third = batch(), batch(), batch()
    assert [each.status_code for each in (first, second, third)] == [200, 200, 429]
    assert [each.headers["ratelimit-remaining"] for each in (first, second)] == ["36", "0"]
    assert third.headers["retry-after"] == third.headers["ratelimit-reset"]
    owed_s = (2 * 64 - 99) * 864  # until one more fits
    assert owed_s - 60 < int(third.headers["retry-after"]) <= owed_s
    assert_problem(third, 429, "rate-limited")


def test_images_crops_items_and_thousands_of_hits_count(start_service, photos, tmp_path) -> None:
    service = start_service(rate_limit_per_address="1000/day")
    search, image = service.client.post, {"data": base64_of(photos[0])}
    crops = {"data": image["data"], "crops": [[0, 0, 0.5, 1], [0.5, 0, 0.5, 1]]}

    def counted(answer: Any) -> int:
        nonlocal left
        assert answer.status_code in (200, 404), answer.text
        before, left = left, int(answer.headers["ratelimit-remaining"])
        return before - left

    left = 1_000
    assert counted(service.search(photos[0])) == 1
    assert counted(service.search(photos[0], k=1000)) == 1
    assert counted(service.search(photos[0], k=900, offset=101)) == 2
    assert counted(service.search(photos[0], k=10_000)) == 10
    assert counted(search("/search", json={"images": [image, crops]})) == 3
    best = {"images": [image, crops], "combine": "best", "k": 2_000}
    assert counted(search("/search", json=best)) == 6
    auto = {"images": [{**image, "crops": "auto"}]}
    assert counted(search("/search", json=auto)) == len(windows()) == 5
    assert counted(search("/search", json={**auto, "k": 2_000})) == 10
    assert counted(service.search(photos[0], crop="auto")) == 5
    assert counted(search("/search/batch", json={"queries": [auto, auto, {}]})) == 11
    files = [("image", ("a.jpg", data)) for data in photos[:2]]
    assert counted(search("/search/batch", files=files, data={"crop": "auto"})) == 10
    assert counted(service.client.get("/galleries/shop/items/0/similar?k=3000")) == 3
    bad = {"queries": [{"images": [image]}, {"images": [image], "k": -1}, {}]}
    assert counted(search("/search/batch", json=bad)) == 3

    shop, left = start_shop(tmp_path, rate_limit_per_address="1000/day"), 998
    assert counted(shop.put_form({f"{n}.png": data for n, data in enumerate(photos)})) == 12
    shop.close()


def test_a_key_has_its_own_rate_instead_of_its_address(start_service, tmp_path) -> None:
    service = start_service(
        state=tmp_path, rate_limit_per_address="1/minute", rate_limit_per_key="2/minute"
    )
    store = KeyStore(tmp_path / "keys.json")
    one, two = ({"x-api-key": store.create(name, ["search"])} for name in ("one", "two"))
    statuses = [
        service.client.get("/galleries", headers=headers).status_code
        for headers in ({}, {}, one, one, one, two)
    ]
    assert statuses == [200, 429, 200, 200, 429, 200]


def test_behind_a_trusted_proxy_each_client_has_its_own_rate(start_service) -> None:
    def ask(service: Any, forwarded: str) -> int:
        headers = {"x-forwarded-for": forwarded}
        return int(service.client.get("/galleries", headers=headers).status_code)

    trusting = start_service(rate_limit_per_address="1/minute", trusted_proxies=("127.0.0.1",))
    assert [ask(trusting, ip) for ip in ("1.1.1.1", "1.1.1.1", "2.2.2.2")] == [200, 429, 200]
    assert ask(trusting, "3.3.3.3, 2.2.2.2") == 429


def test_trailers_change_neither_address_nor_rate(start_service) -> None:
    service = start_service(rate_limit_per_address="2/minute", trusted_proxies=("127.0.0.1",))
    head = (
        b"POST /search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        b"Content-Type: text/plain\r\nConnection: close\r\nTrailer: X-Forwarded-For\r\n\r\n"
    )
    with structlog.testing.capture_logs() as events:
        answers = [
            service.connect(head + b"1\r\nx\r\n0\r\nX-Forwarded-For: 6.6.6.%d\r\n\r\n" % number)
            .makefile("rb")
            .read()
            for number in range(4)
        ]
    assert [answer.split()[1] for answer in answers] == [b"415", b"415", b"429", b"429"]
    assert {event["client"] for event in events} == {"127.0.0.1"}


@pytest.mark.redis
def test_services_share_a_rate_in_redis_or_count_alone(start_service, redis_server) -> None:
    settings = {"rate_limit_per_address": "6/hour"}
    settings |= {"redis_url": redis_server.url, "redis_timeout_ms": 10_000}
    services = [start_service(**settings) for _ in range(2)]

    def allowed(asked: list[Any]) -> int:
        with ThreadPoolExecutor(8) as clients:
            answers = list(clients.map(lambda service: service.client.get("/galleries"), asked))
        assert {answer.status_code for answer in answers} <= {200, 429}
        return sum(answer.is_success for answer in answers)

    assert allowed(services * 8) == 6
    redis_server.kill()
    assert allowed([services[0]] * 8) == 6
    assert allowed([services[1]] * 8) == 6
    redis_server.start()  # empty, so it counts from 0
    until(lambda: allowed([services[0]]))
    assert allowed(services * 8) == 5


@pytest.mark.redis
def test_redis_and_local_counts_agree(redis_server) -> None:
    rates = {"key": "3/hour;5/hour"}

    async def reported(shared: SharedRedis | None) -> list[tuple[bool, int | None, int]]:
        limits = RateLimits(rates, shared)
        if shared is not None:
            await shared.start()
        verdicts = [await limits.hit("key", "till") for _ in range(5)]
        charges = (FIRST, Charge(1, 0), Charge(7, 0), Charge(1, 0), FIRST)
        verdicts += [await limits.hit("key", "feed", charge) for charge in charges]
        if shared is not None:
            await shared.close()
        assert all(1 <= verdict.retry_after_s <= 3 * 3600 for verdict in verdicts)
        return [(verdict.allowed, verdict.amount, verdict.remaining) for verdict in verdicts]

    shared = SharedRedis(redis_server.url, timeout_s=10.0)
    assert asyncio.run(reported(shared)) == asyncio.run(reported(None))
