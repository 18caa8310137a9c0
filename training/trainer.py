"""The training loop, in running order: batch, loss, step, log, evaluate, choose, save."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from kinlens.embedder.errors import TrainingError
from kinlens.training.checkpoint import (
    BEST,
    FILE,
    START,
    Average,
    Epoch,
    Figures,
    Row,
    save_checkpoint,
)
from kinlens.training.config.job import Job
from kinlens.training.config.settings import rate
from kinlens.training.data.features import CachedFeatures, pooled_views
from kinlens.training.data.images import TrainingImages, batches, build_loader
from kinlens.training.data.records import SKIPPED, LabelledImages, Split, write_table
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.device import autocast, on_device
from kinlens.training.distributed import is_main, local_world, main_first, rank, wait_for_all, world
from kinlens.training.evaluation.evaluate import evaluate, pooled, searched
from kinlens.training.evaluation.retrieval import gain, retrieval
from kinlens.training.folder import UNTRAINED
from kinlens.training.losses.base import check_labels
from kinlens.training.models.embedding import evaluating
from kinlens.training.objective import Terms
from kinlens.training.report import notices
from kinlens.training.report.log import Callback, RunLog
from kinlens.training.start import continues_model, start_from_trunk
from kinlens.training.state import Run, create_run, restore

_LOG_EVERY_STEPS = 10
_SAVE_EVERY_S = 15.0
READ_EVERY_STEPS = {"cpu": 1, "cuda": 10}
"""Reading a scalar synchronises the GPU, so metrics are read every N steps."""


def fit(
    job: Job,
    split: Split,
    folder: Path,
    listener: Callback,
    resume: bool = False,
    trains: bool = True,
) -> list[Epoch]:
    """Train `job` on `split.train` and its feedback, and write everything to `folder`.

    Before the first step the trunk alone is measured on the held-out classes. The model of the run
    is the last epoch, in `checkpoint.pt`, unless the job's protocol chooses the best one, which is
    then in `best.pt`. With `resume` the run continues from its last checkpoint; on a CPU the result
    is bit for bit the same as without a stop. If `trains` is False or the start is the trunk alone,
    the run ends before the first step. Returns its epochs. Raises: TrainingError.
    """
    torch.manual_seed(job.seed)  # NumPy and Python draw from generators of their own
    images = split.to_learn()
    order = BatchSampler(job, images.labels, rank(), world())
    job = job.model_copy(update={"optimizer": job.optimizer.enough_epochs(len(order))})
    check_labels(torch.from_numpy(images.labels), images.classes)
    run = create_run(job, images.classes)
    run.net.check_sizes(job.input.size_px, job.input.preprocessing().crop_px)
    if resume:
        restore(run, split, folder / FILE)
    log = RunLog(folder, job.runtime.tensorboard, run.step) if is_main() else None
    training = _Training(run, split, folder, log, listener, order.batch_size)
    training.write_inputs()
    for sentence in notices.before(job, len(order)) if trains else ():
        listener.note(sentence)
    try:
        if not resume:
            training.begin()
        training.finish_epoch()
        if run.trunk_alone or not trains:
            training.save(FILE)
            return run.history
        loader = _loader(run, images, order, listener)
        while run.epoch < job.optimizer.epochs:
            order.epoch = run.epoch
            listener.epoch_started(run.epoch, job.optimizer.epochs, len(order))
            run.history.append(training.epoch(loader))
            # Save before evaluation too, so that a damaged test image does not lose the epoch.
            training.save(FILE, if_due=job.model.frozen_trunk)
            training.finish_epoch()
    finally:
        if log is not None:
            log.close()
    return run.history


def _loader(
    run: Run, images: LabelledImages, order: BatchSampler, listener: Callback
) -> DataLoader[tuple[Tensor, Tensor]]:
    """Random views of the images; with a frozen trunk their features, computed first."""
    job, runtime = run.job, run.job.runtime
    views: Dataset[tuple[Tensor, Tensor]] = TrainingImages(images, job.input, job.seed)
    if job.model.frozen_trunk:
        with main_first():
            features = pooled_views(
                run.net, images, job.input, runtime, job.model.views, computed=listener.computed
            )
        views = CachedFeatures(features, images.labels, job.seed)
        runtime = runtime.model_copy(update={"workers": 0})
    return build_loader(views, order, runtime, run.device, job.seed, local_world())


@dataclass(frozen=True)
class _Training:
    """A run with its data, folder and listener; methods in the order in which `fit` calls them."""

    run: Run
    split: Split
    folder: Path
    log: RunLog | None  # only in the main process
    listener: Callback
    batch_size: int

    def write_inputs(self) -> None:
        if not is_main():
            return
        content = self.run.job.model_dump_json(indent=2) + "\n"
        (self.folder / "job.json").write_text(content, encoding="utf-8")
        for name, part in self.split.parts.items():
            write_table(self.folder / f"{name}.csv", part)
        if self.split.damaged:
            lines = "\n".join(self.split.damaged)
            (self.folder / SKIPPED).write_text(f"{lines}\n", encoding="utf-8")
        if self.split.feedback is not None:
            write_table(self.folder / "feedback.csv", self.split.joined())

    def begin(self) -> None:
        """Epoch 0: measure the trunk or the continued model, set initial weights, measure those."""
        (self.folder / BEST).unlink(missing_ok=True)  # of a start that was cut short
        run, job, computed = self.run, self.run.job, self.listener.computed
        held_out = {} if self.split.validation is None else {"validation": [self.split.validation]}
        if job.protocol.evaluate_test != "never":
            held_out["test"] = self.split.tested
        features = {
            part: [pooled(run.net, images, job, computed) for images in several]
            for part, several in held_out.items()
        }
        trained = continues_model(job)
        run.began_with = "the model that it continued" if trained else UNTRAINED
        embed = run.net.embed_pooled if trained else functional.normalize
        run.trunk, run.trunk_ranks = _measure(run, held_out, features, embed)
        start_from_trunk(run, self.split.to_learn(), computed)
        if run.average is not None:
            run.average = Average(run.net, run.average.decay)
        if run.trunk_alone:
            run.start = run.trunk
        else:
            run.start, _ = _measure(run, held_out, features, run.net.embed_pooled)
        if job.protocol.choose_by == "alpha":
            self.save(START)
        if job.start.projection != "random" or trained:
            self._choose(run.start)
        self._note_start()

    def _note_start(self) -> None:
        run = self.run
        if self.log is not None:
            of_trunk = {f"trunk {name}": value for name, value in run.trunk.row().items()}
            self.log.write("start", 0, **of_trunk, **run.start.row())
        for name, of in ((run.began_with, run.trunk), ("the network at step 0", run.start)):
            recalls = "  ".join(f"{key} {x:.1f}" for key, x in of.row().items() if "R@1" in key)
            if recalls:
                self.listener.note(f"{name}: {recalls}")

    def epoch(self, loader: DataLoader[tuple[Tensor, Tensor]]) -> Epoch:
        started, run = time.perf_counter(), self.run
        run.net.train()
        run.objective.train()
        model = run.begin_epoch(trunk_frozen=run.epoch < run.job.optimizer.warmup_epochs)
        losses, watched = [], defaultdict[str, list[float]](list)
        for step, parts in _steps(run, model, loader):
            losses.append(parts["total"])
            for name, value in Epoch.terms_in(parts).items():
                watched[name].append(value)
            if self.log is not None and step % _LOG_EVERY_STEPS == 0:
                self.log.write("step", step, **parts)
            self.listener.step_done(parts)
        run.epoch += 1
        seconds = time.perf_counter() - started
        return Epoch(
            run.epoch,
            loss=sum(losses) / len(losses),
            seconds=seconds,
            images_per_s=len(losses) * self.batch_size / seconds,
            terms={name: sum(values) / len(values) for name, values in watched.items()},
        )

    def finish_epoch(self) -> None:
        run = self.run
        if run.evaluated == run.epoch:
            return
        last = replace(run.history[-1], figures=self._figures())
        run.history[-1], run.evaluated = last, run.epoch
        self._choose(last.figures)
        done = run.epoch >= run.job.optimizer.epochs
        self.save(FILE, if_due=run.job.model.frozen_trunk and not done)
        if self.log is not None:
            self.log.write("epoch", run.step, **last.row())
        self.listener.epoch_done(last.row())
        for sentence in notices.after_epoch(run.job, run.history):
            self.listener.remark(sentence)  # of the settings; they are in the report as well

    def save(self, name: str, if_due: bool = False) -> None:
        """Write a checkpoint; `if_due` skips it if the last one is only a few seconds old.

        An epoch of a head takes less time than writing the frozen trunk.
        """
        if is_main() and not (if_due and time.monotonic() < self.run.saved_at + _SAVE_EVERY_S):
            save_checkpoint(self.folder / name, self.run.checkpoint(self.split))
            if name == FILE:
                self.run.saved_at = time.monotonic()
        wait_for_all()

    def _figures(self) -> Figures:
        """The figures of a finished epoch, if it is to be evaluated and the protocol permits."""
        run, job = self.run, self.run.job
        last, every = run.epoch >= job.optimizer.epochs, job.runtime.eval_every_epochs
        if not last and (every == 0 or run.epoch % every):
            return Figures()
        figures: dict[str, Row] = {}
        others = job.protocol.choose_by != "last"  # an earlier epoch may be chosen
        if self.split.validation is not None:
            before, parts = run.trunk_ranks.get("validation"), [self.split.validation]
            found = evaluate(run.served, parts, job, before=before, may_collapse=others)
            figures["validation"] = found
        if job.protocol.evaluate_test == "every":
            before = run.trunk_ranks.get("test")
            figures["test"] = evaluate(run.served, self.split.tested, job, last, before, others)
        return Figures(**figures)

    def _choose(self, figures: Figures) -> None:
        """Keep the current model if its figures are the best by the protocol."""
        by = self.run.job.protocol.choose_by
        score = {"validation": figures.validation, "test": figures.test}.get(by, {}).get("R@1")
        if score is not None and score > self.run.best_score:
            self.run.best_epoch, self.run.best_score = self.run.epoch, score
            self.save(BEST)


def _measure(
    run: Run,
    held_out: Mapping[str, list[LabelledImages]],
    features: Mapping[str, list[Tensor]],
    embed: Callable[[Tensor], Tensor],
) -> tuple[Figures, dict[str, Tensor]]:
    """The figures and ranks on each held-out part of the embeddings of pooled features (N, C)."""
    figures: dict[str, Row] = {}
    ranks: dict[str, Tensor] = {}
    for part, images in held_out.items():
        with evaluating(run.net), torch.inference_mode():
            vectors = [embed(x.to(run.device)) for x in features[part]]
        found = retrieval(*searched(vectors, images), ks=run.job.recall_at)
        change = gain(run.trunk_ranks.get(part), found.ranks, images[0].labels)
        figures[part], ranks[part] = found.as_dict() | change, found.ranks
    return Figures(**figures), ranks


def _steps(
    run: Run, model: nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, Row]]:
    """A step per batch; yields numbers, terms and shares. Raises: TrainingError if not finite."""
    unread: list[tuple[int, dict[str, Tensor], Row]] = []
    for number, (images, labels) in enumerate(on_device(batches(loader), run.device), start=1):
        terms = train_step(run, model, images, labels, len(loader))
        unread.append((run.step, terms, run.objective.shares.figures()))
        if len(unread) < READ_EVERY_STEPS[run.device.type] and number < len(loader):
            continue
        found = torch.stack([torch.stack([x.double() for x in t.values()]) for _, t, _ in unread])
        for (step, terms, shares), values in zip(unread, found.tolist(), strict=True):
            row: Row = dict(zip(terms, values, strict=True))
            if not (math.isfinite(row["total"]) and math.isfinite(row["gradient_norm"])):
                raise TrainingError(
                    f"The loss is {row['total']} at step {step}, the norm of its gradient "
                    f"{row['gradient_norm']}. Lower the learning rates or the weights of the "
                    "regularizers; the last good checkpoint is kept."
                )
            yield step, row | shares
        unread = []


def train_step(
    run: Run, model: nn.Module, images: Tensor, labels: Tensor, steps_per_epoch: int
) -> dict[str, Tensor]:
    """One step of `model` from `run.begin_epoch`; returns the terms of the objective, each ().

    Images and labels are on the device of the run, and nothing is read from it. If the loss or its
    gradient is not finite, no parameter changes.
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
