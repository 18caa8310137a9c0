"""The `protocol` table of a job: which classes choose the model, and when test classes are seen."""

from typing import Literal

from pydantic import Field, model_validator

from embedder.errors import JobError
from training.config.section import Section

CHOOSE_BY_TEST = "--choose-by-test"
"""The flag without which no command trains a job that is chosen by its test classes."""


class Protocol(Section):
    """How a model is chosen and tested.

    `validation_fraction` is the part of the train classes that is held out (0: none); in a cross
    validation it is fold number `fold` of `folds` instead. `validation_seed` is of either choice.
    `choose_by`: the epoch that a run keeps: "last"; the best R@1 on "validation" classes; or on
    "test" classes, which makes its test recall too high and needs the flag `--choose-by-test`.
    `evaluate_test`: "every" evaluated epoch, the "end" of the run alone, or "never".
    """

    validation_fraction: float = Field(0.0, ge=0, lt=1)
    validation_seed: int = Field(0, ge=0)
    folds: int | None = Field(None, ge=2)
    fold: int | None = Field(None, ge=0)
    choose_by: Literal["last", "validation", "test"] = "last"
    evaluate_test: Literal["never", "end", "every"] = "every"

    @model_validator(mode="after")
    def _check(self) -> "Protocol":
        if (self.folds is None) != (self.fold is None) or (self.fold or 0) >= (self.folds or 1):
            raise ValueError(
                f"fold = {self.fold} does not fit folds = {self.folds}: 0 .. folds - 1"
            )
        if self.fold is not None and self.validation_fraction:
            raise ValueError("a fold is the validation part; remove validation_fraction")
        if self.choose_by == "validation" and self.validation_fraction == 0 and self.fold is None:
            raise ValueError(
                'choose_by = "validation" needs validation classes; set validation_fraction = 0.1'
            )
        if self.choose_by == "test" and self.evaluate_test != "every":
            raise ValueError(
                'choose_by = "test" compares epochs by test recall; set evaluate_test = "every"'
            )
        return self

    def require_flag(self, given: bool) -> None:
        """Raises: JobError if the job is chosen by test classes and the flag was not given."""
        if self.choose_by == "test" and not given:
            raise JobError(
                'protocol.choose_by = "test" picks the epoch that its own test classes like best, '
                'so the reported recall is too high. Use "validation" with validation_fraction = '
                f"0.1, or pass {CHOOSE_BY_TEST}; the report will say so."
            )
