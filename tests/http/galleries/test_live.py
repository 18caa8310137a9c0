"""A running service on a gallery that another process changes."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.support.servers import DEFAULTS, Running, run
from tests.support.waiting import repeating, until

ROOT = Path(__file__).parents[3]
ATTRIBUTES = {"stock": 1, "price": 1.0, "sale": True, "colour": "grün"}
VALUES = sorted(map(repr, ATTRIBUTES.items()))
WRITER = f"""
import hashlib, sys
from pathlib import Path
from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.types import Entry
from kinlens.indexer.gallery import Gallery

embedder = FakeEmbedder()

def entry(path):
    data = path.read_bytes()
    vector = embedder.embed(embedder.preprocess(data)[None])[0]
    digest = hashlib.sha256(data).hexdigest()
    return Entry(path.name, vector, digest, {ATTRIBUTES!r}, path.name, "PNG")

root = Path(sys.argv[1]) / "images"
gallery = Gallery.open(sys.argv[1] + "/shop")
for line in sys.stdin:
    verb, name = line.rstrip().split("|")
    if verb == "add":
        gallery.add([entry(root / name)])
    elif verb == "remove":
        gallery.remove([name])
    elif verb == "reset":
        wanted = {{f"{{number}}.png" for number in range(8)}}
        there = {{item.key for item in gallery.items()}}
        gallery.remove(there - wanted)
        gallery.add([entry(root / name) for name in wanted - there])
    else:
        gallery.compact()
    print("done", flush=True)
gallery.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, photos: list[bytes]) -> Path:
    """A gallery of images 0 .. 7 of the twelve that lie in its folder of images."""
    folder = tmp_path_factory.mktemp("live")
    root = folder / "images"
    root.mkdir()
    for number, data in enumerate(photos):
        if number == 8:
            build_gallery(folder_source(root), FakeEmbedder(), folder / "shop")
        (root / f"{number}.png").write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def writer(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that changes the gallery on command."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        yield process
        process.communicate()
    assert process.returncode == 0


@pytest.fixture
def write(writer: subprocess.Popen[str]) -> Iterator[Callable[..., None]]:
    """Change the gallery by that process, until the change is acknowledged; undone afterwards."""

    def do(verb: str, name: str = "") -> None:
        writer.stdin.write(f"{verb}|{name}\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "done\n"

    yield do
    do("reset")


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Running]:
    gallery = Gallery.open(folder / "shop")
    service = run(create_app(Settings(**DEFAULTS), FakeEmbedder(), {"shop": gallery}))
    yield service
    service.close()
    gallery.close()


def keys(service: Running, data: bytes) -> list[str]:
    return [hit["key"] for hit in service.search(data).json()["hits"]]


def best(service: Running, data: bytes) -> dict[str, Any]:
    hit: dict[str, Any] = service.search(data, k=1).json()["hits"][0]
    return hit


def listed(service: Running) -> dict[str, Any]:
    (entry,) = service.client.get("/galleries").json()["galleries"]
    return dict(entry)


def test_an_added_item_is_in_the_next_answer(live, write, photos) -> None:
    before = live.search(photos[9], k=1).json()
    assert before["hits"][0]["key"] != "9.png"
    assert live.search(photos[9], k=1).json()["cached"]
    write("add", "9.png")
    after, again = (live.search(photos[9], k=1).json() for _ in range(2))
    assert (after["cached"], again["cached"]) == (False, True)
    assert after["gallery_version"] != before["gallery_version"]
    assert again["hits"] == after["hits"]
    for answer in (after, again):
        assert answer["hits"][0]["key"] == "9.png"
        # by their text, since 1 and True are equal
        assert sorted(map(repr, answer["hits"][0]["attributes"].items())) == VALUES
    assert live.client.get(after["hits"][0]["image"]).content == photos[9]


def test_a_removed_item_is_in_no_later_answer(live, write, photos) -> None:
    hit = best(live, photos[3])
    assert hit["key"] == "3.png"
    etag = live.client.get(hit["image"]).headers["etag"]
    write("remove", "3.png")
    assert "3.png" not in keys(live, photos[3])
    assert best(live, photos[3])["key"] != "3.png"
    for headers in ({}, {"if-none-match": etag}):
        gone = live.client.get(hit["image"], headers=headers)
        assert gone.status_code == 404
        assert gone.json()["type"] == "urn:kinlens:problem:unknown-item"


def test_list_readiness_and_metrics_follow(live, write) -> None:
    first = listed(live)
    write("add", "8.png")
    second = listed(live)
    write("remove", "0.png")
    write("remove", "1.png")
    third = listed(live)
    assert [entry["size"] for entry in (first, second, third)] == [8, 9, 7]
    assert len({entry["version"] for entry in (first, second, third)}) == 3
    assert len({entry["generation"] for entry in (first, second, third)}) == 1
    assert live.client.get("/ready").json()["galleries"] == {"shop": third["version"]}
    text = live.client.get("/metrics").text
    assert 'kinlens_gallery_items{gallery="shop"} 7.0' in text


def test_a_link_stays_valid_while_other_items_change(live, write, photos) -> None:
    link = best(live, photos[5])["image"]
    for verb, name in [("add", "8.png"), ("remove", "0.png"), ("remove", "8.png"), ("compact", "")]:
        write(verb, name)
        assert live.client.get(link).content == photos[5]


def test_a_gallery_may_become_empty_and_full_again(live, write, photos) -> None:
    for number in range(8):
        write("remove", f"{number}.png")
    assert keys(live, photos[0]) == []
    assert live.client.get("/ready").status_code == 200
    write("add", "11.png")
    assert keys(live, photos[0]) == ["11.png"]


def test_no_answer_lags_behind_an_acknowledged_write(live, write, photos) -> None:
    steps = 0  # odd while a change is running; 0, 4, 8: without the item, 2, 6, 10: with it
    looks: set[int] = set()

    def look(_: int) -> None:
        before = steps
        is_found = "9.png" in keys(live, photos[9])
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
