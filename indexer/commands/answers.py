"""Answers of a search, printed for people or as JSON."""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from embedder.types import AttributeValue, Hit
from indexer.commands.console import out, print_json, shown
from indexer.types import Group


class HitShown(BaseModel):
    """One item of an answer."""

    model_config = ConfigDict(frozen=True)

    id: int
    key: str
    score: float
    attributes: Mapping[str, AttributeValue]


class GroupShown(BaseModel):
    """One group of an answer."""

    model_config = ConfigDict(frozen=True)

    value: AttributeValue | None
    score: float
    hits: tuple[HitShown, ...]


class Found(BaseModel):
    """The answers to all queries, in their order: `hits`, or `groups` if these were asked for."""

    model_config = ConfigDict(frozen=True)

    gallery: str
    version: str
    hits: tuple[tuple[HitShown, ...], ...] | None = None
    groups: tuple[tuple[GroupShown, ...], ...] | None = None


def hits_shown(hits: Sequence[Hit]) -> tuple[HitShown, ...]:
    """Hits as they are printed."""
    return tuple(
        HitShown(id=hit.id, key=hit.key, score=hit.score, attributes=hit.attributes) for hit in hits
    )


def group_shown(group: Group) -> GroupShown:
    """A group as it is printed."""
    return GroupShown(value=group.value, score=group.score, hits=hits_shown(group.hits))


def print_found(found: Found, json: bool) -> None:
    """Answers, one line an item, or everything as JSON."""
    if json:
        print_json(found)
        return
    answers: Sequence[Sequence[HitShown | GroupShown]] = found.groups or found.hits or ()
    for number, answer in enumerate(answers):
        if len(answers) > 1:
            out.print(f"Query {number}:")
        if not answer:
            out.print("Nothing fits.")
        for part in answer:
            _print_part(part)


def _print_part(part: HitShown | GroupShown) -> None:
    if isinstance(part, HitShown):
        out.print(f"{part.score:.4f}  {part.key}  {shown(part.attributes)}".rstrip())
        return
    value = "(no value)" if part.value is None else part.value
    out.print(f"{part.score:.4f}  {value}")
    for hit in part.hits:
        out.print(f"    {hit.score:.4f}  {hit.key}  {shown(hit.attributes)}".rstrip())
