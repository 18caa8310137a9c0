"""The trials of a search, kept by Optuna in a file: which values to try next, what they gave."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np

from embedder.errors import JobError
from training.config.space import Choices, Integers, Scalar, Setting
from training.files import replace_json

_NAME = "kinlens"
_OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Trial:
    """One set of values; `state` is "running", "complete" or "failed" (then with a `reason`)."""

    number: int
    values: dict[str, Scalar]
    state: str
    score: float | None = None
    best_epoch: int | None = None
    reason: str = ""


class Study:
    """Trials in `study.db` of a folder; use as a context manager.

    Trial n is drawn by a sampler seeded with (seed, n), so stopping changes nothing.

    Raises: JobError if Optuna is not installed.
    """

    def __init__(self, folder: Path, space: Mapping[str, Setting], seed: int) -> None:
        self._optuna = _optuna()
        self._folder, self._space, self._seed = folder, space, seed
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = self._optuna.storages.RDBStorage(f"sqlite:///{folder / 'study.db'}")
        self._study = self._optuna.create_study(
            storage=self._storage, study_name=_NAME, direction="maximize", load_if_exists=True
        )

    def __enter__(self) -> "Study":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._storage.remove_session()
        self._storage.engine.dispose()

    def place(self, trial: Trial) -> Path:
        """The run folder of a trial."""
        return self._folder / f"trial-{trial.number:03d}"

    def trials(self) -> list[Trial]:
        """All trials, in order."""
        return [self._read(frozen) for frozen in self._study.get_trials(deepcopy=False)]

    def until(self, count: int) -> Iterator[Trial]:
        """Trials that were interrupted, then new ones until there are `count`."""
        for trial in self.trials():
            if trial.state == "running":
                if trial.values.keys() == self._space.keys():
                    yield trial
                else:
                    self.failed(trial, "stopped while its values were drawn")
        for number in range(len(self.trials()), count):
            yield self._draw(number)

    def succeeded(self, trial: Trial, score: float, best_epoch: int) -> None:
        """Keep the score of a trial, at its best epoch."""
        replace_json(self.place(trial) / _OUTCOME, {"best_epoch": best_epoch})
        self._study.tell(trial.number, score)

    def failed(self, trial: Trial, reason: str) -> None:
        """Keep why a trial has no score."""
        replace_json(self.place(trial) / _OUTCOME, {"reason": reason})
        self._study.tell(trial.number, state=self._optuna.trial.TrialState.FAIL)

    def _draw(self, number: int) -> Trial:
        seed = int(np.random.SeedSequence((self._seed, number)).generate_state(1)[0])
        self._study.sampler = self._optuna.samplers.TPESampler(seed=seed)
        drawn = self._study.ask()
        values = {name: _suggest(drawn, name, kind) for name, kind in self._space.items()}
        return Trial(drawn.number, values, "running")

    def _read(self, frozen: Any) -> Trial:
        state = {"COMPLETE": "complete", "FAIL": "failed"}.get(frozen.state.name, "running")
        trial = Trial(frozen.number, dict(frozen.params), state, frozen.value)
        path = self.place(trial) / _OUTCOME
        if state == "running" or not path.exists():
            return trial
        outcome = json.loads(path.read_text(encoding="utf-8"))
        return Trial(trial.number, trial.values, state, trial.score, **outcome)


def _suggest(trial: Any, name: str, setting: Setting) -> Scalar:
    drawn: Scalar
    match setting:
        case Choices():
            drawn = trial.suggest_categorical(name, list(setting.values))
        case Integers():
            drawn = trial.suggest_int(
                name, setting.low, setting.high, step=setting.step, log=setting.log
            )
        case _:
            drawn = trial.suggest_float(
                name, setting.low, setting.high, step=setting.step, log=setting.log
            )
    return drawn


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise JobError(
            "A search needs Optuna. Install it with: pip install 'kinlens[search]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
