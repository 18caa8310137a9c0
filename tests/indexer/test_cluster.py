"""Embedding in parts, also as tasks of a Ray cluster, and galleries of what they have made."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kinlens.commands.__main__ import app
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import KinlensError, SourceError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.addresses import files_at
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import image_root_of, read_image
from kinlens.indexer.ingest import parts
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.parts import Part, SourceAt, begun_shards, embed_part
from kinlens.indexer.ingest.shards import ShardsManifest, VectorShards
from kinlens.indexer.ingest.sources import Record, Source, csv_source, folder_source, source_at
from tests.indexer.conftest import failure, printed
from tests.indexer.oracle import contents
from tests.support.servers import free_port
from tests.tiny import TINY_DIM, encoded, photo

COMMAND = Path(sys.executable).with_name("kinlens-index")
COUNT = 130
OPEN = {"RAY_AUTH_MODE": "disabled"}
"""Nobody else reaches a cluster on the loopback address."""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    """Images, some of them copies, one that is none, and a list of some."""
    folder = tmp_path_factory.mktemp("shop")
    for number in range(COUNT):
        file = folder / f"class-{number % 3}" / f"{number:04}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(encoded(photo(number % 120)))
    (folder / "class-0" / "none.png").write_bytes(b"no picture")
    rows = [f"sku-{n},class-{n % 3}/{n:04}.png,{n / 2},S|M" for n in range(100)]
    (folder / "list.csv").write_text("\n".join(["key,path,price:number,sizes:text[]", *rows]))
    return folder


def command(*words: object, **env: str) -> subprocess.Popen[str]:
    """`kinlens-index` in a process group of its own."""
    return subprocess.Popen(
        [str(COMMAND), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | OPEN | env,
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine, with four logical CPUs."""
    script = Path(__file__).parents[1] / "support" / "ray_cluster.py"
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | OPEN,
    ) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(60)


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def plain(shop, tiny_bundle, tmp_path_factory) -> Path:
    """The gallery of a build without a cluster."""
    out = tmp_path_factory.mktemp("plain") / "g"
    assert invoke("build", shop, "--bundle", tiny_bundle.path, "--out", out).exit_code == 3
    return out


def items_of(path: Path) -> dict[str, tuple[Any, ...]]:
    with closing(Gallery.open(path)) as gallery:
        return contents(gallery)


def test_parts_that_are_killed_and_repeated_together_make_the_vectors_of_a_build(
    shop, plain, tiny_bundle, tmp_path
) -> None:
    """Parts die before and after they write a shard, while the same part runs twice."""
    folder = tmp_path / "v"
    words = ("embed", shop, "--bundle", tiny_bundle.path, "--out", folder, "--shard-size", 8)
    refused = failure(invoke(*words, "--part", "4/3"))
    assert "part = '4/3' must be like 3/16" in refused
    script = [sys.executable, "-m", "tests.support.dying_part"]
    for round_, step in enumerate(("before", "after", "before")):
        died = [*script, step, "1/3 1/3 2/3 3/3", *map(str, words)]
        subprocess.run(died, timeout=120, check=True)
        assert len(VectorShards(str(folder)).missing()) >= 17 - 4 * (round_ + 1)
    made, left = 0, VectorShards(str(folder)).missing()
    assert len(left) <= 14
    for number in (1, 2, 3):
        report = printed(invoke(*words, "--part", f"{number}/3", "--json"), 3 * (number == 3))
        made += report["embedded"]
        assert (report["missing"] == 0) == (number == 3)
    assert made == VectorShards(str(folder)).manifest.images_in(left)
    assert (report["images"], report["items"], report["shards"]) == (COUNT + 1, COUNT, 17)
    assert [one["key"] for one in report["failures"]] == ["class-0/none.png"]
    printed(invoke("build", "--vectors", folder, "--out", tmp_path / "a", "--json"), 3)
    assert items_of(tmp_path / "a") == items_of(plain)
    printed(invoke("import", folder, "--out", tmp_path / "c", "--vector-type", "fp16", "--json"))
    with closing(Gallery.open(tmp_path / "c")) as half:
        assert (half.size, half.bundle_id) == (COUNT, tiny_bundle.bundle_id)
    assert printed(invoke(*words, "--json"), 3)["embedded"] == 0
    for other in ((shop / "class-0", *words[2:]), (*words[1:], "--precision", "bf16")):
        assert "or another --out" in failure(invoke("embed", *other))


def test_parts_that_begin_while_an_image_arrives_share_the_first_list(
    tiny_bundle, tmp_path
) -> None:
    folder, out = tmp_path / "shop", tmp_path / "v"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.png").write_bytes(encoded(photo(number)))
    (folder / "7.png").write_bytes(b"no picture")
    words = ("embed", folder, "--bundle", tiny_bundle.path, "--out", out, "--shard-size", 2)

    def listed() -> Source:
        """Lists the images; before the list is stored, one arrives and the other part begins."""
        source = folder_source(folder)
        (folder / "00.png").write_bytes(encoded(photo(9)))
        printed(invoke(*words, "--part", "2/2", "--json"), 3)
        return source

    given = SourceAt(f"folder {folder}", str(folder), listed)
    shards = begun_shards(given, tiny_bundle.path, SessionSettings(), str(out), 2)
    assert shards.manifest.images == 7
    (folder / "000.png").write_bytes(encoded(photo(8)))
    printed(invoke(*words, "--part", "1/2", "--json"))
    keys = [entry.key for entry in shards.dump("v").entries()]
    assert keys == ["0.png", "00.png", *(f"{number}.png" for number in range(1, 5))]
    assert len({file.parent for file in out.glob("list*/*")}) == 1, "the other list was removed"


@pytest.mark.long
def test_a_ray_cluster_runs_the_parts_and_completes_what_is_missing(
    shop, plain, tiny_bundle, cluster, tmp_path
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'kinlens[ray]')")
    words = ("embed", shop, "--bundle", tiny_bundle.path, "--out", tmp_path / "v")
    words = (*words, "--shard-size", 8)
    printed(invoke(*words, "--part", "2/3", "--json"))
    left = VectorShards(str(tmp_path / "v"))
    expected = left.manifest.images_in(left.missing())
    process = command(*words, "--ray", cluster, "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, err
    assert (json.loads(out)["embedded"], json.loads(out)["missing"]) == (expected, 0)
    printed(invoke("build", "--vectors", tmp_path / "v", "--out", tmp_path / "a", "--json"), 3)
    assert items_of(tmp_path / "a") == items_of(plain)


# What needs no Ray.


def manifest_of(count: int, shard_size: int, **others: Any) -> ShardsManifest:
    facts = {"bundle_id": "b" * 64, "dim": TINY_DIM, "source": "folder", "source_root": "/shop"}
    sizes = {"images": count, "shard_size": shard_size}
    return ShardsManifest(precision="fp32", engine="onnxruntime", **facts | sizes | others)


@pytest.fixture
def embed_all(tiny_bundle) -> Callable[[Source, str], list[int]]:
    """A function that embeds a whole source into shards at an address."""

    def make(source: Source, out: str) -> list[int]:
        given = SourceAt(source.description, str(source.root), lambda: source)
        shards = begun_shards(given, tiny_bundle.path, SessionSettings(), out)
        embedder = OnnxEmbedder.open(tiny_bundle, SessionSettings())
        return [*embed_part(shards, Part(1, 1), embedder, EmbedSettings(workers=1))]

    return make


def test_an_object_store_is_read_and_written(shop, embed_all, plain) -> None:
    files, _ = files_at("memory://shop")
    for file in shop.rglob("*.png"):
        files.pipe_file(f"/shop/{file.relative_to(shop)}", file.read_bytes())
    files.pipe_file("/shop/.hidden/a.png", b"hidden")
    source = source_at("memory://shop")
    assert source.count == COUNT + 1
    assert embed_all(source, "memory://out") == [COUNT + 1]
    mine = VectorShards("memory://out")
    assert mine.missing() == []
    made = {e.key: e.vector.tobytes() for e in mine.dump("v").entries()}
    assert made == {key: one[-1] for key, one in items_of(plain).items()}
    assert [one.key for one in mine.failures()] == ["class-0/none.png"]


def test_the_paths_of_a_list_may_start_from_an_address(shop, embed_all, run, tmp_path) -> None:
    source = csv_source(shop / "list.csv", f"file://{shop}")
    embed_all(source, str(tmp_path / "v"))
    printed(run("build", "--vectors", tmp_path / "v", "--out", tmp_path / "g", "--json"))
    items = items_of(tmp_path / "g")
    _, attributes, place, *_ = items["sku-3"]
    assert (place, attributes) == ("class-0/0003.png", {"price": 1.5, "sizes": ("S", "M")})
    assert len(items) == 100


def test_a_disk_or_network_that_fails_leaves_the_shard_to_be_made(
    shop, embed_all, tmp_path, monkeypatch
) -> None:
    def fail(*_: object) -> bytes:
        raise ConnectionError("no route")

    monkeypatch.setattr(parts, "read_image", fail)
    with pytest.raises(KinlensError, match=r"0000\.png cannot be read.*run the same command"):
        embed_all(folder_source(shop), str(tmp_path / "v"))
    assert VectorShards(str(tmp_path / "v")).missing() == [0]


def test_a_link_that_leads_out_of_a_local_address_is_left_out(shop, tmp_path) -> None:
    (tmp_path / "secret.png").write_bytes(encoded(photo(1)))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(SourceError):
        read_image(image_root_of(f"file://{tmp_path}/in"), "x.png", 10**6)


def test_shards_are_begun_whole_or_not_at_all(tmp_path) -> None:
    shards = VectorShards(str(tmp_path / "v"))
    with pytest.raises(SourceError, match="has no images any more"):
        shards.begin(manifest_of(1, 2), [])
    assert not shards.has_begun
    records = [Record(f"k{n}", f"{n}.png", {"sizes": ("S", "M"), "n": n}) for n in range(5)]
    shards.begin(manifest_of(1, 2), records)
    assert [one for shard in range(3) for one in shards.records(shard)] == records
    assert (shards.missing(), shards.manifest.images_in([0, 2])) == ([0, 1, 2], 3)
    for shard in range(3):
        with pytest.raises(SourceError, match=rf"lacks {3 - shard} of 3 shards.*To resume, run"):
            shards.dump("v")
        unit = np.eye(TINY_DIM, dtype=np.float32)[0]
        entries = [
            Entry(r.key, unit, "0" * 64, r.attributes, r.path, "PNG") for r in shards.records(shard)
        ]
        shards.write(shard, entries, [])
    assert [entry.key for entry in shards.dump("v").entries()] == [one.key for one in records]
    part = tmp_path / "v/parts/000001.parquet"
    part.write_bytes(part.read_bytes()[:-20])
    with pytest.raises(SourceError, match=r"000001\.parquet is damaged.*Remove it and run"):
        list(shards.dump("v").entries())


def test_vectors_and_images_that_cannot_be_opened_are_named(run, tmp_path) -> None:
    result = run("build", "--vectors", tmp_path, "--out", tmp_path / "g")
    assert "no manifest.json" in failure(result)
    result = run("embed", "xyz://nowhere/a", "--bundle", "b", "--out", tmp_path / "v")
    assert "xyz://nowhere/a cannot be opened" in failure(result)
    closed = f"127.0.0.1:{free_port()}"
    for address in (closed, f"ray://{closed}", "127.0.0.1:70000"):
        result = run("embed", tmp_path, "--bundle", "b", "--out", tmp_path / "v", "--ray", address)
        assert f"No Ray cluster answers at {address}" in failure(result)
