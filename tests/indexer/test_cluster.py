"""Embedding on a Ray cluster of this machine, and galleries of what it has made."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kinlens.commands.__main__ import app
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import SourceError
from kinlens.indexer.exchange.objects import files_at
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest import cluster as cluster_module
from kinlens.indexer.ingest.cluster import ShardEmbedder, UnreachableError, remote_source
from kinlens.indexer.ingest.shards import ShardsManifest, VectorShards, reader_at
from kinlens.indexer.ingest.sources import Record, Source, folder_source
from kinlens.indexer.types import Entry
from tests.indexer.conftest import failure, printed
from tests.indexer.oracle import contents
from tests.support import paused_workers
from tests.support.own_process import children, command_of
from tests.support.waiting import until
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


PAUSED = {
    "RAY_RUNTIME_ENV_HOOK": "tests.support.paused_workers.runtime_env",
    "PYTHONPATH": str(Path(__file__).parents[2]),
}


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


def wait_for_parts(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Until that many shards exist; Ray starts slowly while other tests run."""
    end = time.monotonic() + 200
    while len(list(out.glob("parts/*.parquet"))) < count:
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < end, "no shard was made"
        time.sleep(0.05)


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


def below(pid: int) -> list[int]:
    """The processes that this one has started, directly or through others."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for child in children(pid):
            found += [child, *below(child)]
    return found


@pytest.mark.long
def test_a_killed_call_is_finished_on_a_cluster_and_its_gallery_is_that_of_a_build(
    shop, plain, tiny_bundle, request, tmp_path
) -> None:
    """A worker and then the call are killed; the same call makes what is missing, and no more."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'kinlens[ray]')")
    folder = tmp_path / "v"
    words = ("--bundle", tiny_bundle.path, "--out", folder, "--shard-size", 8)
    process = command("embed", shop, *words, **PAUSED)
    wait_for_parts(process, folder, 1)
    worker = next(pid for pid in below(process.pid) if command_of(pid).startswith("ray::MapWorker"))
    os.kill(worker, signal.SIGKILL)
    wait_for_parts(process, folder, paused_workers.PARTS)
    workers = [pid for pid in below(process.pid) if command_of(pid).startswith("ray::")]
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    until(lambda: not any(map(command_of, workers)))  # one may still write its shard
    shards = VectorShards(str(folder))
    left = shards.missing()
    assert 0 < len(left) < shards.manifest.shards
    address = request.getfixturevalue("cluster")
    process = command("embed", shop, *words, "--ray", address, "--json")
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, err
    report = json.loads(out)
    assert report["embedded"] == shards.manifest.images_in(left)
    assert (report["images"], report["items"], report["shards"]) == (COUNT + 1, COUNT, 17)
    assert [one["key"] for one in report["failures"]] == ["class-0/none.png"]
    printed(invoke("build", "--vectors", folder, "--out", tmp_path / "a", "--json"), 3)
    assert items_of(tmp_path / "a") == items_of(plain)
    printed(invoke("import", folder, "--out", tmp_path / "c", "--vector-type", "fp16", "--json"))
    with closing(Gallery.open(tmp_path / "c")) as made:
        assert (made.size, made.bundle_id) == (COUNT, tiny_bundle.bundle_id)
    assert printed(invoke("embed", shop, *words, "--json"), 3)["embedded"] == 0
    for other in ((shop / "class-0",), (shop, "--precision", "bf16")):
        assert "or another --out" in failure(invoke("embed", *other, *words))


# What needs no Ray.


def manifest_of(count: int, shard_size: int, **others: Any) -> ShardsManifest:
    facts = {"bundle_id": "b" * 64, "dim": TINY_DIM, "source": "folder", "source_root": "/shop"}
    sizes = {"images": count, "shard_size": shard_size}
    return ShardsManifest(precision="fp32", engine="onnxruntime", **facts | sizes | others)


@pytest.fixture
def actor(shop, tiny_bundle, tmp_path, monkeypatch) -> Callable[..., ShardEmbedder]:
    """A function that begins shards at an address, and makes an actor for them."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda found: found))
    monkeypatch.setattr(cluster_module, "PAUSE_S", 0.0)

    def make(source: Source, out: str) -> ShardEmbedder:
        origin = {"source": source.description, "source_root": source.address}
        manifest = manifest_of(source.count, 1000, bundle_id=tiny_bundle.bundle_id, **origin)
        VectorShards(out).begin(manifest, source.records())
        files = {
            str(file.relative_to(tiny_bundle.path)): file.read_bytes()
            for file in tiny_bundle.path.rglob("*")
            if file.is_file()
        }
        return ShardEmbedder(files, SessionSettings(threads=1), out, 32, 1)

    return make


def test_an_object_store_is_read_and_written(shop, actor, plain) -> None:
    files, _ = files_at("memory://shop")
    for file in shop.rglob("*.png"):
        files.pipe_file(f"/shop/{file.relative_to(shop)}", file.read_bytes())
    files.pipe_file("/shop/.hidden/a.png", b"hidden")
    source = remote_source("memory://shop")
    assert source.count == COUNT + 1
    assert actor(source, "memory://out")({"shard": [0]})["images"].tolist() == [COUNT + 1]
    mine = VectorShards("memory://out")
    assert mine.missing() == []
    made = {e.key: e.vector.tobytes() for e in mine.dump("v").entries()}
    assert made == {key: one[-1] for key, one in items_of(plain).items()}
    assert [one.key for one in mine.failures()] == ["class-0/none.png"]


def test_the_paths_of_a_list_may_start_from_an_address(shop, actor, run, tmp_path) -> None:
    source = remote_source(f"file://{shop}", shop / "list.csv")
    actor(source, str(tmp_path / "v"))({"shard": [0]})
    printed(run("build", "--vectors", tmp_path / "v", "--out", tmp_path / "g", "--json"))
    items = items_of(tmp_path / "g")
    _, attributes, place, *_ = items["sku-3"]
    assert (place, attributes) == ("class-0/0003.png", {"price": 1.5, "sizes": ("S", "M")})
    assert len(items) == 100


def test_a_disk_or_network_that_fails_leaves_the_shard_to_be_made(
    shop, actor, tmp_path, monkeypatch
) -> None:
    def fail(record: Record, max_bytes: int) -> bytes:
        raise ConnectionError("no route")

    made = actor(folder_source(shop), str(tmp_path / "v"))
    monkeypatch.setattr(made, "_read", fail)
    with pytest.raises(UnreachableError, match=r"0000\.png cannot be read"):
        made({"shard": [0]})
    assert VectorShards(str(tmp_path / "v")).missing() == [0]


def test_a_link_that_leads_out_of_a_local_address_is_left_out(shop, tmp_path) -> None:
    (tmp_path / "secret.png").write_bytes(encoded(photo(1)))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.png").symlink_to(tmp_path / "secret.png")
    read = reader_at(f"file://{tmp_path}/in")
    with pytest.raises(SourceError):
        read(Record("x.png", "x.png"), 10**6)


def test_shards_are_begun_whole_or_not_at_all(tmp_path) -> None:
    shards = VectorShards(str(tmp_path / "v"))
    manifest = manifest_of(5, 2)
    with pytest.raises(SourceError, match="had 5 images, but their number changed"):
        shards.begin(manifest, [Record(f"k{n}", f"{n}.png") for n in range(6)])
    assert not shards.has_begun
    records = [Record(f"k{n}", f"{n}.png", {"sizes": ("S", "M"), "n": n}) for n in range(5)]
    shards.begin(manifest, records)
    assert [one for shard in range(3) for one in shards.records(shard)] == records
    assert (shards.missing(), manifest.images_in([0, 2])) == ([0, 1, 2], 3)
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
