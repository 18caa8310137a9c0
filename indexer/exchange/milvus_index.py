"""Which index a collection of Milvus gets, how it is searched, and how good its answers are."""

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
"""Kinds of index of a collection."""

EXACT_BELOW = 200_000
"""Items of a gallery that is compared with as a whole."""

MEMORY_MB = 16 * 1024.0
"""What the query nodes are taken to have without another word."""

TARGET_RECALL = 0.98
HELD_OUT, K = 200, 10
_PART_OF_MEMORY = 0.7  # the rest is for attributes, growing segments and the server itself
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
    """An index for `count` vectors; `memory_mb` is what it takes on the query nodes."""

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
        """What `create_index` takes besides the metric."""
        own: dict[str, Any] = {"index_type": _TYPES[self.kind]}
        if self.nlist:
            own["nlist"] = self.nlist
        if self.kind == "ivf-rabitq":
            own |= {"refine": True, "refine_type": "SQ8"}
        if self.kind == "hnsw":
            own |= {"M": _GRAPH_M, "efConstruction": _CONSTRUCTION}
        return own

    def efforts(self) -> list[int]:
        """Efforts to try, the least first: clusters, or candidates of a search."""
        most = self.nlist if self.nlist else 4096
        start = max(1, most // 64) if self.nlist else 32
        return [*itertools.takewhile(lambda n: n < most, (start << i for i in range(20))), most]


def version_of(text: str) -> tuple[int, int]:
    """The first two numbers of what a server says of its version, as in v2.3.5-lite; of another
    text (0, 0).
    """
    found = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def planned(count: int, dim: int, asked: str, memory_mb: float | None, server: str) -> MilvusPlan:
    """The index for so many vectors on a server of the version `server`: the one that is `asked`
    for, or with `auto` the fastest one that fits into the memory of the query nodes.

    Raises: PlanError for an index that the server lacks or that does not fit.
    """
    limit = memory_mb or MEMORY_MB
    if asked == "auto":
        if count < EXACT_BELOW:
            return _plan("flat", count, dim)
        kinds: tuple[MilvusIndex, ...] = ("hnsw", "ivf-rabitq", "diskann")
        for kind in kinds:
            plan = _plan(kind, count, dim)
            if _is_offered(kind, server) and plan.memory_mb <= _PART_OF_MEMORY * limit:
                return plan
        least = min(
            _plan(kind, count, dim).memory_mb for kind in kinds if _is_offered(kind, server)
        )
        raise PlanError(
            f"{count:,} vectors of {dim} numbers need {least / _PART_OF_MEMORY:,.0f} MB on the "
            f"query nodes of Milvus, and {limit:,.0f} MB are given. Say how much all of them have "
            "together with --memory-mb, or add query nodes."
        )
    if asked not in get_args(MilvusIndex):
        raise PlanError(
            f"index = {asked!r:.40} is not one of Milvus. Choose auto, "
            f"{', '.join(get_args(MilvusIndex))}."
        )
    kind = next(kind for kind in get_args(MilvusIndex) if kind == asked)
    if not _is_offered(kind, server):
        major, minor = _SINCE[kind]
        raise PlanError(
            f"index = {kind}: the server has version {server}, and this index came with "
            f"{major}.{minor}. Choose hnsw or diskann, or upgrade the server."
        )
    plan = _plan(kind, count, dim)
    if memory_mb is not None and plan.memory_mb > _PART_OF_MEMORY * memory_mb:
        raise PlanError(
            f"index = {kind} takes {plan.memory_mb:,.0f} MB for {count:,} vectors of {dim} "
            f"numbers, more than {_PART_OF_MEMORY:.0%} of {memory_mb:,.0f} MB. Choose auto or "
            "diskann."
        )
    return plan


def search_parameters(
    kind: MilvusIndex, nlist: int, effort: int, n: int, exact: bool
) -> dict[str, int]:
    """What a search for `n` answers takes; `exact` as far as the index can be."""
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
    """Vectors that are added after all others, and what their `K` best of these are.

    queries: (Q, D). `see` is called with all other vectors, in any parts.
    """

    def __init__(self, entries: Iterable[Entry], count: int, dim: int) -> None:
        """Of `count` entries. Raises: InvalidParameterError for a vector that does not fit."""
        stride = max(2, count // HELD_OUT)
        self.entries = [entry for n, entry in enumerate(entries) if n % stride == stride - 1]
        self.keys = {entry.key for entry in self.entries}
        self.queries: Embeddings = checked_vectors(self.entries, dim)
        self._scores = np.full((len(self.entries), K), -np.inf, np.float32)

    def see(self, vectors: Embeddings) -> None:
        """Compare with some of the other vectors (N, D)."""
        scores = np.concatenate([self._scores, self.queries @ vectors.T], axis=1)
        self._scores = np.sort(np.partition(scores, -K, axis=1)[:, -K:], axis=1)

    def recall(self, scores: list[list[float]]) -> float:
        """The mean share of answers that are as good as the true ones, for the scores found."""
        least = self._scores[:, 0] - 1e-5
        hits = [
            sum(score >= bound for score in found[:K]) / K
            for found, bound in zip(scores, least, strict=True)
        ]
        return float(np.mean(hits))


def least_effort(
    plan: MilvusPlan, held_out: HeldOut, search: Callable[[int], list[list[float]]]
) -> tuple[int, float]:
    """The least effort that reaches the target, and its recall at 10. `search` gives the scores of
    the held-out queries with an effort.

    Raises: RecallError if none does.
    """
    best = 0.0
    for effort in plan.efforts():
        recall = held_out.recall(search(effort))
        if recall >= TARGET_RECALL:
            return effort, recall
        best = max(best, recall)
    raise RecallError(
        f"The index {plan.kind} reaches a recall of {best:.3f} at most, and {TARGET_RECALL} is the "
        "target. Choose another one with --index."
    )


def _plan(kind: MilvusIndex, count: int, dim: int) -> MilvusPlan:
    raw = 4.0 * dim
    per_vector = {
        "flat": raw,
        "ivf-flat": raw + 8,
        "hnsw": raw + 8.0 * _GRAPH_M + 8,
        "ivf-rabitq": dim / 8 + dim + 16,  # codes, and one byte a number to refine with
        "diskann": raw / 16 + 8,
    }[kind]
    return MilvusPlan(kind, count, dim, count * per_vector / _MIB)


def _is_offered(kind: MilvusIndex, server: str) -> bool:
    return version_of(server) >= _SINCE.get(kind, (0, 0))
