import time
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


def even(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def sampler(
    labels: np.ndarray,
    batch_size: int,
    seed: int = 0,
    limit: int | None = None,
    ranks: tuple[int, int] = (0, 1),
    confused: np.ndarray | None = None,
    share: float = 0.25,
    **sampling: Any,
) -> BatchSampler:
    sizes = {"batch_size": batch_size, "steps_per_epoch": limit}
    sampling |= {"confused": share}
    job = some_job(seed=seed, sampling=sampling, optimizer=sizes)
    return BatchSampler(job, labels, *ranks, confused)


def balanced(labels: np.ndarray, batch_size: int, m: int, **settings: Any) -> BatchSampler:
    return sampler(labels, batch_size, kind="balanced", per_class=m, **settings)


def paired(labels: np.ndarray, batch_size: int, m: int, **settings: Any) -> BatchSampler:
    return sampler(labels, batch_size, kind="paired", per_class=m, **settings)


def independent(labels: np.ndarray, batch_size: int, m: int) -> BatchSampler:
    return paired(labels, batch_size, m, pairs="independent")


def epoch_of(sampler: BatchSampler, epoch: int = 0) -> list[list[tuple[int, int, int]]]:
    sampler.epoch = epoch
    return list(sampler)


def images_of(sampler: BatchSampler, epoch: int = 0) -> np.ndarray:
    return np.array(epoch_of(sampler, epoch))[:, :, 1]  # (batches, batch_size)


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind.values()))
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param | {"per_class": 3}


MANY = even(60, 8)
CONFUSED = np.array([[3, 41, 2], [3, 55, 2], [7, 8, 1], [20, 59, 4]])
WITH_AND_WITHOUT = pytest.mark.parametrize("confused", [None, CONFUSED], ids=["plain", "confused"])


@WITH_AND_WITHOUT
def test_seed_and_epoch_decide_the_order(kind: dict[str, Any], confused: np.ndarray | None) -> None:
    a, b, c = (sampler(MANY, 24, seed=n, confused=confused, **kind) for n in (0, 0, 1))
    first = epoch_of(a, 0)
    assert epoch_of(a, 1) != first
    assert epoch_of(a, 0) == epoch_of(b, 0) == first
    assert epoch_of(c, 0) != first
    assert {epoch for batch in epoch_of(a, 4) for epoch, _, _ in batch} == {4}


def test_a_limit_only_ends_an_epoch_early(kind: dict[str, Any]) -> None:
    whole, limited, beyond = (sampler(LABELS, 12, limit=n, **kind) for n in (None, 1, 99))
    assert len(whole) == len(epoch_of(whole)) == 27 // 12
    assert len(limited) == 1
    assert epoch_of(limited) == epoch_of(whole)[:1]
    assert epoch_of(beyond) == epoch_of(whole)


@WITH_AND_WITHOUT
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_shares_of_all_ranks_make_the_global_batch(
    world: int, kind: dict[str, Any], confused: np.ndarray | None
) -> None:
    shares = [
        epoch_of(sampler(MANY, 24, ranks=(rank, world), confused=confused, **kind), 2)
        for rank in range(world)
    ]
    assert {len(batch) for share in shares for batch in share} == {24 // world}
    joined = [list(chain.from_iterable(batches)) for batches in zip(*shares, strict=True)]
    assert joined == epoch_of(sampler(MANY, 24, confused=confused, **kind), 2)


def test_the_view_counts_the_uses_of_an_image_in_the_epoch(kind: dict[str, Any]) -> None:
    uses: Counter[int] = Counter()
    for batch in epoch_of(sampler(LABELS, 12, **kind)):
        for _, image, view in batch:
            assert view == uses[image]
            uses[image] += 1
    assert kind["kind"] == "random" or max(uses.values()) > 1


def test_random_batches_keep_the_order_of_earlier_versions() -> None:
    order = np.random.default_rng((3, 2)).permutation(11)
    found = images_of(sampler(np.zeros(11, int), 5, seed=3), 2)
    assert found.ravel().tolist() == order[:10].tolist()


def test_an_incomplete_batch_is_left_out_unless_it_is_the_only_one() -> None:
    assert [len(batch) for batch in sampler(np.zeros(11, int), 5)] == [5, 5]
    assert [len(batch) for batch in sampler(np.zeros(3, int), 5)] == [3]
    labels = even(2, 3)
    assert [len(batch) for batch in balanced(labels, 10, 5)] == [10]
    assert [len(batch) for batch in paired(labels, 20, 5)] == [20]


def test_a_balanced_batch_has_m_images_of_each_class_and_repeats_only_what_it_must() -> None:
    sampler = balanced(LABELS, 20, 5)
    seen = set()
    for epoch in range(20):
        for batch in images_of(sampler, epoch).reshape(-1, 4, 5):
            assert len(set(LABELS[batch[:, 0]])) == 4
            for group in batch:
                assert len(set(LABELS[group])) == 1
                size = SIZES[LABELS[group[0]]]
                uses = Counter(group.tolist())
                assert len(uses) == min(size, 5)
                assert max(uses.values()) - min(uses.values()) <= (5 % len(uses) > 0)
                seen.add(size)
    assert seen == {2, 4, 6, 9}


@pytest.mark.parametrize(("classes", "width"), [(7, 3), (7, 7), (10, 4), (5, 2), (8, 4)])
def test_balanced_batches_visit_the_classes_evenly(classes: int, width: int) -> None:
    labels = even(classes, 12)
    batches = labels[images_of(balanced(labels, 2 * width, 2, seed=1))][:, ::2]
    assert all(len(set(batch)) == width for batch in batches)
    visits = np.zeros(classes, int)
    for label in batches.ravel():
        visits[label] += 1
        assert visits.max() - visits.min() <= 2
    assert visits.max() - visits.min() <= 1


def test_class_groups_differ_between_rounds() -> None:
    labels = even(8, 40)
    batches = labels[images_of(balanced(labels, 8, 2))][:, ::2]
    assert len({frozenset(batch) for batch in batches.tolist()}) > 2


@pytest.mark.parametrize(
    "sampler", [sampler(even(6, 8), 12), balanced(even(6, 8), 12, 4), paired(even(6, 8), 12, 2)]
)
def test_an_epoch_covers_equal_classes_exactly(sampler: BatchSampler) -> None:
    assert sorted(images_of(sampler).ravel()) == list(range(48))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7])
def test_two_draws_have_the_same_classes_and_overlap_as_little_as_possible(n: int) -> None:
    sampler = paired(LABELS, 4 * n, n, limit=10)
    for epoch in range(20):
        for batch in images_of(sampler, epoch):
            draws = batch.reshape(2, 2, n)
            assert (LABELS[draws[0]] == LABELS[draws[1]]).all()
            assert len(set(LABELS[draws[0, :, 0]])) == 2
            for first, second in draws.transpose(1, 0, 2):
                size = SIZES[LABELS[first[0]]]
                a, b = Counter(first.tolist()), Counter(second.tolist())
                assert len(a) == len(b) == min(n, size)
                common = (a & b).total()
                assert common == n // size * size + max(0, 2 * (n % size) - size)
                assert size < 2 * n or common == 0


def test_the_images_of_a_small_class_pair_up_in_changing_order() -> None:
    sampler = paired(even(2, 4), 16, 4)
    equal = 0
    for epoch in range(50):
        first, second = images_of(sampler, epoch)[0].reshape(2, 8)
        equal += int((first == second).sum())
    assert 50 < equal < 150  # by chance one in four of 400


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_independent_draws_have_the_same_classes_and_repeat_no_image_without_need(n: int) -> None:
    sampler = independent(LABELS, 8 * n, n)
    for epoch in range(20):
        for batch in images_of(sampler, epoch):
            first, second = batch.reshape(2, 4, n)
            assert (LABELS[first] == LABELS[second]).all()
            assert len(set(LABELS[first[:, 0]])) == 4
            for images in (*first, *second):
                counts = Counter(images.tolist())
                assert len(set(LABELS[images])) == 1
                assert len(counts) == min(n, SIZES[LABELS[images[0]]])
                assert max(counts.values()) - min(counts.values()) <= 1


def test_what_a_draw_has_says_nothing_about_the_other_if_they_are_independent() -> None:
    sampler = independent(even(4, 6), 12, 2)
    shared = [
        len(set(batch[:6].tolist()) & set(batch[6:].tolist()))
        for epoch in range(200)
        for batch in images_of(sampler, epoch)
    ]
    # Each of the 6 images of a draw is in the other by chance n / 6 = 1/3 of the time.
    assert 1.85 < np.mean(shared) < 2.15


def meetings(sampler: BatchSampler, labels: np.ndarray, epochs: int = 30) -> float:
    """How many of CONFUSED are both in a batch, in the mean batch."""
    met = 0
    for epoch in range(epochs):
        for batch in labels[images_of(sampler, epoch)]:
            met += sum({one, other} <= set(batch.tolist()) for one, other, _ in CONFUSED)
    return met / epochs / len(sampler)


def test_confused_classes_meet_more_often(kind: dict[str, Any]) -> None:
    plain, reported = (sampler(MANY, 24, confused=pairs, **kind) for pairs in (None, CONFUSED))
    never = sampler(MANY, 24, confused=CONFUSED, **(kind | {"share": 0.0}))
    often = sampler(MANY, 24, confused=CONFUSED, **(kind | {"share": 0.5}))
    found = [meetings(each, MANY) for each in (plain, reported, often)]
    assert meetings(never, MANY) == pytest.approx(found[0], rel=0.2)
    assert found[2] > found[1] > 1.4 * found[0]
    for epoch in range(5):
        before, now = MANY[images_of(plain, epoch)], MANY[images_of(reported, epoch)]
        assert sorted(now.ravel()) == sorted(before.ravel())  # the same visits to every class
        if kind["kind"] == "random":
            assert sorted(images_of(reported, epoch).ravel()) == list(range(480))
        else:
            assert {len(set(batch)) for batch in now.tolist()} == {len(set(before[0]))}


def test_absent_confused_classes_leave_the_order(kind: dict[str, Any]) -> None:
    plain = epoch_of(sampler(MANY, 24, **kind), 3)
    for pairs in (np.empty((0, 3), np.int64), np.array([[3, 99, 1]])):
        assert epoch_of(sampler(MANY, 24, confused=pairs, **kind), 3) == plain


def test_batches_that_processes_cannot_share_are_refused(kind: dict[str, Any]) -> None:
    with pytest.raises(JobError, match=r"batch of 12 images .* by 5 processes\. .* a multiple"):
        sampler(LABELS, 12, ranks=(0, 5), **kind)
    with pytest.raises(JobError, match=r"batch of 3 images .* by 2 processes"):
        sampler(np.zeros(3, int), 4, ranks=(0, 2))


def test_impossible_settings_are_refused_with_a_cure() -> None:
    with pytest.raises(JobError, match=r"batch_size 90 is not a multiple of .*per_class 4.* 88"):
        balanced(LABELS, 90, 4)
    with pytest.raises(JobError, match=r"batch_size 90 is not .* twice .*per_class 10.* 80"):
        paired(LABELS, 90, 10)
    with pytest.raises(JobError, match=r"3 of each class needs 10 classes; .* have 5.* most 15"):
        balanced(LABELS, 30, 3)
    with pytest.raises(JobError, match=r"twice 3 of each class needs 10 classes; .* most 30"):
        paired(LABELS, 60, 3)


def test_an_epoch_of_a_large_data_set_takes_about_a_second() -> None:
    counts = np.full(11318, 5)
    counts[: 59551 - counts.sum()] += 1
    labels = np.repeat(np.arange(11318), counts)
    pairs = np.random.default_rng(0).permutation(11318).reshape(-1, 2)
    confused = np.column_stack([pairs, np.ones(len(pairs), int)])
    for sampler in (balanced(labels, 180, 5, confused=confused), paired(labels, 260, 10)):
        started = time.process_time()
        assert len(epoch_of(sampler)) == len(sampler)
        assert time.process_time() - started < 3
