"""The plan: the right kind for the size, within the memory, refused by name where nothing fits."""

import pytest

from kinlens.embedder.errors import PlanError
from kinlens.indexer.index import plan as plans
from kinlens.indexer.index.plan import IndexSettings, Plan
from tests.indexer.oracle import clumped
from tests.support.seams import SegmentIndex, plan_index

MUCH = 1e6


def planned(n: int, dim: int = 128, **changes: object) -> Plan:
    return plan_index(n, dim, IndexSettings(**{"memory_mb": MUCH, **changes}))


@pytest.mark.parametrize(
    ("n", "dim", "kind"),
    [
        (1, 128, "flat"),
        (390_000, 128, "flat"),
        (97_000, 512, "flat"),
        (400_000, 128, "hnsw"),
        (780_000, 128, "ivf-pq"),
        (400_000, 256, "hnsw"),
        (500_000, 256, "hnsw"),
        (500_001, 256, "ivf-pq"),
        (10_000_000, 128, "ivf-pq"),
        (3_000_000, 127, "ivf-pq"),
    ],
)
def test_auto_takes_the_kind_that_suits_the_size(n: int, dim: int, kind: str) -> None:
    plan = planned(n, dim)
    assert (plan.kind, plan.n, plan.dim, plan.device) == (kind, n, dim, "cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 0}, "0 vectors.*1 to"),
        ({"n": 2**31}, "2,147,483,648 vectors"),
        ({"dim": 0}, "dimension 0"),
        ({"dim": 8193}, "dimension 8,193 .*8,192"),
        ({"kind": "lsh"}, "Unknown index 'lsh'.*--index auto, flat, hnsw"),
        ({"kind": "cagra"}, "cagra cannot be built on cpu.*--index-device cuda"),
        ({"device": "tpu"}, "Unknown device 'tpu'.*--index-device cpu or cuda"),
        ({"target_recall": 0.0}, "at most 1, not 0.0.*--target-recall"),
        ({"target_recall": 1.1}, "at most 1, not 1.1"),
        ({"memory_mb": 0}, "--memory-mb must be above 0, not 0"),
        ({"memory_mb": float("nan")}, "must be above 0, not nan"),
        ({"kind": "ivf-pq", "n": 623}, "623 vectors are too few.*624.*--index flat"),
        ({"kind": "fp16"}, "Unknown index 'fp16'"),
        (
            {"n": 10**6, "kind": "hnsw", "memory_mb": 100},
            r"hnsw for 1,000,000 vectors.*needs \d+ MB.*only 100 MB.*--memory-mb",
        ),
        ({"n": 10**7, "memory_mb": 101}, r"only 101 MB.*--memory-mb"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_by_name(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        planned(**{"n": 1000, **changes})


@pytest.mark.parametrize("kind", ["hnsw", "ivf-pq"])
def test_the_memory_of_a_plan_is_that_of_the_index(tmp_path, kind: str) -> None:
    vectors = clumped(8_000, 32)
    plan = planned(*vectors.shape, kind=kind)
    facts = SegmentIndex.build(plan, vectors).save(tmp_path / "index")
    assert plan.memory_mb * 2**20 == pytest.approx(facts.bytes, rel=0.15)


@pytest.mark.parametrize("kind", ["hnsw", "ivf-pq"])
def test_an_approximate_index_does_not_promise_everything(kind: str) -> None:
    assert planned(5_000, kind=kind, target_recall=0.9994).kind == kind
    with pytest.raises(PlanError, match=rf"{kind} is approx.*--index flat.*--target-recall"):
        planned(5_000, kind=kind, target_recall=plans.EXACT_TARGET)
    assert planned(5_000, kind="flat", target_recall=1.0).expected_recall == 1.0
    exact = planned(3_000_000, target_recall=1)
    assert (exact.kind, exact.expected_recall) == ("flat", 1.0)
