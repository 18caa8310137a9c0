"""The JSON of errors, as RFC 9457 has it."""

from pydantic import BaseModel


class Fault(BaseModel):
    """A parameter that does not fit."""

    name: str
    message: str


class Problem(BaseModel):
    """An error as RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    request_id: str
    errors: list[Fault] | None = None
