import pandas as pd
import pytest

from embedder.errors import EvaluationError
from tests.training.studies.fakes import combination, finished
from tests.training.studies.published import LOSSES, RANKING, RECALL_AT_1
from training.studies.runs import Run
from training.studies.standings import Ranking, figures_of, rank, recall_at_1


def published() -> pd.DataFrame:
    return pd.DataFrame(
        {
            f"{network}, {size}": dict(zip(LOSSES, scores, strict=True))
            for network, by_size in RECALL_AT_1.items()
            for size, scores in by_size.items()
        }
    ).T


def table(rows: dict[str, dict[str, float | None]]) -> pd.DataFrame:
    return pd.DataFrame(rows).T


def averages(ranking: Ranking) -> dict[str, float]:
    return dict(ranking.ranks["average rank"])


def test_the_published_tables_give_the_published_tournament() -> None:
    ranks = rank(published()).ranks
    assert ranks.shape == (10, 12 + 3)
    assert list(ranks.index) == list(RANKING)
    for name, (total, average, deviation) in RANKING.items():
        assert ranks.loc[name, "total"] == total
        # The paper cuts digits off.
        assert ranks.loc[name, "average rank"] == pytest.approx(average, abs=0.0101)
        assert ranks.loc[name, "standard deviation"] == pytest.approx(deviation, abs=0.0101)
    assert (ranks.iloc[:, :12].sum() == 10 * 11 / 2).all()


def test_ties_share_the_average_of_their_ranks() -> None:
    ranking = rank(table({"x": {"a": 50.0, "b": 60.0, "c": 50.0, "d": 40.0}}))
    assert averages(ranking) == {"b": 1, "a": 2.5, "c": 2.5, "d": 4}
    assert ranking.ranks["standard deviation"].isna().all()


def test_rounding_alone_makes_no_difference() -> None:
    mean = (0.1 + 0.2) * 10
    assert mean != 3.0
    assert averages(rank(table({"x": {"a": mean, "b": 3.0}}))) == {"a": 1.5, "b": 1.5}


def test_ranking_ignores_the_order_of_experiments_and_the_scale_of_scores() -> None:
    scores = published()
    assert averages(rank(scores)) == averages(rank(3 * scores.iloc[::-1, ::-1] + 1))


INCOMPLETE = table(
    {
        "x": {"a": 3.0, "b": 2.0, "c": 1.0},
        "y": {"a": 1.0, "b": 2.0, "c": None},
        "z": {"a": 1.0, "b": None, "c": None},
    }
)


def test_an_experiment_that_lacks_a_competitor_is_left_out_and_named() -> None:
    ranking = rank(INCOMPLETE)
    assert ranking.left_out == {"y": ["c"], "z": ["b", "c"]}
    assert averages(ranking) == {"a": 1, "b": 2, "c": 3}


def test_missing_competitors_can_share_the_last_ranks() -> None:
    ranking = rank(INCOMPLETE, missing_last=True)
    assert not ranking.left_out
    ranks = ranking.ranks[["x", "y", "z"]]
    assert ranks.T.to_dict("list") == {"a": [1, 2, 1], "b": [2, 1, 2.5], "c": [3, 3, 2.5]}


def test_a_competitor_that_never_finished_does_not_void_the_others() -> None:
    ranking = rank(table({"x": {"a": 2.0, "b": 1.0, "dead": None}}))
    assert ranking.never_finished == ["dead"]
    assert averages(ranking) == {"a": 1, "b": 2}


def test_nothing_to_rank_is_an_error_with_its_cure() -> None:
    crossed = table({"x": {"a": 1.0, "b": None}, "y": {"a": None, "b": 1.0}})
    for scores in (table({"x": {"a": None}}), crossed):
        with pytest.raises(EvaluationError, match="limit the grid"):
            rank(scores)
    assert len(rank(crossed, missing_last=True).ranks) == 2


def test_competitors_are_ranked_by_their_mean_over_seeds() -> None:
    runs = [finished(combination("a", seed=n), r) for n, r in enumerate((60.0, 61.0, 65.0))]
    runs += [finished(combination("b"), 61.0), Run(combination("b", seed=1))]
    means = recall_at_1(figures_of(runs))
    assert means.to_dict("index") == {"net, 64-d": {"a": 62.0, "b": 61.0}}


def test_a_regularizer_makes_another_competitor() -> None:
    runs = [finished(combination("a", regularizer=name), 50.0) for name in ("none", "nir")]
    assert list(recall_at_1(figures_of(runs))) == ["a", "a + nir"]
