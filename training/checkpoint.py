"""Checkpoints: all that a run needs to continue as if it had not stopped."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kinlens.embedder.errors import CheckpointError
from kinlens.training.config.job import Job, stored_job
from kinlens.training.config.settings import ONNX
from kinlens.training.folder import UNTRAINED, replacing
from kinlens.training.models.backbones import State
from kinlens.training.models.embedding import EmbeddingNet
from kinlens.training.models.onnx_trunk import OnnxTrunk
from kinlens.training.parts.own import is_own, require_sources, source_sha256

FILE = "checkpoint.pt"
BEST = "best.pt"
START = "start.pt"
"""The network at step 0, of a run that compares its model with it."""

_FORMAT = 1
_PREFIXES = {"test": "", "validation": "validation "}
"""Of the names of figures in a row, by the classes that they were measured on."""
_TERMS = ("share ", "scale ", "reach ", "calibrates ", "r_", "feature_norm")
"""Prefixes of the terms of a step in a row, also of older runs."""

Row = dict[str, float]


@dataclass(frozen=True)
class Figures:
    """Recall and other figures of a model by name, on test and on validation classes.

    Files have both in one row, those on validation classes with a prefix.
    """

    test: Row = field(default_factory=dict)
    validation: Row = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row) -> "Figures":
        prefix = _PREFIXES["validation"]
        test = {name: value for name, value in row.items() if not name.startswith(prefix)}
        rest = {name.removeprefix(prefix): row[name] for name in row if name not in test}
        return cls(test, rest)

    def row(self) -> Row:
        prefix = _PREFIXES["validation"]
        return {prefix + name: value for name, value in self.validation.items()} | self.test


@dataclass(frozen=True)
class Epoch:
    """A finished epoch, counted from 1: means over its steps, its time without evaluation, and the
    figures after it, if it was evaluated.
    """

    epoch: int
    loss: float
    seconds: float
    images_per_s: float
    terms: Row
    figures: Figures = field(default_factory=Figures)

    @classmethod
    def of(cls, row: Row) -> "Epoch":
        terms = cls.terms_in(row)
        means = {name: row[name] for name in ("loss", "seconds", "images_per_s")}
        known = {"epoch", *means, *terms}
        figures = Figures.of({name: row[name] for name in row if name not in known})
        return cls(int(row["epoch"]), **means, terms=terms, figures=figures)

    @staticmethod
    def terms_in(row: Row) -> Row:
        """The terms of a step, or of its mean, that an epoch has."""
        return {name: value for name, value in row.items() if name.startswith(_TERMS)}

    def row(self) -> Row:
        """All by name, as in the log and in checkpoints."""
        means = {"loss": self.loss, "seconds": self.seconds, "images_per_s": self.images_per_s}
        return {"epoch": float(self.epoch), **means, **self.terms, **self.figures.row()}

    @property
    def shares(self) -> Row:
        """The gradient of each regularizer as a part of the gradient of the loss."""
        return {
            k.removeprefix("share "): v for k, v in self.terms.items() if k.startswith("share ")
        }


@dataclass(frozen=True)
class Checkpoint:
    """State after `epoch` finished epochs. Views and batches depend only on seed and epoch."""

    job: dict[str, Any]
    epoch: int
    step: int
    classes: int
    split_sha256: str
    net: dict[str, Tensor]
    objective: dict[str, Tensor]
    optimizer: dict[str, Any]
    rng: Tensor
    history: list[Epoch]
    evaluated: int = 0
    best_epoch: int = 0
    best_score: float = -1.0
    average: dict[str, Any] | None = None
    trunk: Figures = field(default_factory=Figures)
    trunk_ranks: dict[str, Tensor] = field(default_factory=dict)
    start: Figures = field(default_factory=Figures)
    began_with: str = UNTRAINED
    cuda_rng: Tensor | None = None
    learnt_sha256: str = ""
    trunk_alone: bool = False
    sources: dict[str, str] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        """The state of the network to evaluate and export: the average if there is one."""
        return self.net if self.average is None else Average.weights(self.average)

    def network(self) -> tuple[Job, EmbeddingNet]:
        """The job and its network (with `trunk_alone` its first trunk), evaluating on the CPU."""
        job = stored_job(self.job, "the job in the checkpoint")
        if is_own(backbone := job.model.backbone):  # the only own part of a finished model
            require_sources(self.sources, {backbone: source_sha256(backbone)}, "The run")
        changes: dict[str, Any] = {"weights": "none"}
        if job.model.dim == "auto":  # that of the trunk, or of a bundle that may be gone
            head = "projection.linear" if job.model.hidden else "projection"
            changes["dim"] = len(self.net[f"{head}.weight"])
        trunk = OnnxTrunk.of(self.net) if job.model.backbone == ONNX else None
        model = job.model.model_copy(update=changes)
        net = EmbeddingNet(model, job.regularizers.with_flow, trunk)
        net.load_state_dict(self.weights())
        return job, (net.without_head() if self.trunk_alone else net).eval()


class Average:
    """The exponential moving average of the weights and buffers of a network.

    The first step copies the weights. After n steps the decay is min(`decay`, (1 + n) / (10 + n)),
    so a short run is not dominated by its initial weights.
    """

    def __init__(self, net: EmbeddingNet, decay: float) -> None:
        self.net = copy.deepcopy(net)
        self.decay = decay
        self.steps = 0

    @torch.no_grad()
    def update(self, net: EmbeddingNet) -> None:
        """Add the weights after a step; those of a frozen trunk do not change."""
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps)) if self.steps else 0.0
        self.steps += 1
        means, values = [], []
        for mean, value in zip(_tensors(self.net), _tensors(net), strict=True):
            if mean.is_floating_point():
                means.append(mean)
                values.append(value)
            else:
                mean.copy_(value)
        torch._foreach_lerp_(means, values, 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        own = {f"module.{name}": value for name, value in self.net.state_dict().items()}
        return {"n_averaged": torch.tensor(self.steps), **own}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self.net.load_state_dict(self.weights(state))
        self.steps = int(state["n_averaged"])

    @staticmethod
    def weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {k.removeprefix("module."): v for k, v in state.items() if k != "n_averaged"}


def _tensors(net: EmbeddingNet) -> list[Tensor]:
    modules = [net.projection, net.flow] if net.frozen_trunk else [net]
    return [x for m in modules if m is not None for x in (*m.parameters(), *m.buffers())]


def save_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint. Raises: TrainingError if it cannot be written."""
    with replacing(path) as file:
        try:
            torch.save({"format": _FORMAT, **vars(checkpoint), **_as_rows(checkpoint)}, file)
        except RuntimeError as error:
            if "unexpected pos" not in str(error):
                raise
            raise OSError("the disk may be full") from error  # torch hides the reason


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; nothing in the file is executed. Raises: CheckpointError."""
    if path.suffix != ".pt":
        path = path / FILE
    if not path.is_file():
        absent = f"{path.parent} does not exist" if not path.parent.exists() else f"no {path}"
        raise CheckpointError(f"There is no run: {absent}. Give the folder of a run.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        found = content.pop("format")
        if found != _FORMAT:
            raise CheckpointError(
                f"{path} has format {found}, this version reads {_FORMAT}. Train again."
            )
        return Checkpoint(**content | _from_rows(content))
    except CheckpointError:
        raise
    except Exception as error:
        # torch.load raises pickle, zip, runtime, key and type errors on a damaged file.
        raise CheckpointError(
            f"{path} is damaged or not a checkpoint. Resume from a copy or train again."
        ) from error


def _as_rows(checkpoint: Checkpoint) -> dict[str, Any]:
    ranks = checkpoint.trunk_ranks
    return {
        "history": [epoch.row() for epoch in checkpoint.history],
        "trunk": checkpoint.trunk.row(),
        "start": checkpoint.start.row(),
        "trunk_ranks": {_PREFIXES[part]: of_part for part, of_part in ranks.items()},
    }


def _from_rows(content: Mapping[str, Any]) -> dict[str, Any]:
    """What `_as_rows` made; files of version 0.1 lack all but the history."""
    ranks = content.get("trunk_ranks", {})
    return {
        "history": [Epoch.of(row) for row in content["history"]],
        "trunk": Figures.of(content.get("trunk", {})),
        "start": Figures.of(content.get("start", {})),
        "trunk_ranks": {part: ranks[name] for part, name in _PREFIXES.items() if name in ranks},
    }


def load_chosen(folder: Path) -> Checkpoint:
    """The checkpoint that the run's protocol chose: last epoch or best. Raises: CheckpointError."""
    last = load_checkpoint(folder)
    if (folder / BEST).exists():
        return load_checkpoint(folder / BEST)
    if last.job["protocol"].get("choose_by") in ("alpha", "folds"):
        raise CheckpointError(
            f"The run in {folder} is not finished, so its model is not chosen yet. Run the command "
            "that began it again, `fit` with --resume."
        )
    return last


def write_chosen(folder: Path, alpha: float | None) -> None:
    """Write the model at `alpha` as the chosen one; None is what the run began with.

    A training on few classes may end below its start, so `protocol.alpha` takes it only a part of
    the way: to a mean of the weights of both.

    References:
        Wortsman et al., Robust fine-tuning of zero-shot models (2022), section 3: the line between
        weights. https://arxiv.org/abs/2109.01903
    """
    start, last = load_checkpoint(folder / START), load_checkpoint(folder)
    trunk_alone = start.trunk_alone or (alpha is None and last.began_with == UNTRAINED)
    weights = between(start.weights(), last.weights(), alpha or 0.0)  # the trunk of the start
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
