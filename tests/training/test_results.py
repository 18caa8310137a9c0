import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kinlens.embedder.errors import JobError
from kinlens.training.__main__ import app
from kinlens.training.config.job import parse_job
from kinlens.training.data.load import load_split
from kinlens.training.data.protocol import with_protocol
from kinlens.training.report.tables import (
    Record,
    Study,
    methods,
    paired_difference,
    read_study,
    record_of,
    records_of,
)
from kinlens.training.runner import run_job
from tests.training.jobs import Silent, small_job

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
    assert mean == pytest.approx(4 / 3)
    assert half == pytest.approx(4.3027 / 3, abs=1e-4)


def test_only_seeds_that_both_methods_have_are_compared() -> None:
    rows = methods(study(recipe=[50.0, 60.0], more=[51.0, 61.0, 10.0]))
    assert "+1.0 ± 0.0 (recipe)" in rows[-1]
    assert "| more | 3 |  | 40.7 ± 27.0 |" in rows[-1]


def test_one_seed_has_no_interval() -> None:
    assert "| -2.0 (recipe) |" in methods(study(recipe=[50.0], less=[48.0]))[-1]


def test_runs_and_peers_are_kept_in_a_file_that_makes_the_table_again(tmp_path: Path) -> None:
    job = small_job(tmp_path / "products", epochs=2, min_steps=10)
    split = load_split(job.data)
    folder = tmp_path / "runs" / "determinant" / "seed-0"
    run_job(job, split, folder, Silent())
    peer = tmp_path / "plain.json"
    peer.write_text(json.dumps({"name": "plain loop", "seed": 0, "figures": {"R@1": 10.0}}))
    kept, page = tmp_path / "small.json", tmp_path / "page.md"
    page.write_text("before\n<!-- small -->\n<!-- end small -->\nafter\n")
    words = ["report", str(kept), str(folder), str(peer), "--against", "plain loop"]
    assert CliRunner().invoke(app, [*words, "--page", str(page)]).exit_code == 0
    written = page.read_text()
    assert written.startswith("before\n<!-- small -->\n\n| method |")
    assert written.endswith("<!-- end small -->\nafter\n")
    assert "| determinant | 1 |" in written
    assert "(plain loop)" in written
    record = record_of(folder)
    assert record.terms["share determinant"] > 0
    assert record.trunk["R@1"] > 0
    assert CliRunner().invoke(app, ["report", str(kept), "--page", str(page)]).exit_code == 0
    assert page.read_text() == written
    assert record_of(folder, by="loss.name").method == job.loss.name
    with pytest.raises(JobError, match="Use a name like"):
        record_of(folder, by="loss")
    with pytest.raises(JobError, match=r"and so is another of the runs.*--by"):
        records_of([folder, shutil.copytree(folder, tmp_path / "determinant")])


def test_a_run_that_saw_no_test_class_is_known_by_its_validation_classes(tmp_path: Path) -> None:
    content = small_job(tmp_path / "products").as_dict()
    content["data"]["products"] = 12
    content["protocol"] |= {"validation_fraction": 0.5, "evaluate_test": "never"}
    job = parse_job(content)
    run_job(job, with_protocol(load_split(job.data), job.protocol), tmp_path / "run", Silent())
    record = record_of(tmp_path / "run")
    assert record.figures["R@1"] == record.validation["R@1"]
    assert record.trunk.keys() >= {"R@1", "R@2"}


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(JobError, match="no finished run"):
        record_of(tmp_path / "run")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(JobError, match="is not a study"):
        read_study(tmp_path / "bad.json")
    with pytest.raises(JobError, match=r"is a folder.*kinlens-train compare"):
        read_study(tmp_path / "run")


def test_the_page_of_results_has_the_tables_of_the_committed_studies() -> None:
    page = (DOCS / "results.md").read_text(encoding="utf-8")
    studies = sorted((DOCS / "results").glob("*.json"))
    assert studies
    for path in studies:
        assert "\n".join(methods(read_study(path))) in page, path


def test_figures_on_other_images_are_not_compared() -> None:
    records = [
        Record("recipe", 0, {"R@1": 50.0}, split_sha256="a"),
        Record("more", 0, {"R@1": 51.0}, split_sha256="b"),
    ]
    with pytest.raises(JobError, match="were tested on different images"):
        methods(Study(tuple(records), {"": "recipe"}))
