"""Plan the index of a Milvus collection, its search parameters, and measure its recall."""

import itertools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from kinlens.embedder.errors import PlanError, RecallError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.catalog.entries import checked_vectors
from kinlens.indexer.types import Entry

MilvusIndex = Literal["flat", "ivf-flat", "hnsw", "ivf-rabitq", "diskann"]
"""Index types of a collection."""

EXACT_BELOW = 200_000
"""Number of items below which `auto` compares with every vector."""

MEMORY_MB = 16 * 1024.0
"""Default for the memory of all query nodes together, in MiB."""

TARGET_RECALL = 0.98
HELD_OUT, K = 200, 10
_MEMORY_SHARE = 0.7  # the rest is for attributes, growing segments and the server itself
_GRAPH_M, _CONSTRUCTION = 24, 200
_MIB = 2**20
_SINCE: dict[MilvusIndex, tuple[int, int]] = {"ivf-rabitq": (2, 6), "diskann": (2, 2)}
_TYPES: dict[MilvusIndex, str] = {
    "flat": "FLAT",
    "ivf-flat": "IVF_FLAT",
    "hnsw": "HNSW",
    "ivf-rabitq": "IVF_RABITQ",
    "diskann": "DISKANN",
}


@dataclass(frozen=True, slots=True)
class MilvusPlan:
    """An index for `count` vectors; `memory_mb` is its size on the query nodes in MiB."""

    kind: MilvusIndex
    count: int
    dim: int
    memory_mb: float

    @property
    def nlist(self) -> int:
        """The number of clusters; 0 for an index without them."""
        return 4 * math.isqrt(self.count) if self.kind.startswith("ivf") else 0

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of `create_index` other than the metric."""
        own: dict[str, Any] = {"index_type": _TYPES[self.kind]}
        if self.nlist:
            own["nlist"] = self.nlist
        if self.kind == "ivf-rabitq":
            own |= {"refine": True, "refine_type": "SQ8"}
        if self.kind == "hnsw":
            own |= {"M": _GRAPH_M, "efConstruction": _CONSTRUCTION}
        return own

    def efforts(self) -> list[int]:
        """Efforts to try, in ascending order: clusters to visit, or candidates, per search."""
        most = self.nlist if self.nlist else 4096
        start = max(1, most // 64) if self.nlist else 32
        return [*itertools.takewhile(lambda n: n < most, (start << i for i in range(20))), most]


def version_of(text: str) -> tuple[int, int]:
    """Major and minor version in a text such as v2.3.5-lite or milvus_lite-3.2.2; else (0, 0)."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def planned(count: int, dim: int, asked: str, memory_mb: float | None, server: str) -> MilvusPlan:
    """Plan the index for `count` vectors on a server of version `server`.

    `asked` is an index type, or `auto` for the fastest one that fits into the memory of the query
    nodes.

    Raises: PlanError for an index that the server lacks or that does not fit.
    """
    limit = memory_mb or MEMORY_MB
    if asked == "auto":
        if count < EXACT_BELOW:
            return _plan("flat", count, dim)
        kinds: tuple[MilvusIndex, ...] = ("hnsw", "ivf-rabitq", "diskann")
        for kind in kinds:
            plan = _plan(kind, count, dim)
            if _is_offered(kind, server) and plan.memory_mb <= _MEMORY_SHARE * limit:
                return plan
        least = min(
            _plan(kind, count, dim).memory_mb for kind in kinds if _is_offered(kind, server)
        )
        raise PlanError(
            f"{count:,} vectors of {dim} numbers need {least / _MEMORY_SHARE:,.0f} MB on the "
            f"query nodes of Milvus; the limit is {limit:,.0f} MB. Set the memory of all query "
            "nodes together with --memory-mb, or add query nodes."
        )
    if asked not in get_args(MilvusIndex):
        raise PlanError(
            f"index = {asked!r:.40} is not an index type on Milvus. Choose auto, "
            f"{', '.join(get_args(MilvusIndex))}."
        )
    kind = next(kind for kind in get_args(MilvusIndex) if kind == asked)
    if not _is_offered(kind, server):
        major, minor = _SINCE[kind]
        raise PlanError(
            f"index = {kind} needs Milvus {major}.{minor}, but the server has version {server}. "
            "Choose hnsw or diskann, or upgrade the server."
        )
    plan = _plan(kind, count, dim)
    if memory_mb is not None and plan.memory_mb > _MEMORY_SHARE * memory_mb:
        raise PlanError(
            f"index = {kind} takes {plan.memory_mb:,.0f} MB for {count:,} vectors of {dim} "
            f"numbers, more than {_MEMORY_SHARE:.0%} of {memory_mb:,.0f} MB. Choose auto or "
            "diskann."
        )
    return plan


def search_parameters(
    kind: MilvusIndex, nlist: int, effort: int, n: int, exact: bool
) -> dict[str, int]:
    """The parameters of a search for `n` hits; `exact` is as exact as the index allows."""
    if kind == "flat":
        return {}
    if nlist:
        return {"nprobe": nlist if exact else max(1, min(effort, nlist))}
    wanted = max(n, 32_768 if exact else effort)
    return {"ef" if kind == "hnsw" else "search_list": min(32_768, wanted)}


def is_exact(kind: MilvusIndex) -> bool:
    """Whether a search can compare with every vector."""
    return kind in ("flat", "ivf-flat")


class HeldOut:
    """Held-out vectors, to measure recall, and the scores of their `K` true best neighbours.

    They are added to the gallery after all other vectors. `see` must be called with all other
    vectors, in any parts. `queries` has the shape (Q, D).
    """

    def __init__(self, entries: Iterable[Entry], count: int, dim: int) -> None:
        """Draw them from `count` entries. Raises: InvalidParameterError for an invalid vector."""
        stride = max(2, count // HELD_OUT)
        self.entries = [entry for n, entry in enumerate(entries) if n % stride == stride - 1]
        self.keys = {entry.key for entry in self.entries}
        self.queries: Embeddings = checked_vectors(self.entries, dim)
        self._scores = np.full((len(self.entries), K), -np.inf, np.float32)

    def see(self, vectors: Embeddings) -> None:
        """Update the true scores with other vectors (N, D)."""
        scores = np.concatenate([self._scores, self.queries @ vectors.T], axis=1)
        self._scores = np.sort(np.partition(scores, -K, axis=1)[:, -K:], axis=1)

    def recall(self, scores: list[list[float]]) -> float:
        """The mean share of found scores that reach the true scores."""
        least = self._scores[:, 0] - 1e-5
        hits = [
            sum(score >= bound for score in found[:K]) / K
            for found, bound in zip(scores, least, strict=True)
        ]
        return float(np.mean(hits))


def least_effort(
    plan: MilvusPlan, held_out: HeldOut, search: Callable[[int], list[list[float]]]
) -> tuple[int, float]:
    """The least effort that reaches the target recall, and its recall@10.

    `search` returns the scores of the held-out queries with a given effort.

    Raises: RecallError if no effort reaches it.
    """
    best = 0.0
    for effort in plan.efforts():
        recall = held_out.recall(search(effort))
        if recall >= TARGET_RECALL:
            return effort, recall
        best = max(best, recall)
    raise RecallError(
        f"The index {plan.kind} reaches a recall of at most {best:.3f}; the target is "
        f"{TARGET_RECALL}. Choose another one with --index."
    )


def _plan(kind: MilvusIndex, count: int, dim: int) -> MilvusPlan:
    raw = 4.0 * dim
    per_vector = {
        "flat": raw,
        "ivf-flat": raw + 8,
        "hnsw": raw + 8.0 * _GRAPH_M + 8,
        "ivf-rabitq": dim / 8 + dim + 16,  # codes, and one byte per number for refinement
        "diskann": raw / 16 + 8,
    }[kind]
    return MilvusPlan(kind, count, dim, count * per_vector / _MIB)


def _is_offered(kind: MilvusIndex, server: str) -> bool:
    return version_of(server) >= _SINCE.get(kind, (0, 0))
