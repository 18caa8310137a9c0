"""The commands that make, change, check and copy a gallery: what they print, do and refuse."""

import hashlib
import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kinlens.embedder.errors import GalleryWriteError
from kinlens.indexer.entries import Entry
from kinlens.indexer.filters.tree import Equals
from kinlens.indexer.galleries import current_generation
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.uploads import UploadFolder
from kinlens.quality.calibrator import Calibrator
from tests.indexer.conftest import (
    Run,
    failure,
    flipped,
    printed,
    rows_of,
    segment_of,
    truncated,
)
from tests.indexer.oracle import contents, entry, units
from tests.support.seams import GalleryFolder
from tests.tiny import encoded, photo


def test_build_says_the_cost_before_and_the_result_after(run, shop, out) -> None:
    for number in range(12):
        (shop / f"bad[{number:02d}].jpg").write_text("not an image")
    (shop / "line\nbreak.png").write_bytes(encoded(photo(99)))
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    options = ("--name", "shoes", "--index", "hnsw", "--target-recall", "0.9")
    result = run("build", shop, "--bundle", "b", "--out", out, *options)
    assert result.exit_code == 3
    assert "Found 20 images in the folder" in result.stdout
    assert "Dimension 32, model on FakeExecutionProvider in fp32" in result.stdout
    assert re.search(r"^index +hnsw on cpu", result.stdout, re.MULTILINE)
    assert re.search(r"^vectors +20 x 32$", result.stdout, re.MULTILINE)
    assert "7 items (6 embedded, 0 reused, 1 copies)" in result.stdout
    assert re.search(r"20 of 20 +(?!0\.0 )[\d.]+ images/s +\d:\d\d:\d\d", result.stderr)
    assert re.search(r"^Indexing .* items/s", result.stderr, re.MULTILINE)
    lines = result.stdout.splitlines()[-12:]
    assert lines[0] == "Skipped 13 of 20 images:"
    assert lines[1].startswith("  bad[00].jpg: The file is not an image")
    assert re.fullmatch(r"  \.\.\. and 3 more in .*report\.json", lines[11])
    report = json.loads(Path(lines[11].partition(" in ")[2]).read_text())
    reasons = {failure["key"]: failure["reason"] for failure in report["failures"]}
    assert len(reasons) == 13
    assert any("has control characters or is too long" in reason for reason in reasons.values())
    assert (report["found"], report["indexed"], report["duplicates"]) == (20, 7, 1)
    stats = printed(run("stats", out, "--json"))
    assert (stats["name"], stats["index"]) == ("shoes", "hnsw")


def test_lists_are_indexed_with_their_images_below_a_root(run, shop, out) -> None:
    for root, option, content, expected in (
        ([shop], "--csv", "key,path,colour\nA,f.gif,red\nB,cup/a.png,blue\n", {"colour": 2}),
        (["--root", shop], "--split", "f.gif, 3, 1\ncup/a.png, 3, 2\n", {"class": 1, "class_2": 2}),
    ):
        (shop / "list").write_text(content)
        run("build", *root, option, shop / "list", "--bundle", "b", "--out", out)
        stats = printed(run("stats", out, "--json"))
        assert (stats["size"], stats["attributes"]) == (2, expected)


def test_add_brings_a_gallery_up_to_date_and_says_what_it_did(run, built, shop) -> None:
    (shop / "hat" / "new.png").write_bytes(encoded(photo(99)))
    (shop / "hat" / "bad.png").write_text("not an image")
    result = run("add", built, shop / "hat", "--bundle", "b")
    assert result.exit_code == 3
    assert "1 added, 0 replaced, 0 with new attributes, 3 unchanged (1 embedded)" in result.stdout
    assert "7 items in all" in result.stdout
    assert "  hat/bad.png: The file is not an image" in result.stdout
    again = printed(run("add", built, shop, "--bundle", "b", "--json"), 3)
    assert (again["added"], again["unchanged"], again["embedded"]) == (0, 7, 0)
    assert [f["key"] for f in again["failures"]] == ["hat/bad.png"]


def test_a_list_is_added_with_the_types_that_the_gallery_knows(run, shop, out) -> None:
    old, new = shop / "old.csv", shop / "new.csv"
    old.write_text("key,path,price:number\nA,f.gif,5\n")
    new.write_text("key,path,price,sale:boolean\nA,f.gif,6,\nB,cup/a.png,7,true\n")
    run("build", shop, "--csv", old, "--bundle", "b", "--out", out)
    report = printed(run("add", out, "--csv", new, "--bundle", "b", "--json"))
    assert (report["added"], report["updated"]) == (1, 1)
    shown = printed(run("show", out, "B", "--json"))
    assert (shown["path"], shown["attributes"]) == ("cup/a.png", {"price": 7, "sale": True})


def test_add_makes_a_new_index_when_it_is_due_unless_told_not_to(
    run, built, shop, monkeypatch
) -> None:
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 2)
    for number in range(4):
        (shop / f"new{number}.png").write_bytes(encoded(photo(100 + number)))
    left = run("add", built, shop, "--bundle", "b", "--no-compact")
    assert "A compaction is due: 4 items were added after the segment" in left.stderr
    assert printed(run("stats", built, "--json"))["delta"] == 4
    done = run("add", built, shop, "--bundle", "b")
    assert "Compacting: 4 items were added after the segment" in done.stderr
    assert printed(run("stats", built, "--json"))["delta"] == 0


def test_an_upkeep_that_fails_does_not_make_a_change_look_failed(
    run, built, shop, monkeypatch
) -> None:
    (shop / "new.png").write_bytes(encoded(photo(100)))
    monkeypatch.setattr("kinlens.indexer.live.upkeep._SMALL_DELTA", 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    for arguments in (
        ("add", built, shop, "--bundle", "b"),
        ("update", built, "f.gif", "--set", "a=b"),
    ):
        done = run(*arguments, "--json")
        printed(done)
        assert re.search(r"Warning: the changes are stored.*needs about", done.stderr)
    assert printed(run("stats", built, "--json"))["delta"] == 1


def test_images_are_added_from_another_root_that_is_named(run, built, shop, tmp_path) -> None:
    moved, vectors = shop.rename(tmp_path / "moved"), tmp_path / "vectors"
    Gallery.create(vectors, name="vectors", bundle_id="b" * 64, dim=32).close()
    for gallery, message, done in (
        (built, "image root", "0 added, 0 replaced, 0 with new attributes, 6 unchanged"),
        (vectors, "has no image root", "6 added"),
    ):
        arguments = ("add", gallery, moved, "--bundle", "b")
        assert message in failure(run(*arguments))
        assert done in run(*arguments, "--image-root", moved).stdout


def test_a_gallery_that_is_being_built_cannot_be_changed_meanwhile(run, built, shop) -> None:
    (shop / "new.png").write_bytes(encoded(photo(99)))
    with GalleryFolder(built).locked():
        for arguments in (
            ("add", built, shop, "--bundle", "b"),
            ("remove", built, "f.gif"),
            ("update", built, "f.gif", "--set", "a=b"),
            ("build", shop, "--bundle", "b", "--out", built),
        ):
            assert re.search(r"[Bb]uild \(process \d+\) is", failure(run(*arguments)))
    assert "1 added" in run("add", built, shop, "--bundle", "b").stdout


# The commands update and remove.


def attributes(run: Run, gallery: Path, key: str) -> dict[str, Any]:
    return dict(printed(run("show", gallery, key, "--json"))["attributes"])


@pytest.fixture
def priced(run, built) -> Path:
    for key, price, sale in (("f.gif", 5, "true"), ("cup/a.png", 12.5, "false")):
        changes = ("--set", f"price:number={price}", "--set", f"sale:boolean={sale}")
        assert run("update", built, key, *changes).exit_code == 0
    return built


def test_values_have_the_type_of_the_attribute_or_the_one_that_is_written(run, priced) -> None:
    assert attributes(run, priced, "f.gif") == {"price": 5, "sale": True}
    changes = ("--set", "price=7.25", "--set", "sale=false", "--set", "size=12")
    result = run("update", priced, "f.gif", "hat/c.webp", *changes)
    assert result.stdout == "2 of 2 items changed.\n"
    assert attributes(run, priced, "f.gif") == {"price": 7.25, "sale": False, "size": "12"}
    assert attributes(run, priced, "hat/c.webp")["class"] == "hat"
    taken = run("update", priced, "f.gif", "--unset", "price", "--json")
    assert printed(taken) == {"named": 1, "changed": 1}
    assert attributes(run, priced, "f.gif") == {"sale": False, "size": "12"}


def test_a_list_changes_many_items_or_none(run, priced, tmp_path) -> None:
    changes = tmp_path / "changes.csv"
    changes.write_text("key,price,note\nf.gif,,new\nhat/c.webp,3,\n")
    assert run("update", priced, "--csv", changes).stdout == "2 of 2 items changed.\n"
    assert attributes(run, priced, "f.gif") == {"sale": True, "note": "new"}
    assert attributes(run, priced, "hat/c.webp") == {"class": "hat", "price": 3, "note": ""}
    changes.write_text("key,price\nf.gif,9\ngone,1\n")
    assert "'gone'" in failure(run("update", priced, "--csv", changes))
    assert "price" not in attributes(run, priced, "f.gif")


def test_a_change_that_cannot_be_made_is_refused_and_changes_nothing(run, priced) -> None:
    for arguments, message in (
        (["--set", "price=cheap"], "price is a number and cannot be 'cheap': expected a finite"),
        (["--set", "price:text=1"], "'price' is a number"),
        (["--set", "price"], "Write --set price=VALUE, or --unset price to remove the value."),
        (["--set", "price="], "To remove the value, write --unset price."),
        (["--set", "price:date="], "expected a date such as"),
        (["--set", "=5"], "--set =5: there is no name before the '='. Write --set NAME=5."),
        (["--set", "price=1", "--unset", "price"], "price occurs twice"),
        (["gone", "--set", "price=1"], "'gone'"),
    ):
        assert message in failure(run("update", priced, "f.gif", *arguments))
    assert attributes(run, priced, "f.gif") == {"price": 5, "sale": True}


def test_items_are_removed_by_key_and_unknown_keys_are_named(run, built, tmp_path) -> None:
    result = run("remove", built, "f.gif", "gone", "f.gif")
    assert result.stdout == "1 items removed; 5 items in the gallery.\n"
    assert "Not in the gallery: gone" in result.stderr
    keys = tmp_path / "keys.txt"
    keys.write_text("cup/b.jpg\n\n cup/a.png \n", encoding="utf-8-sig")
    assert "2 items would be" in run("remove", built, "--keys-from", keys, "--dry-run").stdout
    assert run("remove", built, "--keys-from", keys).stdout.startswith("2 items removed")
    keys.write_text("\n")
    assert "has no keys" in failure(run("remove", built, "--keys-from", keys))
    assert "Cannot read the keys" in failure(run("remove", built, "--keys-from", tmp_path / "no"))


def test_items_are_removed_by_filter_and_counted_before(run, priced) -> None:
    where = ("--where", "price < 10 or class = 'hat'")
    counted = run("remove", priced, *where, "--dry-run")
    assert counted.stdout == "4 items would be removed; 6 items in the gallery.\n"
    removed = printed(run("remove", priced, *where, "--json"))
    assert removed == {"removed": 4, "dry_run": False, "unknown": []}
    assert run("remove", priced, "f").stdout == "0 items removed; 2 items in the gallery.\n"


# The commands verify, compact and plan.


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


def test_a_compaction_deletes_erased_images_although_probabilities_cannot_be_fitted(
    run, built, monkeypatch
) -> None:
    data, vector = encoded(photo(99)), units(1, dim=32)[0]
    name, uploads = hashlib.sha256(data).hexdigest(), UploadFolder(built)
    with closing(Gallery.open(built)) as gallery, uploads.storing({name: data}):
        gallery.add([Entry("uploaded", vector, name, format="PNG")])
    assert uploads.has(name)
    run("remove", built, "uploaded")
    fail = Mock(side_effect=GalleryWriteError("No space is left."))
    monkeypatch.setattr(Calibrator, "fit_if_outdated", fail)
    result = run("compact", built)
    assert result.exit_code == 0
    assert "Index flat of 6 items" in result.stdout
    assert "the upkeep of the gallery failed: No space is left." in " ".join(result.stderr.split())
    assert not uploads.has(name)


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
    run("remove", built, "hat/c.webp")
    facts = printed(run("stats", built, "--json"))
    counts = [facts[name] for name in ("size", "distinct_images", "left_out", "removed")]
    assert (counts, facts["attributes"]) == ([6, 6, 0, 1], {"class": 2})
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
    assert [*by_kind] == ["index", "flat", "hnsw", "ivf-pq"]
    assert re.search(r"\d MB +\d[\d,]* MB .* 0\.980$", by_kind["ivf-pq"])


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
        ([file, "--index", "diskann"], "--index diskann is only for Milvus"),
    ):
        assert message in failure(run("import", *arguments, "--out", new))
        assert current_generation(new) is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--memory-mb", "1000"),
        ("--target-recall", "0.9"),
        ("--index-device", "cuda"),
        ("--vector-type", "fp16"),
    ],
)
def test_an_import_onto_milvus_refuses_options_of_folders_before_it_connects(
    run, built, option: str, value: str
) -> None:
    line = failure(run("import", built, "--out", "milvus://127.0.0.1:1/shop", option, value))
    assert f"{option} is only for a gallery in a folder: omit it" in line


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


def test_update_changes_all_items_of_a_product_from_options_and_lists(run, shop, out) -> None:
    (shop / "list.csv").write_text("product,path,price:number\nA,cup,1\nB,hat/c.webp|f.gif,2\n")
    words = ("build", shop, "--csv", shop / "list.csv", "--bundle", "b", "--out", out)
    assert run(*words).exit_code == 0

    def prices() -> dict[str, object]:
        with closing(Gallery.open(out)) as gallery:
            return {item.key: item.attributes["price"] for item in gallery.items()}

    assert prices() == {"A/a.png": 1, "A/b.jpg": 1, "B/c.webp": 2, "B/f.gif": 2}
    result = run("update", out, "--product", "A", "--set", "price=5")
    assert "2 of 2 items changed" in result.stdout
    (shop / "prices.csv").write_text("product,price\nA,6\nB,7\n")
    assert "4 of 4 items changed" in run("update", out, "--csv", shop / "prices.csv").stdout
    assert prices() == {"A/a.png": 6, "A/b.jpg": 6, "B/c.webp": 7, "B/f.gif": 7}
    (shop / "prices.csv").write_text("product,price\nA,8\nnope,9\n")
    assert "No item has the product 'nope'" in failure(
        run("update", out, "--csv", shop / "prices.csv")
    )
    assert prices()["A/a.png"] == 6


def test_a_gallery_with_decomposed_keys_finds_them_in_both_forms(
    gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Galleries of earlier versions have keys and texts as they were given."""
    decomposed, composed = "Cafe\u0301", "Caf\xe9"
    with monkeypatch.context() as earlier:
        earlier.setattr("kinlens.indexer.entries.composed", str)
        gallery.add([entry(decomposed, units(1)[0], {"brand": decomposed})])
    [item] = gallery.items()
    assert (item.key, item.attributes["brand"]) == (decomposed, decomposed)
    for _ in range(2):
        for name in (decomposed, composed):
            assert gallery.stored([name])[name].id == item.id
            assert gallery.page(0, 9, Equals("brand", name)).total == 1
            assert gallery.page(0, 9, prefix=name).total == 1
        gallery.compact()
    assert gallery.update({composed: {"price": 1}}) == 1
    assert gallery.add([entry(composed, units(1)[0], {"brand": composed})]).replaced == 1
    assert gallery.size == 1
    assert gallery.remove([composed]) == 1
    assert len(gallery.restore([composed])) == 1


def test_a_path_that_does_not_exist_and_a_number_that_becomes_a_text_are_named(
    run, built, tmp_path
) -> None:
    image = tmp_path / "nope.jpg"
    assert f"{image} does not exist" in failure(
        run("search", built, "--image", image, "--bundle", "b")
    )
    assert f"{image} does not exist" in failure(run("stats", image))
    ask = ("update", built, "f.gif", "--set")
    assert "for numbers write discount:number=10" in run(*ask, "discount=10").stderr
    assert run(*ask, "discount=11").stderr == run(*ask, "note=red").stderr == ""
    line = failure(run("remove", built, "--where", "discount < 20"))
    assert "or build with the column discount:number" in line
