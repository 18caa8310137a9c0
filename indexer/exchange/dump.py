"""A gallery on its way from one store to another: facts about it, and a stream of entries."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from indexer.types import Entry


@dataclass(frozen=True, slots=True)
class Dump:
    """The content of a gallery: `count` entries with vectors of length `dim`.

    `facts` holds at least `name` and `bundle_id`; also `source`, `source_root` and `created_at`
    where they are known.
    """

    facts: Mapping[str, str]
    dim: int
    count: int
    read: Callable[[], Iterator[Entry]] = field(repr=False)

    def entries(self) -> Iterator[Entry]:
        """Every entry, read while it is asked for; each call starts from the first.

        Raises: SourceError for an entry that is damaged, naming its row.
        """
        return self.read()
