"""The commands verify, compact, plan and stats."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from tests.indexer.conftest import failure, usage
from tests.support.seams import GalleryFolder
from tests.tiny import encoded, picture

Run = Callable[..., Result]


def test_verify_ends_with_zero_or_one(run: Run, built: Path, shop: Path) -> None:
    good = run("verify", built, "--bundle", "b")
    assert good.exit_code == 0
    assert "6 of 6 checked items (6 in all) find themselves" in good.stdout
    (shop / "f.gif").write_bytes(encoded(picture(50), "GIF"))
    bad = run("verify", built, "--bundle", "b")
    assert bad.exit_code == 1
    assert "f.gif: Its image cannot be used" in bad.stdout
    assert "5 of 6 checked items" in bad.stdout
    assert run("verify", built).exit_code == 0
    assert "2 of 2 checked items" in run("verify", built, "--sample", "2").stdout


def test_stats_print_a_table_for_people(run: Run, built: Path) -> None:
    result = run("stats", built)
    assert result.exit_code == 0
    assert re.search(r"^size +6$", result.stdout, re.MULTILINE)
    assert re.search(r"^formats +BMP 1, GIF 1, JPEG 1", result.stdout, re.MULTILINE)


def test_verify_reports_recall_and_ends_with_one_below_the_target(
    run: Run, tmp_path: Path, entries_of: Callable[[np.ndarray], list]
) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((1100, 16)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    path, queries = tmp_path / "large", tmp_path / "queries.npy"
    np.save(queries, rows[1000:])
    gallery = Gallery.create(path, name="large", bundle_id="b", dim=16)
    gallery.add(entries_of(rows[:1000]))
    gallery.compact(IndexSettings(kind="hnsw", target_recall=0.5))
    gallery.close()
    ask = ("verify", path, "--queries", queries)
    good = run(*ask)
    assert good.exit_code == 0
    assert re.search(r"recall@10 0\.\d{4} of 100 queries, target 0.5 \(index hnsw\)", good.stdout)
    low = run(*ask, "--target-recall", "0.99", "--json")
    assert low.exit_code == 1
    assert json.loads(low.stdout)["recall"] < 0.99
    assert run(*ask, "--target-recall", "0.99", "--tune").exit_code == 0
    assert run(*ask).stdout.splitlines()[-1].endswith("target 0.99 (index hnsw).")


def test_tuning_needs_queries_that_fit(run: Run, built: Path, tmp_path: Path) -> None:
    assert "--tune needs --queries" in usage(run("verify", built, "--tune"))
    np.save(tmp_path / "bad.npy", np.eye(5, dtype=np.float32))
    for option in ([], ["--tune"]):
        result = run("verify", built, "--queries", tmp_path / "bad.npy", *option)
        assert "dimension 32" in failure(result)
        assert "6 of 6" not in result.stderr


def test_a_damaged_gallery_fails_the_check_and_is_mended_by_compact(run: Run, built: Path) -> None:
    [segment] = (GalleryFolder(built).current() / "segments").iterdir()
    file = segment / "vectors.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert "vectors.npy has sha256" in failure(run("verify", built))
    assert run("compact", built, "--rebuild").exit_code == 0
    assert run("verify", built).exit_code == 0


def test_compact_takes_in_what_came_since_and_says_the_recall(
    run: Run, built: Path, shop: Path
) -> None:
    assert "Nothing has changed" in run("compact", built).stdout
    (shop / "new.png").write_bytes(encoded(picture(99)))
    run("add", built, shop, "--bundle", "b")
    result = run("compact", built)
    assert re.search(r"Index flat of 7 items in .* s, recall@10 1\.0000 \(target", result.stdout)
    assert json.loads(run("stats", built, "--json").stdout)["delta"] == 0
    report = json.loads(run("compact", built, "--index", "hnsw", "--json").stdout)
    assert (report["manifest"]["kind"], report["manifest"]["size"]) == ("hnsw", 7)
    assert json.loads(run("compact", built, "--json").stdout)["segment"] is None
    rebuilt = json.loads(run("compact", built, "--rebuild", "--json").stdout)
    assert rebuilt["manifest"]["kind"] == "hnsw"
    aimed = json.loads(run("compact", built, "--target-recall", "0.9", "--json").stdout)["manifest"]
    assert (aimed["kind"], aimed["target_recall"]) == ("hnsw", 0.9)


def test_a_compaction_that_does_not_fit_leaves_the_index(run: Run, built: Path) -> None:
    assert "--memory-mb" in failure(run("compact", built, "--memory-mb", "0.001"))
    assert "too few to train" in failure(run("compact", built, "--index", "ivf-pq"))
    assert json.loads(run("stats", built, "--json").stdout)["index"] == "flat"


def test_an_empty_gallery_is_compacted_to_nothing(run: Run, tmp_path: Path) -> None:
    Gallery.create(tmp_path / "empty", name="empty", bundle_id="b", dim=4).close()
    result = run("compact", tmp_path / "empty", "--rebuild")
    assert (result.exit_code, result.stdout) == (0, "The gallery is empty, so it has no index.\n")


def test_a_plan_is_made_without_a_gallery(run: Run) -> None:
    lines = run("plan", 300_000, 512, "--memory-mb", 4000).stdout.splitlines()
    assert lines[0].split()[:4] == ["index", "hnsw", "on", "cpu"]
    plan = json.loads(run("plan", 1_000_000, 128, "--index", "flat", "--json").stdout)
    assert (plan["n"], plan["dim"], plan["plans"][0]["kind"]) == (1_000_000, 128, "flat")
    assert "--memory-mb" in failure(run("plan", 1_000_000, 128, "--memory-mb", "10"))
    assert "0 vectors" in failure(run("plan", 0, 128))


def test_all_plans_are_compared_and_say_why_they_are_refused(run: Run) -> None:
    lines = run("plan", 1_000_000, 128, "--all", "--memory-mb", 1200).stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("index", "flat", "fp16", "hnsw", "ivf-pq", "ivf-rabitq", "cagra")
    ]
    by_kind = {line.split()[0]: line for line in lines}
    assert re.search(r"\d MB +\d[\d,]* MB .* 0\.980$", by_kind["ivf-pq"])
    assert "not made on cpu" in by_kind["cagra"]
    plans = json.loads(run("plan", 100, 8, "--all", "--json").stdout)["plans"]
    assert {plan["kind"]: plan["refused"] is None for plan in plans}["ivf-pq"] is False


@pytest.mark.parametrize("option", ["--memory-mb", "--target-recall"])
def test_numbers_out_of_range_end_with_two(run: Run, option: str) -> None:
    assert option in usage(run("plan", 100, 8, option, "0"))
