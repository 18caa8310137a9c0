"""The training loop, in running order: batch, loss, step, log, evaluate, choose, save."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from embedder.errors import TrainingError
from training.checkpoint import BEST, FILE, UNTRAINED, Average, save_checkpoint, seed_everything
from training.config.job import Job
from training.config.settings import rate
from training.data.images import TrainingImages, build_loader
from training.data.records import LabelledImages, Split, write_table
from training.data.samplers import BatchSampler
from training.device import autocast, on_device
from training.distributed import is_main, local_world, rank, wait_for_all, world
from training.evaluation.evaluate import (
    batches,
    embed,
    evaluate,
    evaluating,
    figures_of,
)
from training.losses.proxies import check_labels
from training.objective import Terms
from training.report import notices
from training.report.log import RunLog
from training.start import goes_on, start_from_trunk
from training.state import OF_TERMS, VALIDATION, Row, Run, create_run, restore

_LOG_EVERY_STEPS = 10
READ_EVERY_STEPS = {"cpu": 1, "cuda": 10}
"""To read a number off a GPU is to wait for all that it has to do."""


class Listener(Protocol):
    """Who wants to know how a run goes; `training.report.log` draws it."""

    def said(self, sentence: str) -> None: ...
    def epoch_started(self, epoch: int, epochs: int, steps: int) -> None: ...
    def step_done(self, parts: dict[str, float]) -> None: ...
    def epoch_done(self, row: dict[str, float]) -> None: ...


def fit(
    job: Job, split: Split, folder: Path, listener: Listener, resume: bool = False
) -> list[Row]:
    """Train `job` on `split.train` and keep everything in `folder`.

    Before the first step the trunk alone is measured on the held-out classes. The last epoch is
    the model of the run, in `checkpoint.pt`, unless the job's protocol chooses the best one, which
    is then in `best.pt`. With `resume` the run goes on from its last checkpoint, bit for bit on a
    CPU as if it had not stopped. Returns a row of figures per epoch.

    Raises: TrainingError.
    """
    seed_everything(job.seed)
    order = BatchSampler(job, split.train.labels, rank(), world())
    job = job.model_copy(update={"optimizer": job.optimizer.enough_epochs(len(order))})
    check_labels(torch.from_numpy(split.train.labels), split.train.classes)
    run = create_run(job, split.train.classes)
    run.objective.shares.calibration_steps = len(order)
    run.net.check_sizes(job.input.size_px, job.input.preprocessing().crop_px)
    if resume:
        restore(run, split, folder / FILE)
    views = TrainingImages(split.train, job.input, job.seed)
    loader = build_loader(views, order, job.runtime, run.device, job.seed, local_world())
    log = RunLog(folder, job.runtime.tensorboard, run.step) if is_main() else None
    _write_inputs(folder, job, split)
    for sentence in notices.before(job, len(order)):
        listener.said(sentence)
    try:
        if not resume:
            _begin(run, split, folder, log, listener)
        _finish_epoch(run, split, folder, log, listener)
        while run.epoch < job.optimizer.epochs:
            order.epoch = run.epoch
            listener.epoch_started(run.epoch, job.optimizer.epochs, len(order))
            run.history.append(_train_epoch(run, loader, log, listener))
            # Saved before evaluation too: a damaged test image must not cost the epoch.
            _save(run, split, folder / FILE)
            _finish_epoch(run, split, folder, log, listener)
    finally:
        if log is not None:
            log.close()
    return run.history


def _begin(run: Run, split: Split, folder: Path, log: RunLog | None, listener: Listener) -> None:
    """Epoch 0: the figures of what the run begins with, the start values, those of the network.

    A run begins with a trunk, or with the trained model of a bundle that it goes on from.
    """

    def embedded(x: Tensor) -> Tensor:
        return net.embed(net.project(x))

    (folder / BEST).unlink(missing_ok=True)  # of a start that was stopped before its first epoch
    net, pooled = run.net, _pooled(run, split)
    trained = goes_on(run.job)
    run.began_with = "the model that it went on from" if trained else UNTRAINED
    began = embedded if trained else functional.normalize
    for prefix, (parts, features) in pooled.items():
        run.trunk |= _figures_of_pooled(run, prefix, parts, features, began)
    start_from_trunk(run, split.train)
    if run.average is not None:
        run.average = Average(net, run.average.decay)
    for prefix, (parts, features) in pooled.items():
        run.start |= _figures_of_pooled(run, prefix, parts, features, embedded)
    if run.job.start.projection == "trunk" or trained:
        _choose(run, run.start, split, folder)
    if log is not None:
        log.write("start", 0, **{f"trunk {k}": v for k, v in run.trunk.items()}, **run.start)
    for name, row in ((run.began_with, run.trunk), ("the network at step 0", run.start)):
        recalls = "  ".join(f"{key} {value:.1f}" for key, value in row.items() if "R@1" in key)
        if recalls:
            listener.said(f"{name}: {recalls}")


def _pooled(
    run: Run, split: Split
) -> dict[str, tuple[list[LabelledImages], list[NDArray[np.float32]]]]:
    """Held-out images and what the trunk makes of them (N, C), by the prefix of their figures."""
    held_out = {VALIDATION: [split.validation], "": [split.test, split.gallery]}
    if run.job.protocol.evaluate_test == "never":
        del held_out[""]
    found = {}
    for prefix, images in held_out.items():
        parts = [part for part in images if part is not None]
        if parts:
            features = [embed(run.net, part, run.job, run.net.pooled) for part in parts]
            found[prefix] = (parts, features)
    return found


def _figures_of_pooled(
    run: Run,
    prefix: str,
    parts: list[LabelledImages],
    features: list[NDArray[np.float32]],
    function: Callable[[Tensor], Tensor],
) -> Row:
    """The figures of `function` of pooled features (N, C): unit vectors."""
    with evaluating(run.net), torch.inference_mode():
        tensors = [function(torch.from_numpy(x).to(run.device)) for x in features]
    figures = figures_of([x.cpu().numpy() for x in tensors], parts, run.job, full=False)
    return {prefix + name: value for name, value in figures.items()}


def _train_epoch(
    run: Run, loader: DataLoader[tuple[Tensor, Tensor]], log: RunLog | None, listener: Listener
) -> Row:
    """One pass over the images; returns the figures of the epoch."""
    started = time.perf_counter()
    run.net.train()
    run.objective.train()
    model = run.warm_up(run.epoch < run.job.optimizer.warmup_epochs)
    losses, watched = [], defaultdict[str, list[float]](list)
    for step, parts in _steps(run, model, loader):
        losses.append(parts["total"])
        for name, value in parts.items():
            if name.startswith(OF_TERMS):
                watched[name].append(value)
        if log is not None and step % _LOG_EVERY_STEPS == 0:
            log.write("step", step, **parts)
        listener.step_done(parts)
    run.epoch += 1
    seconds = time.perf_counter() - started
    return {
        "epoch": float(run.epoch),
        "loss": sum(losses) / len(losses),
        "seconds": seconds,
        "images_per_s": len(losses) * run.job.optimizer.batch_size / seconds,
        **{name: sum(values) / len(values) for name, values in watched.items()},
    }


def _steps(
    run: Run, model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, Row]]:
    """A step for each batch; gives their numbers and terms, on a GPU some steps later."""
    every = READ_EVERY_STEPS[run.device.type]
    unread: list[tuple[dict[str, Tensor], Row]] = []
    for images, labels in on_device(batches(loader), run.device):
        parts = train_step(run, model, images, labels, len(loader))
        unread.append((parts, run.objective.shares.figures()))
        if len(unread) == every:
            yield from _read(unread, run.step)
            unread = []
    yield from _read(unread, run.step)


def train_step(
    run: Run, model: nn.Module, images: Tensor, labels: Tensor, steps_per_epoch: int
) -> dict[str, Tensor]:
    """One step of `model`, made by `run.warm_up`; returns the terms of the objective, each ().

    Images and labels are on the device of the run, and nothing is read off it. If the loss or its
    gradient is not finite, no parameter moves.
    """
    settings, optimizer = run.job.optimizer, run.optimizer
    factor = rate(settings, run.step, steps_per_epoch)
    for group in optimizer.param_groups:
        group["lr"] = factor * group["initial_lr"]
    with autocast(run.job.runtime, run.device):
        terms: Terms = model(images, labels)
    total = terms.total.detach()
    optimizer.zero_grad(set_to_none=True)
    terms.total.backward()  # type: ignore[no-untyped-call]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if settings.clip_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, settings.clip_norm, norm)
    if settings.clip_value is not None:
        nn.utils.clip_grad_value_(parameters, settings.clip_value)
    optimizer.found_inf = (~(total.isfinite() & norm.isfinite())).float()  # type: ignore[attr-defined]
    optimizer.step()
    if run.average is not None:
        run.average.update(run.net)
    run.step += 1
    return {"total": total, "gradient_norm": norm, **terms.parts}


def _read(unread: list[tuple[dict[str, Tensor], Row]], last: int) -> Iterator[tuple[int, Row]]:
    """The terms of the steps up to number `last`, in one copy off the device, and their shares.

    Raises: TrainingError for a loss or a gradient that is not finite.
    """
    if not unread:
        return
    names = list(unread[0][0])
    found = torch.stack([torch.stack([p[n].double() for n in names]) for p, _ in unread]).tolist()
    for step, values, (_, shares) in zip(count(last - len(unread) + 1), found, unread):
        row = dict(zip(names, values, strict=True))
        if not (math.isfinite(row["total"]) and math.isfinite(row["gradient_norm"])):
            raise TrainingError(
                f"The loss is {row['total']} at step {step}, the norm of its gradient "
                f"{row['gradient_norm']}. Lower the learning rates or the "
                "weights of the regularizers; the last good checkpoint is kept."
            )
        yield step, row | shares


def _finish_epoch(
    run: Run, split: Split, folder: Path, log: RunLog | None, listener: Listener
) -> None:
    """Evaluate the epoch that is finished but not yet evaluated, choose, save and report it."""
    if run.evaluated == run.epoch:
        return
    row = run.history[-1]
    row |= _evaluation(run, split)
    run.evaluated = run.epoch
    _choose(run, row, split, folder)
    _save(run, split, folder / FILE)
    if log is not None:
        log.write("epoch", run.step, **row)
    listener.epoch_done(row)
    for sentence in notices.after_epoch(run.job, run.history):
        listener.said(sentence)


def _choose(run: Run, row: Row, split: Split, folder: Path) -> None:
    """Keep the model of this moment if the protocol likes its figures best."""
    score = _score(run.job, row)
    if score is not None and score > run.best_score:
        run.best_epoch, run.best_score = run.epoch, score
        _save(run, split, folder / BEST)


def _evaluation(run: Run, split: Split) -> Row:
    """The figures of a finished epoch, if it is one to evaluate."""
    job = run.job
    last = run.epoch >= job.optimizer.epochs
    every = job.runtime.eval_every_epochs
    if not last and (every == 0 or run.epoch % every):
        return {}
    return _figures(run, split, full=last)


def _figures(run: Run, split: Split, full: bool = False) -> Row:
    """Figures on validation classes and, as far as the protocol lets, on test classes."""
    job, row = run.job, Row()
    if split.validation is not None:
        figures = evaluate(run.served, split.validation, job)
        row |= {VALIDATION + name: value for name, value in figures.items()}
    if job.protocol.evaluate_test == "every":
        row |= evaluate(run.served, split.test, job, split.gallery, full=full)
    return row


def _score(job: Job, row: Row) -> float | None:
    """What the protocol chooses the epoch by; None without a choice."""
    names = {"last": "", "validation": VALIDATION + "R@1", "test": "R@1"}
    return row.get(names[job.protocol.choose_by])


def _save(run: Run, split: Split, path: Path) -> None:
    if is_main():
        save_checkpoint(path, run.checkpoint(split))
    wait_for_all()


def _write_inputs(folder: Path, job: Job, split: Split) -> None:
    if not is_main():
        return
    (folder / "job.json").write_text(job.model_dump_json(indent=2) + "\n", encoding="utf-8")
    for name in ("train", "validation", "test", "gallery"):
        part: LabelledImages | None = getattr(split, name)
        if part is not None:
            write_table(folder / f"{name}.csv", part)
