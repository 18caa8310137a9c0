"""A running service on a gallery that another process changes."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from tests.support.own_process import ROOT
from tests.support.shops import Shop, start_shop
from tests.support.waiting import repeating, until

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
        gallery.compact()
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
