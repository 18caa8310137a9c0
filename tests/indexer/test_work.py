"""The work file: vectors survive, by bundle and content."""

import sqlite3
from pathlib import Path

import numpy as np

from tests.support.seams import WorkFile

ROWS = {name * 64: np.full(4, number, np.float32) for number, name in enumerate("abc")}


def test_vectors_survive_reopening_and_come_in_the_order_asked_for(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "work", "bundle", 4)
    work.add(ROWS)
    work.close()
    again = WorkFile(tmp_path / "work", "bundle", 4)
    assert again.known() == set(ROWS)
    order = ["c" * 64, "a" * 64, "c" * 64]
    assert again.vectors(order)[:, 0].tolist() == [2, 0, 2]
    assert again.vectors(order).dtype == np.float32
    again.close()


def test_another_bundle_sees_nothing_of_it(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "work", "bundle", 4)
    work.add(ROWS)
    work.close()
    other = WorkFile(tmp_path / "work", "other", 4)
    assert other.known() == set()
    other.close()


def test_vectors_of_another_length_are_not_known(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "work", "bundle", 4)
    work.add(ROWS)
    work.close()
    other = WorkFile(tmp_path / "work", "bundle", 5)
    assert other.known() == set()
    other.add({"a" * 64: np.ones(5, np.float32)})
    assert other.known() == {"a" * 64}
    other.close()


def test_a_damaged_work_file_is_dropped_instead_of_stopping_the_build(tmp_path: Path) -> None:
    path = tmp_path / "work"
    path.write_bytes(b"not a database, whoever wrote it" * 200)
    work = WorkFile(path, "bundle", 4)
    assert work.known() == set()
    work.add(ROWS)
    assert work.known() == set(ROWS)
    work.close()


def test_what_was_added_is_on_disk_without_closing(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "work", "bundle", 4)
    work.add(ROWS)
    reader = sqlite3.connect(tmp_path / "work")
    assert reader.execute("SELECT count(*) FROM vectors").fetchone() == (3,)
    reader.close()
    work.close()


def test_removing_keeps_the_vectors_of_a_build_with_another_bundle(tmp_path: Path) -> None:
    for bundle_id in ("a", "b", "c"):
        work = WorkFile(tmp_path / "work", bundle_id, 4)
        work.add(ROWS)
        work.close()
    for bundle_id, others in (("b", ("a", "c")), ("a", ("c",))):
        WorkFile(tmp_path / "work", bundle_id, 4).remove()
        left = WorkFile(tmp_path / "work", bundle_id, 4)
        assert left.known() == set()
        left.close()
        for other in others:
            left = WorkFile(tmp_path / "work", other, 4)
            assert left.known() == set(ROWS)
            left.close()
    WorkFile(tmp_path / "work", "c", 4).remove()
    assert list(tmp_path.iterdir()) == []


def test_removing_leaves_no_file_behind(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "work", "bundle", 4)
    work.add(ROWS)
    work.remove()
    assert list(tmp_path.iterdir()) == []
