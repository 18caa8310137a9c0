import pytest

from embedder.errors import EvaluationError
from tests.training.tournament.published import LOSSES, RANKING, RECALL_AT_1
from training.tournament.ranking import Ranking, rank


def published() -> dict[str, dict[str, float | None]]:
    return {
        f"{network}, {size}": dict(zip(LOSSES, scores, strict=True))
        for network, by_size in RECALL_AT_1.items()
        for size, scores in by_size.items()
    }


def averages(ranking: Ranking) -> dict[str, float]:
    return {place.competitor: place.average for place in ranking.places}


def test_the_published_tables_give_the_published_tournament() -> None:
    ranking = rank(published(), "leave-out")
    assert len(ranking.experiments) == 12
    assert [place.competitor for place in ranking.places] == list(RANKING)
    for place in ranking.places:
        total, average, deviation = RANKING[place.competitor]
        assert place.total == total
        assert place.average == pytest.approx(average, abs=0.0101)  # the paper cuts digits off
        assert place.deviation == pytest.approx(deviation, abs=0.0101)


def test_ties_share_the_average_of_their_ranks() -> None:
    ranking = rank({"x": {"a": 50.0, "b": 60.0, "c": 50.0, "d": 40.0}}, "leave-out")
    assert averages(ranking) == {"b": 1, "a": 2.5, "c": 2.5, "d": 4}


def test_rounding_alone_makes_no_difference() -> None:
    mean = (0.1 + 0.2) * 10
    assert mean != 3.0
    assert averages(rank({"x": {"a": mean, "b": 3.0}}, "leave-out")) == {"a": 1.5, "b": 1.5}


def test_ranks_of_an_experiment_sum_to_n_times_n_plus_1_half() -> None:
    ranking = rank(published(), "leave-out")
    for number in range(len(ranking.experiments)):
        assert sum(place.ranks[number] for place in ranking.places) == 55


def test_ranking_ignores_the_order_of_experiments_and_the_scale_of_scores() -> None:
    table = published()
    other = {
        experiment: {name: 3 * score + 1 for name, score in reversed(row.items())}
        for experiment, row in reversed(table.items())
    }
    assert averages(rank(table, "leave-out")) == averages(rank(other, "leave-out"))


def test_a_single_experiment_has_no_deviation() -> None:
    ranking = rank({"x": {"a": 2.0, "b": 1.0}}, "leave-out")
    assert [place.deviation for place in ranking.places] == [None, None]


INCOMPLETE = {
    "x": {"a": 3.0, "b": 2.0, "c": 1.0},
    "y": {"a": 1.0, "b": 2.0, "c": None},
    "z": {"a": 1.0, "b": None, "c": None},
}


def test_an_experiment_that_lacks_a_competitor_is_left_out_and_named() -> None:
    ranking = rank(INCOMPLETE, "leave-out")
    assert ranking.experiments == ("x",)
    assert ranking.left_out == {"y": ("c",), "z": ("b", "c")}
    assert averages(ranking) == {"a": 1, "b": 2, "c": 3}


def test_missing_competitors_can_share_the_last_ranks() -> None:
    ranking = rank(INCOMPLETE, "last")
    assert ranking.experiments == ("x", "y", "z")
    assert not ranking.left_out
    assert {p.competitor: p.ranks for p in ranking.places} == {
        "a": (1, 2, 1),
        "b": (2, 1, 2.5),
        "c": (3, 3, 2.5),
    }


def test_a_competitor_that_never_finished_does_not_void_the_others() -> None:
    ranking = rank({"x": {"a": 2.0, "b": 1.0, "dead": None}}, "leave-out")
    assert ranking.never_finished == ("dead",)
    assert averages(ranking) == {"a": 1, "b": 2}


def test_nothing_to_rank_is_an_error_with_its_cure() -> None:
    for table in ({"x": {"a": None}}, {"x": {"a": 1.0, "b": None}, "y": {"a": None, "b": 1.0}}):
        with pytest.raises(EvaluationError, match="limit the grid"):
            rank(table, "leave-out")
    assert len(rank({"x": {"a": 1.0, "b": None}, "y": {"a": None, "b": 1.0}}, "last").places) == 2
