"""The JSON of health: is the process there, can it answer."""

from typing import Literal

from pydantic import BaseModel


class Live(BaseModel):
    """The process answers."""

    status: Literal["live"] = "live"


class Ready(BaseModel):
    """What is served, by what, and the verdict of each check: `ok` or what is wrong."""

    status: Literal["ready", "not ready"]
    provider: str
    precision: str | None = None
    precision_reason: str | None = None
    bundle_id: str
    galleries: dict[str, str]
    queue_depth: int
    redis: Literal["off", "up", "down"]
    checks: dict[str, str]
    last_error: str | None
