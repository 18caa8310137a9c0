"""The commands build and add: what they print, how they end, what they refuse."""

import json
import re
from pathlib import Path

from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live import compaction
from tests.indexer.conftest import failure, printed
from tests.support.seams import GalleryFolder
from tests.tiny import encoded, photo


def test_build_says_the_cost_before_and_the_result_after(run, shop, out) -> None:
    for number in range(12):
        (shop / f"bad[{number:02d}].jpg").write_text("not an image")
    options = ("--name", "shoes", "--index", "hnsw", "--target-recall", "0.9")
    result = run("build", shop, "--bundle", "b", "--out", out, *options)
    assert result.exit_code == 0
    assert "Found 18 images in the folder" in result.stdout
    assert "Dimension 32, model on FakeExecutionProvider in fp32" in result.stdout
    assert re.search(r"^index +hnsw on cpu", result.stdout, re.MULTILINE)
    assert re.search(r"^vectors +18 x 32$", result.stdout, re.MULTILINE)
    assert "6 items (6 embedded, 0 from an earlier run, 0 copies)" in result.stdout
    assert re.search(r"18 of 18 +(?!0\.0 )[\d.]+ images/s +\d:\d\d:\d\d", result.stderr)
    lines = result.stdout.splitlines()[-12:]
    assert lines[0] == "Skipped 12 of 18 images:"
    assert lines[1].startswith("  bad[00].jpg: The file is not an image")
    assert re.fullmatch(r"  \.\.\. and 2 more in .*report\.json", lines[11])
    report = json.loads(Path(lines[11].partition(" in ")[2]).read_text())
    assert len(report["failures"]) == 12
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
    assert result.exit_code == 0
    assert "1 added, 0 replaced, 0 with new attributes, 3 unchanged (1 embedded)" in result.stdout
    assert "7 items in all" in result.stdout
    assert "  hat/bad.png: The file is not an image" in result.stdout
    again = printed(run("add", built, shop, "--bundle", "b", "--json"))
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
    monkeypatch.setattr(compaction, "_SMALL_DELTA", 2)
    for number in range(4):
        (shop / f"new{number}.png").write_bytes(encoded(photo(100 + number)))
    left = run("add", built, shop, "--bundle", "b", "--no-compact")
    assert "A compaction is due: 4 items were added or changed after the segment" in left.stderr
    assert printed(run("stats", built, "--json"))["delta"] == 4
    done = run("add", built, shop, "--bundle", "b")
    assert "Compacting: 4 items were added or changed after the segment" in done.stderr
    assert printed(run("stats", built, "--json"))["delta"] == 0


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
