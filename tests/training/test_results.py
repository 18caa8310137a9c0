"""What finished runs report: tables of studies."""

import json
import re
import shutil
from pathlib import Path

import pytest

from kinlens.embedder.errors import JobError, KinlensError
from kinlens.training.data.load import load_split
from kinlens.training.runner import run_job
from kinlens.training.studies.tables import (
    Record,
    Study,
    methods,
    paired_difference,
    read_study,
    record_of,
    records_of,
)
from tests.training.jobs import Silent, called, small_job

DOCS = Path(__file__).parents[2] / "docs"


def study(**recalls: list[float]) -> Study:
    records = [
        Record(method=name, seed=seed, figures={"R@1": value})
        for name, values in recalls.items()
        for seed, value in enumerate(values)
    ]
    return Study(tuple(records), {"": "recipe"})


def test_a_difference_is_paired_by_seed_with_students_interval() -> None:
    mean, half = paired_difference([50.0, 52.0, 54.0], [49.0, 50.0, 53.0])
    # Differences 1, 2, 1: deviation 1/sqrt(3), t(0.975, 2) = 4.3027.
    assert (mean, half) == pytest.approx((4 / 3, 4.3027 / 3), abs=1e-4)
    rows = methods(study(recipe=[50.0, 60.0], more=[51.0, 61.0, 10.0]))
    assert "+1.0 ± 0.0 (recipe)" in rows[-1]  # of the seeds that both have
    assert "| more | 3 |  | 40.7 ± 27.0 |" in rows[-1]
    assert "| -2.0 (recipe) |" in methods(study(recipe=[50.0], less=[48.0]))[-1]


def test_runs_and_peers_are_kept_in_a_file_that_makes_the_table_again(tmp_path: Path) -> None:
    job = small_job(tmp_path / "products", epochs=1, min_steps=20)
    folder = tmp_path / "runs" / "determinant" / "seed-0"
    run_job(job, load_split(job.data), folder, Silent())
    peer = tmp_path / "plain.json"
    peer.write_text(json.dumps({"name": "plain loop", "seed": 0, "figures": {"R@1": 10.0}}))
    kept, page = tmp_path / "small.json", tmp_path / "page.md"
    page.write_text("before\n<!-- small -->\n<!-- end small -->\nafter\n")
    words = ["report", kept, folder, peer, "--against", "plain loop", "--page", page]
    called(*words)
    written = page.read_text()
    assert written.startswith("before\n<!-- small -->\n\n| method |")
    assert written.endswith("<!-- end small -->\nafter\n")
    assert "| determinant | 1 |" in written
    assert "(plain loop)" in written
    assert record_of(folder).terms["share determinant"] > 0
    assert record_of(folder).trunk["R@1"] > 0
    called("report", kept, "--page", page)
    assert page.read_text() == written
    assert record_of(folder, by="loss.name").method == job.loss.name
    with pytest.raises(JobError, match="Use a name like"):
        record_of(folder, by="loss")
    with pytest.raises(JobError, match=r"and so is another of the runs.*--by"):
        records_of([folder, shutil.copytree(folder, tmp_path / "determinant")])


def test_a_table_between_comments_is_that_of_its_committed_study() -> None:
    pages = "".join(page.read_text("utf-8") for page in (DOCS / "results").glob("*.md"))
    marked = re.findall(r"<!-- end (.+) -->", pages)
    assert marked
    for name in marked:
        table = "\n".join(methods(read_study(DOCS / "results" / f"{name}.json")))
        assert f"<!-- {name} -->\n\n{table}" in pages, name


def test_runs_on_other_images_are_not_subtracted(tmp_path: Path) -> None:
    records = [Record(name, 0, {"R@1": 50.0}, split_sha256=name) for name in ("recipe", "more")]
    with pytest.raises(JobError, match="were tested on different images"):
        methods(Study(tuple(records), {"": "recipe"}))
    with pytest.raises(KinlensError, match="has no finished run"):
        called("report", tmp_path / "study.json", tmp_path)
