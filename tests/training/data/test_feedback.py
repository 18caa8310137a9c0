"""Feedback as a source of training data: which query image joins which class."""

import csv
from pathlib import Path
from typing import Any

import pytest

from kinlens.embedder.errors import DatasetError
from kinlens.training.config.settings import FolderData
from kinlens.training.data.doctor import examine
from kinlens.training.data.feedback import sentences
from kinlens.training.data.load import load_split
from kinlens.training.data.records import Split, hold_out
from tests.tiny import encoded, photo
from tests.training.jobs import called

PRODUCTS = ("bag", "cup", "hat", "jar", "mug", "pen")
Rows = list[tuple[str, str, str, str]]


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    for number, product in enumerate(PRODUCTS):
        for view in range(3):
            put(tmp_path / "shop" / product / f"{view}.png", 10 * number + view)
    return tmp_path / "shop"


def put(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(photo(seed)))


def reported(folder: Path, rows: Rows, *without: str) -> Path:
    """A folder of feedback with the images of all its queries but for those `without`."""
    folder.mkdir()
    for number, query in enumerate(sorted({row[0] for row in rows} - {"", *without})):
        put(folder / query, 1000 + number)
    with (folder / "pairs.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerows([("query", "query_key", "item", "action"), *rows])
    return folder


def split_of(shop: Path, *folders: Path, **settings: Any) -> Split:
    """Trained on are all products but for two."""
    feedback = [str(folder) for folder in folders]
    data = {"kind": "folder", "root": str(shop), "train_fraction": 0.67, "feedback": feedback}
    return load_split(FolderData.model_validate(data | settings))


def joined(split: Split) -> dict[str, str]:
    """Class by name of the image."""
    found = split.joined()
    return {
        Path(path).name: found.class_names[label]
        for path, label in zip(found.paths, found.labels, strict=True)
    }


def test_what_rows_tell_and_what_they_do_not(shop: Path, tmp_path: Path) -> None:
    a, b, c, d = split_of(shop).train.class_names
    rows: Rows = [
        ("p/clicked.png", "", f"{a}/0.png", "clicked"),
        ("p/clicked.png", "", f"{b}/0.png", "wrong"),
        ("p/clicked.png", "", f"{b}/1.png", "wrong"),
        ("p/most.png", "", f"{a}/0.png", "clicked"),
        ("p/most.png", "", f"{b}/0.png", "clicked"),
        ("p/most.png", "", f"{b}/0.png", "bought"),
        ("p/tie.png", "", f"{c}/0.png", "clicked"),
        ("p/tie.png", "", f"{d}/0.png", "clicked"),
        ("p/denied.png", "", f"{c}/0.png", "clicked"),
        ("p/denied.png", "", f"{c}/0.png", "wrong"),
        ("p/gone.png", "", f"{c}/0.png", "bought"),
        ("p/gone.png", "", f"{d}/0.png", "wrong"),
        ("p/nobody.png", "", f"{d}/0.png", "wrong"),
        ("p/clicked.png", "", "sold/0.png", "clicked"),
        ("", f"{a}/1.png", f"{c}/2.png", "wrong"),
        ("", f"{a}/1.png", f"{d}/2.png", "clicked"),
        ("", f"{a}/1.png", f"{a}/2.png", "wrong"),
    ]
    split = split_of(shop, reported(tmp_path / "reported", rows, "p/gone.png"))
    assert joined(split) == {"clicked.png": a, "most.png": b}
    text = "\n".join(sentences(split))
    assert "2 query image(s) join 2 train class(es)\n" in text
    for count, words in (
        (1, "name items that are not in the data; train on the folder"),
        (3, "judge an answer to a search with an image of the shop itself"),
        (1, "like an answer to a query image that is not kept"),
        (2, "call an answer wrong for a query image of unknown product"),
        (4, "are outvoted by other rows"),
    ):
        assert f"{count} of 17 rows {words}" in text
    assert split.feedback is not None
    assert sum(split.feedback.unused.values()) == 17 - 6


def test_no_class_that_is_held_out_is_touched(shop: Path, tmp_path: Path) -> None:
    rows: Rows = [(f"{name}.png", "", f"{name}/0.png", "clicked") for name in PRODUCTS]
    rows += [("bag.png", "", f"{name}/0.png", "wrong") for name in PRODUCTS[1:]]
    folder = reported(tmp_path / "reported", rows)
    plain, split = split_of(shop), split_of(shop, folder)
    assert set(joined(split).values()) == set(split.train.class_names)
    assert "4 train class(es); 2 of held-out" in sentences(split)[0]
    assert split.sha256() == plain.sha256() != split.learnt_sha256()
    held = hold_out(split, 0.5)
    assert held.validation is not None
    assert set(joined(held).values()) == set(held.train.class_names)
    assert "2 train class(es); 4 of held-out" in sentences(held)[0]
    learnt = held.to_learn()
    assert learnt.paths[: len(held.train)] == held.train.paths
    assert len(learnt) == len(held.train) + 2
    assert all((learnt.root / path).is_file() for path in learnt.paths)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"reported/pairs.csv cannot be read: .* `kinlens-serve feedback export` wrote"),
        ("query,item\n", r"must name the columns query, query_key, item, action; it names query,"),
        ("a.png,,bag/0.png,liked", r"line 2: the action 'liked' must be one of clicked, bought, w"),
        (",,bag/0.png,wrong", r"line 2: it needs an item, and a query or query_key"),
        ("../a.png,,bag/0.png,wrong", r"line 2: the query '../a.png' must be a relative path"),
    ],
)
def test_bad_folders_are_named(shop: Path, tmp_path: Path, text: str | None, message: str) -> None:
    folder = tmp_path / "reported"
    folder.mkdir()
    if text is not None:
        header = "" if text.startswith("query") else "query,query_key,item,action\n"
        (folder / "pairs.csv").write_text(header + text)
    with pytest.raises(DatasetError, match=message):
        split_of(shop, folder)
    assert [finding.code for finding in examine(shop, feedback=[folder]).findings] == [
        "feedback-rows"
    ]


def test_the_doctor_tells_what_feedback_adds(shop: Path, tmp_path: Path) -> None:
    rows: Rows = [(f"{name}.png", "", f"{name}/0.png", "clicked") for name in ("bag", "cup", "hat")]
    rows += [("bag.png", "", "mug/0.png", "wrong")] * 2 + [("cup.png", "", "sold.png", "bought")]
    folder = reported(tmp_path / "reported", rows)
    report = examine(shop, feedback=[folder])
    assert report.healthy
    assert report.parts["feedback"] == (3, 3)
    examples = {finding.code: finding.examples for finding in report.findings}
    assert examples["feedback"][0].startswith("1 of 6 name items that are not in the data")
    printed = called("data", "doctor", shop, "--feedback", folder)
    assert "feedback: 3 images of 3 classes" in printed
    (folder / "cup.png").write_bytes(b"")
    damaged = examine(shop, feedback=[folder]).findings
    assert [f.examples[0].split(": ")[0] for f in damaged if f.severity == "problem"] == [
        str(folder / "cup.png")
    ]
