"""How much one request asks for, as a whole."""

from collections.abc import Sequence

from embedder.errors import InvalidParameterError
from service.search.query import Query, SearchLimits


def check_amounts(queries: Sequence[Query], limits: SearchLimits) -> None:
    """Queries that are answered by one request: their number, their views and their hits.

    Raises: InvalidParameterError.
    """
    check_queries(len(queries), limits)
    check_views(sum(len(query.views) for query in queries), limits)
    hits = sum(query.k * (query.grouping.size if query.grouping else 1) for query in queries)
    if hits > limits.max_batch_hits:
        raise InvalidParameterError(
            f"The queries ask for up to {hits:,} hits in all; the limit of a request is "
            f"{limits.max_batch_hits:,}. Lower k, or send several requests."
        )


def check_queries(count: int, limits: SearchLimits) -> None:
    """Raises: InvalidParameterError."""
    if count > limits.max_queries:
        raise InvalidParameterError(
            f"{count:,} queries are more than a request may have, which is "
            f"{limits.max_queries:,}. Send several requests."
        )


def check_views(count: int, limits: SearchLimits) -> None:
    """Raises: InvalidParameterError."""
    if count > limits.max_views:
        raise InvalidParameterError(
            f"The request looks for {count:,} images and crops in all; the limit is "
            f"{limits.max_views:,}. Send fewer crops, or several requests."
        )
