"""A run in progress: the state that a step changes, and how it is created, saved and restored."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kinlens.embedder.errors import CheckpointError, DatasetError, TrainingError
from kinlens.training.checkpoint import Average, Checkpoint, Epoch, Figures, load_checkpoint
from kinlens.training.config.job import Job
from kinlens.training.data.records import Split
from kinlens.training.device import choose_device
from kinlens.training.distributed import world
from kinlens.training.folder import FREE_TO_RESUME, UNTRAINED, changes
from kinlens.training.models.backbones import TimmTrunk, stages_of
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.models.from_bundle import new_network
from kinlens.training.objective import Objective, TrainingStep
from kinlens.training.parts.own import require_sources, sources_of

_PROGRESS = (
    "epoch", "step", "history", "evaluated", "best_epoch", "best_score", "trunk",
    "trunk_ranks", "start", "began_with", "trunk_alone",
)  # fmt: skip
"""Fields that a run and its checkpoint share."""


@dataclass
class Run:
    """Everything that a step changes.

    `evaluated` is the last evaluated epoch. `trunk` and `start` are the figures before the first
    step, of the trunk alone and of the network; `trunk_ranks` are the ranks of the trunk for each
    query of test and validation classes, to compare later models. With `trunk_alone` the trunk is
    the model.
    """

    job: Job
    net: EmbeddingNet
    objective: Objective
    optimizer: torch.optim.Optimizer
    device: torch.device
    epoch: int = 0
    step: int = 0
    evaluated: int = 0
    best_epoch: int = 0
    best_score: float = -1.0
    history: list[Epoch] = field(default_factory=list)
    trunk: Figures = field(default_factory=Figures)
    trunk_ranks: dict[str, Tensor] = field(default_factory=dict)
    start: Figures = field(default_factory=Figures)
    began_with: str = UNTRAINED
    trunk_alone: bool = False
    average: Average | None = None
    saved_at: float = -math.inf
    sources: dict[str, str] = field(init=False)
    _model: tuple[bool, nn.Module] | None = None

    def __post_init__(self) -> None:
        self.sources = sources_of(self.job.as_dict())  # now: an edit during the run changes nothing

    @property
    def served(self) -> EmbeddingNet:
        """The network to evaluate and export: the average of the weights if there is one."""
        return self.net if self.average is None else self.average.net

    def checkpoint(self, split: Split) -> Checkpoint:
        return Checkpoint(
            job=self.job.as_dict(),
            classes=split.train.classes,
            split_sha256=split.sha256(),
            learnt_sha256=split.learnt_sha256(),
            net=self.net.state_dict(),
            objective=self.objective.checkpoint(),
            optimizer=self.optimizer.state_dict(),
            rng=torch.get_rng_state(),
            average=None if self.average is None else self.average.state_dict(),
            sources=self.sources,
            cuda_rng=torch.cuda.get_rng_state() if self.device.type == "cuda" else None,
            **{name: getattr(self, name) for name in _PROGRESS},
        )

    def begin_epoch(self, *, trunk_frozen: bool) -> nn.Module:
        """Freeze or unfreeze the trunk; returns the module whose forward pass gives the loss.

        Under several ranks it averages gradients, and is rebuilt only when the trunk changes state.
        """
        self.objective.begin_epoch(self.epoch)
        if self._model is not None and self._model[0] == trunk_frozen:
            return self._model[1]
        for group in self.optimizer.param_groups:
            if group["name"] == "trunk":
                for parameter in group["params"]:
                    parameter.requires_grad_(not trunk_frozen)
        model: nn.Module = TrainingStep(self.net, self.objective)
        if world() > 1:
            ids = [self.device] if self.device.type == "cuda" else None
            model = DistributedDataParallel(model, device_ids=ids)
        self._model = (trunk_frozen, model)
        return model


def create_run(job: Job, classes: int) -> Run:
    """A fresh network, objective and optimizer on the device of the job. Raises: TrainingError."""
    device = choose_device(job.runtime)
    net = new_network(job).to(device)
    net.to(memory_format=torch.channels_last)
    if world() > 1 and job.model.batch_norm == "train":
        if device.type != "cuda":
            raise TrainingError(
                'model.batch_norm = "train" under several processes needs synchronised batch '
                'statistics, which torch computes on GPUs only. Set it to "frozen" or "folded", or '
                "train in one process."
            )
        net.trunk = synchronize_batch_norm(net.trunk)
    objective = Objective(job, classes, net.dim).to(device)
    groups = parameter_groups(job, net, objective)
    kind = torch.optim.AdamW if job.optimizer.kind == "adamw" else torch.optim.Adam
    run = Run(job, net, objective, kind(groups, eps=job.optimizer.eps, fused=True), device)
    if job.optimizer.average is not None:
        run.average = Average(net, job.optimizer.average)
    return run


def parameter_groups(job: Job, net: EmbeddingNet, objective: Objective) -> list[dict[str, Any]]:
    """Groups for trunk, head, proxies (all of the loss) and flows, each with its own rate.

    With `stage_decay` each stage of the trunk is a group. S stages, s of them from 0 on, have the
    rates lr_trunk · decay^(S - 1 - s).
    """
    rates = job.optimizer
    decay, own = rates.weight_decay, rates.weight_decay_criterion
    criterion_decay = decay if own is None else own
    losses = [objective.loss, objective.second_loss]
    flows = [net.flow, *objective.terms.values()]

    def inside(*modules: nn.Module | None) -> list[nn.Parameter]:
        return [p for module in modules if module is not None for p in module.parameters()]

    trunk = [inside(net.trunk)]
    if rates.stage_decay < 1 and not net.frozen_trunk:
        trunk = stages_of(net.backbone, net.trunk)
    factors = [rates.stage_decay ** (len(trunk) - 1 - s) for s in range(len(trunk))]
    members: list[tuple[str, float, float, list[nn.Parameter]]] = [
        *(("trunk", rates.lr_trunk * f, decay, x) for f, x in zip(factors, trunk, strict=True)),
        ("head", rates.rate_of(rates.lr_head), decay, inside(net.pool, net.projection)),
        ("proxies", rates.rate_of(rates.lr_proxies), criterion_decay, inside(*losses)),
        ("flows", rates.rate_of(rates.lr_flows), criterion_decay, inside(*flows)),
    ]
    groups: list[dict[str, Any]] = []
    for name, lr, weight_decay, parameters in members:
        found = [parameter for parameter in parameters if parameter.requires_grad]
        if found:
            group = {"name": name, "params": found, "lr": lr, "initial_lr": lr}
            groups.append({**group, "weight_decay": weight_decay})
    learnt = [p for m in (net, objective) for p in m.parameters() if p.requires_grad]
    assert len(learnt) == sum(len(group["params"]) for group in groups), "a group is missing"
    return groups


def require_same(checkpoint: Checkpoint, job: Job, split: Split, path: Path) -> None:
    """Raises: DatasetError, CheckpointError if `job` on `split` cannot continue a checkpoint."""
    split.require(checkpoint.split_sha256, str(path))
    require_sources(checkpoint.sources, sources_of(job.as_dict()), str(path))
    if (checkpoint.learnt_sha256 or checkpoint.split_sha256) != split.learnt_sha256():
        raise DatasetError(
            f"{path} was trained with other feedback than data.feedback has now. Restore the "
            "original folders, or start a new run in another run folder."
        )
    if changed := changes(checkpoint.job, job, FREE_TO_RESUME, str(path)):
        raise CheckpointError(
            f"{path} was trained with other settings: {', '.join(changed)}. Resume with the same "
            "job, or start a new run in another run folder."
        )


def restore(run: Run, split: Split, path: Path) -> None:
    """Restore `run` from a checkpoint. Raises: DatasetError, CheckpointError."""
    checkpoint = load_checkpoint(path)
    require_same(checkpoint, run.job, split, path)
    try:
        run.net.load_state_dict(checkpoint.net)
        run.objective.restore(checkpoint.objective)
    except RuntimeError as error:
        raise CheckpointError(f"{path} has other parameters: {error}. Start a new run.") from error
    run.optimizer.load_state_dict(checkpoint.optimizer)
    if run.average is not None and checkpoint.average is not None:
        run.average.load_state_dict(checkpoint.average)
    torch.set_rng_state(checkpoint.rng)
    if checkpoint.cuda_rng is not None and run.device.type == "cuda":
        torch.cuda.set_rng_state(checkpoint.cuda_rng)
    for name in _PROGRESS:
        setattr(run, name, getattr(checkpoint, name))


def synchronize_batch_norm(trunk: nn.Module) -> nn.Module:
    """`trunk` with the batch statistics of all processes in place of those of each."""
    if isinstance(trunk, TimmTrunk):
        # torch's conversion would drop the activations that timm has inside its batch norm.
        from timm.layers import convert_sync_batchnorm

        trunk.network = convert_sync_batchnorm(trunk.network)
        return trunk
    convert: Callable[[nn.Module], nn.Module] = nn.SyncBatchNorm.convert_sync_batchnorm
    return convert(trunk)
