"""Many shops in one service: a bound key reaches nothing of the others, on any route."""

import contextlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from kinlens.embedder.fake import FakeEmbedder
from tests.support.market import start_market
from tests.support.routes import RIGHTS
from tests.support.seams import KeyStore, Limits
from tests.support.shops import Shop, assert_problem, base64_of, sha256, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

MINE, THEIRS, NOWHERE = "shop-7", "zz-rival", "zz-nought"
OWN, HIDDEN, NO_KEY = "own/0", "rival/hidden", "rival/nought"
NO_ID, NO_JOB = 987_654, "0123456789ab"
MARKS = ("rivalvalue", "rivalattribute", "rivalkey", "rivallabel")
"""In everything that others have; no request has any of them."""


@dataclass(frozen=True)
class Aim:
    """What a request is about."""

    gallery: str
    item: int
    key: str
    sha256: str
    job: str
    answer_id: str

    def path(self, template: str) -> str:
        parts = {"name": self.gallery, "item_id": self.item, "key": self.key}
        parts |= {"key:path": self.key, "sha256": self.sha256}
        parts |= {"job_id": self.job}
        return re.sub(r"\{([^}]+)\}", lambda found: str(parts[found[1]]), template)


Body = Callable[[Aim], dict[str, Any]]
IMAGE = encoded(photo(90))


def form(**fields: str) -> dict[str, Any]:
    parts: list[Any] = [("image", ("x.png", IMAGE, "image/png"))]
    return {"files": parts + [(name, (None, text)) for name, text in fields.items()]}


def nothing(_: Aim) -> dict[str, Any]:
    return {}


IMAGES: list[Body] = [nothing, lambda _: {"params": {"size": 160}}]
ASKED: dict[str, list[Body]] = {
    "GET /ready": [nothing, lambda aim: {"params": {"gallery": aim.gallery}}],
    "POST /search": [
        lambda aim: form(gallery=aim.gallery),
        lambda aim: form(k="50"),
        lambda aim: form(filter='rivalname = "x"'),
        lambda aim: form(sort_by="rivalname"),
        lambda aim: form(facets="tenant"),
        lambda aim: form(group_by="tenant", k="50"),
        lambda aim: {"json": {"positives": [OWN], "negatives": [aim.key]}},
    ],
    "POST /search/batch": [
        lambda aim: {
            "json": {
                "queries": [
                    {"images": [{"data": base64_of(IMAGE)}], "gallery": aim.gallery},
                    {"positives": [aim.key]},
                    {"images": [{"data": base64_of(IMAGE)}], "k": 50},
                ]
            }
        }
    ],
    "POST /boxes": [lambda aim: form(gallery=aim.gallery), lambda _: form()],
    "POST /feedback": [
        lambda aim: {"json": {"answer_id": aim.answer_id, "item": aim.key, "action": "clicked"}}
    ],
    "POST /galleries": [lambda aim: {"json": {"name": aim.gallery}}],
    "GET /galleries/{name}/feedback": [nothing, lambda _: {"params": {"format": "json"}}],
    "GET /galleries/{name}/items": [
        nothing,
        lambda _: {"params": {"filter": "tenant = 8"}},
        lambda _: {"params": {"filter": 'rivalname = "x"'}},
        lambda _: {"params": {"sort_by": "tenant", "facets": "tenant"}},
        lambda _: {"params": {"key_prefix": "rival"}},
    ],
    "PUT /galleries/{name}/items": [
        lambda aim: {"json": {"items": [{"key": "new", "data": base64_of(IMAGE)}]}},
        lambda aim: form(key="new", attributes='{"tenant": 8}'),
    ],
    "PATCH /galleries/{name}/items": [
        lambda aim: {"json": {"changes": {aim.key: {"price": 1}}}},
        lambda aim: {"json": {"filter": "tenant = 8", "set": {"price": 1}}},
    ],
    "DELETE /galleries/{name}/items": [lambda aim: {"params": {"key": [aim.key]}}],
    "POST /galleries/{name}/items/delete": [
        lambda aim: {"json": {"keys": [aim.key]}},
        lambda aim: {"json": {"filter": "tenant = 8"}},
        lambda aim: {"json": {"keys": ["no-such-key"], "keep": [aim.key]}},
    ],
    "POST /galleries/{name}/items/restore": [
        lambda aim: {"json": {"keys": [aim.key, "rival/gone"]}}
    ],
    "PATCH /galleries/{name}/items/by-key/{key:path}": [lambda _: {"json": {"price": 1}}],
    "GET /galleries/{name}/items/{item_id}/image": IMAGES,
    "GET /galleries/{name}/items/by-key/{key:path}/image": IMAGES,
    "POST /galleries/{name}/items/{item_id}/explain": [lambda _: form()],
    "POST /galleries/{name}/items/by-key/{key:path}/explain": [lambda _: form()],
    "POST /galleries/{name}/golden": [lambda _: form(label='{"no_match": true}')],
    "POST /galleries/{name}/swap": [
        lambda aim: {"json": {"with": MINE}},
        lambda aim: {"json": {"with": aim.gallery}},
    ],
    "POST /galleries/{name}/rebuild": [lambda _: {"json": {"bundle_id": "f" * 64}}],
    "POST /jobs/train": [lambda aim: {"json": {"job": "shop", "gallery": aim.gallery}}],
    "POST /keys": [lambda aim: {"json": {"name": "mole", "scopes": ["admin"]}}],
}
"""What is asked at each route that needs a body or has options; nothing is sent to the others."""


class Market:
    """A service with two shops, of which one shares its gallery with another tenant."""

    def __init__(self, shop: Shop, store: KeyStore) -> None:
        self.shop, self.client, self.store = shop, shop.client, store
        secret = {"rivalattribute": "rivalvalue", "price": 777}
        for name in (MINE, THEIRS):
            shop.create(name)
        shop.put({OWN: encoded(photo(1)), "own/1": encoded(photo(2))}, MINE, tenant=7, price=5)
        shop.put({"own/2": encoded(photo(3))}, MINE, tenant=7, colour="red")
        hidden = {HIDDEN: encoded(photo(4)), "rivalkey/1": encoded(photo(5))}
        shop.put(hidden, MINE, tenant=8, **secret)
        theirs = {HIDDEN: encoded(photo(6)), "rivalkey/2": encoded(photo(7))}
        shop.put(theirs, THEIRS, tenant=8, **secret)
        shop.put({"rival/gone": encoded(photo(8))}, MINE, tenant=8, **secret)
        self.client.delete(f"/galleries/{MINE}/items", params={"key": "rival/gone"})
        for name in (MINE, THEIRS):
            label = {"label": (None, '{"no_match": true}'), "name": (None, "rivallabel")}
            image = {"image": ("x.png", encoded(photo(9)), "image/png")}
            answer = self.client.post(f"/galleries/{name}/golden", files=label | image)
            answer.raise_for_status()
        job = self.client.post(f"/galleries/{THEIRS}/compact").json()["id"]
        answer = shop.running.search(IMAGE, gallery=THEIRS).json()
        self.answers = {
            name: shop.running.search(IMAGE, gallery=name).json()["answer_id"]
            for name in (MINE, THEIRS)
        }
        reported = {"answer_id": answer["answer_id"], "item": "rivalkey/2", "action": "bought"}
        self.client.post("/feedback", json=reported).raise_for_status()
        sha = sha256(encoded(photo(9)))
        self.foreign = Aim(THEIRS, self.number(THEIRS), HIDDEN, sha, job, self.answers[THEIRS])
        self.hidden = replace(
            self.foreign, gallery=MINE, item=self.number(MINE), answer_id=self.answers[MINE]
        )

        self.given = self.content()

    def number(self, gallery: str) -> int:
        found = self.client.get(f"/galleries/{gallery}/items/by-key/{HIDDEN}").json()
        return int(found["id"])

    def key(self, name: str, scope: Any = "admin", **limits: Any) -> dict[str, str]:
        """The headers of a new key."""
        text = self.store.create(name, [scope], limits=Limits(**limits))
        return {"authorization": f"Bearer {text}"}

    def ask(self, route: str, body: Body, aim: Aim, headers: Mapping[str, str]) -> httpx.Response:
        method, template = route.split(" ")
        path = aim.path(template if "{path:path}" not in template else "/ui/shared/api.js")
        return self.client.request(method, path, headers=dict(headers), **body(aim))

    def content(self) -> Any:
        """All that the others have, as the operator sees it."""
        parts = (f"{THEIRS}/items", f"{THEIRS}/golden", f"{THEIRS}/feedback")
        parts += (f"{MINE}/items?filter=tenant%3D8",)
        shown = [self.client.get(f"/galleries/{part}").text for part in parts]
        return shown, [key.name for key in self.store.list() if key.name == "mole"]


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Market]:
    state = tmp_path_factory.mktemp("state")
    shop = start_shop(state, create=False, feedback="pairs")
    with contextlib.closing(shop):
        yield Market(shop, KeyStore(state / "keys.json"))


@pytest.fixture(scope="module")
def bound(market: Market) -> dict[str, str]:
    """Bound to one gallery, which it sees whole."""
    return market.key("bound", galleries=(MINE,))


@pytest.fixture(scope="module")
def filtered(market: Market) -> dict[str, str]:
    """Bound to some items of one gallery."""
    return market.key("filtered", galleries=(MINE,), filter="tenant = 7")


def comparable(answer: httpx.Response, *names: str) -> Any:
    """An answer without what differs between any two, and without what was asked for."""
    text = answer.text
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(name, "NAME")
    text = re.sub(r'"timings_ms":{[^}]*}', "", text)
    varied = "request_id|cached|answer_id|version|gallery_version|free_memory_mb|queue_depth"
    text = re.sub(rf'"({varied})":[^,}}]*', "", text)
    headers = {name for name in answer.headers if name not in ("date", "content-length")}
    return answer.status_code, text, headers


@pytest.mark.parametrize("route", RIGHTS)
def test_a_foreign_gallery_is_answered_like_a_missing_one(market, bound, route: str) -> None:
    absent = replace(market.foreign, gallery=NOWHERE, job=NO_JOB)
    for body in ASKED.get(route, [nothing]):
        answer = market.ask(route, body, market.foreign, bound)
        other = market.ask(route, body, absent, bound)
        names = (THEIRS, NOWHERE, market.foreign.job, NO_JOB)
        if route != "POST /feedback":  # the answer id names the foreign gallery itself
            assert comparable(answer, *names) == comparable(other, *names)
        if RIGHTS[route].extent == "service":
            assert_problem(answer, 403, "not-allowed")
        elif "{name}" in route:
            assert_problem(answer, 404, "unknown-gallery")
            assert f"Known are: {MINE}." in answer.json()["detail"]
    assert market.content() == market.given


@pytest.mark.parametrize("route", RIGHTS)
def test_an_item_outside_the_filter_is_like_a_missing_one(market, filtered, route: str) -> None:
    absent = replace(market.hidden, item=NO_ID, key=NO_KEY)
    for body in ASKED.get(route, [nothing]):
        answer = market.ask(route, body, market.hidden, filtered)
        other = market.ask(route, body, absent, filtered)
        names = (HIDDEN, NO_KEY, f"item {market.hidden.item};", f"item {NO_ID};")
        names += (f"items/{market.hidden.item}", f"items/{NO_ID}", "rival%2Fhidden")
        assert comparable(answer, *names) == comparable(other, *names)
        assert not [mark for mark in MARKS if mark in answer.text + str(answer.headers)]
        if RIGHTS[route].extent in ("service", "galleries"):
            assert_problem(answer, 403, "not-allowed")
    assert market.content() == market.given


def test_counts_for_a_bound_key_omit_other_items(market, bound, filtered) -> None:
    get = market.client.get
    for headers, size in ((bound, 5), (filtered, 3), ({}, 5)):
        galleries = get("/galleries", headers=headers).json()["galleries"]
        listed = {one["name"]: one["size"] for one in galleries}
        assert listed == {MINE: size} | ({} if headers else {THEIRS: 2})
        detail = get(f"/galleries/{MINE}", headers=headers).json()
        assert detail["size"] == size
        assert get(f"/galleries/{MINE}/items", headers=headers).json()["total"] == size
    attributes = {one["name"]: one for one in detail["attributes"]}
    assert attributes["price"]["maximum"] == 777
    seen = get(f"/galleries/{MINE}", headers=filtered).json()
    attributes = {one["name"]: one for one in seen["attributes"]}
    assert attributes.keys() == {"tenant", "price", "colour"}
    assert attributes["tenant"]["values"] == [{"value": 7, "count": 3}]
    assert attributes["price"]["maximum"] == 5
    assert (seen["index"]["delta"], seen["index"]["segment_items"]) == (0, 0)
    page = get(f"/galleries/{MINE}/items", headers=filtered, params={"facets": "tenant"}).json()
    assert page["facets"]["tenant"]["values"] == [{"value": 7, "count": 3}]
    ready = get("/ready", headers=bound).json()
    assert ready["galleries"].keys() == {MINE}
    assert {check for check in ready["checks"] if "gallery" in check} == {f"gallery {MINE}"}


def test_the_default_gallery_is_the_first_that_the_key_is_bound_to(market) -> None:
    second = market.key("second", "search", galleries=("not-yet", THEIRS))
    answer = market.client.post("/search", headers=second, **form()).json()
    assert answer["gallery"] == THEIRS
    nowhere = market.key("nowhere", "search", galleries=("not-yet",))
    problem = assert_problem(
        market.client.post("/search", headers=nowhere, **form()), 404, "unknown-gallery"
    )
    assert "no gallery yet" in problem["detail"]


def test_a_cached_answer_is_used_only_for_the_same_filter(market) -> None:
    """Each asks first and second: the whole gallery, one tenant, the other one."""
    eight = market.key("eight", "search", galleries=(MINE,), filter="tenant = 8")
    seven = market.key("seven", "search", galleries=(MINE,), filter="tenant = 7")
    for own in (lambda: form(k="41"), lambda: {"json": {"positives": [OWN], "k": 41}}):
        for headers, tenants in ((eight, {8}), (seven, {7}), ({}, {7, 8})) * 2:
            answer = market.client.post("/search", headers=headers, **own())
            if tenants == {8} and "json" in own():
                assert_problem(answer, 404, "unknown-item")
                continue
            hits = answer.json()["hits"]
            assert {hit["attributes"]["tenant"] for hit in hits} == tenants


def test_a_cached_answer_passes_a_full_queue_also_with_a_filter(tmp_path) -> None:
    entered, gate = threading.Semaphore(0), threading.Event()

    class Held(FakeEmbedder):
        is_held = False

        def embed(self, images: Any) -> Any:
            if self.is_held:
                entered.release()
                assert gate.wait(30)
            return super().embed(images)

    settings = {"search_threads": 1, "queue_size": 1}
    with contextlib.closing(start_market(tmp_path, embedder=Held, **settings)) as shop:
        limits = Limits(galleries=("shop",), filter="price < 5")
        text = KeyStore(tmp_path / "keys.json").create("cheap", ["search"], limits=limits)
        whole: dict[str, str] = {}
        cheap = {"authorization": f"Bearer {text}"}

        def ask(headers: dict[str, str], number: int) -> httpx.Response:
            files = {"image": encoded(photo(number))}
            return shop.client.post("/search", headers=headers, files=files)

        first = [ask(headers, 50).raise_for_status() for headers in (whole, cheap)]
        Held.is_held = True
        with ThreadPoolExecutor(4) as clients:
            waiting = [clients.submit(ask, whole, 51)]
            assert entered.acquire(timeout=30)
            for number, headers in enumerate((whole, whole, cheap), 1):
                waiting.append(clients.submit(ask, headers, 52 if number == 1 else 50))
                until(lambda n=number: shop.running.runtime.search_threads.waiting == n)
            refused = ask(whole, 53)
            gate.set()
            answers = [call.result().raise_for_status().json() for call in waiting]
    assert_problem(refused, 503, "overloaded")
    assert [answer["cached"] for answer in answers] == [False, False, True, True]
    assert [answer["hits"] for answer in answers[2:]] == [one.json()["hits"] for one in first]


def test_changes_of_a_key_with_a_filter_stay_within_it(tmp_path) -> None:
    shop = start_shop(tmp_path)
    with contextlib.closing(shop):
        store, client = KeyStore(tmp_path / "keys.json"), shop.client
        text = store.create(
            "seven", ["write"], limits=Limits(galleries=("shop",), filter="tenant = 7")
        )
        seven = {"authorization": f"Bearer {text}"}

        def put(key: str, number: int, attributes: Any) -> httpx.Response:
            item = {"key": key, "data": base64_of(encoded(photo(number)))}
            items = {"items": [item | {"attributes": attributes}]}
            return client.put(f"{shop.url}/items", json=items, headers=seven)

        def change(what: str, **body: Any) -> Any:
            return client.post(f"{shop.url}/items/{what}", json=body, headers=seven).json()

        # Nothing has the attribute yet: the gallery is empty, and takes what fits.
        assert client.get(f"{shop.url}/items", headers=seven).json()["total"] == 0
        assert client.post("/search", headers=seven, **form()).json()["hits"] == []
        for attributes in (None, {}, {"tenant": 8}, {"tenant": "7"}):
            problem = assert_problem(put("a", 1, attributes), 422, "invalid-parameter")
            assert "does not match the filter" in problem["detail"]
        assert put("a", 1, {"tenant": 7}).json()["added"] == 1
        shop.put({"theirs": encoded(photo(2))}, tenant=8, price=1)
        before = shop.items(filter="tenant = 8")["items"]

        # The key of another tenant is taken; the answer does not show its item.
        problem = assert_problem(put("theirs", 3, {"tenant": 7}), 422, "invalid-parameter")
        assert "Choose another one" in problem["detail"]
        assert put("b", 3, {"tenant": 7, "price": 5}).json()["added"] == 1
        assert put("b", 3, None).json()["unchanged"] == 1, "what was stored still fits"

        # No change takes an item out, and no filter takes one in.
        patch = f"{shop.url}/items"
        for new in ({"tenant": 8}, {"tenant": None}):
            for body in ({"changes": {"a": new}}, {"filter": "price = 5", "set": new}):
                answer = client.patch(patch, json=body, headers=seven)
                assert_problem(answer, 422, "invalid-parameter")
        body = {"filter": "tenant = 8 or price > 0", "set": {"price": 9}}
        assert client.patch(patch, json=body, headers=seven).json()["changed"] == 1
        assert change("delete", filter="not tenant = 7")["removed"] == 0
        assert change("delete", keys=["a", "theirs"])["removed"] == 1
        shop.remove("theirs")
        restored = change("restore", keys=["a", "theirs"])["items"]
        assert [item["key"] for item in restored] == ["a"]
        client.post(f"{shop.url}/items/restore", json={"keys": ["theirs"]}).raise_for_status()
        after = shop.items(filter="tenant = 8")["items"]
        assert [item["attributes"] for item in after] == [item["attributes"] for item in before]
        assert sorted(item["key"] for item in shop.items()["items"]) == ["a", "b", "theirs"]

        # What scales by all items needs limits of its own.
        boosted = client.post("/search", headers=seven, **form(boost="price:0.1"))
        assert "FROM:TO" in assert_problem(boosted, 422, "invalid-parameter")["detail"]
        boosted = client.post("/search", headers=seven, **form(boost="price:0.1:0:10"))
        assert boosted.status_code == 200


def test_a_bound_admin_manages_only_its_own_galleries(market) -> None:
    admin = market.key("admin-of-two", galleries=(MINE, "shop-7b"))
    for name in (THEIRS, NOWHERE):  # whether it exists or not
        refused = market.client.post("/galleries", json={"name": name}, headers=admin)
        assert "not bound" in assert_problem(refused, 403, "not-allowed")["detail"]
    swaps = [
        market.client.post(f"/galleries/{MINE}/swap", json={"with": name}, headers=admin)
        for name in (THEIRS, NOWHERE)
    ]
    assert comparable(swaps[0], THEIRS) == comparable(swaps[1], NOWHERE)
    assert_problem(swaps[0], 404, "unknown-gallery")
    made = market.client.post("/galleries", json={"name": "shop-7b"}, headers=admin)
    assert made.status_code == 201
    assert market.client.delete("/galleries/shop-7b", headers=admin).status_code == 204
    job = market.client.post(f"/galleries/{MINE}/compact", headers=admin).json()["id"]
    listed = market.client.get("/jobs", headers=admin).json()["jobs"]
    assert [one["id"] for one in listed] == [job]
    assert len(market.client.get("/jobs").json()["jobs"]) == 2
    until(lambda: market.client.get(f"/jobs/{job}").json()["state"] == "succeeded")
    assert market.client.get(f"/jobs/{job}/log", headers=admin).json()["text"]
    options = market.client.get("/jobs/options", headers=admin).json()
    assert "bound to galleries" in options["no_training"]
    assert not options["data"] + options["weights"] + options["training_jobs"]


def test_each_caller_can_ask_what_it_may_do(market, bound, filtered, start_service) -> None:
    def ask(headers: dict[str, str]) -> Any:
        return market.client.get("/access", headers=headers).json()

    every = ["search", "write", "admin", "embed"]
    assert ask({}) == {"key": None, "scopes": every, "galleries": None, "filter": None}
    assert ask(bound) == {"key": "bound", "scopes": every, "galleries": [MINE], "filter": None}
    assert ask(filtered)["filter"] == "tenant = 7"
    assert ask(market.key("staff", "write"))["scopes"] == ["search", "write"]
    wrong = {"authorization": "Bearer kl_0_wrong"}
    assert_problem(market.client.get("/access", headers=wrong), 401, "key-needed")
    closed = start_service(anonymous_scopes=())
    assert_problem(closed.client.get("/access"), 403, "not-allowed")


def test_a_rate_and_the_units_of_a_day_are_of_the_key(market) -> None:
    slow = market.key("slow", "search", rate="3/minute")
    daily = market.key("daily", "search", rate="", daily_units=4)
    for headers, limit in ((slow, 3), (daily, 4)):
        for left in range(limit - 1, -1, -1):
            answer = market.client.post("/search", headers=headers, **form())
            assert answer.status_code == 200
            assert answer.headers["ratelimit-limit"] == str(limit)
            assert answer.headers["ratelimit-remaining"] == str(left)
        answer = market.client.post("/search", headers=headers, **form())
        assert_problem(answer, 429, "rate-limited")
        assert int(answer.headers["retry-after"]) > 1
    assert int(answer.headers["retry-after"]) in range(21_000, 21_601), "a quarter of a day"


def test_metrics_count_requests_and_units_by_the_name_of_the_key(market) -> None:
    counted = market.key("counted", "search", rate="7/day")
    queries = {"queries": [{"images": [{"data": base64_of(IMAGE)}]}] * 3}
    market.client.post("/search/batch", json=queries, headers=counted).raise_for_status()
    market.client.get("/galleries", headers={"authorization": "Bearer kl_0_wrong"})
    for _ in range(9):
        market.client.get("/galleries", headers=counted)  # some are refused, and owe nothing

    def lines() -> list[str]:
        return market.client.get("/metrics").text.splitlines()

    until(lambda: 'kinlens_key_requests_total{key="counted"} 10.0' in lines())
    assert 'kinlens_key_units_total{key="counted"} 7.0' in lines()
    names = {key.name for key in market.store.list()}
    labels = {found[1] for line in lines() if (found := re.search(r'\{key="([^"]*)"', line))}
    assert labels <= names, "no other text becomes a label"


def test_keys_are_made_listed_rotated_and_revoked_over_http(tmp_path) -> None:
    shop = start_shop(tmp_path, trusted_proxies=("127.0.0.1",))
    addresses = itertools.count(1)  # wrong keys are limited by address
    with contextlib.closing(shop):
        client, store = shop.client, KeyStore(tmp_path / "keys.json")
        wanted = {"name": "till", "scopes": ["search"], "galleries": ["shop"]}
        wanted |= {"rate": "9000/second", "filter": "tenant = 7", "expires_days": 3}
        made = client.post("/keys", json=wanted)
        assert made.status_code == 201
        assert made.headers["cache-control"] == "no-store"
        text, key = made.json()["text"], made.json()["key"]
        assert key["galleries"] == ["shop"]
        assert (key["filter"], key["state"], key["old_until"]) == ("tenant = 7", "active", None)

        def opens(secret: str) -> bool:
            sent = {"authorization": f"Bearer {secret}"}
            sent["x-forwarded-for"] = f"203.0.{next(addresses) // 250}.{next(addresses) % 250}"
            return bool(client.get("/galleries", headers=sent).status_code == 200)

        assert opens(text)
        rotated = client.post("/keys/till/rotate").json()
        assert opens(text)
        assert opens(rotated["text"])
        assert rotated["key"]["old_until"] is not None
        assert rotated["key"]["id"] == key["id"], "counters and log lines go on"
        third = client.post("/keys/till/rotate", json={"overlap_hours": 1}).json()["text"]
        until(lambda: not opens(text))  # two at most: the first one ends now
        assert opens(rotated["text"])
        assert opens(third)
        listed = client.get("/keys")
        assert [one["name"] for one in listed.json()["keys"]] == ["till"]
        for secret in (text, rotated["text"], third):
            assert secret.split("_")[2] not in listed.text + store.path.read_text()
        assert client.delete("/keys/till").json()["state"] == "revoked"
        until(lambda: not opens(third))
        assert_problem(client.delete("/keys/till"), 404, "unknown-key")
        assert_problem(client.post("/keys/till/rotate"), 404, "unknown-key")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scopes": []}, "scopes"),
        ({"galleries": ["a/b"]}, "a/b"),
        ({"filter": "tenant = 7"}, "galleries"),
        ({"galleries": ["shop"], "filter": "tenant ="}, "filter"),
        ({"rate": "often"}, "600/minute"),
        ({"daily_units": 0}, "daily_units"),
        ({"expires_days": 0}, "expires_days"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_an_invalid_key_is_refused_with_the_reason(market, wrong: Any, message: str) -> None:
    answer = market.client.post("/keys", json={"name": "wrong", "scopes": ["search"]} | wrong)
    assert_problem(answer, 422, "invalid-parameter")
    assert message in json.dumps(answer.json())
    assert "wrong" not in {key.name for key in market.store.list()}


def test_no_name_outside_the_binding_is_searched_on_disk(market, bound, monkeypatch) -> None:
    """That takes longer for a name that is not served, so it would tell which names are."""
    registry = market.shop.running.runtime.registry
    looked: list[str | None] = []
    look = registry.read_from_disk

    async def seen(limit_s: float, name: str, **more: Any) -> None:
        looked.append(name)
        await look(limit_s, name, **more)

    monkeypatch.setattr(registry, "read_from_disk", seen)
    for headers in (bound, {}):
        for name in (THEIRS, NOWHERE):
            market.client.get(f"/galleries/{name}/items", headers=headers)
    assert looked == [NOWHERE], "by the caller who is not bound"
