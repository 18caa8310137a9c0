"""Services that follow a published gallery answer as the one that publishes it."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.service.__main__ import app
from kinlens.service.app import create_app
from kinlens.service.commands import options
from kinlens.service.settings import Settings
from tests.support.own_process import ROOT, own_process
from tests.support.seams import publish
from tests.support.servers import DEFAULTS, Running, run
from tests.support.waiting import until
from tests.tiny import encoded, photo

FOLLOWERS = 3
ITEMS = 8


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A gallery of eight images for the fake model."""
    source = tmp_path / "pictures"
    source.mkdir()
    for number in range(ITEMS):
        (source / f"{number}.png").write_bytes(encoded(photo(number)))
    build_gallery(folder_source(source), FakeEmbedder(), tmp_path / "shop")
    return tmp_path / "shop"


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/published"


Follow = Callable[..., Running]


@pytest.fixture
def follow(address: str, tmp_path: Path) -> Iterator[Follow]:
    """Start a service that follows the address, with a folder of its own for the copy."""
    with ExitStack() as stack:

        def start(name: str = "copies", **settings: Any) -> Running:
            given: dict[str, Any] = {
                "galleries": f"shop={address}",
                "follow": "100ms",
                "replica_folder": tmp_path / name,
                "reload_interval_ms": 100,
            }
            app = create_app(Settings(**DEFAULTS | given | settings), FakeEmbedder())
            service = run(app)
            stack.callback(service.close)
            return service

        yield start


def put(service: Running, key: str, image: bytes) -> httpx.Response:
    """Upload one item."""
    form: list[Any] = [("image", ("x.png", image)), ("key", (None, key))]
    return service.client.put("/galleries/shop/items", files=form)


def version(service: Running) -> str:
    return str(service.client.get("/galleries/shop").json()["version"])


def test_three_followers_move_on_while_they_answer_and_no_answer_mixes_two_snapshots(
    shop: Path, address: str, follow: Follow
) -> None:
    with closing(Gallery.open(shop)) as writer:
        writer.update({f"{n}.png": {"round": 0} for n in range(ITEMS)})
        publish(shop, address)
        services = [follow(f"host{number}") for number in range(FOLLOWERS)]
        seen: list[set[int]] = [set() for _ in services]
        faults: list[object] = []
        over = threading.Event()

        def ask(number: int) -> None:
            while not over.is_set():
                answer = services[number].search(encoded(photo(1)), k=50)
                if answer.status_code != 200:
                    return faults.append(answer.text)
                rounds = {hit["attributes"]["round"] for hit in answer.json()["hits"]}
                if len(rounds) != 1:
                    return faults.append(rounds)
                seen[number] |= rounds
            return None

        threads = [threading.Thread(target=ask, args=(n,)) for n in range(FOLLOWERS)]
        for thread in threads:
            thread.start()
        for number in range(1, 5):
            writer.update({f"{n}.png": {"round": number} for n in range(ITEMS)})
            if number % 2:
                writer.compact()
            publish(shop, address)
            until(lambda: all(version(service) == writer.version for service in services))
        over.set()
        for thread in threads:
            thread.join()
    assert not faults
    assert all(len(rounds) > 2 and 4 in rounds for rounds in seen)


def test_links_and_images_of_one_host_hold_on_every_other(
    shop: Path, address: str, follow: Follow, tmp_path: Path
) -> None:
    uploaded = encoded(photo(50))
    writer = run(
        create_app(
            Settings(
                **DEFAULTS,
                galleries=(f"shop={shop}",),
                state=tmp_path / "state",
                anonymous_scopes=("admin",),
            ),
            FakeEmbedder(),
        )
    )
    with closing(writer):
        put(writer, "new", uploaded).raise_for_status()
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


@pytest.mark.parametrize(
    "request_of", ["put", "patch", "delete", "delete_item", "gallery", "job", "golden"]
)
def test_changes_of_a_copy_are_refused_with_the_place_to_make_them(
    shop: Path, address: str, follow: Follow, tmp_path: Path, request_of: str
) -> None:
    publish(shop, address)
    service = follow(state=tmp_path / "state", anonymous_scopes=("admin",))
    items = "/galleries/shop/items"
    ask: dict[str, Callable[[], httpx.Response]] = {
        "put": lambda: put(service, "a", encoded(photo(60))),
        "patch": lambda: service.client.patch(items, json={"changes": {"1.png": {"a": 1}}}),
        "delete": lambda: service.client.post(f"{items}/delete", json={"keys": ["1.png"]}),
        "delete_item": lambda: service.client.delete(f"{items}/1"),
        "job": lambda: service.client.post("/galleries/shop/compact"),
        "golden": lambda: service.client.post("/galleries/shop/golden/run"),
        "gallery": lambda: service.client.delete("/galleries/shop"),
    }
    answer = ask[request_of]()
    assert answer.status_code == 409, answer.text
    assert address in answer.json()["detail"] or request_of == "gallery"
    assert version(service) == Gallery.open(shop).version


def test_a_store_that_is_away_leaves_the_copy_and_its_age_is_a_metric(
    shop: Path, address: str, follow: Follow, tmp_path: Path
) -> None:
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
        until(lambda: version(again) == writer.version)


def test_a_follower_that_is_killed_goes_on_at_its_next_start(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    source = tmp_path / "pictures"
    source.mkdir()
    for number in range(ITEMS):
        (source / f"{number}.png").write_bytes(encoded(photo(number)))
    build_gallery(folder_source(source), OnnxEmbedder.open(tiny_bundle), tmp_path / "shop")
    publish(tmp_path / "shop", f"file://{tmp_path}/published")
    settings: dict[str, Any] = {
        "bundle": tiny_bundle.path,
        "galleries": f"shop=file://{tmp_path}/published",
        "follow": "100ms",
        "state": tmp_path / "state",
        "workers": 2,
    }
    command = [sys.executable, "-m", "kinlens.indexer", "publish", tmp_path / "shop"]
    command += [f"file://{tmp_path}/published", "--every", "100ms"]
    with closing(Gallery.open(tmp_path / "shop")) as writer:
        with (
            subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as publisher,
            own_process(tmp_path / "log", may_be_killed=True, **settings) as service,
        ):
            writer.remove(["1.png"])
            until(lambda: _version(service.url) == writer.version)
            publisher.kill()
            service.process.send_signal(signal.SIGKILL)
        writer.remove(["2.png"])
        publish(tmp_path / "shop", f"file://{tmp_path}/published")
        with own_process(tmp_path / "log", **settings) as service:
            assert _version(service.url) == writer.version


def _version(url: str) -> str:
    return str(httpx.get(f"{url}/galleries/shop").json()["version"])


def test_the_check_of_a_start_looks_at_the_address(
    shop: Path, address: str, tmp_path: Path, tiny_bundle: Bundle
) -> None:
    command = (
        "check",
        "--json",
        "--gallery",
        f"shop={address}",
        "--state",
        str(tmp_path / "state"),
    )
    runner = CliRunner()
    bundle = ("--bundle", str(tiny_bundle.path))
    assert "No snapshot at" in runner.invoke(app, [*command, *bundle]).output
    publish(shop, address)
    # The bundle of the fake model is not there, which is found before anything is copied.
    found = json.loads(runner.invoke(app, [*command, *bundle]).output)["findings"]
    [gallery] = [one["text"] for one in found if one["subject"] == "gallery shop"]
    assert "bundle fake is unknown" in gallery
    assert not (tmp_path / "state" / "replicas").exists()


def test_settings_of_followers_are_checked(tmp_path: Path) -> None:
    def fault(**given: Any) -> str:
        with pytest.raises(ValidationError) as error:
            Settings(**given)
        return options.faults(error.value)

    assert "--replica-folder" in fault(galleries="shop=s3://a/shop")
    assert "follow" in fault(galleries="shop=s3://a/b", state=tmp_path, follow="often")
    assert Settings(follow="2m").follow == 120
    assert Settings(follow="250ms").follow == 0.25
