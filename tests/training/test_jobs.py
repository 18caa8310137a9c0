import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kinlens.service.jobs.params import data_kind, training_jobs
from kinlens.training.config.job import Job, job_toml, load_job, parse_job
from kinlens.training.config.layers import JOBS, job_names
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.state import create_run
from kinlens.training.studies.tournament import load_grid
from kinlens.training.trainer import train_step
from tests.training.jobs import TINY_TRUNK

NAMES = job_names()
TOURNAMENTS = JOBS / "tournaments"
HEADED = sorted({*JOBS.rglob("*.toml")} - {*JOBS.glob("data/*.toml")})


def miniature(job: Job) -> Job:
    """The job as it stands but for images, sizes, trunk and the number of steps."""
    content = job.as_dict() | {"data": {"kind": "folder", "root": "unused"}}
    content["model"] |= {"backbone": TINY_TRUNK, "weights": "none"}
    content["input"] |= {"size_px": 32, "resize_px": 36, "test_px": None}
    content["optimizer"] |= {"epochs": 1, "steps_per_epoch": 2, "batch_size": 8}
    if content["sampling"]["kind"] != "random":
        content["sampling"]["per_class"] = 2
    content["runtime"] = {"workers": 0, "device": "cpu", "precision": "fp32"}
    return parse_job(content)


def parts(job: Job) -> tuple[object, ...]:
    """What a training step of the job is made of."""
    used = frozenset(name for name, value in job.regularizers if value is not None)
    return job.loss.name, used, job.sampling.kind, job.model.frozen_trunk


def distinct() -> list[str]:
    """A job, by name, for each thing that jobs do in a step."""
    jobs = {name: load_job(name) for name in NAMES}
    return list({parts(job): name for name, job in jobs.items()}.values())


@pytest.mark.parametrize("name", distinct())
def test_each_kind_of_job_trains_two_steps(name: str) -> None:
    job, labels = miniature(load_job(name)), np.arange(24) % 6
    images = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8)
    run, order = create_run(job, 6), BatchSampler(job, labels)
    model = run.begin_epoch(trunk_frozen=False).train()
    assert len(order) == 2
    for batch in order:
        rows = torch.tensor([row for _, row, _ in batch])
        parts = train_step(run, model, images[rows], torch.from_numpy(labels)[rows], len(order))
        assert all(value.isfinite() for value in parts.values())
    assert {part for part, value in job.regularizers if value is not None} <= parts.keys()


def test_every_job_is_described_and_survives_writing(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for name in NAMES:
        job = load_job(name)
        assert job.name == name
        assert job.description
        path.write_text(job_toml(job, "a comment", "and another"), encoding="utf-8")
        assert path.read_text().startswith("# a comment\n# and another\n")
        assert load_job(path) == job


@pytest.mark.parametrize("path", HEADED, ids=lambda path: path.stem)
def test_every_job_and_grid_opens_with_command_machine_time_and_expectation(path: Path) -> None:
    head = path.read_text().split("\n\n")[0]
    for word in ("command", "machine", "time", "expected"):
        assert f"# {word} " in head, f"{path.stem} does not say its {word}"
    assert path.stem in head.split("# command")[1].splitlines()[0]
    if path.parent == TOURNAMENTS:
        assert f"tournament training/jobs/tournaments/{path.name} --out" in head
        runs = re.search(r"\b(\d+) runs\b", head)
        assert runs is not None
        assert len(load_grid(path)) == int(runs[1])


def test_the_service_knows_the_same_jobs_and_what_they_train_on() -> None:
    assert {name: data_kind(name) for name in training_jobs()} == {
        name: load_job(name).data.kind for name in NAMES
    }
