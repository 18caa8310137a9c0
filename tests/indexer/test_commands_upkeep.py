"""The commands verify, compact, plan, stats, export, import, backup and restore."""

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kinlens.indexer.gallery import Gallery, current_generation
from kinlens.indexer.index.plan import IndexSettings
from tests.indexer.conftest import failure, flipped, printed, rows_of, segment_of, truncated
from tests.indexer.oracle import contents, entry, units
from tests.tiny import encoded, photo


def test_verify_exits_with_zero_or_one(run, built, shop) -> None:
    good = run("verify", built, "--bundle", "b")
    assert good.exit_code == 0
    assert "6 of 6 checked items (6 in all) find themselves" in good.stdout
    (shop / "f.gif").write_bytes(encoded(photo(50), "GIF"))
    bad = run("verify", built, "--bundle", "b")
    assert bad.exit_code == 1
    assert "f.gif: Its image cannot be used" in bad.stdout
    assert "5 of 6 checked items" in bad.stdout
    assert run("verify", built).exit_code == 0
    assert "2 of 2 checked items" in run("verify", built, "--sample", "2").stdout


def test_verify_reports_recall_and_exits_with_one_below_the_target(run, tmp_path) -> None:
    path, queries, rows = tmp_path / "large", tmp_path / "queries.npy", units(1100)
    np.save(queries, rows[1000:])
    with closing(Gallery.create(path, name="large", bundle_id="b", dim=16)) as gallery:
        gallery.add(entry(f"item-{n}", row) for n, row in enumerate(rows[:1000]))
        gallery.compact(IndexSettings(kind="hnsw", target_recall=0.5))
    ask = ("verify", path, "--queries", queries)
    good = run(*ask)
    assert good.exit_code == 0
    assert re.search(r"recall@10 0\.\d{4} of 100 queries, target 0.5 \(index hnsw\)", good.stdout)
    low = run(*ask, "--target-recall", "0.99", "--json")
    assert low.exit_code == 1
    assert json.loads(low.stdout)["recall"] < 0.99


def test_compact_takes_in_what_came_since_and_says_the_recall(run, built, shop) -> None:
    assert "Nothing has changed" in run("compact", built).stdout
    (shop / "new.png").write_bytes(encoded(photo(99)))
    run("add", built, shop, "--bundle", "b")
    result = run("compact", built)
    assert re.search(r"Index flat of 7 items in .* s, recall@10 1\.0000 \(target", result.stdout)
    report = printed(run("compact", built, "--index", "hnsw", "--json"))
    assert (report["manifest"]["kind"], report["manifest"]["size"]) == ("hnsw", 7)
    assert printed(run("compact", built, "--json"))["segment"] is None
    flipped(segment_of(built) / "index.faiss")
    assert "index.faiss has sha256" in failure(run("verify", built))
    rebuilt = printed(run("compact", built, "--rebuild", "--json"))
    assert rebuilt["manifest"]["kind"] == "hnsw"
    assert run("verify", built).exit_code == 0
    aimed = printed(run("compact", built, "--target-recall", "0.9", "--json"))["manifest"]
    assert (aimed["kind"], aimed["target_recall"]) == ("hnsw", 0.9)
    assert "--memory-mb" in failure(run("compact", built, "--memory-mb", "0.001"))
    table = run("stats", built).stdout
    assert re.search(r"^index +hnsw$", table, re.MULTILINE)
    assert re.search(r"^formats +BMP 1, GIF 1, JPEG 1", table, re.MULTILINE)


def test_a_plan_is_made_without_a_gallery_and_all_plans_are_compared(run) -> None:
    lines = run("plan", 300_000, 512, "--memory-mb", 4000).stdout.splitlines()
    assert lines[0].split()[:4] == ["index", "hnsw", "on", "cpu"]
    plan = printed(run("plan", 1_000_000, 128, "--index", "flat", "--json"))
    assert (plan["n"], plan["dim"], plan["plans"][0]["kind"]) == (1_000_000, 128, "flat")
    assert "--memory-mb" in failure(run("plan", 1_000_000, 128, "--memory-mb", "10"))
    lines = run("plan", 1_000_000, 128, "--all", "--memory-mb", 1200).stdout.splitlines()
    by_kind = {line.split()[0]: line for line in lines}
    assert [*by_kind] == ["index", "flat", "hnsw", "ivf-pq", "cagra"]
    assert re.search(r"\d MB +\d[\d,]* MB .* 0\.980$", by_kind["ivf-pq"])
    assert "cannot be built on cpu" in by_kind["cagra"]


# Export, import, backup, restore.


def content(path: Path) -> dict[str, tuple[object, ...]]:
    with closing(Gallery.open(path)) as gallery:
        return contents(gallery)


@pytest.fixture
def changed(run, built) -> Path:
    """The gallery of the shop with typed attributes and an item less."""
    for arguments in (
        ("update", built, "f.gif", "--set", "price:number=5", "--set", "sale:boolean=true"),
        ("update", built, "cup/a.png", "--set", "price=7.5"),
        ("remove", built, "hat/c.webp"),
    ):
        assert run(*arguments).exit_code == 0
    return built


def test_an_exported_gallery_is_imported_whole(run, changed, tmp_path, shop) -> None:
    pytest.importorskip("pyarrow", reason="export writes Parquet")
    file, copy, new = tmp_path / "shop.parquet", tmp_path / "copy", tmp_path / "new"
    assert run("export", changed, "--out", file).stdout == f"5 items in {file}.\n"
    report = printed(run("import", file, "--out", copy, "--index", "hnsw", "--json"))
    assert (report["name"], report["items"], report["dim"]) == ("gallery", 5, 32)
    assert content(copy) == content(changed)
    stats = printed(run("stats", copy, "--json"))
    assert (stats["index"], stats["source_root"]) == ("hnsw", str(shop.resolve()))
    assert run("verify", copy, "--bundle", "b").exit_code == 0
    run("remove", copy, "f.gif")
    named = run("import", file, "--out", copy, "--name", "other")
    assert "(other): 5 items imported" in named.stdout
    assert content(copy) == content(changed)
    (tmp_path / "cut.parquet").write_bytes(file.read_bytes()[:-100])
    for arguments, message in (
        ([tmp_path / "cut.parquet"], "cut.parquet"),
        ([file, "--memory-mb", "0.001"], "--memory-mb"),
    ):
        assert message in failure(run("import", *arguments, "--out", new))
        assert current_generation(new) is None


def test_a_backup_brings_back_what_was_lost(run, changed, tmp_path) -> None:
    folder = tmp_path / "backup"
    before = content(changed)
    result = run("backup", changed, "--out", folder)
    assert result.stdout.startswith(f"Backup {folder} of gallery: 5 items, ")
    run("remove", changed, "f.gif", "cup/a.png")
    assert "--replace" in failure(run("restore", folder, "--out", changed))
    assert len(content(changed)) == 3
    restored = printed(run("restore", folder, "--out", changed, "--replace", "--json"))
    assert restored["name"] == "gallery"
    assert content(changed) == before
    assert "already exists" in failure(run("backup", changed, "--out", folder))
    truncated(rows_of(folder))
    damaged = run("restore", folder, "--out", changed, "--replace")
    assert "rows.f32" in failure(damaged)
    assert content(changed) == before
