"""Galleries and state folders of earlier versions go on opening: tests/golden/README.md."""

import json
import shutil
import sqlite3
import tarfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from kinlens.commands.__main__ import app
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.catalog.schema import seal
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import SearchOptions
from kinlens.service.settings import Settings
from tests.support.seams import Segment
from tests.support.servers import create_app
from tests.support.waiting import until
from tests.tiny import encoded, photo

GOLDEN = Path(__file__).parent / "golden"
ADMIN = "kl_c995cb1b_25811d97b7cd9e8d1cb9b76045c7a2d544eb089832c5be15f98fce89c4d522d3"
SEARCHER = "kl_a7e34e33_cf8bc83df511438b13f6b82ed14c187be048338e489ddbd0a752dd6f08ad2769"


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A copy that a test may change."""
    with tarfile.open(GOLDEN / "gallery.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def kinlens_index(*arguments: object) -> Any:
    """What a command prints as JSON."""
    done = CliRunner().invoke(app, [*(str(argument) for argument in arguments), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def units(count: int) -> Any:
    """The vectors of the stored galleries with removed items."""
    rows = np.random.default_rng(5).normal(size=(count, 8)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def items_of(path: Path) -> dict[str, tuple[dict[str, Any], str, tuple[float, ...]]]:
    """Attributes, content and vector of each item by key."""
    gallery = Gallery.open(path)
    keys = [item.key for item in gallery.items()]
    found = {
        entry.key: (dict(entry.attributes), entry.sha256, tuple(entry.vector.tolist()))
        for entry in gallery.entries(keys)
    }
    gallery.close()
    return found


def test_a_stored_gallery_is_searched(stored: Path) -> None:
    """It has an index, an item that came after it, one removed and one changed."""
    embedder = OnnxEmbedder.open(Bundle.open(stored / "bundle"))
    gallery = Gallery.open(stored / "shop", image_root=stored / "images")
    facts = gallery.facts()
    assert (gallery.size, facts.delta, facts.tombstones) == (29, 6, 1)
    files = sorted((stored / "images").iterdir())
    queries = embedder.embed(np.stack([embedder.preprocess(f.read_bytes()) for f in files]))
    for number, [best] in enumerate(gallery.search(queries, 1)):
        if number != 7:
            assert best.key == f"item-{number}"
            assert best.score == pytest.approx(1, abs=1e-5)
            assert gallery.image(best.id).data == files[number].read_bytes()
        else:
            assert best.key != "item-7"
    gallery.close()
    query = ["search", stored / "shop", "--image", files[3], "--bundle", stored / "bundle"]
    found = kinlens_index(*query, "--where", 'colour = "red" and price > 90')
    assert json.dumps(found).count('"item-') == 1
    assert items_of(stored / "shop")["item-3"][0] == {"price": 99.25, "colour": "red"}


def test_a_stored_gallery_is_changed_compacted_and_verified(stored: Path) -> None:
    before = items_of(stored / "shop")
    gallery = Gallery.open(stored / "shop", image_root=stored / "images")
    vector = np.eye(8, dtype=np.float32)[0]
    gallery.add([Entry("new", vector, "a" * 64, {"colour": "green"})])
    gallery.update({"item-0": {"price": 5}})
    gallery.remove(["item-1"])
    gallery.compact()
    gallery.close()
    after = items_of(stored / "shop")
    assert after.keys() == (before.keys() | {"new"}) - {"item-1"}
    assert after["item-0"][0]["price"] == 5
    assert {key: after[key] for key in before if key not in ("item-0", "item-1")} == {
        key: before[key] for key in before if key not in ("item-0", "item-1")
    }
    kinlens_index("verify", stored / "shop", "--image-root", stored / "images")


@pytest.mark.parametrize("name", ["points", "codes"])
def test_stored_galleries_of_approximate_kinds_are_searched(stored: Path, name: str) -> None:
    """HNSW, and IVF with RaBitQ codes, which is compared with as it is, over 640 vectors."""
    gallery = Gallery.open(stored / name)
    entries = gallery.entries([f"p{n}" for n in range(640)])
    found = gallery.search(np.stack([entry.vector for entry in entries]), 1)
    hits = [hit.key == entry.key for [hit], entry in zip(found, entries, strict=True)]
    gallery.close()
    assert np.mean(hits) > 0.95


@pytest.mark.parametrize("name", ["shop", "points", "codes"])
def test_a_compaction_moves_stored_vectors_out_of_the_catalogue(stored: Path, name: str) -> None:
    before = items_of(stored / name)
    kinlens_index("compact", stored / name)
    [catalogue] = (stored / name).glob("versions/*/catalog.sqlite")
    with closing(sqlite3.connect(catalogue)) as catalog:
        assert catalog.execute("SELECT count(vector) FROM vectors").fetchone()[0] == 0
    assert schema_of(stored / name) == 7
    assert items_of(stored / name) == before
    kinlens_index("verify", stored / name)


def test_items_removed_after_a_conversion_are_erased(stored: Path, tmp_path: Path) -> None:
    """Also from the pages of the catalogue that the vectors have left, and from a backup."""
    before = items_of(stored / "points")
    gone = [np.array(before[f"p{n}"][2], np.float32).tobytes() for n in range(10)]
    kinlens_index("compact", stored / "points")
    kinlens_index("remove", stored / "points", *(f"p{n}" for n in range(10)), "--no-compact")
    kinlens_index("compact", stored / "points")
    kinlens_index("backup", stored / "points", "--out", tmp_path / "saved")
    for file in [*(stored / "points").rglob("*"), *(tmp_path / "saved").rglob("*")]:
        assert not file.is_file() or not any(vector in file.read_bytes() for vector in gone), file


@pytest.fixture(params=[5, 6])
def version(request: pytest.FixtureRequest) -> int:
    """A schema of which a gallery with removed items is stored."""
    return int(request.param)


@pytest.fixture
def with_removed(version: int, tmp_path: Path) -> Path:
    """A copy of that gallery."""
    with tarfile.open(GOLDEN / "removed.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / f"version-{version}"


def schema_of(path: Path) -> int:
    [catalogue] = path.glob("versions/*/catalog.sqlite")
    with closing(sqlite3.connect(catalogue)) as catalog:
        return int(catalog.execute("PRAGMA user_version").fetchone()[0])


def test_filters_find_their_items_while_another_process_converts_a_gallery(
    with_removed: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The items have other rows afterwards, next to those that can be restored."""
    may_open, original = threading.Event(), Segment.open

    def held(folder: Path, **options: Any) -> Segment:
        if threading.current_thread().name == "segment":
            may_open.wait(60)
        return original(folder, **options)

    with closing(Gallery.open(with_removed)) as gallery, closing(Gallery.open(with_removed)) as own:
        blue = {item.key for item in gallery.items() if item.attributes["colour"] == "blue"}
        assert schema_of(with_removed) == version
        assert gallery.remove(["unknown"]) == 0
        assert schema_of(with_removed) == 7
        monkeypatch.setattr(Segment, "open", held)
        try:
            [hits] = own.search(units(1), 40, SearchOptions(where=Equals("colour", "blue")))
        finally:
            may_open.set()
        assert {hit.key for hit in hits} == blue


def test_a_gallery_that_waits_for_writes_is_not_converted_in_the_background(
    with_removed: Path, version: int
) -> None:
    """Also after a write of the earlier version."""
    with closing(Gallery.open(with_removed)) as gallery:
        assert gallery.needs_compaction()
        gallery.compact_in_background(after_writes=True)
        [catalogue] = with_removed.glob("versions/*/catalog.sqlite")
        with closing(sqlite3.connect(catalogue)) as catalog, catalog:
            catalog.execute("UPDATE state SET seq = seq + 1")
            seal(catalog)
        gallery.refresh()
        until(lambda: "compaction" not in [thread.name for thread in threading.enumerate()])
        assert gallery.needs_compaction()
        assert schema_of(with_removed) == version
        gallery.update({"k0": {"n": 1}})
        until(lambda: not gallery.needs_compaction())


def test_items_that_an_earlier_version_removed_come_back(with_removed: Path, version: int) -> None:
    """Read as they are, and converted by the first write; their vectors were kept elsewhere."""
    path = with_removed
    removed, vectors = ["k1", "k2", "k6", "k20", "k21"], units(40)

    def found(gallery: Gallery) -> list[str]:
        return [hits[0].key for hits in gallery.search(vectors[:26], 1)]

    check_files(path)
    with closing(Gallery.open(path)) as gallery, closing(Gallery.open(path)) as other:
        assert (gallery.size, gallery.facts().tombstones, gallery.has_removed()) == (21, 5, True)
        expected = [f"k{n}" for n in range(26)]
        are_there = [n for n, key in enumerate(expected) if key not in [*removed, "k3"]]
        assert [found(gallery)[n] for n in are_there] == [expected[n] for n in are_there]
        assert not {*removed} & {*found(gallery)}
        assert schema_of(path) == version
        assert sorted(item.key for item in gallery.restore([*removed, "k3"])) == sorted(removed)
        assert schema_of(path) == 7
        are_back = [n for n in range(26) if n != 3]  # which was replaced
        for each in (gallery, other):
            assert [found(each)[n] for n in are_back] == [expected[n] for n in are_back]
        check_files(path)
        gallery.remove(removed)
        gallery.compact()
        assert gallery.restore(removed) == []
    check_files(path)


def test_a_stored_parquet_file_and_a_backup_hold_the_same_items(stored: Path) -> None:
    expected = items_of(stored / "shop")
    kinlens_index("import", stored / "shop.parquet", "--out", stored / "imported")
    assert items_of(stored / "imported") == expected
    shutil.rmtree(stored / "shop")
    kinlens_index("restore", stored / "backup", "--out", stored / "shop")
    assert items_of(stored / "shop") == expected


@pytest.fixture
def shop(stored: Path) -> Iterator[TestClient]:
    """The stored state folder, served for the holder of its key `office`."""
    settings = Settings(
        bundle=stored / "bundle",
        galleries=(f"shop={stored / 'shop'}",),
        image_roots=(f"shop={stored / 'images'}",),
        state=stored / "state",
        allowed_hosts=("*",),
    )
    with TestClient(create_app(settings), headers={"Authorization": f"Bearer {ADMIN}"}) as client:
        yield client


def uploaded(number: int) -> bytes:
    return encoded(photo(200 + number, (40, 30)))


def search(shop: TestClient, number: int) -> list[str]:
    data = {"gallery": "made", "k": "3"}
    answer = shop.post("/search", files={"image": uploaded(number)}, data=data)
    return [hit["key"] for hit in answer.raise_for_status().json()["hits"]]


def test_a_stored_state_folder_is_served_changed_and_has_its_keys(shop: TestClient) -> None:
    galleries = shop.get("/galleries").raise_for_status().json()["galleries"]
    assert {g["name"]: (g["size"], g["managed"]) for g in galleries} == {
        "shop": (29, False),
        "made": (8, True),
    }
    items = shop.get("/galleries/made/items").raise_for_status().json()["items"]
    assert [item["attributes"]["price"] for item in items] == [0, 77, 2, 3, 4, 5, 6, 7]
    for number, item in enumerate(items):
        assert shop.get(item["image"]).raise_for_status().content == uploaded(number)
        assert search(shop, number)[0] == f"made-{number}"
    [job] = shop.get("/jobs").raise_for_status().json()["jobs"]
    assert (job["kind"], job["gallery"], job["state"]) == ("compact", "made", "succeeded")
    fields: list[Any] = [("image", ("x.png", uploaded(8), "image/png")), ("key", (None, "made-8"))]
    shop.put("/galleries/made/items", files=fields).raise_for_status()
    assert search(shop, 8)[0] == "made-8"
    removed = shop.request("DELETE", "/galleries/made/items", params={"key": "made-2"})
    assert removed.status_code in (200, 204), removed.text
    assert "made-2" not in search(shop, 2)
    for key, status in ((SEARCHER, 403), (SEARCHER[:-1] + "x", 401)):
        assert shop.get("/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == status
