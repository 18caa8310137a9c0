from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import JobError
from kinlens.training.data.samplers import BatchSampler
from tests.training.studies.runs import some_job

LABELS = np.repeat([3, 5, 7, 8, 11], [6, 2, 9, 4, 6])  # 27 images; numbers with gaps
SIZES = dict(zip(*np.unique(LABELS, return_counts=True), strict=True))
KINDS: list[dict[str, Any]] = [
    {"kind": "random"},
    {"kind": "balanced"},
    {"kind": "paired"},
    {"kind": "paired", "pairs": "independent"},
]


def sampler(
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
    limit: int | None = None,
    ranks: tuple[int, int] = (0, 1),
    **sampling: Any,
) -> BatchSampler:
    sizes = {"batch_size": batch_size, "steps_per_epoch": limit}
    job = some_job(seed=seed, sampling=sampling, optimizer=sizes)
    return BatchSampler(job, labels, *ranks)


def even(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def balanced(labels: np.ndarray, batch_size: int, m: int, **settings: Any) -> BatchSampler:
    return sampler(labels, batch_size, kind="balanced", per_class=m, **settings)


def paired(labels: np.ndarray, batch_size: int, m: int, **settings: Any) -> BatchSampler:
    return sampler(labels, batch_size, kind="paired", per_class=m, **settings)


def epoch_of(sampler: BatchSampler, epoch: int = 0) -> list[list[tuple[int, int, int]]]:
    """Of every batch the epoch, image and view of each member."""
    sampler.epoch = epoch
    return list(sampler)


def images_of(sampler: BatchSampler, epoch: int = 0) -> np.ndarray:
    return np.array(epoch_of(sampler, epoch))[:, :, 1]  # (batches, batch_size)


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind.values()))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param | {"per_class": 3}


MANY = even(60, 8)


def test_seed_and_epoch_decide_the_order(kind: dict[str, Any]) -> None:
    a, b, c = (sampler(MANY, 24, seed=n, **kind) for n in (0, 0, 1))
    first = epoch_of(a, 0)
    assert epoch_of(a, 1) != first
    assert epoch_of(a, 0) == epoch_of(b, 0) == first
    assert epoch_of(c, 0) != first
    assert {epoch for batch in epoch_of(a, 4) for epoch, _, _ in batch} == {4}


def test_a_limit_only_ends_an_epoch_early(kind: dict[str, Any]) -> None:
    whole, limited, beyond = (sampler(LABELS, 12, limit=n, **kind) for n in (None, 1, 99))
    assert len(whole) == len(epoch_of(whole)) == 27 // 12
    assert epoch_of(limited) == epoch_of(whole)[:1]
    assert epoch_of(beyond) == epoch_of(whole)
    uses: Counter[int] = Counter()
    for _, image, view in chain.from_iterable(epoch_of(whole)):
        assert view == uses[image]  # counts the uses of an image in the epoch
        uses[image] += 1


def test_a_batch_of_all_images_is_shared_equally_too() -> None:
    sizes = [len(epoch_of(sampler(even(9, 3), 60, ranks=(rank, 2)))[0]) for rank in (0, 1)]
    assert sizes == [13, 13]  # of 27 images


def test_the_shares_of_all_ranks_make_the_global_batch(kind: dict[str, Any]) -> None:
    whole = epoch_of(sampler(MANY, 24, **kind), 2)
    for world in (2, 3):
        shares = [
            epoch_of(sampler(MANY, 24, ranks=(rank, world), **kind), 2) for rank in range(world)
        ]
        assert {len(batch) for share in shares for batch in share} == {24 // world}
        joined = [list(chain.from_iterable(batches)) for batches in zip(*shares, strict=True)]
        assert joined == whole


def test_an_incomplete_batch_is_left_out_unless_it_is_the_only_one() -> None:
    assert [len(batch) for batch in sampler(np.zeros(11, int), 5)] == [5, 5]
    assert [len(batch) for batch in sampler(np.zeros(3, int), 5)] == [3]
    assert [len(batch) for batch in paired(even(2, 3), 20, 5)] == [20]


def test_a_balanced_batch_has_m_images_of_each_class_and_repeats_only_what_it_must() -> None:
    sampler = balanced(LABELS, 20, 5)
    seen = set()
    for epoch in range(20):
        for batch in images_of(sampler, epoch).reshape(-1, 4, 5):
            assert len(set(LABELS[batch[:, 0]])) == 4
            for group in batch:
                assert len(set(LABELS[group])) == 1
                seen.add(size := SIZES[LABELS[group[0]]])
                uses = Counter(group.tolist())
                assert len(uses) == min(size, 5)
                assert max(uses.values()) - min(uses.values()) <= (5 % len(uses) > 0)
    assert seen == {2, 4, 6, 9}


@pytest.mark.parametrize(
    "sampler", [sampler(even(6, 8), 12), balanced(even(6, 8), 12, 4), paired(even(6, 8), 12, 2)]
)
def test_an_epoch_covers_equal_classes_exactly(sampler: BatchSampler) -> None:
    assert sorted(images_of(sampler).ravel()) == list(range(48))


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_two_draws_have_the_same_classes_and_overlap_as_little_as_possible(n: int) -> None:
    disjoint = paired(LABELS, 4 * n, n, limit=10)
    alone = paired(LABELS, 4 * n, n, limit=10, pairs="independent")
    for batch in chain(
        *(images_of(one, epoch) for one in (disjoint, alone) for epoch in range(10))
    ):
        draws = batch.reshape(2, 2, n)
        assert (LABELS[draws[0]] == LABELS[draws[1]]).all()
        assert len(set(LABELS[draws[0, :, 0]])) == 2
        for images in draws.reshape(4, n):
            uses = Counter(images.tolist())
            assert len(set(LABELS[images])) == 1
            assert len(uses) == min(n, SIZES[LABELS[images[0]]])
            assert max(uses.values()) - min(uses.values()) <= 1
    for batch in chain(*(images_of(disjoint, epoch) for epoch in range(10))):
        for first, second in batch.reshape(2, 2, n).transpose(1, 0, 2):
            size = SIZES[LABELS[first[0]]]
            common = (Counter(first.tolist()) & Counter(second.tolist())).total()
            assert common == n // size * size + max(0, 2 * (n % size) - size)


def test_impossible_settings_are_refused_with_a_cure(kind: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"batch of 12 images .* by 5 processes\. .* a multiple"):
        sampler(LABELS, 12, ranks=(0, 5), **kind)
    with pytest.raises(JobError, match=r"batch_size 90 is not a multiple of .*per_class 4.* 88"):
        balanced(LABELS, 90, 4)
    with pytest.raises(JobError, match=r"batch_size 90 is not .* twice .*per_class 10.* 80"):
        paired(LABELS, 90, 10)
    with pytest.raises(JobError, match=r"twice 3 of each class needs 10 classes; .* most 30"):
        paired(LABELS, 60, 3)
