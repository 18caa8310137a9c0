"""What an answer guarantees: the set of products that holds the right one, and whether the best
product may be taken without a person.
"""

from collections.abc import Callable
from typing import Any

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.filters.tree import Filter
from kinlens.indexer.types import SAME_SCORE, Group, Grouping, SearchOptions
from kinlens.quality.guarantee import Guarantee
from kinlens.service.galleries.locations import Gallery
from kinlens.service.galleries.registry import Served
from kinlens.service.galleries.view import GalleryView
from kinlens.service.search.query import Query


def guaranteed_by(served: Served, query: Query) -> Guarantee:
    """The labelled queries behind the guarantee that a query asks for.

    Raises: InvalidParameterError with the cure if there are none, or not enough.
    """
    if served.calibrator is None:
        raise InvalidParameterError(
            f"Gallery {served.name} is on Milvus, where no answer is guaranteed. Omit guarantee "
            "and accept, or use a gallery in a folder."
        )
    if isinstance(served.gallery, GalleryView):
        raise InvalidParameterError(
            "The key has a filter, and guarantees are for all items. Omit guarantee and accept, or "
            "send a key that was made without --filter."
        )
    found = served.calibrator.guarantee()
    if query.guarantee is not None:
        found.sets(query.guarantee)
    if query.accept is not None:
        found.decisions(query.accept)
    return found


def guaranteed(
    gallery: Gallery,
    query: Query,
    target: Embeddings,
    guarantee: Guarantee,
    checkpoint: Callable[[], None],
) -> dict[str, Any]:
    """The fields of the answer. The products are ranked as those of the labelled queries were:
    among all items, through the index.
    """
    sets = None if query.guarantee is None else guarantee.sets(query.guarantee)
    decisions = None if query.accept is None else guarantee.decisions(query.accept)
    widest = 0.0 if sets is None else max(sets.limits.values()) + SAME_SCORE
    depth = max(query.k + 1, 2)  # one more product shows whether the set is cut

    def search(where: Filter | None) -> list[Group]:
        options = SearchOptions(where=where, checkpoint=checkpoint)
        [groups] = gallery.search_groups(target, depth, Grouping(guarantee.product), options)
        return groups

    best = search(None)
    members = best[:1] if sets is None else sets.members(best, guarantee.by)
    cut = None
    if len(best) == depth and best[0].score - best[-1].score <= widest:
        members, cut = members[: query.k], "k"
    if query.where is not None:
        matching = {_name(group) for group in search(query.where)}
        kept = [group for group in members if _name(group) in matching]
        if len(kept) < len(members):
            members, cut = kept, "filter"
    accepted = None
    if decisions is not None:
        is_shown = bool(members) and members[0] is best[0]
        accepted = is_shown and decisions.accepts(best, guarantee.by)
    return {
        "accepted": accepted,
        "guarantee": {
            "queries": len(guarantee.queries) if sets is None else sets.queries,
            "source": guarantee.source,
            "product": guarantee.product,
            "level": query.guarantee,
            "holds": None if sets is None else cut is None,
            "cut": cut,
            "groups": [
                {"value": group.value, "key": group.hits[0].key, "score": round(group.score, 6)}
                for group in members
            ],
            "none": None if sets is None else sets.has_none([group.score for group in best]),
            "accept": query.accept,
            "confidence": None if decisions is None else decisions.confidence,
        },
    }


def _name(group: Group) -> object:
    """What identifies a product; an item without one is its own product."""
    if group.value is None:
        return "item", group.hits[0].id
    return isinstance(group.value, bool), group.value
