import tomllib
from pathlib import Path

import pytest

from embedder.errors import JobError
from tests.training.studies import some_job
from training.config.job import JOBS, load_job
from training.config.toml import job_toml, toml


@pytest.mark.parametrize("name", sorted(path.stem for path in JOBS.glob("*.toml")))
def test_every_job_survives_being_written(name: str, tmp_path: Path) -> None:
    job = load_job(name)
    path = tmp_path / "job.toml"
    path.write_text(job_toml(job, "a comment", "and another"), encoding="utf-8")
    assert path.read_text().startswith("# a comment\n# and another\n")
    assert load_job(path) == job


def test_values_of_all_kinds_survive() -> None:
    content = {
        "word": 'quotes " backslash \\ tab\t newline\n é \x7f',
        "numbers": [1, -2, 1e-05, 1.0, 1e300],
        "flags": [True, False],
        "empty": [],
        "nested": {"a b": {"x.y": 1}, "list": [{"k": 1, "l": [2]}], "nothing": {}},
    }
    assert tomllib.loads(toml(content)) == content


def test_none_is_left_out_or_refused() -> None:
    assert tomllib.loads(toml({"a": None, "b": {"c": None, "d": 1}})) == {"b": {"d": 1}}
    with pytest.raises(JobError, match="TOML has no none"):
        job_toml(some_job(model={"dim": None}))
