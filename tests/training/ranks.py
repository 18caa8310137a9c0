"""Gradients of one training step, alone or on several ranks.

`python -m tests.training.ranks FOLDER` writes what each of two ranks found, which then train
FOLDER/job.toml as `kinlens-train fit` does. The ranks are forks of a process that has loaded torch:
to load it in each takes longer than all that they do.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import kinlens.training.runner  # noqa: F401  (loaded once, before the ranks part)
from kinlens.training.__main__ import main
from kinlens.training.config.job import Job
from kinlens.training.distributed import process_group, rank, world
from kinlens.training.state import create_run
from tests.training.jobs import step_job

CLASSES, BATCH, SIZE = 6, 8, 32
FLOW = {"layers": 2, "hidden": 8}
NIR = {"blocks": 2, "hidden": 8, "layers": 3, "exponentiate": False}
REGULARIZERS: dict[str, dict[str, Any]] = {
    "determinant": {"determinant": {"flow": FLOW, "lambda1": 1, "lambda2": 1}},
    "separate_proxies": {"determinant": {"flow": FLOW, "proxies": "separate"}},
    "skewed_mean": {"skewed_mean": {}},
    "skewed_mean_subset": {"skewed_mean": {"subset": 3, "kind": "distance"}},
    "skewed_mean_of_the_batch": {"skewed_mean": {"centres": "batch"}},
    "non_isotropy": {"non_isotropy": NIR},
    "graph_consistency": {"graph_consistency": {"weight": 1, "share": 0.2}},
    "koleo": {"koleo": {}},
    "all": {
        "determinant": {"flow": FLOW, "lambda1": 1, "lambda2": 1},
        "skewed_mean": {},
        "non_isotropy": NIR,
        "graph_consistency": {"weight": 1},
        "koleo": {},
    },
}


def cases(weights: Path) -> dict[str, Job]:
    """A job for a loss with proxies, one that draws, and every kind of regularizer.

    The objective sees the whole batch on each rank, so other losses add nothing.
    """
    jobs = {name: step_job({}, weights, {"name": name}) for name in ("soft_triple", "margin")}
    for name in ("separate_proxies", "skewed_mean_subset", "skewed_mean_of_the_batch", "all"):
        jobs[f"proxy_anchor + {name}"] = step_job(REGULARIZERS[name], weights)
    return jobs


def gradients(job: Job) -> dict[str, Tensor]:
    """The gradient of every trainable parameter after one step on this rank's part of a batch."""
    torch.manual_seed(0)
    run = create_run(job, CLASSES)
    _stir(run.objective)
    # In float64 rounding cannot be mistaken for a wrong gradient, nor hide one.
    run.net.double()
    run.objective.double()
    run.net.train()
    model = run.begin_epoch(trunk_frozen=False)
    images = torch.randint(0, 256, (BATCH, 3, SIZE, SIZE), dtype=torch.uint8)
    labels = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])
    mine = slice(rank() * BATCH // world(), (rank() + 1) * BATCH // world())
    model(images[mine], labels[mine]).total.backward()
    parameters = {**dict(run.net.named_parameters()), **dict(run.objective.named_parameters())}
    return {
        name: parameter.grad
        for name, parameter in parameters.items()
        if parameter.requires_grad and parameter.grad is not None
    }


def _stir(objective: torch.nn.Module) -> None:
    """Move the flows off the identity, where some of their gradients vanish."""
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def work(folder: Path) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    with process_group("cpu"):
        found = {name: gradients(job) for name, job in cases(folder / "weights.pth").items()}
        torch.save(found, folder / f"rank{rank()}.pt")
        # In the same group: one that is opened again reads the addresses that the first one left.
        sys.argv[1:] = ["fit", str(folder / "job.toml"), "--out", str(folder / "two")]
        main()


if __name__ == "__main__":
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, work)(Path(sys.argv[1]))
