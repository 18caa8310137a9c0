"""The doctor, on folders that are well and folders that are not."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from embedder.errors import DatasetError
from tests.tiny import encoded, picture
from tests.training.official_layouts import KINDS, write_layout
from training.commands.data import app
from training.data.datasets import OFFICIAL, Count
from training.data.doctor import Report, examine

SIZE = (48, 40)


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Four products with two good pictures each."""
    names = [f"{product}/{view}" for product in ("mug", "hat", "pen", "cup") for view in "12"]
    for number, name in enumerate(names):
        path = tmp_path / f"{name}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encoded(picture(number, SIZE), "JPEG"))
    return tmp_path


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


def spoil(shop: Path, name: str, data: bytes) -> Path:
    (shop / name).write_bytes(data)
    return shop


@pytest.mark.parametrize(
    ("data", "code", "detail"),
    [
        (b"", "empty", "0 bytes"),
        (b"<html></html>", "not-an-image", "known format"),
        (b"\xff\xd8\xff\xe0 and then nothing", "damaged", "header is damaged"),
        (encoded(picture(9, (400, 300)), "JPEG")[:-900], "damaged", "truncated"),
        (encoded(Image.new("1", (16400, 8))), "too-large", "16384 px a side"),
    ],
)
def test_a_bad_image_is_a_problem(shop: Path, data: bytes, code: str, detail: str) -> None:
    report = examine(spoil(shop, "mug/3.jpg", data))
    assert not report.healthy
    severity, count, examples = found(report)[code]
    assert (severity, count) == ("problem", 1)
    assert examples[0].startswith("mug/3.jpg: ")
    assert detail in examples[0]


def test_a_quick_look_misses_damage_behind_the_header_and_says_so(shop: Path) -> None:
    spoil(shop, "mug/3.jpg", encoded(picture(9, (400, 300)), "JPEG")[:-900])
    report = examine(shop, quick=True)
    assert report.healthy
    assert report.as_dict()["quick"] is True
    code, text = run(str(shop), "--quick")
    assert code == 0
    assert "as far as headers show" in text


def test_all_faults_are_told_at_once(shop: Path) -> None:
    spoil(shop, "mug/3.jpg", b"")
    spoil(shop, "hat/3.jpg", b"no image")
    shutil.copy(shop / "pen" / "1.jpg", shop / "hat" / "4.jpg")
    (shop / "lone").mkdir()
    spoil(shop, "lone/1.jpg", encoded(picture(20, SIZE), "JPEG"))
    (shop / "two  words").mkdir()
    for view in "12":
        spoil(shop, f"two  words/{view}.jpg", encoded(picture(30 + int(view), SIZE), "JPEG"))
    problems = {f.code for f in examine(shop).findings if f.is_problem}
    assert problems == {
        "empty",
        "not-an-image",
        "copies-across-classes",
        "one-image",
        "white-space",
    }


def test_copies_are_told_by_where_they_lie(shop: Path) -> None:
    shutil.copy(shop / "pen" / "1.jpg", shop / "pen" / "3.jpg")
    assert found(examine(shop)) == {"copies": ("note", 1, ("pen/1.jpg = pen/3.jpg",))}
    shutil.copy(shop / "pen" / "1.jpg", shop / "hat" / "3.jpg")
    report = found(examine(shop))
    assert report["copies-across-classes"][0] == "problem"
    assert "copies" not in report
    rows = [
        f"{path.relative_to(shop).as_posix()},{path.parent.name},{part}"
        for path in sorted(shop.rglob("*.jpg"))
        for part in ("test" if path.parent.name == "hat" else "train",)
    ]
    (shop / "images.csv").write_text("path,label,split\n" + "\n".join(rows))
    report = found(examine(shop))
    assert report["copies-across-parts"][:2] == ("problem", 1)


def test_uncommon_images_are_noted_and_healthy(shop: Path) -> None:
    spoil(shop, "mug/grey.jpg", encoded(picture(7, SIZE).convert("L"), "JPEG"))
    spoil(shop, "mug/cmyk.jpg", encoded(picture(8, SIZE).convert("CMYK"), "JPEG"))
    spoil(shop, "mug/dot.png", encoded(Image.new("RGB", (1, 1))))
    report = examine(shop)
    assert report.healthy
    assert found(report) == {
        "grey": ("note", 1, ("mug/grey.jpg",)),
        "cmyk": ("note", 1, ("mug/cmyk.jpg",)),
        "tiny": ("note", 1, ("mug/dot.png: 1 x 1 px",)),
    }


def test_fewer_classes_than_a_training_needs_are_a_problem(shop: Path) -> None:
    shutil.rmtree(shop / "cup")
    severity, count, examples = found(examine(shop))["few-classes"]
    assert (severity, count, examples) == ("problem", 3, ("hat", "mug", "pen"))
    rows = [
        f"{p}/{v}.jpg,{p},{'test' if p == 'pen' else 'train'}"
        for p in ("mug", "hat", "pen")
        for v in "12"
    ]
    (shop / "images.csv").write_text("path,label,split\n" + "\n".join(rows))
    assert "few-classes" in found(examine(shop))


def test_files_that_are_left_out_are_noted(shop: Path) -> None:
    spoil(shop, "mug/notes.txt", b"hello")
    spoil(shop, "mug/.hidden.jpg", b"hidden")
    spoil(shop, "flat.jpg", b"flat")
    assert found(examine(shop)) == {
        "other-files": ("note", 1, ("mug/notes.txt",)),
        "unlisted": ("note", 2, ("flat.jpg", "mug/.hidden.jpg")),
    }


def test_what_cannot_be_read_is_named(shop: Path) -> None:
    (shop / "mug" / "3.jpg").mkdir()
    severity, _, examples = found(examine(shop))["unreadable"]
    assert (severity, examples) == ("problem", ("mug/3.jpg: Is a directory",))


def test_a_csv_is_told_of_every_row(shop: Path) -> None:
    rows = ["mug/1.jpg,mug", "mug/1.jpg,mug", "mug/2.jpg,", "mug/9.jpg,mug", "hat/1.jpg,hat "]
    (shop / "images.csv").write_text("path,label\n" + "\n".join(rows))
    report = examine(shop)
    assert (report.kind, report.parts) == ("csv", {"all": Count(2, 2)})
    severity, count, examples = found(report)["rows"]
    assert (severity, count) == ("problem", 3)
    assert [example.split(", ")[1].split(":")[0] for example in examples] == [
        "line 3",
        "line 4",
        "line 5",
    ]
    assert found(report)["white-space"] == ("problem", 1, ("'hat '",))


@pytest.mark.parametrize("kind", KINDS)
def test_an_official_layout_is_recognised_and_counted(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_layout(kind, tmp_path)
    report = examine(tmp_path)
    assert (report.kind, report.healthy) == (kind, False)
    assert report.parts["train"] == Count(8, 2)
    assert {f.code for f in report.findings if f.is_problem} == {"counts"}
    assert examine(tmp_path, allow_partial=True).healthy
    whole = replace(OFFICIAL[kind], expected=report.parts)
    monkeypatch.setattr("training.data.doctor.OFFICIAL", {kind: whole})
    assert "counts" not in found(examine(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_missing_images_of_an_official_layout_are_told(tmp_path: Path, kind: str) -> None:
    write_layout(kind, tmp_path)
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
    assert (report.kind, report.healthy) == ("sop", False)
    assert "it lacks Ebay_test.txt" in report.findings[0].message


def test_an_unknown_folder_is_told_what_would_be_known(tmp_path: Path) -> None:
    report = examine(tmp_path)
    assert (report.kind, report.healthy) == (None, False)
    write_layout("cub", tmp_path / "a" / "CUB_200_2011")
    assert f"{tmp_path / 'a' / 'CUB_200_2011'} looks like one" in (
        examine(tmp_path / "a", kind=None).findings[0].message
    )
    with pytest.raises(DatasetError, match="is not a folder"):
        examine(tmp_path / "nowhere")
    with pytest.raises(DatasetError, match=r"--kind bird: no such layout. Give one of cub"):
        examine(tmp_path, kind="bird")


def test_the_command_prints_everything_and_fails(shop: Path) -> None:
    for number in range(7):
        spoil(shop, f"mug/bad{number}.jpg", b"")
    spoil(shop, "mug/dot.png", encoded(Image.new("RGB", (1, 1))))
    code, text = run(str(shop))
    assert code == 1
    assert text.index("PROBLEM [empty] 7 image(s)") < text.index("note [tiny] 1 image(s)")
    assert "... and 2 more" in text
    assert "1 kind(s) of problems must be mended." in text


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
