"""The commands search and show: every kind of question, and what cannot be asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from embedder.fake import FakeEmbedder
from tests.indexer.conftest import PICTURES, failure, query, usage

Run = Callable[..., Result]


def hits(result: Result, query: int = 0) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return list(json.loads(result.stdout)["hits"][query])


def found(result: Result) -> list[str]:
    return [hit["key"] for hit in hits(result)]


@pytest.fixture
def vectors(shop: Path, tmp_path: Path, embedder: FakeEmbedder) -> Path:
    """The vectors of f.gif and cup/a.png in a file."""
    file = tmp_path / "queries.npy"
    rows = [query(embedder, shop / name) for name in ("f.gif", "cup/a.png")]
    np.save(file, np.concatenate(rows))
    return file


def test_an_image_finds_itself_first(run: Run, built: Path, shop: Path) -> None:
    ask = ("search", built, "--image", shop / "f.gif", "--bundle", "b")
    [first, *_] = run(*ask, "-k", "2").stdout.splitlines()
    assert first == "1.0000  f.gif"
    result = run(*ask, "-k", "3", "--json")
    assert len(hits(result)) == 3
    assert (hits(result)[0]["key"], hits(result)[0]["attributes"]) == ("f.gif", {})
    assert json.loads(result.stdout)["gallery"] == "gallery"


def test_vectors_of_a_file_are_answered_one_by_one(run: Run, built: Path, vectors: Path) -> None:
    result = run("search", built, "--vector", vectors, "-k", "1", "--json")
    assert [hits(result, n)[0]["key"] for n in (0, 1)] == ["f.gif", "cup/a.png"]
    lines = run("search", built, "--vector", vectors, "-k", "1").stdout.splitlines()
    assert lines == ["Query 0:", "1.0000  f.gif", "Query 1:", "1.0000  cup/a.png  class=cup"]


def test_liked_items_are_not_in_their_own_answer(run: Run, built: Path) -> None:
    keys = found(run("search", built, "--like", "f.gif", "--json"))
    assert sorted(keys) == sorted(set(PICTURES) - {"f.gif"})
    mixed = run("search", built, "--like", "f.gif", "--unlike", keys[0], "--json")
    assert sorted(found(mixed)) == sorted(set(PICTURES) - {"f.gif", keys[0]})


def test_k_beyond_the_gallery_gives_all_of_it_and_offset_the_rest(
    run: Run, built: Path, vectors: Path
) -> None:
    ask = ("search", built, "--like", "f.gif", "--json")
    everything = found(run(*ask, "-k", "1000"))
    assert len(everything) == 5
    assert found(run(*ask, "-k", "2", "--offset", "2")) == everything[2:4]
    assert found(run(*ask, "-k", "2", "--offset", "9")) == []


def test_filters_scores_and_exactness_are_handed_on(run: Run, built: Path, vectors: Path) -> None:
    ask = ("search", built, "--vector", vectors, "--json")
    assert sorted(found(run(*ask, "--where", "class = 'cup'"))) == ["cup/a.png", "cup/b.jpg"]
    assert found(run(*ask, "--min-score", "0.999")) == ["f.gif"]
    assert found(run(*ask, "--exact")) == found(run(*ask, "--effort", "5"))


def test_equal_content_is_shown_once_if_asked(run: Run, built: Path, shop: Path) -> None:
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    assert run("add", built, shop, "--bundle", "b").exit_code == 0
    ask = ("search", built, "--image", shop / "f.gif", "--bundle", "b", "-k", "2", "--json")
    assert found(run(*ask)) == ["f.gif", "copy.gif"]
    assert "copy.gif" not in found(run(*ask, "--distinct"))


@pytest.mark.parametrize("score", ["best", "mean"])
def test_groups_are_shown_with_their_items(run: Run, built: Path, shop: Path, score: str) -> None:
    ask = ("search", built, "--image", shop / "cup" / "a.png", "--bundle", "b")
    options = ("--group-by", "class", "--group-score", score, "--group-size", "2", "-k", "3")
    [groups] = json.loads(run(*ask, *options, "--json").stdout)["groups"]
    assert sorted(str(group["value"]) for group in groups) == ["None", "cup", "hat"]
    [cup] = [group for group in groups if group["value"] == "cup"]
    assert [hit["key"] for hit in cup["hits"]] == ["cup/a.png", "cup/b.jpg"]
    lines = run(*ask, *options).stdout.splitlines()
    assert len([line for line in lines if not line.startswith(" ")]) == 3
    assert any(line.endswith("  (no value)") for line in lines)


def test_groups_like_items_leave_these_items_out(run: Run, built: Path) -> None:
    ask = ("search", built, "--like", "cup/a.png", "--unlike", "f.gif", "--group-by", "class")
    [groups] = json.loads(run(*ask, "--group-size", "9", "--json").stdout)["groups"]
    keys = [hit["key"] for group in groups for hit in group["hits"]]
    assert sorted(keys) == sorted(set(PICTURES) - {"cup/a.png", "f.gif"})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.ones((1, 5), np.float32), r"dimension 32"),
        (np.full((1, 32), np.nan, np.float32), "nan"),
        (np.ones((1, 32), np.float32), "norm 5.657, not 1"),
        (np.zeros((2, 3, 4), np.float32), "float32 (2, 3, 4); expected float32 vectors of shape"),
        (np.zeros((0, 32), np.float32), "holds no vectors: its shape is (0, 32)"),
        (np.array(["a"]), "expected float32 vectors"),
    ],
)
def test_vectors_that_do_not_fit_are_refused_in_one_line(
    run: Run, built: Path, tmp_path: Path, rows: np.ndarray, message: str
) -> None:
    np.save(tmp_path / "bad.npy", rows)
    assert message in failure(run("search", built, "--vector", tmp_path / "bad.npy"))


def test_files_that_are_no_vectors_or_images_are_refused_by_name(
    run: Run, built: Path, shop: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.npy").write_text("not an array")
    np.savez(tmp_path / "many.npz", a=np.ones(3))
    (tmp_path / "text.jpg").write_text("not an image")
    for option, name, message in (
        ("--vector", "text.npy", "is not a .npy file of numbers"),
        ("--vector", "many.npz", "is not a .npy file of numbers"),
        ("--vector", "none.npy", "Cannot read the vectors in"),
        ("--image", "text.jpg", "The image"),
        ("--image", "none.jpg", "none.jpg is missing"),
    ):
        bundle = ["--bundle", "b"] if option == "--image" else []
        line = failure(run("search", built, option, tmp_path / name, *bundle))
        assert message in line
        assert name in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-k", "0"], "k = 0 is not a whole number of at least 1"),
        (["-k", "-3"], "k = -3"),
        (["--offset", "-1"], "offset = -1"),
        (["--min-score", "2"], "min_score = 2.0 is outside -1..1"),
        (["--effort", "0"], "effort = 0"),
        (["--where", "color = 'red'"], "no attribute 'color'. Known are 'class'"),
        (["--where", "class = 5"], "'class' is a text"),
        (["--where", "class ="], "ends at position 7. Expected a value"),
        (["--group-by", "color"], "no attribute 'color' to group by. Known are 'class'"),
    ],
)
def test_a_question_that_cannot_be_answered_is_refused_in_one_line(
    run: Run, built: Path, arguments: list[str], message: str
) -> None:
    assert message in failure(run("search", built, "--like", "f.gif", *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give --image, --vector or --like"),
        (["--like", "a", "--vector", "b"], "one of them alone"),
        (["--image", "a"], "--image needs --bundle"),
        (["--vector", "a", "--unlike", "b"], "--unlike needs at least one --like"),
        (["--like", "a", "--group-score", "worst"], "worst"),
    ],
)
def test_wrong_usage_ends_with_two(
    run: Run, built: Path, arguments: list[str], message: str
) -> None:
    assert message in usage(run("search", built, *arguments))


def test_an_item_is_shown_with_all_that_is_known(run: Run, built: Path) -> None:
    lines = run("show", built, "cup/a.png").stdout.splitlines()
    assert "key        cup/a.png" in lines
    assert "attributes class=cup" in lines
    shown = json.loads(run("show", built, "cup/a.png", "--json").stdout)
    assert (shown["key"], shown["format"], len(shown["sha256"])) == ("cup/a.png", "PNG", 64)
    assert "no item with the key 'gone'" in failure(run("show", built, "gone"))
    assert "'gone'" in failure(run("search", built, "--like", "gone"))


@pytest.mark.parametrize("address", ["milvus://", "milvus://host:1", "milvus://host:1/a/b"])
def test_an_address_that_names_no_gallery_is_refused(run: Run, address: str) -> None:
    assert "Write milvus://HOST:PORT/NAME" in failure(run("show", address, "key"))
