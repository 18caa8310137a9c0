"""The blocking steps of a write: uploads on the disk first, then the catalogue."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from embedder.errors import InvalidParameterError, KinlensError
from embedder.types import AttributeValue, ItemId
from indexer.filters.tree import Filter
from indexer.types import Entry, Item
from service.galleries.items import Draft, Outcome, Status, check_count, status_of
from service.galleries.types import Gallery
from service.galleries.uploads import Uploads

Changes = Mapping[str, Mapping[str, AttributeValue | None]]
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Put:
    """What became of each item, in the order sent, and the version of the gallery afterwards."""

    outcomes: Sequence[Outcome]
    version: str

    def count(self, status: Status) -> int:
        """How many items became that."""
        return sum(outcome.status == status for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Changed:
    """How many items were changed or removed, and the version of the gallery afterwards."""

    count: int
    version: str


def store(
    gallery: Gallery, uploads: Uploads, drafts: Sequence[Draft], claim: Callable[[], None]
) -> tuple[Put, list[str]]:
    """Keep the images and store the items; also the contents that may have become orphans.

    `claim` is called before an image is kept: the gallery has uploads from now on.

    Raises: GalleryBusyError, GalleryWriteError, and then nothing was stored.
    """
    good = [draft for draft in drafts if draft.error is None]
    old = gallery.stored([draft.item.key for draft in good])
    entries = {draft.item.key: draft.entry(old.get(draft.item.key)) for draft in good}
    uploaded = [draft for draft in good if not entries[draft.item.key].path]
    if uploaded:
        claim()
    with uploads.keeping([draft.sha256 for draft in uploaded]):
        for draft in uploaded:
            uploads.save(draft.item.data)
        _add(gallery, good, entries)
    new = gallery.stored([*entries])
    outcomes = [_outcome(draft, entries, old, new) for draft in drafts]
    orphans = [item.sha256 for key, item in old.items() if item.sha256 != entries[key].sha256]
    orphans += [draft.sha256 for draft in uploaded if draft.error is not None]
    return Put(outcomes, gallery.version), orphans


def patch(gallery: Gallery, changes: Changes) -> Changed:
    """Change attributes. Raises: ItemNotFoundError, InvalidParameterError, GalleryError."""
    for key, item in gallery.stored([*changes]).items():
        names = set(item.attributes)
        for name, value in changes[key].items():
            (names.discard if value is None else names.add)(name)
        if names - set(item.attributes):
            check_count(key, names)
    return Changed(gallery.update(changes), gallery.version)


def remove(gallery: Gallery, keys: Sequence[str]) -> tuple[Changed, list[str]]:
    """Remove items; also the contents that may have become orphans. Raises: GalleryError."""
    contents = [item.sha256 for item in gallery.stored(keys).values() if not item.path]
    return Changed(gallery.remove(keys), gallery.version), contents


def remove_item(gallery: Gallery, item_id: ItemId) -> tuple[Changed, list[str]]:
    """As `remove`, by number. Raises: ItemNotFoundError, GalleryError."""
    item = gallery.item(item_id)
    if not gallery.remove_items([item_id]):
        gallery.item(item_id)  # replaced meanwhile: an error that says so
    return Changed(1, gallery.version), [] if item.path else [item.sha256]


def remove_where(gallery: Gallery, where: Filter) -> tuple[Changed, list[str]]:
    """As `remove`, every item that fits. Raises: FilterError, GalleryError."""
    contents: list[str] = []
    after, items = -1, gallery.page(0, _PAGE, where).items
    while items:
        contents += [item.sha256 for item in items if not item.path]
        after = items[-1].id
        items = gallery.page(0, _PAGE, where, after=after).items
    return Changed(gallery.remove_where(where), gallery.version), contents


def _add(gallery: Gallery, drafts: Sequence[Draft], entries: Mapping[str, Entry]) -> None:
    """All in one transaction; if an entry does not fit after all, each in its own."""
    try:
        gallery.add([entries[draft.item.key] for draft in drafts])
    except InvalidParameterError:
        for draft in drafts:
            try:
                gallery.add([entries[draft.item.key]])
            except KinlensError as error:
                draft.error = error


def _outcome(
    draft: Draft,
    entries: Mapping[str, Entry],
    old: Mapping[str, Item],
    new: Mapping[str, Item],
) -> Outcome:
    key = draft.item.key
    if draft.error is not None:
        return Outcome(key, "failed", error=draft.error)
    number = new[key].id if key in new else None
    return Outcome(key, status_of(old.get(key), entries[key]), number)
