"""The doctor, on folders that are well and folders that are not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from kinlens.embedder.errors import DatasetError
from kinlens.training.commands.data import app
from kinlens.training.data.datasets import OFFICIAL, Count
from kinlens.training.data.doctor import Report, examine
from tests.tiny import encoded, photo
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


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["doctor", *arguments], catch_exceptions=False)
    return done.exit_code, done.stdout


def test_a_good_folder_is_healthy(shop: Path) -> None:
    steps: list[int] = []
    report = examine(shop, watch=lambda total: lambda: steps.append(total))
    assert report.healthy
    assert (report.kind, report.parts, report.findings) == ("folder", {"all": Count(8, 4)}, ())
    assert steps == [8] * 8


@pytest.mark.parametrize(
    ("data", "detail"),
    [
        (b"", "0 bytes"),
        (b"<html></html>", "supported format"),
        (b"\xff\xd8\xff\xe0 and then nothing", "header of the JPEG image is damaged"),
        (TRUNCATED, "truncated"),
        (encoded(Image.new("1", (16400, 8))), "16384 px per side"),
    ],
)
def test_a_bad_image_is_a_problem(shop: Path, data: bytes, detail: str) -> None:
    put(shop, "mug/3.jpg", data)
    severity, count, examples = found(examine(shop))["unreadable"]
    assert (severity, count) == ("problem", 1)
    assert examples[0].startswith("mug/3.jpg: ")
    assert detail in examples[0]


def test_a_quick_look_misses_damage_behind_the_header(shop: Path) -> None:
    put(shop, "mug/3.jpg", TRUNCATED)
    assert examine(shop, quick=True).healthy


def test_all_faults_are_told_at_once(shop: Path) -> None:
    put(shop, "mug/3.jpg", b"")
    shutil.copy(shop / "pen" / "1.jpg", shop / "hat" / "4.jpg")
    put(shop, "lone/1.jpg", encoded(photo(20, SIZE), "JPEG"))
    put(shop, "flat.jpg", b"flat")
    put(shop, "mug/.hidden.jpg", b"hidden")
    assert found(examine(shop)) == {
        "unreadable": (
            "problem",
            1,
            ("mug/3.jpg: The image is empty (0 bytes). Send the content of an image file.",),
        ),
        "one-image": ("problem", 1, ("lone",)),
        "copies-across-classes": ("problem", 1, ("hat/4.jpg = pen/1.jpg",)),
        "unlisted": ("note", 2, ("flat.jpg", "mug/.hidden.jpg")),
    }


def test_copies_are_told_by_where_they_lie(shop: Path) -> None:
    shutil.copy(shop / "pen" / "1.jpg", shop / "pen" / "3.jpg")
    assert found(examine(shop)) == {"copies": ("note", 1, ("pen/1.jpg = pen/3.jpg",))}
    shutil.copy(shop / "pen" / "1.jpg", shop / "hat" / "3.jpg")
    report = found(examine(shop))
    assert report["copies-across-classes"][0] == "problem"
    assert "copies" not in report
    write_csv(shop, test="hat")
    assert found(examine(shop))["copies-across-parts"][:2] == ("problem", 1)


def test_fewer_classes_than_a_training_needs_are_a_problem(shop: Path) -> None:
    shutil.rmtree(shop / "cup")
    assert found(examine(shop)) == {"few-classes": ("problem", 3, ("hat", "mug", "pen"))}
    write_csv(shop, test="pen")
    assert "few-classes" in found(examine(shop))


def test_a_csv_is_told_of_every_row(shop: Path) -> None:
    rows = ["mug/1.jpg,mug", "mug/1.jpg,mug", "mug/2.jpg,", "mug/9.jpg,mug", "hat/1.jpg,hat"]
    (shop / "images.csv").write_text("path,label\n" + "\n".join(rows))
    report = examine(shop)
    assert (report.kind, report.parts) == ("csv", {"all": Count(2, 2)})
    severity, _, examples = found(report)["rows"]
    assert severity == "problem"
    lines = [example.split(", ")[1].split(":")[0] for example in examples]
    assert lines == ["line 3", "line 4", "line 5"]


def test_a_list_of_another_name_is_read_when_it_is_named(shop: Path) -> None:
    put(shop, "new/mug.jpg", TRUNCATED)
    (shop / "spring.csv").write_text("path,label\nnew/mug.jpg,mug\nmug/1.jpg,mug\n")
    write_csv(shop, test="pen")  # the usual list, which is not asked
    code, shown = run(str(shop), "--file", "spring.csv")
    assert code == 1
    assert "all: 2 images of 1 classes" in shown
    assert "new/mug.jpg" in shown.split("[unreadable]")[1].splitlines()[1]
    with pytest.raises(DatasetError, match="for the kind csv, not cub"):
        examine(shop, kind="cub", file="spring.csv")


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_is_recognised(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(kind, tmp_path)
    report = examine(tmp_path)
    assert (report.kind, report.healthy) == (kind, False)
    assert report.parts["train"] == Count(8, 2)
    assert found(report).keys() == {"counts"}
    assert examine(tmp_path, allow_partial=True).healthy
    whole = replace(OFFICIAL[kind], expected=report.parts)
    monkeypatch.setattr("kinlens.training.data.doctor.OFFICIAL", {kind: whole})
    assert examine(tmp_path).healthy
    gone = sorted(path for path in tmp_path.rglob("*") if path.suffix.lower() == ".jpg")[0]
    gone.unlink()
    severity, count, examples = found(examine(tmp_path))["missing"]
    assert (severity, count) == ("problem", 1)
    assert examples[0].endswith(gone.name)
    assert found(examine(tmp_path, allow_partial=True))["missing"][0] == "note"


def test_copies_in_an_official_data_set_are_notes(tmp_path: Path) -> None:
    write_layout("cub", tmp_path)
    images = sorted((tmp_path / "images").rglob("*.jpg"))
    shutil.copy(images[0], images[-1])
    report = examine(tmp_path, allow_partial=True)
    assert report.healthy
    assert found(report)["copies-across-parts"][:2] == ("note", 1)


def test_a_list_that_does_not_fit_is_a_problem_of_the_layout(tmp_path: Path) -> None:
    write_layout("sop", tmp_path)
    (tmp_path / "Ebay_test.txt").unlink()
    report = examine(tmp_path)
    assert report.kind == "sop"
    assert "it lacks Ebay_test.txt" in found(report)["layout"][2][0]


def test_an_unknown_folder_is_told_what_would_be_known(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert (report.kind, report.healthy) == (None, False)
    write_layout("cub", tmp_path / "a" / "CUB_200_2011")
    above = found(examine(tmp_path / "a"))["layout"][2][0]
    assert f"{tmp_path / 'a' / 'CUB_200_2011'} looks like one" in above
    with pytest.raises(DatasetError, match="is not a folder"):
        examine(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"--kind bird: no such layout. Give one of cub"):
        examine(tmp_path, kind="bird")


def test_the_command_prints_everything_and_fails(shop: Path) -> None:
    for number in range(7):
        put(shop, f"mug/bad{number}.jpg", b"")
    put(shop, "flat.jpg", b"")
    code, text = run(str(shop))
    assert code == 1
    assert "all: 15 images of 4 classes" in text
    assert text.index("PROBLEM [unreadable] 7 image(s)") < text.index("note [unlisted] 1 image(s)")
    assert "... and 2 more" in text


def test_the_command_gives_json(shop: Path) -> None:
    code, text = run(str(shop), "--json", "--kind", "folder")
    report = json.loads(text)
    assert code == 0
    assert report["healthy"] is True
    assert report["parts"] == {"all": {"images": 8, "classes": 4}}


@pytest.mark.real_data
def test_a_copy_of_some_real_cars_is_healthy(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "data" / "cars196-half"
    (tmp_path / "car_ims").mkdir()
    shutil.copy(source / "cars_annos.mat", tmp_path)
    for path in sorted((source / "car_ims").iterdir())[:40]:
        shutil.copy(path, tmp_path / "car_ims")
    report = examine(tmp_path, allow_partial=True)
    assert (report.kind, report.healthy) == ("cars196", True)
    assert not examine(tmp_path).healthy
