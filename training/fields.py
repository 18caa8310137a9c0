"""Bounded numbers and frozen tables, for the settings of a job and the options of a loss."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Cosine = Annotated[float, Field(ge=-1, le=1)]


class Section(BaseModel):
    """A frozen table of the job file; the docstring below a field describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
