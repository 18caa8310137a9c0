"""Callbacks of a training, and the two that report to trackers."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from kinlens.embedder.errors import JobError
from kinlens.training.config.job import Job
from kinlens.training.folder import Result, by_name


class Callback:
    """Follows a training; override what you need. Rows and parts are figures by name.

    An error that a method raises ends the training; its finished epochs are kept.
    """

    def started(self, job: Job) -> None:
        """Before the first step."""

    def note(self, sentence: str) -> None:
        """A message for the user."""

    def remark(self, sentence: str) -> None:
        """A message of the report."""

    def computed(self, done: int, total: int) -> None:
        """Features of a frozen trunk were computed."""

    def epoch_started(self, epoch: int, epochs: int, steps: int) -> None:
        """`epoch` counts from 0."""

    def step_done(self, parts: dict[str, float]) -> None:
        """`parts` are the loss, each penalty, their sum and the norm of the gradient."""

    def epoch_done(self, row: dict[str, float]) -> None:
        """After the evaluation of an epoch, if it has one; `row["epoch"]` counts from 1."""

    def finished(self, result: Result) -> None:
        """After the test of the model."""


class Callbacks(Callback):
    """Several callbacks as one, called in their order."""

    def __init__(self, every: Sequence[Any]) -> None:
        for name in (name for name in vars(Callback) if not name.startswith("_")):
            called = [getattr(one, name) for one in every if hasattr(one, name)]
            setattr(self, name, lambda *given, called=called: [each(*given) for each in called])


class MlflowCallback(Callback):
    """Reports settings, the figures of each epoch and those of the test to MLflow.

    It begins a run of MLflow, whose server and experiment are set as usual. Names have "_at_" for
    the "@" that MLflow refuses. Raises: JobError without the package mlflow.
    """

    def __init__(self) -> None:
        self.mlflow = _package("mlflow")

    def started(self, job: Job) -> None:
        self.mlflow.start_run(run_name=job.name)
        self.mlflow.log_params(by_name(job.as_dict()))

    def epoch_done(self, row: dict[str, float]) -> None:
        self._write(row, int(row["epoch"]))

    def finished(self, result: Result) -> None:
        self._write({f"test {name}": value for name, value in result.figures.items()}, None)
        self.mlflow.end_run()

    def _write(self, row: dict[str, float], step: int | None) -> None:
        self.mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in row.items()}, step=step)


class WandbCallback(Callback):
    """Reports settings, the figures of each epoch and those of the test to Weights & Biases.

    `options` go to `wandb.init`, for example `project`. Raises: JobError without the package wandb.
    """

    def __init__(self, **options: Any) -> None:
        self.wandb, self.options = _package("wandb"), options

    def started(self, job: Job) -> None:
        self.run = self.wandb.init(name=job.name, config=job.as_dict(), **self.options)

    def epoch_done(self, row: dict[str, float]) -> None:
        self.run.log(row, step=int(row["epoch"]))

    def finished(self, result: Result) -> None:
        self.run.summary.update(result.figures)
        self.run.finish()


TRACKERS = {"mlflow": MlflowCallback, "wandb": WandbCallback}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise JobError(
            f"Tracking needs the package {name}: pip install {name}. Without it log.jsonl of the "
            "run folder has the same numbers."
        ) from error
