"""Rates: per key and per address, in this process or in Redis, and never a reason to wait."""

import asyncio
import math
import subprocess
import sys
from collections.abc import Callable, Coroutine
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.access.rates import RateVerdict, parse_rates
from tests.support.seams import KeyStore, LocalCounts, RateLimits, SharedCounts

ROOT = Path(__file__).parents[3]
OTHER_PROCESS = """
import asyncio, sys
from service.access.rates import RateLimits, SharedCounts

async def main(url):
    shared = SharedCounts(url, timeout_s=10.0, retry_s=0.1, connections=2)
    rates = RateLimits({"key": "10/hour"}, shared)
    verdicts = [await rates.hit("key", "till") for _ in range(6)]
    print(sum(verdict.allowed for verdict in verdicts))
    await rates.close()

asyncio.run(main(sys.argv[1]))
"""


def with_redis(
    url: str, rate: str, use: Callable[[RateLimits], Coroutine[Any, Any, Any]], **options: Any
) -> Any:
    """Run `use` with limits that count in Redis."""

    async def main() -> Any:
        options_ = {"timeout_s": 10.0, "retry_s": 0.1, "connections": 4} | options
        rates = RateLimits({"key": rate}, SharedCounts(url, **options_))
        try:
            return await use(rates)
        finally:
            await rates.close()

    return asyncio.run(main())


async def hits(rates: RateLimits, count: int, caller: str = "till") -> list[RateVerdict]:
    return [await rates.hit("key", caller) for _ in range(count)]


def test_what_is_above_the_rate_is_refused_and_each_caller_counts_alone() -> None:
    async def main() -> None:
        rates = RateLimits({"key": "5/minute"})
        verdicts = await hits(rates, 7)
        assert [verdict.allowed for verdict in verdicts] == [True] * 5 + [False] * 2
        assert [verdict.remaining for verdict in verdicts] == [4, 3, 2, 1, 0, 0, 0]
        assert all(1 <= verdict.retry_after_s <= 60 for verdict in verdicts)
        assert (await hits(rates, 1, "other"))[0].allowed
        assert (await rates.hit("address", "till")).amount is None

    asyncio.run(main())


@pytest.mark.parametrize(("rate", "amount", "period_s"), [("5/minute", 5, 60), ("4/second", 4, 1)])
def test_a_caller_has_what_a_full_bucket_gives_that_is_filled_evenly(
    rate: str, amount: int, period_s: int
) -> None:
    """GCRA is the leaky bucket: here by counting drops, a drop for each request."""
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


def test_callers_who_owe_nothing_are_forgotten() -> None:
    now_ns = 0
    counts = LocalCounts(lambda: now_ns)
    rates = parse_rates("1/second")
    for number in range(20_000):
        now_ns += 10**7
        counts.hit(rates, "address", str(number))
    assert len(counts) < 3_000


@pytest.mark.parametrize("text", ["600", "many", "0/minute", "-1/minute", "5/fortnight", "5/s;x"])
def test_a_text_that_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="600/minute"):
        parse_rates(text)
    assert parse_rates(" ") == ()


@pytest.mark.redis
def test_processes_that_share_redis_share_the_rate(redis_server) -> None:
    command = [sys.executable, "-c", OTHER_PROCESS, redis_server.url]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    allowed = [int(process.communicate(timeout=60)[0]) for process in processes]
    assert sum(allowed) == 10
    verdicts = with_redis(redis_server.url, "10/hour", lambda rates: hits(rates, 1))
    assert not verdicts[0].allowed


@pytest.mark.redis
def test_without_redis_each_process_counts_for_itself_and_comes_back(redis_server) -> None:
    async def use(rates: RateLimits) -> None:
        assert [v.allowed for v in await hits(rates, 3)] == [True, True, True]
        redis_server.kill()
        assert [v.allowed for v in await hits(rates, 4)] == [True, True, True, False]
        redis_server.start()
        await asyncio.sleep(0.2)
        assert (await hits(rates, 1))[0].allowed  # an empty Redis counts anew

    with_redis(redis_server.url, "3/hour", use)


def test_a_service_refuses_an_address_above_its_rate_and_says_when_to_come_back(
    start_service, pictures
) -> None:
    service = start_service(rate_limit_per_address="3/minute")
    found = [service.search(pictures[0]) for _ in range(5)]
    assert [answer.status_code for answer in found] == [200, 200, 200, 429, 429]
    assert found[0].headers["ratelimit-limit"] == "3"
    assert [answer.headers["ratelimit-remaining"] for answer in found] == list("21000")
    assert 1 <= int(found[3].headers["retry-after"]) <= 60
    problem = found[3].json()
    assert problem["type"] == "urn:kinlens:problem:rate-limited"
    assert "this address" in problem["detail"]
    for path in ("/live", "/ready", "/metrics", "/", "/ui/shared/icon.svg"):
        answer = service.client.get(path)
        assert answer.status_code == 200
        assert "ratelimit-limit" not in answer.headers
    assert service.client.get("/nowhere").status_code == 429


def test_a_key_has_a_rate_of_its_own_and_not_that_of_its_address(start_service, tmp_path) -> None:
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


def test_services_that_share_redis_share_the_rate_of_an_address(
    start_service, redis_server
) -> None:
    settings = {"rate_limit_per_address": "4/hour", "redis_url": redis_server.url}
    first, second = (start_service(**settings, redis_timeout_ms=10_000) for _ in range(2))
    statuses = [
        service.client.get("/galleries").status_code
        for service in (first, second, first, second, first, second)
    ]
    assert statuses == [200] * 4 + [429] * 2


@pytest.mark.redis
def test_counting_in_redis_says_what_counting_here_says(redis_server) -> None:
    rates = "3/hour;5/hour"

    async def here() -> list[RateVerdict]:
        return await hits(RateLimits({"key": rates}), 5)

    there = with_redis(redis_server.url, rates, lambda limits: hits(limits, 5))
    for one, other in zip(there, asyncio.run(here()), strict=True):
        assert (one.allowed, one.amount, one.remaining) == (
            other.allowed,
            other.amount,
            other.remaining,
        )
        assert 1 <= one.retry_after_s <= 3600
