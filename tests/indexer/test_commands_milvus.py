"""Commands on a gallery in Milvus: the same as on one in a folder."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from indexer.gallery import Gallery
from tests.indexer.conftest import failure
from tests.indexer.milvus_server import MilvusServer
from tests.tiny import encoded, picture

Run = Callable[..., Result]


@pytest.mark.milvus
def test_a_gallery_moves_to_milvus_is_used_there_and_comes_back(
    run: Run, built: Path, shop: Path, tmp_path: Path, milvus_server: MilvusServer
) -> None:
    there = f"{milvus_server.uri.replace('http', 'milvus')}/moved"
    run("update", built, "f.gif", "--set", "price:number=5")
    imported = run("import", built, "--out", there, "--json")
    assert json.loads(imported.stdout)["items"] == 6
    ask = ("search", there, "--image", shop / "f.gif", "--bundle", "b", "-k", "1")
    assert run(*ask).stdout == "1.0000  f.gif  price=5\n"
    assert run("update", there, "cup/a.png", "--set", "price=7.5").stdout.startswith("1 of 1")
    (shop / "new.png").write_bytes(encoded(picture(99)))
    assert "1 added, 0 replaced" in run("add", there, shop, "--bundle", "b").stdout
    counted = run("remove", there, "--where", "price > 6", "--dry-run")
    assert counted.stdout == "1 items would be removed; 7 items in the gallery.\n"
    assert run("remove", there, "--where", "price > 6").stdout.startswith("1 items removed; 6")
    stats = json.loads(run("stats", there, "--json").stdout)
    assert (stats["size"], stats["formats"]["PNG"]) == (6, 1)
    assert run("import", there, "--out", tmp_path / "back").exit_code == 0
    gallery = Gallery.open(tmp_path / "back")
    keys = {item.key for item in gallery.items()}
    assert ("new.png" in keys, "cup/a.png" in keys, len(keys)) == (True, False, 6)
    gallery.close()
    again = run("import", built, "--out", there)
    assert "6 items imported" in again.stdout


def test_a_server_that_does_not_answer_is_one_line(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pymilvus", reason="galleries on Milvus need it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"milvus://127.0.0.1:{free.getsockname()[1]}/shop"
    assert address.removeprefix("milvus://").removesuffix("/shop") in failure(
        run("show", address, "key")
    )
