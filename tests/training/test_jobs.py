import re
import sys
from functools import cache
from itertools import islice
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
import torch

from kinlens import training
from kinlens.service.jobs.params import data_kind, training_jobs
from kinlens.training.config.job import Job, job_toml, load_job, parse_job
from kinlens.training.config.layers import JOBS, job_names, read_file
from kinlens.training.data.datasets import OFFICIAL
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.state import create_run
from kinlens.training.studies.tournament import load_grid
from kinlens.training.terms import WITH_PROXIES
from kinlens.training.trainer import train_step
from tests.training.jobs import TINY_TRUNK

NAMES = job_names()
TOURNAMENTS = JOBS / "tournaments"
OF_PAPERS = [
    *JOBS.glob("methods/*.toml"),
    *JOBS.glob("spaces/*.toml"),
    *(
        path
        for of in ("determinant-", "graph-", "nir-", "skewed-", "ten-losses")
        for path in TOURNAMENTS.glob(f"{of}*.toml")
    ),
]
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


TRAIN_SIZES = {kind: data_set.expected["train"] for kind, data_set in OFFICIAL.items()}
GRIDS = sorted(TOURNAMENTS.glob("*.toml"))


@cache
def in_grids() -> list[Job]:
    return [run.job for path in GRIDS if "grids" not in read_file(path) for run in load_grid(path)]


def positive_pairs(job: Job, batches: int = 12) -> list[int]:
    """Pairs of a class in the first batches, or in each draw, on as many images as the data has, in
    classes as uneven as those of products: some have two images alone.
    """
    images, classes = TRAIN_SIZES[job.data.kind]
    rng = np.random.default_rng(0)
    more = rng.multinomial(images - 2 * classes, rng.dirichlet(np.ones(classes)))
    labels = np.repeat(np.arange(classes), 2 + more)
    order, counts = BatchSampler(job, labels), []
    for batch in islice(order, batches):
        for draw in np.split(labels[[image for _, image, _ in batch]], job.sampling.parts):
            sizes = np.bincount(draw)
            counts.append(int((sizes * (sizes - 1)).sum()) // 2)
    return counts


def test_every_loss_without_proxies_finds_positive_pairs_in_every_batch() -> None:
    jobs = [*map(load_job, NAMES), *in_grids()]
    batches = {  # those of other losses with the same settings are the same
        (job.data.kind, job.seed, job.sampling, job.optimizer.batch_size): job
        for job in jobs
        if job.data.kind in TRAIN_SIZES and job.loss.name not in WITH_PROXIES
    }
    assert {kind for kind, *_ in batches} >= {"cars196", "cub", "sop"}
    for job in batches.values():
        assert min(positive_pairs(job)) >= job.optimizer.batch_size / 4, job.name


def test_random_batches_of_many_classes_have_no_positive_pairs() -> None:
    job = load_job("sop-proxy-anchor", ["optimizer.batch_size=100"])
    assert sum(count == 0 for count in positive_pairs(job, 100)) > 40


def test_jobs_of_the_papers_test_once() -> None:
    for name in NAMES:
        job = load_job(name)
        if job.data.kind in TRAIN_SIZES and "half" not in name:
            assert (job.runtime.eval_every_epochs, job.protocol.choose_by) == (0, "last"), name


def test_published_weights_and_scales_are_those_of_their_formulas() -> None:
    """Losses are means here: a weight printed for a sum is divided by the images of a draw."""
    runs = load_grid(TOURNAMENTS / "graph-consistency-cars196.toml")
    weights = {run.regularizer: run.job.regularizers.wanted() for run in runs}
    draw = runs[0].job.optimizer.batch_size / 2
    for printed in (0.001, 0.002):
        term = weights[f"graph_consistency-{printed}"]["graph_consistency"]
        assert term.weight * draw == pytest.approx(printed, rel=2e-3)
    assert {run.job.loss.l2 for run in runs if run.loss == "n_pair"} == {0}
    assert {run.job.input.aspect for run in runs} == {"squashed"}
    for path in TOURNAMENTS.glob("ten-losses-*.toml"):
        runs = load_grid(path)
        assert {run.job.loss.scale for run in runs if run.loss == "proxy_nca"} == {0.5}


def parts(job: Job) -> tuple[object, ...]:
    """What a training step of the job is made of."""
    used = frozenset(job.regularizers.wanted())
    return job.loss.name, used, job.sampling.kind, job.model.frozen_trunk


def distinct() -> list[str]:
    """A job, by name, for each thing that jobs do in a step."""
    jobs = {name: load_job(name) for name in NAMES}
    return list({parts(job): name for name, job in jobs.items()}.values())


@pytest.mark.parametrize("name", distinct())
def test_each_kind_of_job_trains_two_steps(name: str) -> None:
    trains_two_steps(load_job(name))


def test_each_kind_of_run_of_a_grid_trains_two_steps() -> None:
    known = {parts(load_job(name))[:2] for name in NAMES}
    runs = {parts(job)[:2]: job for job in in_grids()}  # by loss and regularizers
    new = [job for kind, job in runs.items() if kind not in known]
    assert {job.loss.name for job in new} >= {"multi_similarity", "n_pair", "lifted_structure"}
    for job in new:
        trains_two_steps(job)


def trains_two_steps(whole: Job) -> None:
    job, labels = miniature(whole), np.arange(24) % 6
    images = torch.randint(0, 256, (24, 3, 32, 32), dtype=torch.uint8)
    run, order = create_run(job, 6), BatchSampler(job, labels)
    model = run.begin_epoch(trunk_frozen=False).train()
    assert len(order) == 2
    for batch in order:
        rows = torch.tensor([row for _, row, _ in batch])
        parts = train_step(run, model, images[rows], torch.from_numpy(labels)[rows], len(order))
        assert all(value.isfinite() for value in parts.values())
    assert job.regularizers.wanted().keys() <= parts.keys()


def test_a_step_of_proxy_anchor_passes_ten_modules() -> None:
    job, entered = miniature(load_job("cub-proxy-anchor")), set[str]()
    run = create_run(job, 6)
    model = run.begin_epoch(trunk_frozen=False).train()
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    root = str(Path(training.__file__).parent)

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            entered.add(frame.f_code.co_filename.removeprefix(root))

    sys.setprofile(note)
    try:
        train_step(run, model, images, torch.arange(8) // 2, 2)
    finally:
        sys.setprofile(None)
    assert "/losses/proxy_anchor.py" in entered
    assert len(entered) <= 10, sorted(entered)


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
def test_every_job_and_grid_opens_with_command_machine_time_expectation_and_deviations(
    path: Path,
) -> None:
    head = path.read_text().split("\n\n")[0]
    for word in ("command", "machine", "time", "expected"):
        assert f"# {word} " in head, f"{path.stem} does not say its {word}"
    assert path.stem in head.split("# command")[1].splitlines()[0]
    if path in OF_PAPERS:
        deviations = re.search(r"# deviates  (.+)", head)
        assert deviations, f"{path.stem} does not say what deviates from its paper"
        for other in re.findall(r"[\w-]+\.toml", deviations[1]):
            assert (path.parent / other) in OF_PAPERS
    if path.parent == TOURNAMENTS:
        assert f"tournament training/jobs/tournaments/{path.name} --out" in head
        runs = re.search(r"\b(\d+) runs\b", head)
        assert runs is not None
        assert len(load_grid(path)) == int(runs[1])


def test_the_service_knows_the_same_jobs_and_what_they_train_on() -> None:
    assert {name: data_kind(name) for name in training_jobs()} == {
        name: load_job(name).data.kind for name in NAMES
    }
