"""The doctor, on folders that are well and folders that are not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from kinlens.embedder.errors import DatasetError
from kinlens.training.__main__ import app
from kinlens.training.data.datasets import OFFICIAL, Count
from kinlens.training.data.doctor import Report, examine
from tests.tiny import encoded, photo
from tests.training.jobs import called
from tests.training.official_layouts import KINDS, write_layout

SIZE = (48, 40)
TRUNCATED = encoded(photo(9, (400, 300)), "JPEG")[:-900]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Four products with two good images each."""
    names = [f"{product}/{view}" for product in ("mug", "hat", "pen", "cup") for view in "12"]
    for number, name in enumerate(names):
        put(tmp_path, f"{name}.jpg", encoded(photo(number, SIZE), "JPEG"))
    return tmp_path


def put(shop: Path, name: str, data: bytes) -> None:
    (shop / name).parent.mkdir(exist_ok=True)
    (shop / name).write_bytes(data)


def write_csv(shop: Path, test: str) -> None:
    """A list of all images, in which the product `test` is the test part."""
    rows = [
        f"{path.relative_to(shop).as_posix()},{path.parent.name},"
        f"{'test' if path.parent.name == test else 'train'}"
        for path in sorted(shop.rglob("*.jpg"))
    ]
    (shop / "images.csv").write_text("\n".join(["path,label,split", *rows]))


def found(report: Report) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    return {f.code: (f.severity, f.count, f.examples) for f in report.findings}


def test_a_good_folder_is_healthy(shop: Path) -> None:
    report = examine(shop)
    assert report.healthy
    assert (report.kind, report.parts, report.findings) == ("folder", {"all": Count(8, 4)}, ())
    words = ["data", "doctor", str(shop), "--json", "--kind", "folder"]
    shown = json.loads(CliRunner().invoke(app, words).stdout)
    assert shown["healthy"] is True
    assert shown["parts"] == {"all": {"images": 8, "classes": 4}}


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"<html></html>", "supported format"),
        (TRUNCATED, "truncated"),
        (encoded(Image.new("1", (16400, 8))), "16384 px per side"),
    ],
    ids=["html", "truncated", "large"],
)
def test_a_bad_image_is_a_problem(shop: Path, data: bytes, detail: str) -> None:
    put(shop, "mug/3.jpg", data)
    severity, count, examples = found(examine(shop))["unreadable"]
    assert (severity, count) == ("problem", 1)
    assert examples[0].startswith("mug/3.jpg: ")
    assert detail in examples[0]
    assert examine(shop, quick=True).healthy == (detail == "truncated")  # behind the header


def test_all_faults_are_told_at_once(shop: Path) -> None:
    put(shop, "mug/3.jpg", b"")
    shutil.copy(shop / "pen" / "1.jpg", shop / "hat" / "4.jpg")
    shutil.copy(shop / "cup" / "1.jpg", shop / "cup" / "3.jpg")
    put(shop, "lone/1.jpg", encoded(photo(20, SIZE), "JPEG"))
    put(shop, "flat.jpg", b"flat")
    put(shop, "mug/.hidden.jpg", b"hidden")
    empty = "mug/3.jpg: The image is empty (0 bytes). Send the content of an image file."
    assert found(examine(shop)) == {
        "unreadable": ("problem", 1, (empty,)),
        "one-image": ("problem", 1, ("lone",)),
        "copies-across-classes": ("problem", 1, ("hat/4.jpg = pen/1.jpg",)),
        "copies": ("problem", 1, ("cup/1.jpg = cup/3.jpg",)),
        "unlisted": ("note", 1, ("flat.jpg",)),
        "omitted": ("note", 1, ("Omitted 1 hidden files or folders (mug/.hidden.jpg).",)),
    }
    for number in range(7):
        put(shop, f"mug/bad{number}.jpg", b"")
    text = called("data", "doctor", shop, code=1)
    assert "all: 19 images of 5 classes" in text
    assert text.index("PROBLEM [unreadable] 8 image(s)") < text.index("note [unlisted] 1 image(s)")
    assert "... and 3 more (--all lists them)" in text
    assert text.endswith("Fix the problems before training.\n")
    text = called("data", "doctor", shop, "--all", code=1)
    assert all(f"mug/bad{number}.jpg: " in text for number in range(7))


def test_few_classes_and_copies_across_the_parts_are_problems(shop: Path) -> None:
    shutil.rmtree(shop / "cup")
    assert found(examine(shop)) == {"few-classes": ("problem", 3, ("hat", "mug", "pen"))}
    shutil.copy(shop / "pen" / "1.jpg", shop / "hat" / "3.jpg")
    write_csv(shop, test="hat")
    report = found(examine(shop))
    assert "few-classes" in report
    assert report["copies-across-parts"][:2] == ("problem", 1)


def test_a_csv_is_told_of_every_row_also_by_another_name(shop: Path) -> None:
    rows = ["mug/1.jpg,mug", "mug/1.jpg,mug", "mug/2.jpg,", "mug/9.jpg,mug", "hat/1.jpg,hat"]
    (shop / "spring.csv").write_text("path,label\n" + "\n".join(rows))
    write_csv(shop, test="pen")  # the usual list, which is not asked
    report = examine(shop, file="spring.csv")
    assert (report.kind, report.parts) == ("csv", {"all": Count(3, 2)})
    assert found(report)["missing"][2] == ("mug/9.jpg",)
    severity, _, examples = found(report)["rows"]
    assert severity == "problem"
    lines = [example.split(", ")[1].split(":")[0] for example in examples]
    assert lines == ["line 3", "line 4"]
    shown = called("data", "doctor", shop, "--file", "spring.csv", code=1)
    assert "all: 3 images of 2 classes" in shown
    with pytest.raises(DatasetError, match="for the kind csv, not cub"):
        examine(shop, kind="cub", file="spring.csv")


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_is_recognised(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(kind, tmp_path)
    report = examine(tmp_path)
    assert (report.kind, report.healthy) == (kind, False)
    assert report.parts["train"] == Count(8, 2)
    assert found(report).keys() == {"counts"}
    whole = replace(OFFICIAL[kind], expected=report.parts)
    monkeypatch.setattr("kinlens.training.data.doctor.OFFICIAL", {kind: whole})
    assert examine(tmp_path).healthy
    images = sorted(path for path in tmp_path.rglob("*") if path.suffix.lower() == ".jpg")
    shutil.copy(images[1], images[-1])
    images[0].unlink()
    report = examine(tmp_path)
    severity, count, examples = found(report)["missing"]
    assert (severity, count) == ("problem", 1)
    assert examples[0].endswith(images[0].name)
    assert found(report)["copies-across-parts"][:2] == ("note", 1)  # no fault of the user
    assert examine(tmp_path, allow_partial=True).healthy


def test_an_unknown_folder_is_told_what_would_be_known(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert (report.kind, report.healthy) == (None, False)
    place = write_layout("sop", tmp_path / "a" / "Stanford_Online_Products")
    assert f"{place} looks like one" in found(examine(tmp_path / "a"))["layout"][2][0]
    (place / "Ebay_test.txt").unlink()
    assert "it lacks Ebay_test.txt" in found(examine(place))["layout"][2][0]
    with pytest.raises(DatasetError, match="nowhere does not exist"):
        examine(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"--kind bird: no such layout. Give one of cub"):
        examine(tmp_path, kind="bird")
