"""Progress of a run: JSON lines always, TensorBoard and trackers on request, and the console."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kinlens.embedder.errors import JobError
from kinlens.embedder.programs.progress import console

if TYPE_CHECKING:
    from kinlens.training.config.job import Job
    from kinlens.training.folder import Result


def note(sentence: str) -> None:
    """Print without line breaks or markup, which would damage a path."""
    console.print(sentence, markup=False, soft_wrap=True)


class RunLog:
    """Records in `log.jsonl` of a run folder; numbers also go to TensorBoard.

    Records after `step`, that of the checkpoint of a resumed run, are dropped: they come again.
    """

    def __init__(self, folder: Path, tensorboard: bool, step: int) -> None:
        from kinlens.training.folder import replace_text  # loads all settings of a job

        path = folder / "log.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        replace_text(path, "".join(kept))
        self._file = path.open("a", encoding="utf-8")
        self._writer = _summary_writer(folder) if tensorboard else None

    def write(self, kind: str, step: int, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


class Callback:
    """Follows a training; override what you need. Rows and parts are figures by name.

    An error that a method raises ends the training; its finished epochs are kept.
    """

    def started(self, job: "Job") -> None:
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

    def finished(self, result: "Result") -> None:
        """After the test of the model."""

    def stopped(self) -> None:
        """In place of `finished`, if an error or Ctrl-C ends the training."""


def epoch_bar(*more: ProgressColumn) -> Progress:
    """A bar over the steps of all epochs; without ipywidgets a notebook cannot show it."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        *more,
        console=console,
        disable=console.is_jupyter and find_spec("ipywidgets") is None,
    )


_QUICK_S = 1.0
_PAUSE_S = 10.0


@contextmanager
def console_listener(verbose: bool = False, brief: bool = False) -> Iterator["ConsoleListener"]:
    with epoch_bar(TextColumn("{task.fields[loss]}")) as progress:
        yield ConsoleListener(progress, verbose=verbose, brief=brief)


class ConsoleListener(Callback):
    """Prints the progress of a run: a bar over the steps of all epochs, and a line for each epoch.

    The lines repeat the content of the bar, since a log file does not show it. With `verbose` it
    also prints remarks that are in the report, with `brief` only how many epochs are done.
    """

    def __init__(
        self,
        progress: Progress,
        clock: Callable[[], float] = time.monotonic,
        verbose: bool = False,
        brief: bool = False,
    ) -> None:
        self._verbose, self._brief = verbose, brief
        self._progress = progress
        self._task = progress.add_task("epoch", total=None, loss="", visible=False)
        self._clock = clock
        self._epochs = 0
        self._began: tuple[int, float] | None = None
        self._told_at: float | None = None

    def note(self, sentence: str) -> None:
        if not self._brief:
            note(sentence)

    def remark(self, sentence: str) -> None:
        if self._verbose:
            note(sentence)

    def computed(self, done: int, total: int) -> None:
        self._progress.update(
            self._task, total=total, completed=done, description="look at images", visible=True
        )
        if console.is_terminal:
            return
        now = self._clock()
        if self._told_at is None:
            self._told_at = now
        elif now - self._told_at >= _PAUSE_S:  # a log file does not show the bar
            self._told_at = now
            note(f"looked at {done:,} of {total:,} views of the images")

    def epoch_started(self, epoch: int, epochs: int, steps: int) -> None:
        """The bar restarts its timing, as evaluation runs between epochs."""
        self._epochs = epochs
        if self._began is None or epoch <= self._began[0]:  # the first epoch of a training
            self._began = (epoch, self._clock())
        self._progress.reset(
            self._task,
            total=epochs * steps,
            completed=epoch * steps,
            description=f"epoch {epoch + 1} of {epochs}",
            visible=True,
        )

    def step_done(self, parts: dict[str, float]) -> None:
        self._progress.update(
            self._task, advance=1, loss="" if self._brief else f"loss {parts['loss']:.3f}"
        )

    def epoch_done(self, row: dict[str, float]) -> None:
        recalls = "  ".join(f"{k} {v:.1f}" for k, v in row.items() if "R@" in k)
        if not recalls and row["seconds"] < _QUICK_S and row["epoch"] < self._epochs:
            return
        words = [f"epoch {row['epoch']:.0f}{f' of {self._epochs}' if self._epochs else ''}"]
        words += [f"loss {row['loss']:.3f}", recalls, f"{row['images_per_s']:.0f} images/s"]
        self.note("  ".join(word for word in (*words, self._time_left(row["epoch"])) if word))

    def _time_left(self, epoch: float) -> str:
        """Estimate for this training, from the mean time of its epochs, including evaluation."""
        if self._began is None or epoch <= self._began[0]:  # finished by the previous process
            return ""
        first, since = self._began
        seconds = (self._clock() - since) / (epoch - first) * (self._epochs - epoch)
        if seconds <= 0:
            return ""
        if seconds < 90:
            return f"about {math.ceil(seconds)} s left"
        minutes = math.ceil(seconds / 60)
        return f"about {f'{minutes} min' if minutes < 90 else f'{minutes / 60:.1f} h'} left"


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise JobError(
            "runtime.tensorboard = true needs TensorBoard: pip install 'kinlens[tensorboard]'. Or "
            "set it to false: log.jsonl has the same numbers."
        ) from error
    return SummaryWriter(folder / "tensorboard")


class Callbacks(Callback):
    """Several callbacks as one, called in their order."""

    def __init__(self, every: Sequence[Any]) -> None:
        self._every = every
        for name in (name for name in vars(Callback) if name[0] != "_" and name != "stopped"):
            called = [getattr(one, name) for one in every if hasattr(one, name)]
            setattr(self, name, lambda *given, called=called: [each(*given) for each in called])

    def stopped(self) -> None:
        """An error of one is a message: it neither hides why the training ended nor ends others."""
        for one in (one for one in self._every if hasattr(one, "stopped")):
            try:
                one.stopped()
            except Exception as error:
                note(f"{type(one).__name__} could not end its run: {error}")


class MlflowCallback(Callback):
    """Reports settings, the figures of each epoch and those of the test to MLflow.

    It begins a run of MLflow, whose server and experiment are set as usual. Names have "_at_" for
    the "@" that MLflow refuses. Raises: JobError without the package mlflow.
    """

    def __init__(self) -> None:
        self.mlflow = _package("mlflow")

    def started(self, job: "Job") -> None:
        from kinlens.training.folder import by_name  # loads all settings of a job

        self.mlflow.start_run(run_name=job.name)
        self.mlflow.log_params(by_name(job.as_dict()))

    def epoch_done(self, row: dict[str, float]) -> None:
        self._write(row, int(row["epoch"]))

    def finished(self, result: "Result") -> None:
        self._write({f"test {name}": value for name, value in result.figures.items()}, None)
        self.mlflow.end_run()

    def stopped(self) -> None:
        self.mlflow.end_run("FAILED")

    def _write(self, row: dict[str, float], step: int | None) -> None:
        self.mlflow.log_metrics({k.replace("@", "_at_"): v for k, v in row.items()}, step=step)


class WandbCallback(Callback):
    """Reports settings, the figures of each epoch and those of the test to Weights & Biases.

    `options` go to `wandb.init`, for example `project`. Raises: JobError without the package wandb.
    """

    def __init__(self, **options: Any) -> None:
        self.wandb, self.options = _package("wandb"), options

    def started(self, job: "Job") -> None:
        self.run = self.wandb.init(name=job.name, config=job.as_dict(), **self.options)

    def epoch_done(self, row: dict[str, float]) -> None:
        self.run.log(row, step=int(row["epoch"]))

    def finished(self, result: "Result") -> None:
        self.run.summary.update(result.figures)
        self.run.finish()

    def stopped(self) -> None:
        self.run.finish(exit_code=1)


TRACKERS = {"mlflow": MlflowCallback, "wandb": WandbCallback}


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise JobError(
            f"Tracking needs the package {name}: pip install {name}. Without it log.jsonl of the "
            "run folder has the same numbers."
        ) from error
