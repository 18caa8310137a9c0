"""The training loop, in running order: batch, loss, step, log, evaluate, save."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
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
from training.config import Job, Runtime
from training.data.dataset import EvaluationImages, RandomBatches, TrainingImages
from training.data.records import LabelledImages, Split
from training.evaluation import Recall, recall_at
from training.models.embedding import EmbeddingNet
from training.objective import Objective
from training.runlog import RunLog
from training.schedule import rate

_LOG_EVERY_STEPS = 10


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
    log = RunLog(folder, job.runtime.tensorboard)
    batches = RandomBatches(len(split.train), job.optimizer.batch_size, job.seed)
    loader = _training_loader(job, split.train, batches)
    total_steps = job.optimizer.epochs * len(batches)
    try:
        while run.epoch < job.optimizer.epochs and not _spent(run):
            started = time.perf_counter()
            batches.epoch = run.epoch
            listener.epoch_started(run.epoch, job.optimizer.epochs, len(batches))
            loss, images = _train_epoch(run, loader, total_steps, log, listener)
            seconds = time.perf_counter() - started
            run.epoch += 1
            row = {"epoch": float(run.epoch), "loss": loss, "seconds": seconds}
            row["images_per_s"] = images / seconds
            if _evaluates(run):
                row |= evaluate(run.net, split.test, job).as_dict()
            history.append(row)
            log.write("epoch", run.step, **row)
            save_checkpoint(folder / FILE, _checkpoint(run, split, history))
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


def evaluate(net: EmbeddingNet, images: LabelledImages, job: Job) -> Recall:
    """Recall of `net` on `images`, preprocessed as in the service."""
    return recall_at(embed(net, images, job), images.labels, job.recall_at)


def embed(net: EmbeddingNet, images: LabelledImages, job: Job) -> NDArray[np.float32]:
    """Embeddings (N, D) of all images, in their order."""
    was_training = net.training
    net.eval()
    device = next(net.parameters()).device
    dataset = EvaluationImages(images, job.input.preprocessing())
    loader = DataLoader(dataset, job.optimizer.batch_size, num_workers=job.runtime.workers)
    with torch.inference_mode(), autocast(job.runtime, device):
        chunks = [net(batch.to(device)).float().cpu().numpy() for batch, _ in loader]
    net.train(was_training)
    vectors: NDArray[np.float32] = np.concatenate(chunks)
    return vectors


def choose_device(runtime: Runtime) -> torch.device:
    """The device of the job. Raises: TrainingError if CUDA is asked for and absent."""
    available = torch.cuda.is_available()
    if runtime.device == "cuda" and not available:
        raise TrainingError(
            'runtime.device = "cuda", but torch sees no GPU. Check the driver, or set it to '
            '"auto" or "cpu".'
        )
    return torch.device("cuda" if available and runtime.device != "cpu" else "cpu")


def autocast(runtime: Runtime, device: torch.device) -> torch.autocast:
    """bf16 where asked for or, under "auto", where the processor computes in it."""
    if runtime.precision == "auto":
        fast = (
            torch.cuda.is_bf16_supported()
            if device.type == "cuda"
            else torch.cpu._is_avx512_bf16_supported()
        )
    else:
        fast = runtime.precision == "bf16"
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=fast)


def _train_epoch(
    run: Run,
    loader: DataLoader[tuple[Tensor, Tensor]],
    total_steps: int,
    log: RunLog,
    listener: Listener,
) -> tuple[float, int]:
    """One pass over the loader; returns the mean total loss and the number of images."""
    run.net.train()
    run.objective.train()
    warm = run.epoch < run.job.optimizer.warmup_epochs
    losses, seen = [], 0
    for images, labels in _limited(run, loader):
        _set_rates(run, total_steps, warm)
        images, labels = images.to(run.device), labels.to(run.device)
        with autocast(run.job.runtime, run.device):
            terms = run.objective(run.net, images, labels)
        run.optimizer.zero_grad(set_to_none=True)
        terms.total.backward()
        if run.job.optimizer.clip_norm is not None:
            nn.utils.clip_grad_norm_(_all(run), run.job.optimizer.clip_norm)
        run.optimizer.step()
        run.step += 1
        losses.append(_finite(terms.total, run))
        seen += len(labels)
        parts = {name: float(value) for name, value in terms.parts.items()}
        if run.step % _LOG_EVERY_STEPS == 0:
            log.write("step", run.step, **parts)
        listener.step_done(parts)
    return sum(losses) / len(losses), seen


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


def _limited(
    run: Run, loader: DataLoader[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in loader:
        if _spent(run):
            return
        yield batch


def _all(run: Run) -> list[nn.Parameter]:
    return [*run.net.parameters(), *run.objective.parameters()]


def _spent(run: Run) -> bool:
    limit = run.job.optimizer.max_steps
    return limit is not None and run.step >= limit


def _evaluates(run: Run) -> bool:
    every = run.job.runtime.eval_every_epochs
    last = run.epoch >= run.job.optimizer.epochs or _spent(run)
    return last or (every > 0 and run.epoch % every == 0)


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
    if checkpoint.split_sha256 != split.sha256():
        raise CheckpointError(
            f"{path} was trained on other images (split {checkpoint.split_sha256[:12]}, now "
            f"{split.sha256()[:12]}). Restore the data set, or start a new run."
        )
    run.net.load_state_dict(checkpoint.net)
    run.objective.load_state_dict(checkpoint.objective)
    run.optimizer.load_state_dict(checkpoint.optimizer)
    torch.set_rng_state(checkpoint.rng)
    run.epoch, run.step = checkpoint.epoch, checkpoint.step
    return list(checkpoint.history)
