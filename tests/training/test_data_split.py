"""kinlens-train data split: lists of official data sets."""

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from embedder.errors import DatasetError
from tests.training.official_layouts import KINDS, write_layout
from training.commands.data import app
from training.data.load import write_lists


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.mark.parametrize("kind", KINDS)
def test_the_lists_name_existing_images_and_disjoint_classes(kind: str, tmp_path: Path) -> None:
    root = write_layout(kind, tmp_path / kind)
    written = write_lists(root, tmp_path / "lists", None, allow_partial=True)
    train, test = rows(tmp_path / "lists" / "train.csv"), rows(tmp_path / "lists" / "test.csv")
    assert len(written["train"]) == len(train) > 0
    assert all((written["train"].root / row["path"]).is_file() for row in (*train, *test))
    assert not {row["class"] for row in train} & {row["class"] for row in test}


def test_in_shop_has_its_gallery_with_the_classes_of_the_queries(tmp_path: Path) -> None:
    root = write_layout("in_shop", tmp_path / "in-shop")
    write_lists(root, tmp_path / "lists", "in_shop", allow_partial=True)
    queries, gallery = (rows(tmp_path / "lists" / f"{name}.csv") for name in ("test", "gallery"))
    assert {row["class"] for row in queries} == {row["class"] for row in gallery}
    assert not {row["path"] for row in queries} & {row["path"] for row in gallery}


def test_the_command_says_where_the_paths_start(tmp_path: Path) -> None:
    root = write_layout("sop", tmp_path / "sop")
    arguments = ["split", str(root), "--out", str(tmp_path / "lists"), "--allow-partial"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert result.output.replace("\n", "").endswith(f"images: {root}")


def test_a_part_of_a_data_set_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    root = write_layout("sop", tmp_path / "sop")
    with pytest.raises(DatasetError, match=r"59,551 train images"):
        write_lists(root, tmp_path / "lists", None, allow_partial=False)


@pytest.mark.parametrize(("name", "kind"), [("nothing", None), ("sop", "folder")])
def test_what_is_no_official_data_set_is_named(name: str, kind: str | None, tmp_path: Path) -> None:
    write_layout("sop", tmp_path / "sop")
    with pytest.raises(DatasetError, match=r"is not"):
        write_lists(tmp_path / name, tmp_path / "lists", kind, allow_partial=True)
