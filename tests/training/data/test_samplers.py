import time
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from embedder.errors import JobError
from training.config.job import Job
from training.data.samplers import BatchSampler, ClassBatches, RandomBatches, build_sampler

LABELS = np.repeat([3, 5, 7, 8, 11], [6, 2, 9, 4, 6])  # 27 images; numbers with gaps


def even(classes: int, each: int) -> np.ndarray:
    return np.repeat(np.arange(classes), each)


def balanced(labels: np.ndarray, batch_size: int, m: int, **settings: int) -> ClassBatches:
    return ClassBatches(labels, batch_size, m, **{"seed": 0, **settings})


def paired(labels: np.ndarray, batch_size: int, m: int, **settings: int) -> ClassBatches:
    return balanced(labels, batch_size, m, draws=2, **settings)


def independent(labels: np.ndarray, batch_size: int, m: int, **settings: int) -> ClassBatches:
    return paired(labels, batch_size, m, independent=True, **settings)


def epoch_of(sampler: BatchSampler, epoch: int = 0) -> list[list[tuple[int, int, int]]]:
    sampler.epoch = epoch
    return list(sampler)


def images_of(sampler: BatchSampler, epoch: int = 0) -> np.ndarray:
    return np.array(epoch_of(sampler, epoch))[:, :, 1]  # (batches, batch_size)


def samplers(seed: int = 0, **settings: int) -> list[BatchSampler]:
    return [
        RandomBatches(len(LABELS), 12, seed, **settings),
        balanced(LABELS, 12, 3, seed=seed, **settings),
        paired(LABELS, 12, 3, seed=seed, **settings),
        independent(LABELS, 12, 3, seed=seed, **settings),
    ]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    for a, b, other in zip(samplers(), samplers(), samplers(seed=1), strict=True):
        first = epoch_of(a, 0)
        assert epoch_of(a, 1) != first
        assert epoch_of(a, 0) == first
        assert epoch_of(b, 0) == first
        assert epoch_of(other, 0) != first
        assert {epoch for batch in epoch_of(a, 4) for epoch, _, _ in batch} == {4}


def test_the_length_is_that_of_the_epoch_and_a_limit_only_ends_it_early() -> None:
    for whole, limited, beyond in zip(
        samplers(), samplers(limit=1), samplers(limit=99), strict=True
    ):
        assert len(whole) == len(epoch_of(whole)) == 27 // 12
        assert len(limited) == 1
        assert epoch_of(limited) == epoch_of(whole)[:1]
        assert epoch_of(beyond) == epoch_of(whole)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_shares_of_all_ranks_make_the_global_batch(world: int) -> None:
    whole = [epoch_of(sampler, 2) for sampler in samplers()]
    ranks = [samplers(rank=rank, world=world) for rank in range(world)]
    for kind, expected in enumerate(whole):
        shares = [epoch_of(ranks[rank][kind], 2) for rank in range(world)]
        assert {len(batch) for share in shares for batch in share} == {12 // world}
        joined = [list(chain.from_iterable(batches)) for batches in zip(*shares, strict=True)]
        assert joined == expected


def test_the_view_counts_the_uses_of_an_image_in_the_epoch() -> None:
    for sampler in samplers():
        uses: Counter[int] = Counter()
        for batch in epoch_of(sampler):
            for _, image, view in batch:
                assert view == uses[image]
                uses[image] += 1
    assert max(uses.values()) > 1


def test_random_batches_cover_every_image_once() -> None:
    assert sorted(images_of(RandomBatches(10, 5, seed=0)).ravel()) == list(range(10))


def test_random_batches_keep_the_order_of_earlier_versions() -> None:
    order = np.random.default_rng((3, 2)).permutation(11)
    assert images_of(RandomBatches(11, 5, seed=3), 2).ravel().tolist() == order[:10].tolist()


def test_an_incomplete_batch_is_left_out_unless_it_is_the_only_one() -> None:
    assert [len(batch) for batch in RandomBatches(11, 5, seed=0)] == [5, 5]
    assert [len(batch) for batch in RandomBatches(3, 5, seed=0)] == [3]


def test_a_balanced_batch_has_m_images_of_each_of_its_classes() -> None:
    sampler = balanced(LABELS, 12, 3)
    for epoch in range(20):
        for batch in images_of(sampler, epoch):
            labels = LABELS[batch].reshape(4, 3)
            assert (labels == labels[:, :1]).all()
            assert len(set(labels[:, 0])) == 4


def test_a_class_repeats_images_in_a_batch_only_if_it_has_too_few() -> None:
    sampler = balanced(LABELS, 20, 5)
    sizes = dict(zip(*np.unique(LABELS, return_counts=True), strict=True))
    seen = set()
    for epoch in range(20):
        for group in images_of(sampler, epoch).reshape(-1, 5):
            size = sizes[LABELS[group[0]]]
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


def test_a_balanced_epoch_covers_equal_classes_exactly() -> None:
    labels = even(6, 8)
    assert sorted(images_of(balanced(labels, 12, 4)).ravel()) == list(range(48))


def test_a_paired_batch_has_the_same_classes_in_both_draws() -> None:
    sampler = paired(LABELS, 24, 3)
    for epoch in range(20):
        for batch in images_of(sampler, epoch):
            first, second = LABELS[batch].reshape(2, 4, 3)
            assert (first == second).all()
            assert (first == first[:, :1]).all()
            assert len(set(first[:, 0])) == 4


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7])
def test_two_draws_of_a_class_overlap_as_little_as_possible(n: int) -> None:
    sampler = paired(LABELS, 4 * n, n, limit=10)
    sizes = dict(zip(*np.unique(LABELS, return_counts=True), strict=True))
    for epoch in range(20):
        for batch in images_of(sampler, epoch):
            for first, second in batch.reshape(2, 2, n).transpose(1, 0, 2):
                size = sizes[LABELS[first[0]]]
                a, b = Counter(first.tolist()), Counter(second.tolist())
                assert len(a) == len(b) == min(n, size)
                common = (a & b).total()
                rest = n % size
                assert common == n // size * size + max(0, 2 * rest - size)
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
    sizes = dict(zip(*np.unique(LABELS, return_counts=True), strict=True))
    for epoch in range(20):
        for batch in images_of(sampler, epoch):
            first, second = batch.reshape(2, 4, n)
            assert (LABELS[first] == LABELS[second]).all()
            assert len(set(LABELS[first[:, 0]])) == 4
            for images in (*first, *second):
                size = sizes[LABELS[images[0]]]
                assert len(set(LABELS[images])) == 1
                counts = Counter(images.tolist())
                assert len(counts) == min(n, size)
                assert max(counts.values()) - min(counts.values()) <= 1


def test_what_a_draw_has_says_nothing_about_the_other_if_they_are_independent() -> None:
    labels, n, batches = even(4, 6), 2, 0
    common, disjoint = 0, 0
    for epoch in range(200):
        for kind in (independent, paired):
            for batch in images_of(kind(labels, 12, n, seed=0), epoch):
                shared = len(set(batch[:6].tolist()) & set(batch[6:].tolist()))
                if kind is paired:
                    disjoint += shared
                else:
                    common += shared
                    batches += 1
    # Each of the 6 images of a draw is in the other by chance n / 6 = 1/3 of the time.
    assert disjoint == 0
    assert 1.85 < common / batches < 2.15


def test_a_paired_epoch_covers_equal_classes_exactly() -> None:
    labels = even(6, 8)
    assert sorted(images_of(paired(labels, 12, 2)).ravel()) == list(range(48))


def test_few_images_make_one_batch() -> None:
    labels = even(2, 3)
    assert [len(batch) for batch in balanced(labels, 10, 5)] == [10]
    assert [len(batch) for batch in paired(labels, 20, 5)] == [20]


def test_batches_that_processes_cannot_share_are_refused() -> None:
    with pytest.raises(JobError, match=r"batch_size 12 .* by 5 processes\. .* multiple of 5, .*10"):
        samplers(rank=0, world=5)
    with pytest.raises(JobError, match=r"all 3 images .*batch_size is 4.* which 2 processes"):
        RandomBatches(3, 4, 0, rank=0, world=2)
    with pytest.raises(ValueError, match="rank 2"):
        samplers(rank=2, world=2)


def test_impossible_settings_are_refused_with_a_cure() -> None:
    with pytest.raises(JobError, match=r"batch_size 90 is not a multiple of .*per_class 4.* 88"):
        balanced(LABELS, 90, 4)
    with pytest.raises(JobError, match=r"batch_size 90 is not .* twice .*per_class 10.* 80"):
        paired(LABELS, 90, 10)
    with pytest.raises(JobError, match=r"3 of each class needs 10 classes; .* have 5.* most 15"):
        balanced(LABELS, 30, 3)
    with pytest.raises(JobError, match=r"twice 3 of each class needs 10 classes; .* most 30"):
        paired(LABELS, 60, 3)
    with pytest.raises(JobError, match="per_class 0"):
        balanced(LABELS, 30, 0)
    with pytest.raises(JobError, match="batch_size 0"):
        RandomBatches(10, 0, 0)


def test_a_job_names_its_sampler() -> None:
    kinds = (
        ("random", "disjoint"),
        ("balanced", "disjoint"),
        ("paired", "disjoint"),
        ("paired", "independent"),
    )
    own = {"limit": 1, "rank": 1, "world": 2}
    for (kind, pairs), expected in zip(kinds, samplers(seed=9, **own), strict=True):
        job = Job.model_validate(
            {
                "name": "x",
                "seed": 9,
                "data": {"kind": "folder", "root": "x"},
                "sampling": {"kind": kind, "per_class": 3, "pairs": pairs},
                "optimizer": {"batch_size": 12, "steps_per_epoch": 1},
            }
        )
        sampler = build_sampler(job, LABELS, rank=1, world=2)
        assert type(sampler) is type(expected)
        assert epoch_of(sampler) == epoch_of(expected)


def test_an_epoch_of_a_large_data_set_takes_about_a_second() -> None:
    counts = np.full(11318, 5)
    counts[: 59551 - counts.sum()] += 1
    labels = np.repeat(np.arange(11318), counts)
    for sampler in (balanced(labels, 180, 5), paired(labels, 260, 10)):
        started = time.process_time()
        assert len(epoch_of(sampler)) == len(sampler)
        assert time.process_time() - started < 3
