"""Plans changes of a gallery on Milvus, and sends them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from embedder.types import AttributeValue, ItemId
from indexer.catalog.attributes import AttributeKind
from indexer.catalog.entries import checked_vectors, learn_kinds, with_stored
from indexer.exchange.milvus_connection import Connection
from indexer.exchange.milvus_schema import Row, entry_row, item_row, page_rows
from indexer.exchange.milvus_view import MilvusView
from indexer.types import Entry, Item, Written

Changes = Mapping[str, Mapping[str, AttributeValue | None]]
_DELETE_AT_ONCE = 10_000


@dataclass(slots=True)
class Plan:
    """What to send: new rows, rows that keep their number, and numbers to remove."""

    kinds: dict[str, AttributeKind]
    new: list[Row] = field(default_factory=list)
    changed: list[Row] = field(default_factory=list)
    gone: list[ItemId] = field(default_factory=list)
    written: Written = field(default_factory=Written)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be done."""
        return not (self.new or self.changed or self.gone)


def plan_add(
    view: MilvusView, entries: Sequence[Entry], owned: frozenset[str] | None = None
) -> Plan:
    """What `add` has to do. Raises: InvalidParameterError."""
    vectors = checked_vectors(entries, view.state.dim)
    known = view.by_key([entry.key for entry in entries])
    entries = with_stored(entries, {key: items[-1] for key, items in known.items()}, owned)
    plan = Plan(dict(view.state.kinds))
    for entry in entries:
        learn_kinds(plan.kinds, entry.key, entry.attributes)
    updated: list[tuple[Item, Entry]] = []
    replaced = 0
    for entry, vector in zip(entries, vectors, strict=True):
        *older, item = known.get(entry.key, [None])
        plan.gone += [old.id for old in older if old is not None]
        if item is None or item.sha256 != entry.sha256:
            plan.new.append(entry_row(view.state.next_id + len(plan.new), entry, vector))
            plan.gone += [] if item is None else [item.id]
            replaced += item is not None
        elif not _is_equal(item, entry):
            updated.append((item, entry))
    plan.changed = _updated_rows(view, updated)
    plan.written = Written(
        added=len(plan.new) - replaced,
        replaced=replaced,
        updated=len(updated),
        unchanged=len(entries) - len(plan.new) - len(updated),
    )
    return plan


def plan_update(view: MilvusView, changes: Changes) -> Plan:
    """What `update` has to do. Raises: ItemNotFoundError, InvalidParameterError."""
    items = view.known([*changes])
    plan = Plan(dict(view.state.kinds))
    for key, change in changes.items():
        learn_kinds(plan.kinds, key, {n: v for n, v in change.items() if v is not None})
    merged = [{**item.attributes, **changes[item.key]} for item in items]
    wanted = [{n: v for n, v in attributes.items() if v is not None} for attributes in merged]
    differ = [
        (item, attributes)
        for item, attributes in zip(items, wanted, strict=True)
        if attributes != item.attributes
    ]
    vectors = view.vectors([item.id for item, _ in differ])
    plan.changed = [
        item_row(item, attributes, vector)
        for (item, attributes), vector in zip(differ, vectors, strict=True)
    ]
    return plan


def send(connection: Connection, collection: str, plan: Plan, dim: int) -> None:
    """Send a plan. New content comes before the old one goes: for a moment both are there.

    Raises: EngineUnavailableError.
    """
    for method, rows in (("insert", plan.new), ("upsert", plan.changed)):
        for start in range(0, len(rows), page_rows(dim)):
            connection.call(method, collection, list(rows[start : start + page_rows(dim)]))
    for start in range(0, len(plan.gone), _DELETE_AT_ONCE):
        connection.call("delete", collection, ids=plan.gone[start : start + _DELETE_AT_ONCE])


def _is_equal(item: Item, entry: Entry) -> bool:
    return (item.path, item.format, item.attributes) == (
        entry.path,
        entry.format,
        dict(entry.attributes),
    )


def _updated_rows(view: MilvusView, updated: Sequence[tuple[Item, Entry]]) -> list[Row]:
    """Rows with the stored vectors: those of equal content are not written anew."""
    vectors = view.vectors([item.id for item, _ in updated])
    return [
        entry_row(item.id, entry, vector)
        for (item, entry), vector in zip(updated, vectors, strict=True)
    ]
