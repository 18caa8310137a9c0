"""The JSON of jobs."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from service.jobs.params import Params, TrainParams
from service.jobs.store import Kind, State

_JOB: dict[str, JsonValue] = {
    "id": "4f2a90c1be77",
    "kind": "rebuild",
    "gallery": "shop",
    "state": "succeeded",
    "step": "done",
    "done": 1000,
    "total": 1000,
    "created_at": "2026-01-01T00:00:00.000+00:00",
    "started_at": "2026-01-01T00:00:00.100+00:00",
    "ended_at": "2026-01-01T00:03:20.000+00:00",
    "by": "office",
    "params": {"bundle_id": "3f1c" + "0" * 60, "swap": "auto"},
    "error": None,
    "report": {
        "old": {"bundle_id": "77aa" + "0" * 60, "items": 2640, "recall_at_1": 0.61},
        "new": {"bundle_id": "3f1c" + "0" * 60, "items": 2640, "recall_at_1": 0.74},
        "overlap_at_k": 0.43,
        "gate": {"passed": True, "reason": "recall@1 0.7400 after 0.6100, on 1,000 queries."},
        "swapped": True,
    },
}


class JobModel(BaseModel):
    """Long work on a gallery."""

    model_config = ConfigDict(json_schema_extra={"examples": [_JOB]})

    id: str
    kind: Kind
    gallery: str
    state: State
    step: Annotated[str, Field(description="What it does now.")]
    done: Annotated[int, Field(description="Of `total`; never goes back.")]
    total: int | None
    created_at: str
    started_at: str | None
    ended_at: str | None
    by: Annotated[str, Field(description="The key that started it.")]
    params: dict[str, Any]
    error: Annotated[str | None, Field(description="Why it failed, and what to do.")]
    report: Annotated[
        dict[str, Any] | None,
        Field(description="What it found: old and new gallery, overlap, gate, whether swapped."),
    ]


class Jobs(BaseModel):
    """Jobs, newest first."""

    jobs: list[JobModel]


class JobLog(BaseModel):
    """A part of what a job has written; ask again from `next_offset`."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"offset": 0, "next_offset": 8, "text": "epoch 1\n"}]}
    )

    offset: int
    next_offset: int
    text: str


class SwapRequest(Params):
    """The gallery whose state becomes the next generation of this one."""

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        json_schema_extra={"examples": [{"with": "shop-new"}]},
    )

    other: Annotated[str, Field(alias="with", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TrainRequest(TrainParams):
    """Train a model and give it to a gallery."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "job": "shop",
                    "gallery": "shop",
                    "overrides": {"optimizer.epochs": 2},
                    "gate": {"max_recall_loss": 0.0},
                    "swap": "auto",
                }
            ]
        },
    )

    gallery: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
