"""Errors of validation have our words, whatever their kind and wherever they are shown."""

import errno
import re
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import PydanticKnownError
from pydantic_core.core_schema import ErrorType

from kinlens.embedder.errors import is_disk_full
from kinlens.embedder.programs.faults import fault_text, file_fault

FOREIGN = re.compile(
    r"Input should|Input tag|Value error|Field required|Extra inputs|[Pp]ydantic|Assertion|"
    r"valid (dictionary|string|integer|tuple)|type="
)


class Square(BaseModel):
    kind: Literal["square"]
    side: int = Field(gt=0)


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: float = Field(allow_inf_nan=False)


class Page(BaseModel, extra="forbid"):
    shape: Annotated[Square | Circle, Field(discriminator="kind")]
    names: list[str] = []
    flag: bool = False
    word: str = Field("x", pattern="^x+$")

    @field_validator("names")
    @classmethod
    def _few(cls, value: list[str]) -> list[str]:
        if len(value) > 1:
            raise ValueError("names = has too many; send one")
        return value


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        "text",
        {"shape": 3},
        {"shape": {}},
        {"shape": {"kind": "oval"}},
        {"shape": {"kind": "square"}},
        {"shape": {"kind": "square", "side": "x"}},
        {"shape": {"kind": "square", "side": 0}},
        {"shape": {"kind": "circle", "radius": "inf"}},
        {"shape": {"kind": "circle", "radius": 1}, "names": "a"},
        {"shape": {"kind": "circle", "radius": 1}, "names": [1]},
        {"shape": {"kind": "circle", "radius": 1}, "names": ["a", "b"]},
        {"shape": {"kind": "circle", "radius": 1}, "flag": "perhaps", "word": "y", "more": 1},
    ],
)
def test_no_fault_has_the_words_of_the_library(content: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        Page.model_validate(content)
    texts = [fault_text(fault, "page") for fault in caught.value.errors()]
    for text in (*texts, file_fault(caught.value)):
        assert not FOREIGN.search(text), text


def test_every_kind_of_fault_has_a_text_of_ours() -> None:
    known = {"gt": 1, "ge": 1, "lt": 1, "le": 1, "min_length": 1, "max_length": 1, "expected": "a"}
    known |= {"discriminator": "kind", "tag": "x", "expected_tags": "'a'", "error": "a comma"}
    for kind in get_args(ErrorType):
        fault = {"type": kind, "msg": "Input should be a valid x", "input": "x", "ctx": known}
        if kind not in ("value_error", "assertion_error"):
            assert not FOREIGN.search(fault_text(fault, "page")), kind
    assert PydanticKnownError("missing").message() == "Field required", "the words that we replace"


def test_a_full_disk_is_found_among_causes_that_may_be_a_circle() -> None:
    one, other = ValueError(), KeyError()
    one.__context__, other.__context__ = other, one
    assert not is_disk_full(one)
    other.__context__ = OSError(errno.ENOSPC, "")
    assert is_disk_full(one)
