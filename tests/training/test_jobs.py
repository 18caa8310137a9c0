import re
from pathlib import Path

import numpy as np
import pytest

from kinlens.service.jobs.params import data_kind, training_jobs
from kinlens.training.config.job import Job, job_toml, load_job, parse_job
from kinlens.training.config.layers import JOBS, job_names
from kinlens.training.data.load import load_split
from kinlens.training.data.protocol import with_protocol
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.runner import run_job
from kinlens.training.studies.tournament import load_grid
from tests.training.jobs import TINY_TRUNK, Silent
from tests.training.official_layouts import KINDS, write_layout

NAMES = job_names()
TOURNAMENTS = JOBS / "tournaments"
HEADED = sorted({*JOBS.rglob("*.toml")} - {*JOBS.glob("data/*.toml")})
TEN_LOSSES = sorted(TOURNAMENTS.glob("ten-losses-*.toml"))
OFFICIAL = ("cub", "cars196", "sop", "in-shop")
METHODS = ("proxy-anchor", "determinant", "skewed-mean", "nir", "graph-consistency")


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("layouts")
    return {kind: write_layout(kind, root / kind, classes=6, images=4) for kind in KINDS}


def miniature(job: Job, layouts: dict[str, Path], tmp_path: Path) -> Job:
    """The job as it stands but for images, sizes, trunk and the number of steps."""
    content = job.as_dict()
    kind = content["data"]["kind"]
    if kind in layouts:
        content["data"] |= {"root": str(layouts[kind]), "allow_partial": True}
    else:
        products = {"kind": "rendered", "root": str(tmp_path / "products"), "size_px": 40}
        content["data"] = products | {"products": 8, "views": 4}
    content["model"] |= {"backbone": TINY_TRUNK, "weights": "none"}
    content["input"] |= {"size_px": 32, "resize_px": 36, "test_px": None}
    content["optimizer"] |= {"epochs": 1, "steps_per_epoch": 2, "batch_size": 8, "min_steps": 0}
    if content["sampling"]["kind"] != "random":
        content["sampling"]["per_class"] = 2
    content["runtime"] = {"workers": 0, "device": "cpu", "precision": "fp32"}
    return parse_job(content)


def parts(job: Job) -> tuple[object, ...]:
    """What a training step of the job is made of."""
    used = frozenset(name for name, value in job.regularizers if value is not None)
    return job.loss.name, used, job.sampling.kind, job.sampling.pairs, job.input.crop


def distinct() -> list[str]:
    """A job, by name, for each thing that jobs and grids do in a step."""
    jobs = {name: load_job(name) for name in NAMES}
    return list({parts(job): name for name, job in jobs.items()}.values())


@pytest.mark.parametrize("name", distinct())
def test_each_kind_of_job_trains(name: str, layouts: dict[str, Path], tmp_path: Path) -> None:
    trains_two_steps(miniature(load_job(name), layouts, tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("grid", "loss", "regularizer"),
    [
        ("nir-cars196", "soft_triple", "non_isotropy"),
        ("graph-consistency-cars196", "triplet", "graph_consistency-0.001"),
        ("graph-consistency-cars196", "n_pair", "graph_consistency-0.002"),
    ],
)
def test_runs_of_grids_train_two_steps(
    grid: str, loss: str, regularizer: str, layouts: dict[str, Path], tmp_path: Path
) -> None:
    found = {
        (one.loss, one.regularizer): one.job for one in load_grid(TOURNAMENTS / f"{grid}.toml")
    }
    trains_two_steps(miniature(found[loss, regularizer], layouts, tmp_path), tmp_path)


def trains_two_steps(job: Job, tmp_path: Path) -> None:
    split = with_protocol(load_split(job.data), job.protocol)
    listener = Silent()
    result = run_job(job, split, tmp_path / "run", listener)
    assert len(listener.steps) == 2
    assert result.figures.keys() >= {f"R@{k}" for k in job.recall_at} | {"MAP@R", "NMI", "F1"}
    terms = {part for part, value in job.regularizers if value is not None}
    assert terms | {"loss"} <= listener.steps[-1].keys()


def test_there_is_a_job_for_each_data_set_and_method() -> None:
    expected = {f"{data}-{method}" for data in OFFICIAL for method in METHODS}
    assert expected | {f"cars196-half-{method}" for method in METHODS} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_job_is_described_and_survives_writing(name: str, tmp_path: Path) -> None:
    job = load_job(name)
    assert job.name == name
    assert job.description
    path = tmp_path / "job.toml"
    path.write_text(job_toml(job, "a comment", "and another"), encoding="utf-8")
    assert path.read_text().startswith("# a comment\n# and another\n")
    assert load_job(path) == parse_job(job.as_dict()) == job


@pytest.mark.parametrize(
    ("data", "classes", "images", "iterations"),
    [
        ("cub", 100, 5864, 5000),
        ("cars196", 98, 8054, 10_000),
        ("sop", 11_318, 59_551, 20_000),
        ("in-shop", 3997, 25_882, 20_000),
    ],
)
def test_graph_consistency_trains_for_the_papers_iterations(
    data: str, classes: int, images: int, iterations: int
) -> None:
    job = load_job(f"{data}-graph-consistency")
    steps = len(BatchSampler(job, np.arange(images) % classes))
    assert iterations <= steps * job.optimizer.epochs < iterations + steps


def test_the_ablations_have_the_papers_values_around_the_best_one() -> None:
    of_determinant = [
        one.job.regularizers.determinant
        for one in load_grid(TOURNAMENTS / "determinant-ablation-cars196-half.toml")
    ]
    used = [settings for settings in of_determinant if settings is not None]
    assert len(of_determinant) == len(used) + 1
    assert all(settings.lambda1 == settings.lambda2 for settings in used)
    assert all(settings.lambda1 == 0.05 or settings.eps == 0.4 for settings in used)
    assert {settings.lambda1 for settings in used} == {0.01, 0.05, 0.1, 0.2, 0.5}
    assert {settings.eps for settings in used} == {0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8}
    assert {settings.direction for settings in used} == {"between", "tangent"}
    swept = load_grid(TOURNAMENTS / "skewed-mean-sweeps-cars196-half.toml")
    assert {one.dim for one in swept} == {32, 64, 128, 256, 512, 1024}
    at_512 = [one.job.regularizers.skewed_mean for one in swept if one.dim == 512]
    deltas = {settings.delta for settings in at_512 if settings is not None}
    assert deltas == {0.45, 0.5, 0.55, 0.6, 0.66, 0.7}


def test_graph_consistency_is_tried_beside_the_papers_three_losses_with_their_weights() -> None:
    combinations = load_grid(TOURNAMENTS / "graph-consistency-cars196.toml")
    weights = {}
    for one in combinations:
        graph = one.job.regularizers.graph_consistency
        assert (graph is None) == (one.regularizer == "none")
        weights.setdefault(one.loss, set()).add(graph and graph.weight)
        assert (one.job.sampling.kind, one.job.sampling.pairs) == ("paired", "independent")
        assert (one.job.optimizer.batch_size, one.job.sampling.per_class) == (2 * 13 * 10, 10)
    assert weights == {
        "triplet": {None, 0.001},
        "n_pair": {None, 0.002},
        "binomial_deviance": {None, 0.002},
    }
    by_loss = {one.loss: one.job.loss for one in combinations}
    assert by_loss["triplet"].margin == 0.05  # of cosines: 0.1 of squared distances


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


@pytest.mark.parametrize("path", TEN_LOSSES, ids=lambda path: path.stem)
def test_every_tournament_has_the_settings_of_the_table(path: Path) -> None:
    combinations = load_grid(path)
    losses = {one.loss for one in combinations}
    assert len(losses) == 12
    assert losses >= {"loss1", "loss2"}
    networks = {(one.backbone, one.dim) for one in combinations}
    assert len(combinations) == 12 * len(networks)
    assert len(networks) == (1 if "half" in path.stem else 12)
    by_name = {one.loss: one.job for one in combinations}
    assert by_name["lifted_structure"].sampling.kind == "balanced"
    assert by_name["multi_similarity"].sampling.kind == "balanced"
    assert by_name["triplet"].loss.mining == "semi_hard"
    assert by_name["margin"].optimizer.lr_proxies == 5e-5
    assert by_name["proxy_nca"].optimizer.lr_proxies == 1e-5
    assert by_name["arcface"].optimizer.lr_proxies == 1e-4
    assert by_name["soft_triple"].optimizer.lr_proxies == 1e-4


def test_the_service_knows_the_same_jobs_and_what_they_train_on() -> None:
    assert {name: data_kind(name) for name in training_jobs()} == {
        name: load_job(name).data.kind for name in NAMES
    }
