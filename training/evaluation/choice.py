"""Choose the model of a run: a point between its start and its last epoch, or the trunk itself.

A training on few classes may end below its start. So its model is a point on the line between the
weights of both, `protocol.alpha`. And the run is first repeated on folds, each of which holds out a
part of the train classes. Held-out images are searched with the trunk, the start, the last epoch
and points between. If one of these is better than alpha beyond chance, the best of them takes its
place. The model is then built from the training on all classes. A run that continues a bundle has
no folds: that bundle may have been trained on the classes that they hold out.

The best candidate of the folds alone would be a worse choice for few classes: a fold has fewer of
them than the run, so its training gains less, and held-out queries are few (docs/results.md).

References:
    Wortsman et al., Robust fine-tuning of zero-shot models (2022), section 3: the line between
    weights. https://arxiv.org/abs/2109.01903
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kinlens.embedder.errors import JobError
from kinlens.training.checkpoint import (
    BEST,
    FILE,
    START,
    load_checkpoint,
    save_checkpoint,
)
from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.protocol import with_protocol
from kinlens.training.data.records import FEWEST, Split
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.device import choose_device
from kinlens.training.distributed import is_main, rank, wait_for_all, world
from kinlens.training.evaluation.evaluate import embed, pooled, through_head
from kinlens.training.evaluation.retrieval import GAIN, gain, retrieval
from kinlens.training.folder import UNTRAINED, changes, read_json, replace_json
from kinlens.training.models.weights import State
from kinlens.training.state import RESUMABLE

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Points between the weights at the start (0) and those of the last epoch (1)."""

FEWEST_CLASSES = 4
"""Minimum number of train classes: two folds of two. A shop that tests on half of them has 8."""

WITHOUT_FOLDS = (
    "The model is alpha {}, a point between the continued bundle (0) and the last epoch (1). "
    "There are no folds: the bundle may have been trained on the classes that they hold out."
)

_OTHERS = 2000
"""Maximum number of held-out queries, and of images of trained classes in their gallery."""

_TRUNK = "trunk"
_LINE = "line.json"

Train = Callable[[Job, Split, Path], None]


@dataclass(frozen=True)
class Choice:
    """The result of the folds.

    `alpha` is the point on the line, None the trunk itself. `recall` and `map_at_r` are by the name
    of a candidate, in percent. `gain` is the interval of the change in R@1 from the untrained trunk
    to the chosen one. `wanted` is the alpha of the job.
    """

    alpha: float | None
    folds: int
    queries: int
    wanted: float
    recall: dict[str, float]
    map_at_r: dict[str, float]
    gain: dict[str, float] = field(default_factory=dict)

    def sentence(self) -> str:
        recall, chosen = self.recall, name_of(self.alpha)
        what = f"kept alpha {chosen}"
        if self.alpha != self.wanted:
            model = "the trunk itself" if self.alpha is None else f"alpha {chosen}"
            what = f"chose {model}, better than alpha {name_of(self.wanted)} beyond chance"
        paired = ""
        if self.gain and self.alpha is not None:
            low, high = (self.gain[name] for name in GAIN)
            verdict = "" if low > 0 else ", no gain beyond chance"
            paired = f" (95 % interval {low:+.1f} to {high:+.1f}{verdict})"
        line = ", ".join(f"{name} {value:.1f}" for name, value in recall.items())
        return (
            f"{self.folds} folds of the train classes ({self.queries:,} held-out queries) {what}: "
            f"R@1 {recall[chosen]:.1f}, {recall[chosen] - recall[_TRUNK]:+.1f} from {UNTRAINED}"
            f"{paired}. R@1 from the start (alpha 0) to the last epoch (1): {line}"
        )


def name_of(alpha: float | None) -> str:
    return _TRUNK if alpha is None else f"{alpha:g}"


def too_few(split: Split) -> str:
    """Why no model can be chosen on folds of these classes; "" if it can."""
    found = split.train.classes
    if found >= FEWEST_CLASSES:
        return ""
    whole = found + split.test.classes
    return (
        f"There are {whole} classes, {found} of them to train on: too few to tell whether a "
        f"training helps, which needs {FEWEST_CLASSES} ({2 * FEWEST_CLASSES} classes in all, half "
        "of them to test on). So nothing is trained: the model is the trunk itself or, with a "
        "trained bundle as model.weights, that model."
    )


def choose(job: Job, split: Split, folder: Path, train: Train) -> Choice:
    """Train on the folds of `split.train` that the job configures, and compare the candidates.

    Of several that are better than the alpha of the job, the best has the highest R@1 over the
    queries of all folds, then the highest MAP@R. A finished fold is not trained again; `train`
    trains or resumes a job.
    """
    count = min(job.protocol.folds or FEWEST, split.train.classes // FEWEST)
    runs = []
    for number in range(count):
        protocol = job.protocol.model_copy(
            update={"folds": count, "fold": number, "choose_by": "last", "evaluate_test": "never"}
        )
        one = job.model_copy(update={"protocol": protocol})
        part = with_protocol(split, protocol)
        try:  # before any fold is trained
            BatchSampler(one, part.to_learn().labels, rank(), world())
        except JobError as error:
            reason = f"Fold {number + 1} of {count} trains on {part.train.classes} classes: {error}"
            raise JobError(reason) from error
        runs.append((one, part))
    found = []
    for number, (one, part) in enumerate(runs):
        run_folder = folder / f"fold-{number:02d}"
        identity = {"job": one.as_dict(), "split_sha256": part.learnt_sha256()}
        line = _read(run_folder / _LINE, identity)
        if line is None:
            train(one, part, run_folder)
            line = identity | _evaluate_fold(one, part, run_folder)
            wait_for_all()
            if is_main():
                replace_json(run_folder / _LINE, line)
        if is_main():
            for name in (FILE, START, BEST):
                (run_folder / name).unlink(missing_ok=True)
        found.append(line)
    return _choice(found, job.protocol.alpha)


def write_chosen(folder: Path, alpha: float | None) -> None:
    """Write the model at `alpha` as the chosen one; None is what the run began with."""
    start, last = load_checkpoint(folder / START), load_checkpoint(folder)
    trunk_alone = alpha is None and last.began_with == UNTRAINED
    before, after = (one.network()[1].state_dict() for one in (start, last))
    weights = between(before, after, alpha or 0.0)  # the trunk of the start
    save_checkpoint(
        folder / BEST, replace(last, net=weights, average=None, trunk_alone=trunk_alone)
    )


def between(before: State, after: State, alpha: float) -> dict[str, Tensor]:
    """The state of the network at a point on the line."""
    return {
        name: torch.lerp(before[name], value, alpha)
        if value.is_floating_point()
        else (value if alpha else before[name])
        for name, value in after.items()
    }


def _evaluate_fold(job: Job, split: Split, run_folder: Path) -> dict[str, Any]:
    """The results of each candidate of a finished fold, by held-out image.

    Held-out images are searched among all images of the train classes: among a few held-out classes
    nearly all are found, whatever the candidate.
    """
    start, last = load_checkpoint(run_folder / START), load_checkpoint(run_folder)
    held_out = split.validation
    assert held_out is not None  # the protocol holds out a fold
    held_out = held_out.some_pairs(_OTHERS, job.seed)
    parts = [held_out, split.train.some(_OTHERS, job.seed)]
    labels = np.concatenate([held_out.labels, parts[1].labels + held_out.classes])
    net, trunk = last.network()[1], start.network()[1]
    after, before = copy.deepcopy(net.state_dict()), copy.deepcopy(trunk.state_dict())
    net, trunk = (one.to(choose_device(job.runtime)) for one in (net, trunk))
    features = [pooled(net, part, job) for part in parts] if net.frozen_trunk else []
    ranks, precisions = {}, {}

    def ask(name: str, vectors: list[NDArray[np.float32]]) -> None:
        answers = retrieval(np.concatenate(vectors), labels)
        ranks[name] = answers.ranks[: len(held_out)].tolist()
        precisions[name] = answers.precisions[: len(held_out)].tolist()

    of_trunk = features or [pooled(trunk, part, job) for part in parts]
    ask(_TRUNK, [functional.normalize(x).numpy() for x in of_trunk])
    for alpha in ALPHAS:
        net.load_state_dict(between(before, after, alpha))
        if features:
            ask(name_of(alpha), [through_head(net, x) for x in features])
        else:
            ask(name_of(alpha), [embed(net, part, job) for part in parts])
    return {
        "classes": [held_out.class_names[label] for label in held_out.labels.tolist()],
        "ranks": ranks,
        "precisions": precisions,
    }


def _choice(lines: list[dict[str, Any]], wanted: float) -> Choice:
    def over_folds(key: str) -> dict[str, NDArray[Any]]:
        return {name: np.concatenate([x[key][name] for x in lines]) for name in lines[0][key]}

    ranks, precisions = over_folds("ranks"), over_folds("precisions")
    names = [name for line in lines for name in line["classes"]]
    _, classes = np.unique(names, return_inverse=True)
    answered = ranks["0"] >= 0
    recall = {name: 100 * float((r[answered] == 0).mean()) for name, r in ranks.items()}
    map_at_r = {name: 100 * float(p[answered].mean()) for name, p in precisions.items()}
    hits = {name: torch.from_numpy(r) for name, r in ranks.items()}
    chosen = name_of(wanted)
    gains = {x: gain(hits[chosen], hits[x], classes, len(hits) - 1) for x in hits}
    better = [x for x, interval in gains.items() if interval.get(GAIN[0], 0.0) > 0]
    if better:
        chosen = max(better, key=lambda name: (recall[name], map_at_r[name]))
    return Choice(
        alpha=None if chosen == _TRUNK else float(chosen),
        folds=len(lines),
        queries=int(answered.sum()),
        wanted=wanted,
        recall=recall,
        map_at_r=map_at_r,
        gain=gain(hits[_TRUNK], hits[chosen], classes),
    )


def _read(path: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    """A finished fold, if there is one. Raises: JobError if it is of another job or images."""
    if not path.is_file():
        return None
    cure = f"Delete {path.parent} to train this fold again"
    line: dict[str, Any] = read_json(path, f"{cure}, and use --resume.")
    stored = parse_job(line.get("job", {}), str(path)).as_dict()
    changed = changes(stored, identity["job"], RESUMABLE)
    if line.get("split_sha256") != identity["split_sha256"]:
        changed.append("other images")
    if changed:
        raise JobError(
            f"{path.parent} is finished, with other settings: {', '.join(changed)}. {cure}, or use "
            "another run folder."
        )
    return line
