"""Guarantees over HTTP: the labelled queries behind them, and the fields of an answer."""

from collections.abc import Callable
from typing import Any

import structlog

from kinlens.embedder.errors import InvalidParameterError
from kinlens.models import GuaranteeModel
from kinlens.quality.answers import Guaranteed
from kinlens.quality.guarantee import Guarantee, Vector, decision_rule, set_rule
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


def watch(served: Served, guarantee: Guarantee, found: Guaranteed, vector: Vector) -> None:
    """Compare a query with the labelled ones; an alarm is logged, and withdraws the guarantee."""
    if served.calibrator is None or found.best is None:
        return
    if served.calibrator.observe(guarantee, found.best, vector):
        structlog.get_logger().warning(
            "guarantee withdrawn",
            gallery=served.name,
            detail="The queries that come differ from the labelled ones.",
        )


def withdrawn(served: Served) -> str | None:
    """Why a guarantee ended; empty while it holds, None if there was none for this caller."""
    if served.calibrator is None or isinstance(served.gallery, GalleryView):
        return None
    return served.calibrator.withdrawn()


def offered(served: Served) -> dict[str, float | None]:
    """What the search page may ask for: a set, and decisions as strict as the labels allow. Empty
    while nothing is guaranteed to this caller.
    """
    if served.calibrator is None or isinstance(served.gallery, GalleryView):
        return {}
    try:
        guarantee = served.calibrator.guarantee()
    except InvalidParameterError:  # there is none, or it was withdrawn
        return {}

    def first(rule: Callable[[Guarantee, float], object], *shares: float) -> float | None:
        return next((one for one in shares if not isinstance(rule(guarantee, one), str)), None)

    return {"guarantee": first(set_rule, 0.95), "accept": first(decision_rule, 0.99, 0.95)}


def described(found: Guaranteed) -> dict[str, Any]:
    """The fields of an answer about what it guarantees."""
    members = [
        {"value": group.value, "key": group.hits[0].key, "score": round(group.score, 6)}
        for group in found.groups
    ]
    names = GuaranteeModel.model_fields.keys()
    fields = {name: members if name == "groups" else getattr(found, name) for name in names}
    return {"accepted": found.accepted, "guarantee": fields}
