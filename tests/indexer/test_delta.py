import numpy as np
import pytest

from indexer.live.delta import Delta

DIM = 8


def unit(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


NONE = ids()


def test_an_older_delta_stays_as_it_was_when_it_grows() -> None:
    vectors = unit(1000)
    first = Delta.of(NONE, unit(0))
    deltas = [first]
    for start in range(0, 1000, 50):
        part = slice(start, start + 50)
        deltas.append(deltas[-1].changed(np.arange(start, start + 50), vectors[part], NONE))
    for number, delta in enumerate(deltas):
        np.testing.assert_array_equal(delta.ids, np.arange(50 * number))
        np.testing.assert_array_equal(delta.vectors, vectors[: 50 * number])


def test_two_children_of_one_delta_do_not_share_rows() -> None:
    parent = Delta.of(ids(1), unit(1))
    one = parent.changed(ids(2), unit(1, 1), NONE)
    other = parent.changed(ids(3), unit(1, 2), NONE)
    np.testing.assert_array_equal(one.ids, [1, 2])
    np.testing.assert_array_equal(other.ids, [1, 3])
    np.testing.assert_array_equal(one.vectors[1], unit(1, 1)[0])


@pytest.mark.parametrize("queries", [1, 3, 40])
def test_the_nearest_are_those_of_brute_force_without_the_removed(queries: int) -> None:
    vectors, asked = unit(500), unit(queries, 9)
    removed = np.arange(0, 500, 3)
    delta = Delta.of(np.arange(500), vectors).changed(NONE, unit(0), removed)
    assert delta.size == 500 - len(removed)
    among = np.arange(500) % 2 == 0
    for chosen in (None, among):
        alive = delta.alive if chosen is None else delta.alive & chosen
        scores = np.where(alive, asked @ vectors.T, -np.inf)
        best, found = delta.nearest(asked, 10, chosen)
        np.testing.assert_array_equal(found, np.argsort(-scores, axis=1)[:, :10])
        np.testing.assert_allclose(best, -np.sort(-scores, axis=1)[:, :10], atol=1e-6)


def test_fewer_items_than_asked_for_give_fewer_columns() -> None:
    delta = Delta.of(ids(4, 7), unit(2)).changed(NONE, unit(0), ids(4))
    scores, found = delta.nearest(unit(3, 1), 10)
    assert scores.shape == (3, 1)
    assert set(found.ravel()) == {7}
    assert Delta.of(NONE, unit(0)).nearest(unit(3, 1), 10)[0].shape == (3, 0)


def test_unknown_numbers_have_no_position() -> None:
    delta = Delta.of(ids(4, 7, 9), unit(3))
    np.testing.assert_array_equal(delta.positions_of(ids(1, 7, 8, 9, 100)), [1, 2])
