"""Images that were left out, and why."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict

from embedder.errors import SourceError
from indexer.ingest.embed import Outcome
from indexer.ingest.sources import Source

_EXAMPLES = 3


class Failure(BaseModel):
    """An image that was left out, and why."""

    model_config = ConfigDict(frozen=True)

    key: str
    path: str
    reason: str


def failures_of(outcomes: Iterable[Outcome]) -> tuple[Failure, ...]:
    """One for each record that cannot be used."""
    return tuple(
        Failure(key=o.record.key, path=_shown(o.record.path), reason=o.failure)
        for o in outcomes
        if o.failure is not None
    )


def refuse_unreadable(source: Source, failures: Sequence[Failure]) -> None:
    """Raises: SourceError if not one record of the source could be used."""
    if len(failures) < len(source.records):
        return
    examples = "; ".join(f"{f.key}: {f.reason}" for f in failures[:_EXAMPLES])
    raise SourceError(
        f"None of the {len(failures):,} images of the {source.description} can be read. "
        f"The first of them: {examples} Check the folder and the paths in the list."
    )


def _shown(path: str) -> str:
    return path.encode("utf-8", "backslashreplace").decode()
