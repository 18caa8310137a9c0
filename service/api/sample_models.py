"""The JSON of sample queries."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class SampleModel(BaseModel):
    """A picture to try a search with."""

    name: str
    image: Annotated[str, Field(description="Address of the picture.")]


class SamplesAnswer(BaseModel):
    """All sample queries."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"samples": [{"name": "00-shoes", "image": "/samples/0"}]}]}
    )

    samples: list[SampleModel]
