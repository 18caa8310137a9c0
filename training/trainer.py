"""The training loop, in running order: batch, loss, step, log, evaluate, save."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from embedder.errors import CheckpointError, TrainingError
from training.checkpoint import (
    FILE,
    Checkpoint,
    load_checkpoint,
    save_checkpoint,
    seed_everything,
)
from training.config.job import Job
from training.data.dataset import RandomBatches, TrainingImages
from training.data.records import LabelledImages, Split
from training.data.table import write_table
from training.inference import autocast, batches, choose_device, evaluate, flow_lipschitz
from training.models.embedding import EmbeddingNet
from training.objective import Objective, Terms
from training.runlog import RunLog
from training.schedule import rate

_LOG_EVERY_STEPS = 10
_FREE_SETTINGS = frozenset(("runtime", "data.root", "description", "licence", "recall_at"))


class Listener(Protocol):
    """Who wants to know how a run goes; `training.console` draws it."""

    def epoch_started(self, epoch: int, epochs: int, steps: int) -> None: ...
    def step_done(self, parts: dict[str, float]) -> None: ...
    def epoch_done(self, row: dict[str, float]) -> None: ...


@dataclass
class Run:
    """A run in progress: everything that a step changes."""

    job: Job
    net: EmbeddingNet
    objective: Objective
    optimizer: torch.optim.AdamW
    device: torch.device
    epoch: int = 0
    step: int = 0


def fit(
    job: Job, split: Split, folder: Path, listener: Listener, resume: bool = False
) -> list[dict[str, float]]:
    """Train `job` on `split.train`, test on `split.test`, keep everything in `folder`.

    The model of a run is that of its last epoch: test recall is reported, never used to choose.
    With `resume` the run goes on from its last checkpoint, bit for bit on a CPU as if it had not
    stopped. Returns a row of figures per epoch.

    Raises: TrainingError.
    """
    seed_everything(job.seed)
    run = create_run(job, split.train.classes)
    history = _restore(run, split, folder / FILE) if resume else []
    _write_inputs(folder, job, split)
    log = RunLog(folder, job.runtime.tensorboard, run.step)
    settings = job.optimizer
    order = RandomBatches(len(split.train), settings.batch_size, job.seed, settings.steps_per_epoch)
    loader = _training_loader(job, split.train, order)
    try:
        while run.epoch < settings.epochs:
            order.epoch = run.epoch
            listener.epoch_started(run.epoch, settings.epochs, len(order))
            row = _train_epoch(run, loader, settings.epochs * len(order), log, listener)
            history.append(row)
            # Saved before evaluation too: a damaged test image must not cost the epoch.
            save_checkpoint(folder / FILE, _checkpoint(run, split, history))
            figures = _evaluation(run, split.test)
            if figures:
                row |= figures
                save_checkpoint(folder / FILE, _checkpoint(run, split, history))
            log.write("epoch", run.step, **row)
            listener.epoch_done(row)
    finally:
        log.close()
    return history


def create_run(job: Job, classes: int) -> Run:
    """A fresh network, objective and optimizer on the device of the job."""
    device = choose_device(job.runtime)
    net = EmbeddingNet(job.model, job.regularizers.determinant).to(device)
    net.to(memory_format=torch.channels_last)
    objective = Objective(job, classes, net.dim).to(device)
    optimizer = torch.optim.AdamW(
        parameter_groups(job, net, objective), weight_decay=job.optimizer.weight_decay
    )
    return Run(job, net, objective, optimizer, device)


def parameter_groups(job: Job, net: EmbeddingNet, objective: Objective) -> list[dict[str, object]]:
    """A group each for trunk, head, proxies and flows, with its own learning rate.

    Raises: TrainingError if a trainable parameter is in no group.
    """
    rates = job.optimizer
    flows: list[nn.Module] = [m for m in (net.flow, objective.determinant) if m is not None]
    losses: list[nn.Module] = [m for m in (objective.loss, objective.second_loss) if m is not None]
    members: dict[str, tuple[float, list[nn.Module]]] = {
        "trunk": (rates.lr_trunk, [net.trunk]),
        "head": (rates.lr_head, [net.projection]),
        "proxies": (rates.lr_proxies, losses),
        "flows": (rates.lr_flows, flows),
    }
    groups: list[dict[str, object]] = []
    held: set[int] = set()
    for name, (lr, modules) in members.items():
        parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        held |= {id(p) for p in parameters}
        if parameters:
            groups.append({"name": name, "params": parameters, "lr": lr, "initial_lr": lr})
    for module in (net, objective):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise TrainingError(f"The parameter {name} is in no optimizer group.")
    return groups


def _train_epoch(
    run: Run,
    loader: DataLoader[tuple[Tensor, Tensor]],
    total_steps: int,
    log: RunLog,
    listener: Listener,
) -> dict[str, float]:
    """One pass over the loader; returns the figures of the epoch."""
    started = time.perf_counter()
    run.net.train()
    run.objective.train()
    warm = run.epoch < run.job.optimizer.warmup_epochs
    losses, seen = [], 0
    for images, labels in batches(loader):
        _set_rates(run, total_steps, warm)
        terms = _step(run, images.to(run.device), labels.to(run.device))
        run.step += 1
        losses.append(_finite(terms.total, run))
        seen += len(labels)
        parts = {name: float(value) for name, value in terms.parts.items()}
        if run.step % _LOG_EVERY_STEPS == 0:
            log.write("step", run.step, **parts)
        listener.step_done(parts)
    run.epoch += 1
    seconds = time.perf_counter() - started
    return {
        "epoch": float(run.epoch),
        "loss": sum(losses) / len(losses),
        "seconds": seconds,
        "images_per_s": seen / seconds,
    }


def _step(run: Run, images: Tensor, labels: Tensor) -> Terms:
    with autocast(run.job.runtime, run.device):
        terms: Terms = run.objective(run.net, images, labels)
    run.optimizer.zero_grad(set_to_none=True)
    terms.total.backward()  # type: ignore[no-untyped-call]
    if run.job.optimizer.clip_norm is not None:
        parameters = [*run.net.parameters(), *run.objective.parameters()]
        nn.utils.clip_grad_norm_(parameters, run.job.optimizer.clip_norm)
    run.optimizer.step()
    return terms


def _finite(loss: Tensor, run: Run) -> float:
    value = float(loss.detach())
    if not np.isfinite(value):
        raise TrainingError(
            f"The loss is {value} at step {run.step}. Lower the learning rates or the weights of "
            "the regularizers; the last good checkpoint is kept."
        )
    return value


def _set_rates(run: Run, total_steps: int, warm: bool) -> None:
    settings = run.job.optimizer
    factor = rate(settings.schedule, run.step, total_steps, settings.decay_start)
    for group in run.optimizer.param_groups:
        frozen = warm and group["name"] == "trunk"
        group["lr"] = 0.0 if frozen else factor * group["initial_lr"]


def _evaluation(run: Run, test: LabelledImages) -> dict[str, float]:
    every = run.job.runtime.eval_every_epochs
    last = run.epoch >= run.job.optimizer.epochs
    if not last and (every == 0 or run.epoch % every):
        return {}
    figures = evaluate(run.net, test, run.job).as_dict()
    return figures | (flow_lipschitz(run.net, test, run.job) if last else {})


def _write_inputs(folder: Path, job: Job, split: Split) -> None:
    (folder / "job.json").write_text(job.model_dump_json(indent=2) + "\n", encoding="utf-8")
    write_table(folder / "train.csv", split.train)
    write_table(folder / "test.csv", split.test)


def _training_loader(
    job: Job, images: LabelledImages, batches: RandomBatches
) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(
        TrainingImages(images, job.input, job.seed),
        batch_sampler=batches,
        num_workers=job.runtime.workers,
        persistent_workers=job.runtime.workers > 0,
    )


def _checkpoint(run: Run, split: Split, history: list[dict[str, float]]) -> Checkpoint:
    return Checkpoint(
        job=run.job.as_dict(),
        epoch=run.epoch,
        step=run.step,
        classes=split.train.classes,
        split_sha256=split.sha256(),
        net=run.net.state_dict(),
        objective=run.objective.state_dict(),
        optimizer=run.optimizer.state_dict(),
        rng=torch.get_rng_state(),
        history=history,
    )


def _restore(run: Run, split: Split, path: Path) -> list[dict[str, float]]:
    checkpoint = load_checkpoint(path)
    split.require(checkpoint.split_sha256, str(path))
    changed = _changed(checkpoint.job, run.job.as_dict())
    if changed:
        raise CheckpointError(
            f"{path} was trained with other settings: {', '.join(changed)}. Resume with the same "
            "job, or start a new run with another --out."
        )
    run.net.load_state_dict(checkpoint.net)
    run.objective.load_state_dict(checkpoint.objective)
    run.optimizer.load_state_dict(checkpoint.optimizer)
    torch.set_rng_state(checkpoint.rng)
    run.epoch, run.step = checkpoint.epoch, checkpoint.step
    return list(checkpoint.history)


def _changed(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings that differ and change what is learnt."""
    names = []
    for key in sorted(old.keys() | new.keys()):
        name = prefix + key
        before, after = old.get(key), new.get(key)
        if name in _FREE_SETTINGS or before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            names += _changed(before, after, f"{name}.")
        else:
            names.append(f"{name} = {before!r}, now {after!r}")
    return names
