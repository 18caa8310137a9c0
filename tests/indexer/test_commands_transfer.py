"""The commands export, import, backup and restore: nothing is lost on the way."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from indexer.gallery import Gallery
from tests.indexer.conftest import failure

Run = Callable[..., Result]


def content(path: Path) -> dict[str, tuple[object, ...]]:
    gallery = Gallery.open(path)
    try:
        entries = [entry for batch in gallery.scan() for entry in batch]
        facts = {e.key: (e.sha256, e.path, e.format, dict(e.attributes)) for e in entries}
        return {e.key: (*facts[e.key], e.vector.tobytes()) for e in entries}
    finally:
        gallery.close()


@pytest.fixture
def changed(run: Run, built: Path) -> Path:
    """The gallery of the shop with typed attributes and an item less."""
    for arguments in (
        ("update", built, "f.gif", "--set", "price:number=5", "--set", "sale:boolean=true"),
        ("update", built, "cup/a.png", "--set", "price=7.5"),
        ("remove", built, "hat/c.webp"),
    ):
        assert run(*arguments).exit_code == 0
    return built


def test_an_exported_gallery_is_imported_whole(
    run: Run, changed: Path, tmp_path: Path, shop: Path
) -> None:
    pytest.importorskip("pyarrow", reason="export writes Parquet")
    file, copy = tmp_path / "shop.parquet", tmp_path / "copy"
    assert run("export", changed, "--out", file).stdout == f"5 items in {file}.\n"
    result = run("import", file, "--out", copy, "--index", "hnsw", "--json")
    report = json.loads(result.stdout)
    assert (report["name"], report["items"], report["dim"]) == ("gallery", 5, 32)
    assert content(copy) == content(changed)
    stats = json.loads(run("stats", copy, "--json").stdout)
    assert (stats["index"], stats["source_root"]) == ("hnsw", str(shop.resolve()))
    assert run("verify", copy, "--bundle", "b").exit_code == 0
    named = run("import", file, "--out", tmp_path / "other", "--name", "other")
    assert "(other): 5 items imported" in named.stdout


def test_files_that_cannot_be_imported_leave_no_gallery(
    run: Run, changed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow", reason="export writes Parquet")
    file = tmp_path / "shop.parquet"
    run("export", changed, "--out", file)
    (tmp_path / "cut.parquet").write_bytes(file.read_bytes()[:-100])
    for name in ("cut.parquet", "none.parquet"):
        assert name in failure(run("import", tmp_path / name, "--out", tmp_path / "new"))
    assert "cannot stand in an address" in failure(
        run("import", file, "--out", tmp_path / "new", "--name", "a/b")
    )
    assert "--memory-mb" in failure(
        run("import", file, "--out", tmp_path / "new", "--memory-mb", "0.001")
    )
    assert not (tmp_path / "new").exists()


def test_an_import_replaces_a_gallery_only_when_it_is_whole(
    run: Run, changed: Path, built: Path, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow", reason="export writes Parquet")
    file = tmp_path / "shop.parquet"
    run("export", changed, "--out", file)
    before = content(built)
    assert "No gallery" in failure(run("import", tmp_path, "--out", built))
    assert content(built) == before
    run("remove", built, "f.gif")
    assert run("import", file, "--out", built).exit_code == 0
    assert content(built) == before


def test_a_backup_brings_back_what_was_lost(run: Run, changed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backup"
    before = content(changed)
    result = run("backup", changed, "--out", folder)
    assert result.stdout.startswith(f"Backup {folder} of gallery: 5 items, ")
    run("remove", changed, "f.gif", "cup/a.png")
    refused = run("restore", folder, "--out", changed)
    assert "--replace" in failure(refused)
    assert len(content(changed)) == 3
    done = run("restore", folder, "--out", changed, "--replace", "--json")
    assert json.loads(done.stdout)["name"] == "gallery"
    assert content(changed) == before
    assert "is there already" in failure(run("backup", changed, "--out", folder))


def test_a_damaged_backup_is_refused_and_changes_nothing(
    run: Run, changed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "backup"
    run("backup", changed, "--out", folder, "--json")
    [file] = folder.rglob("vectors.npy")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = content(changed)
    result = run("restore", folder, "--out", changed, "--replace")
    assert "vectors.npy" in failure(result)
    assert content(changed) == before


def test_vectors_keep_every_bit_on_the_way(run: Run, changed: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="export writes Parquet")
    gallery = Gallery.open(changed)
    [entry] = gallery.entries(["f.gif"])
    gallery.close()
    run("export", changed, "--out", tmp_path / "a.parquet")
    run("import", tmp_path / "a.parquet", "--out", tmp_path / "copy")
    copy = Gallery.open(tmp_path / "copy")
    np.testing.assert_array_equal(copy.entries(["f.gif"])[0].vector, entry.vector)
    copy.close()
