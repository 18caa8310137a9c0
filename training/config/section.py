"""What every table of a job file is."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen table of the job file."""

    model_config = ConfigDict(frozen=True, extra="forbid")
