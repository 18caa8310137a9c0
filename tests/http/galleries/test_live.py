"""Services on a gallery that another process changes, and services that follow a published one."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.galleries import Follower
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.service.settings import Settings
from tests.support.own_process import ROOT
from tests.support.seams import publish
from tests.support.servers import DEFAULTS, Running, create_app, run
from tests.support.shops import Shop, assert_problem, base64_of, start_shop
from tests.support.waiting import repeating, until
from tests.tiny import encoded, photo

ATTRIBUTES = {"stock": 1, "price": 1.0, "sale": True, "colour": "grün"}
WRITER = f"""
import hashlib, sys
from pathlib import Path
from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.types import Entry
from kinlens.indexer.gallery import Gallery

embedder, gallery = FakeEmbedder(), Gallery.open("shop")
for line in sys.stdin:
    verb, name = line.rstrip().split("|")
    if verb == "add":
        data = Path("images", name).read_bytes()
        vector = embedder.embed(embedder.preprocess(data)[None])[0]
        digest = hashlib.sha256(data).hexdigest()
        gallery.add([Entry(name, vector, digest, {ATTRIBUTES!r}, name, "PNG")])
    elif verb == "remove":
        gallery.remove([name])
    else:
        gallery.compact(wait=True)
    print("done", flush=True)
gallery.close()
"""


@pytest.fixture
def live(tmp_path: Path, photos: list[bytes], closes: Callable[[Shop], Shop]) -> Shop:
    """A gallery of images 0 .. 7 of the twelve that lie in its folder of images."""
    root = tmp_path / "images"
    root.mkdir()
    for number, data in enumerate(photos):
        if number == 8:
            build_gallery(folder_source(root), FakeEmbedder(), tmp_path / "shop")
        (root / f"{number}.png").write_bytes(data)
    given = (f"shop={tmp_path / 'shop'}",)
    return closes(start_shop(tmp_path / "state", create=False, galleries=given))


@pytest.fixture
def write(live: Shop, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Change the gallery by another process, until the change is acknowledged."""
    with subprocess.Popen(
        [sys.executable, "-c", WRITER],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:

        def do(verb: str, name: str = "") -> None:
            process.stdin.write(f"{verb}|{name}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"

        yield do
        process.communicate()
    assert process.returncode == 0


def test_answers_links_and_metrics_follow_each_write(live, write, photos) -> None:
    [kept] = live.search(photos[5], k=1).json()["hits"]
    before, cached = (live.search(photos[9], k=1).json() for _ in range(2))
    assert (before["hits"][0]["key"] != "9.png", cached["cached"]) == (True, True)
    write("add", "9.png")
    after, again = (live.search(photos[9], k=1).json() for _ in range(2))
    assert (after["cached"], again["cached"]) == (False, True)
    assert after["gallery_version"] != before["gallery_version"]
    [hit] = after["hits"]
    assert again["hits"] == [hit]
    # by their text, since 1 and True are equal
    assert sorted(map(repr, hit["attributes"].items())) == sorted(map(repr, ATTRIBUTES.items()))
    image = live.client.get(hit["image"])
    assert image.content == photos[9]

    write("remove", "9.png")
    write("remove", "0.png")
    assert "9.png" not in [hit["key"] for hit in live.search(photos[9]).json()["hits"]]
    for headers in ({}, {"if-none-match": image.headers["etag"]}):
        assert live.client.get(hit["image"], headers=headers).status_code == 404
    described = live.gallery()
    assert described["size"] == 7
    assert live.client.get("/ready").json()["galleries"] == {"shop": described["version"]}
    assert 'kinlens_gallery_items{gallery="shop"} 7.0' in live.client.get("/metrics").text
    write("compact")
    assert live.client.get(kept["image"]).content == photos[5]


def test_no_answer_lags_behind_an_acknowledged_write(live, write, photos) -> None:
    steps = 0  # odd while a change is running; 0, 4, 8: without the item, 2, 6, 10: with it
    looks: set[int] = set()

    def look(_: int) -> None:
        before = steps
        is_found = "9.png" in [hit["key"] for hit in live.search(photos[9]).json()["hits"]]
        if before == steps and before % 2 == 0:
            assert is_found == (before % 4 == 2), f"step {before}"
            looks.add(before)

    with repeating(look, 3):
        for number in range(20):
            steps += 1
            write("remove" if number % 2 else "add", "9.png")
            steps += 1
            until(lambda now=steps: now in looks)
    assert set(range(2, 41, 2)) <= looks


FOLLOWERS = 2
ITEMS = 8


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A gallery of eight images for the fake model."""
    (tmp_path / "pictures").mkdir()
    for number in range(ITEMS):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(encoded(photo(number)))
    build_gallery(folder_source(tmp_path / "pictures"), FakeEmbedder(), tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/published"


Follow = Callable[..., Running]


@pytest.fixture
def follow(address: str, tmp_path: Path, closes: Callable[[Running], Running]) -> Follow:
    """Start a service that follows the address, with a folder of its own for the copy."""

    def start(name: str = "copies", **settings: Any) -> Running:
        given: dict[str, Any] = {"galleries": f"shop={address}", "replica_folder": tmp_path / name}
        given |= {"follow": "100ms"}
        return closes(run(create_app(Settings(**DEFAULTS | given | settings), FakeEmbedder())))

    return start


def version(url: str) -> str:
    return str(httpx.get(f"{url}/galleries/shop").json()["version"])


def test_no_answer_of_a_follower_mixes_two_snapshots(shop, address, follow) -> None:
    with closing(Gallery.open(shop)) as writer:
        writer.update({f"{n}.png": {"round": 0} for n in range(ITEMS)})
        publish(shop, address)
        services = [follow(f"host{number}") for number in range(FOLLOWERS)]
        seen: list[set[int]] = [set() for _ in services]

        def ask(number: int) -> None:
            answer = services[number].search(encoded(photo(1)), k=50)
            assert answer.status_code == 200, answer.text
            rounds = {hit["attributes"]["round"] for hit in answer.json()["hits"]}
            assert len(rounds) == 1
            seen[number] |= rounds

        with repeating(ask, FOLLOWERS):
            for number in range(1, 5):
                writer.update({f"{n}.png": {"round": number} for n in range(ITEMS)})
                if number % 2:
                    writer.compact(wait=True)
                publish(shop, address)
                until(lambda: all(version(service.url) == writer.version for service in services))
    assert all(len(rounds) > 2 and 4 in rounds for rounds in seen)


def test_links_and_images_are_valid_on_every_host(shop, address, follow, tmp_path) -> None:
    uploaded = encoded(photo(50))
    made = start_shop(tmp_path / "state", create=False, galleries=(f"shop={shop}",))
    with closing(writer := made.running):
        made.put({"new": uploaded})
        publish(shop, address, with_images=True)
        (tmp_path / "pictures").rename(tmp_path / "elsewhere")
        follower = follow()
        [hit] = writer.search(uploaded, k=1).json()["hits"]
        assert hit["key"] == "new"
        assert follower.search(uploaded, k=1).json()["hits"] == [hit]
        assert follower.client.get(hit["image"]).content == uploaded
        found = follower.search(encoded(photo(3)), k=1).json()["hits"][0]
        assert follower.client.get(found["image"]).content == encoded(photo(3))
        assert follower.client.get(f"{found['image']}&size=160").status_code == 200


def test_an_image_that_is_kept_later_reaches_followers(shop, address, follow, tmp_path) -> None:
    image = encoded(photo(50))
    made = start_shop(tmp_path / "state", create=False, galleries=(f"shop={shop}",))
    with closing(made.running):
        put_json(made, image, keep=False)
        publish(shop, address, with_images=True)
        follower = follow()
        put_json(made, image, keep=True)
        assert publish(shop, address).pictures == 1
        until(lambda: version(follower.url) == made.gallery()["version"])
        item = follower.client.get("/galleries/shop/items/by-key/new").json()
        assert follower.client.get(item["image"]).content == image


def test_an_image_that_is_not_kept_any_more_is_shown_nowhere(
    shop, address, follow, tmp_path
) -> None:
    image = encoded(photo(50))
    made = start_shop(tmp_path / "state", create=False, galleries=(f"shop={shop}",))
    with closing(made.running):
        put_json(made, image, keep=True)
        publish(shop, address, with_images=True)
        follower = follow()
        clients, tags = (made.client, follower.client), []
        link = made.link("new")
        for client in clients:
            for url in (link, f"{link}&size=160"):
                answer = client.get(url)
                assert answer.status_code == 200, answer.text
                tags.append(answer.headers["etag"])
        put_json(made, image, keep=False)
        publish(shop, address)
        until(lambda: version(follower.url) == made.gallery()["version"])
        known = {"If-None-Match": ", ".join(tags)}
        for client in (*clients, follow("another").client):
            for url in (link, f"{link}&size=160"):
                for headers in ({}, known):
                    answer = client.get(url, headers=headers)
                    assert "not kept" in assert_problem(answer, 404, "unknown-item")["detail"]
        report = publish(shop, f"{address}-later", with_images=True)
        assert (report.pictures, report.missing_pictures) == (ITEMS, 1)


def put_json(shop: Shop, image: bytes, keep: bool) -> None:
    """Put the item `new`."""
    sent = {"keep": keep, "items": [{"key": "new", "data": base64_of(image)}]}
    shop.client.put(f"{shop.url}/items", json=sent).raise_for_status()


def test_changes_of_a_copy_are_refused(shop, address, follow, tmp_path) -> None:
    publish(shop, address)
    service = follow(state=tmp_path / "state", anonymous_scopes=("admin",))
    gallery, client = "/galleries/shop", service.client
    changes = (
        Shop(service, tmp_path).put_form({"a": encoded(photo(60))}),
        client.patch(f"{gallery}/items", json={"changes": {"1.png": {"a": 1}}}),
        client.post(f"{gallery}/golden/run"),
    )
    for answer in changes:
        assert answer.status_code == 409, answer.text
        assert address in answer.json()["detail"], "the place to change it"
    assert client.delete(gallery).status_code == 409
    assert version(service.url) == Gallery.open(shop).version


def test_without_its_store_the_copy_is_served_and_ages(shop, address, follow, tmp_path) -> None:
    with pytest.raises(Exception, match="No snapshot at"):
        follow()
    publish(shop, address)
    service = follow()
    service.close()
    published = tmp_path / "published"
    published.rename(tmp_path / "away")
    again = follow()  # with the copy of the first start
    assert again.search(encoded(photo(2)), k=1).json()["hits"][0]["key"] == "2.png"
    text = again.client.get("/metrics").text
    [line] = [x for x in text.splitlines() if x.startswith("kinlens_replica_checked_seconds{")]
    assert 0 < float(line.split()[-1]) < 100
    (tmp_path / "away").rename(published)
    with closing(Gallery.open(shop)) as writer:
        writer.remove(["2.png"])
        publish(shop, address)
        until(lambda: version(again.url) == writer.version)


def test_each_fault_of_a_store_is_logged_once_until_it_is_cured(
    shop, address, follow, monkeypatch
) -> None:
    publish(shop, address)
    service = follow()
    faults: list[Exception] = []
    update = Follower.update

    def fail(follower: Follower, **options: Any) -> bool:
        for fault in faults[:1]:
            if len(faults) > 1:
                faults.remove(fault)
            raise fault
        return update(follower, **options)

    def logged() -> list[str]:
        return [each["detail"] for each in events if each["event"] == "snapshot not followed"]

    monkeypatch.setattr(Follower, "update", fail)
    with structlog.testing.capture_logs() as events:
        for text in ("the store refuses the key", "the disk is full"):
            faults[:] = [OSError(text)]
            until(lambda text=text: logged()[-1:] == [text])
        assert len(logged()) == 2
        faults[:] = [OSError(f"file tmp-{number} is missing") for number in range(20)]
        until(lambda: len(faults) == 1)
        assert len(logged()) < 10
        faults.clear()
        until(lambda: any(each["event"] == "snapshots can be read again" for each in events))
        faults[:] = [OSError("the disk is full")]
        until(lambda: logged()[-1] == "the disk is full")
    assert service.search(encoded(photo(2)), k=1).status_code == 200
