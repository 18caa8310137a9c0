"""The commands build and add: what they print, how they end, what they refuse."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from embedder.errors import GalleryNotFoundError
from indexer.gallery import Gallery
from indexer.live import compaction
from tests.indexer.conftest import CountingEmbedder, failure, usage
from tests.support.seams import GalleryFolder
from tests.tiny import encoded, picture

Run = Callable[..., Result]


def test_build_says_the_cost_before_and_the_result_after(run: Run, shop: Path, out: Path) -> None:
    result = run("build", shop, "--bundle", "b", "--out", out, "--name", "shoes")
    assert result.exit_code == 0
    assert "Found 6 images in the folder" in result.stdout
    assert "Dimension 32, model on FakeExecutionProvider in fp32" in result.stdout
    assert "6 items (6 embedded, 0 from an earlier run, 0 copies)" in result.stdout
    assert re.search(r"6 of 6 +(?!0\.0 )[\d.]+ images/s +\d:\d\d:\d\d", result.stderr)
    assert json.loads(run("stats", out, "--json").stdout)["name"] == "shoes"


def test_unreadable_images_are_the_last_lines_and_no_failure(
    run: Run, shop: Path, out: Path
) -> None:
    for number in range(12):
        (shop / f"bad[{number:02d}].jpg").write_text("not an image")
    result = run("build", shop, "--bundle", "b", "--out", out)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()[-12:]
    assert lines[0] == "Left out 12 of 18 images:"
    assert lines[1].startswith("  bad[00].jpg: The content is not an image")
    assert re.fullmatch(r"  \.\.\. and 2 more in .*report\.json", lines[11])
    path = Path(lines[11].partition(" in ")[2])
    assert len(json.loads(path.read_text())["failures"]) == 12


@pytest.mark.parametrize("as_root", [False, True], ids=["IMAGES", "--root"])
@pytest.mark.parametrize(
    ("option", "content", "expected"),
    [
        ("--csv", "key,path,colour\nA,f.gif,red\nB,cup/a.png,blue\n", {"colour": 2}),
        ("--split", "f.gif, 3, 1\ncup/a.png, 3, 2\n", {"class": 1, "class_2": 2}),
    ],
)
def test_lists_are_indexed(
    run: Run,
    shop: Path,
    out: Path,
    tmp_path: Path,
    option: str,
    content: str,
    expected: dict[str, int],
    as_root: bool,
) -> None:
    (tmp_path / "list").write_text(content)
    root = ["--root", shop] if as_root else [shop]
    result = run("build", *root, option, tmp_path / "list", "--bundle", "b", "--out", out)
    assert result.exit_code == 0
    stats = json.loads(run("stats", out, "--json").stdout)
    assert (stats["size"], stats["attributes"]) == (2, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--csv", "a", "--split", "b"], "Give --csv or --split, not both"),
        ([], "Give the folder IMAGES, or a list"),
        (["images", "--root", "other"], "IMAGES or --root, not both"),
        (["images", "--batch-size", "0"], "--batch-size"),
        (["images", "--device", "tpu"], "tpu"),
    ],
)
def test_wrong_usage_ends_with_two(run: Run, arguments: list[str], message: str) -> None:
    assert message in usage(run("build", *arguments, "--bundle", "b", "--out", "o"))


def test_build_prints_the_plan_before_the_work_and_refuses_what_does_not_fit(
    run: Run, shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    arguments = ("build", shop, "--bundle", "b", "--out", out)
    refused = run(*arguments, "--memory-mb", "0.001")
    assert re.search(r"The index .* needs .* of memory .*Raise --memory-mb", failure(refused))
    assert embedder.batches == []
    planned = run(*arguments, "--index", "hnsw", "--target-recall", "0.9")
    assert re.search(r"^index +hnsw on cpu", planned.stdout, re.MULTILINE)
    assert re.search(r"^vectors +6 x 32$", planned.stdout, re.MULTILINE)
    assert json.loads(run("stats", out, "--json").stdout)["index"] == "hnsw"


def test_build_reports_in_json_alone(run: Run, shop: Path, out: Path) -> None:
    (shop / "bad.jpg").write_text("not an image")
    report = json.loads(run("build", shop, "--bundle", "b", "--out", out, "--json").stdout)
    assert (report["found"], report["indexed"]) == (7, 6)
    assert [f["key"] for f in report["failures"]] == ["bad.jpg"]
    assert (out / "versions" / report["generation"]).is_dir()


def test_add_brings_a_gallery_up_to_date_and_says_what_it_did(
    run: Run, built: Path, shop: Path
) -> None:
    (shop / "hat" / "new.png").write_bytes(encoded(picture(99)))
    (shop / "hat" / "bad.png").write_text("not an image")
    result = run("add", built, shop / "hat", "--bundle", "b")
    assert result.exit_code == 0
    assert "1 added, 0 replaced, 0 with new attributes, 3 unchanged (1 embedded)" in result.stdout
    assert "7 items in all" in result.stdout
    assert "  hat/bad.png: The content is not an image" in result.stdout
    again = json.loads(run("add", built, shop, "--bundle", "b", "--json").stdout)
    assert (again["added"], again["unchanged"], again["embedded"]) == (0, 7, 0)
    assert [f["key"] for f in again["failures"]] == ["hat/bad.png"]


def test_a_list_is_added_with_the_types_that_the_gallery_knows(
    run: Run, shop: Path, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "old.csv").write_text("key,path,price:number\nA,f.gif,5\n")
    (tmp_path / "new.csv").write_text(
        "key,path,price,sale:boolean\nA,f.gif,6,\nB,cup/a.png,7,true\n"
    )
    assert (
        run("build", shop, "--csv", tmp_path / "old.csv", "--bundle", "b", "--out", out).exit_code
        == 0
    )
    result = run("add", out, "--csv", tmp_path / "new.csv", "--bundle", "b", "--json")
    report = json.loads(result.stdout)
    assert (report["added"], report["updated"]) == (1, 1)
    shown = json.loads(run("show", out, "B", "--json").stdout)
    assert (shown["path"], shown["attributes"]) == ("cup/a.png", {"price": 7, "sale": True})


def test_add_makes_a_new_index_when_it_is_due_unless_told_not_to(
    run: Run, built: Path, shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_SMALL_DELTA", 2)
    for number in range(4):
        (shop / f"new{number}.png").write_bytes(encoded(picture(100 + number)))
    left = run("add", built, shop, "--bundle", "b", "--no-compact")
    assert "A compaction is due: 4 items came after the segment" in left.stderr
    assert json.loads(run("stats", built, "--json").stdout)["delta"] == 4
    done = run("add", built, shop, "--bundle", "b")
    assert "Compacting: 4 items came after the segment" in done.stderr
    assert json.loads(run("stats", built, "--json").stdout)["delta"] == 0


def test_add_refuses_what_does_not_belong_to_the_gallery(
    run: Run, built: Path, shop: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.png").write_bytes(encoded(picture(1)))
    (tmp_path / "kinds.csv").write_text("key,path,class:number\nA,f.gif,1\n")
    (tmp_path / "lead.csv").write_text("key,path\nA,../a.png\n")
    embedder.batches.clear()
    for arguments, message in (
        ([elsewhere], r"elsewhere is outside .*shop, the image root of the gallery. Move or copy"),
        ([shop / "none"], r"There is no folder .*none"),
        (["--csv", tmp_path / "none.csv"], r"Cannot read the list .*none\.csv"),
        (["--csv", tmp_path / "kinds.csv"], "class:number does not fit the gallery, where class"),
        (["--csv", tmp_path / "lead.csv"], r"lead\.csv:2: the path '\.\./a\.png' leads out"),
    ):
        assert re.search(message, failure(run("add", built, *arguments, "--bundle", "b")))
    assert embedder.batches == []


def test_images_that_were_moved_are_added_from_where_they_are(
    run: Run, built: Path, shop: Path, tmp_path: Path
) -> None:
    moved = shop.rename(tmp_path / "moved")
    (moved / "new.png").write_bytes(encoded(picture(99)))
    arguments = ("add", built, moved, "--bundle", "b")
    assert "image root" in failure(run(*arguments))
    assert "1 added" in run(*arguments, "--image-root", moved).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give the folder IMAGES, or a list"),
        (["images", "--csv", "list.csv"], "Give IMAGES or a list, not both"),
        (["--csv", "a", "--split", "b"], "Give --csv or --split, not both"),
    ],
)
def test_wrong_usage_of_add_ends_with_two(
    run: Run, built: Path, arguments: list[str], message: str
) -> None:
    assert message in usage(run("add", built, *arguments, "--bundle", "b"))


def test_a_csv_list_with_missing_files_is_indexed_without_them(
    run: Run, shop: Path, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "list.csv").write_text("key,path\nA,f.gif\nB,gone.png\n")
    result = run("build", shop, "--csv", tmp_path / "list.csv", "--bundle", "b", "--out", out)
    assert result.exit_code == 0
    assert "B: gone.png is missing below" in result.stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("key,file\nA,f.gif\n", "no column path; its first line names ['key', 'file']"),
        (
            "key,path,price:number\nA,f.gif,cheap\n",
            ":2: column price has 'cheap', expected a finite",
        ),
        ("key,path\nA,f.gif\nA,f.gif\n", "the key 'A' is on line 2 and on line 3"),
        ("key,path\nA,gone.png\n", "None of the 1 images"),
    ],
)
def test_a_bad_list_is_one_line_and_no_gallery(
    run: Run, shop: Path, out: Path, tmp_path: Path, content: str, message: str
) -> None:
    (tmp_path / "list.csv").write_text(content)
    result = run("build", shop, "--csv", tmp_path / "list.csv", "--bundle", "b", "--out", out)
    assert message in failure(result)
    with pytest.raises(GalleryNotFoundError):
        Gallery.open(out)


def test_a_gallery_that_is_being_built_cannot_be_changed_meanwhile(
    run: Run, built: Path, shop: Path
) -> None:
    with GalleryFolder(built).locked():
        for arguments in (
            ("add", built, shop, "--bundle", "b"),
            ("remove", built, "f.gif"),
            ("update", built, "f.gif", "--set", "a=b"),
            ("build", shop, "--bundle", "b", "--out", built),
        ):
            if arguments[0] == "add":
                (shop / "new.png").write_bytes(encoded(picture(99)))
            assert re.search(r"[Bb]uild \(process \d+\) is", failure(run(*arguments)))
    assert "1 added" in run("add", built, shop, "--bundle", "b").stdout


def test_a_folder_that_cannot_be_read_is_named(
    run: Run, built: Path, shop: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def closed(path: str) -> object:
        if Path(path) == shop / "hat":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    for arguments in (
        ("build", shop, "--bundle", "b", "--out", out),
        ("add", built, shop, "--bundle", "b"),
    ):
        assert f"The folder {shop / 'hat'} cannot be read" in failure(run(*arguments))


def test_a_gallery_of_vectors_takes_images_only_from_a_root_that_is_named(
    run: Run, shop: Path, tmp_path: Path
) -> None:
    path = tmp_path / "vectors"
    Gallery.create(path, name="vectors", bundle_id="b" * 64, dim=32).close()
    refused = run("add", path, shop, "--bundle", "b")
    assert "has no image root" in failure(refused)
    assert "6 added" in run("add", path, shop, "--bundle", "b", "--image-root", shop).stdout
