"""Guarantees: exact quantiles and binomials, coverage by simulation, refusals and withdrawal."""

from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kinlens
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit
from kinlens.golden import Label
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Group, Grouping, SearchOptions
from kinlens.quality.answers import Guaranteed, Wanted, guaranteed
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.golden import GoldenSet, NewQuery
from kinlens.quality.guarantee import (
    RANKED,
    Choices,
    Guarantee,
    Judged,
    Labelled,
    counts_to_test,
    judge,
    labels_for_decisions,
    labels_for_sets,
    lowest_lead,
    quantile,
)
from kinlens.quality.guarantee_report import report_of
from kinlens.quality.intervals import exact_interval, tail, upper_bound
from tests.indexer.oracle import DIM, units

PRODUCTS, VIEWS = 60, 3
NOISE, CLEAR = 0.2, 0.1  # in photos of a shop, and of a studio


def photos(rng: np.random.Generator, products: np.ndarray, noise: float) -> Embeddings:
    """A photo of each product, around centres that are the same in every call."""
    vectors = units(2 * PRODUCTS, 7)[products] + noise * rng.standard_normal((len(products), DIM))
    unit: Embeddings = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float32)


def stocked(gallery: Gallery, noise: float = NOISE) -> None:
    products = np.repeat(np.arange(PRODUCTS), VIEWS)
    vectors = photos(np.random.default_rng(1), products, noise)
    gallery.add(
        Entry(f"k{n}", vector, f"{n:064x}", {"product": f"p{p}", "kind": f"c{p % 3}"})
        for n, (vector, p) in enumerate(zip(vectors, products.tolist(), strict=True))
    )
    GoldenSet(gallery.path).add([NewQuery(b"a photo", Label(no_match=True))], gallery)


def asked(count: int, noise: float = NOISE) -> Iterator[Labelled]:
    """Labelled photos; a fifth of them shows a product that is not in the gallery."""
    rng = np.random.default_rng(2)
    products = rng.integers(0, PRODUCTS, count)
    products = np.where(rng.random(count) < 0.2, products + PRODUCTS, products)

    def is_of(product: int):
        return lambda hit: hit.attributes["product"] == f"p{product}"

    for vector, product in zip(photos(rng, products, noise), products.tolist(), strict=True):
        yield Labelled(vector, f"p{product}", is_of(product) if product < PRODUCTS else None)


def all_queries(path: Path, noise: float) -> Guarantee:
    gallery = Gallery.create(path / "g", name="g", bundle_id="b", dim=DIM)
    stocked(gallery, noise)
    found = judge(gallery, "product", asked(800, noise))
    gallery.close()
    return found


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Guarantee:
    """All queries that ever come to a shop, judged by its gallery."""
    return all_queries(tmp_path_factory.mktemp("shop"), NOISE)


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Guarantee:
    """The same for queries that are easier."""
    return all_queries(tmp_path_factory.mktemp("studio"), CLEAR)


def drawn(people: Guarantee, count: int, seed: int, absent: bool = True) -> Guarantee:
    """Labelled queries, drawn at random from all that come."""
    known = [one for one in people.queries if absent or not one.absent]
    chosen = np.random.default_rng(seed).integers(0, len(known), count)
    return people.model_copy(update={"queries": tuple(known[n] for n in chosen), "at": str(seed)})


def judged(lead: float, right: bool, kind: str = "") -> Judged:
    return Judged(0.9, (0.0, lead), 0.0 if right else lead, kind=kind, best_kind=kind)


def of(*queries: Judged, by: str | None = None) -> Guarantee:
    return Guarantee(
        at="",
        items=0,
        last=0,
        product="p",
        source="golden",
        queries=queries,
        by=by,
        is_split=bool(by),
    )


@pytest.mark.parametrize("count", [1, 7, 120, 299, 1000])
@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05, 0.5, 0.97])
def test_binomials_are_those_of_scipy(count: int, rate: float) -> None:
    from scipy import stats  # here, since its import takes a second

    for wrong in sorted({0, 1, count // 20, count // 2, count - 1, count}):
        assert tail(wrong, count, rate) == pytest.approx(
            stats.binom.cdf(wrong, count, rate), rel=1e-9, abs=1e-11
        )
        proof = stats.binomtest(wrong, count).proportion_ci(0.95, method="exact")
        assert exact_interval(wrong, count) == pytest.approx((proof.low, proof.high), abs=1e-9)
        one_sided = stats.binomtest(wrong, count, alternative="less").proportion_ci(0.99, "exact")
        assert upper_bound(wrong, count, 0.99) == pytest.approx(one_sided.high, abs=1e-9)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99, 0.57])
@pytest.mark.parametrize("count", [1, 9, 18, 19, 20, 99, 100, 137])
def test_the_quantile_covers_exactly_as_many_of_equal_chances(level: float, count: int) -> None:
    """Each of n + 1 numbers is equally likely to be the new one."""
    numbers = np.random.default_rng(count).standard_normal(count + 1).tolist()
    covered = sum(
        number <= quantile([*numbers[:n], *numbers[n + 1 :]], level)
        for n, number in enumerate(numbers)
    )
    least = next(k for k in range(count + 2) if k * 100 >= round(100 * level) * (count + 1))
    assert covered == least
    assert (quantile(numbers[1:], level) == inf) is (count < labels_for_sets(level))


@pytest.mark.parametrize("count", [20, 40, 150])
def test_sets_cover_the_level_of_the_queries_that_come(people: Guarantee, count: int) -> None:
    """An off-by-one in the quantile of 20 labels would cover 0.905 on average."""
    queries, shares = people.present, []
    for seed in range(500):
        rule = drawn(people, count, seed, absent=False).sets(0.95)
        shares.append(
            np.mean([rule.has(inf if one.behind is None else one.behind, "") for one in queries])
        )
    error = np.std(shares) / np.sqrt(len(shares))
    assert np.mean(shares) >= 0.95 - 2 * error
    assert np.mean(shares) <= 0.95 + 1 / (count + 1) + 0.004  # a coarse population adds a little
    assert 0.9 < np.quantile(shares, 0.5) < 1


def test_none_of_these_is_covered_at_any_share_of_absent_products(people: Guarantee) -> None:
    absent = [one for one in people.queries if one.absent]
    shares = [
        np.mean([rule.has_none(one.scores) for one in absent])
        for seed in range(300)
        if (rule := drawn(people, 250, seed).sets(0.9)).none is not None
    ]
    assert 0.89 < np.mean(shares) < 0.94


@pytest.mark.parametrize(("accept", "count"), [(0.9, 60), (0.9, 300), (0.95, 400)])
def test_decisions_err_more_often_than_asked_in_at_most_one_of_twenty(
    studio: Guarantee, accept: float, count: int
) -> None:
    queries, harmed, accepted = studio.queries, 0, []
    for seed in range(500):
        try:
            rule = drawn(studio, count, seed).decisions(accept)
        except InvalidParameterError:
            continue
        taken = [one for one in queries if rule.takes(one.lead, "")]
        accepted.append(len(taken) / len(queries))
        harmed += np.mean([one.is_right for one in taken]) < accept
    assert harmed <= 41  # a binomial of 500 and 5 % exceeds it once in 1,000 times
    assert np.mean(accepted) > 0.3
    assert len(accepted) > 100


def test_a_decision_without_a_bound_would_err_far_more_often(studio: Guarantee) -> None:
    """The plug-in: the lowest lead with an error of at most a tenth among the labelled queries."""
    harmed = 0
    for seed in range(200):
        order = sorted(drawn(studio, 60, seed).queries, key=lambda one: -one.lead)
        wrong = np.cumsum([not one.is_right for one in order]) / np.arange(1, len(order) + 1)
        least = order[int(np.flatnonzero(wrong <= 0.1).max(initial=0))].lead
        taken = [one.is_right for one in studio.queries if one.lead >= least]
        harmed += np.mean(taken) < 0.9
    assert harmed > 0.25 * 200


def test_as_many_labels_are_needed_as_the_binomial_needs() -> None:
    assert labels_for_sets(0.95) == 19
    assert labels_for_sets(0.99) == 99
    assert labels_for_decisions(0.99) == 299
    assert labels_for_decisions(0.99, 0.99) == 459
    assert labels_for_decisions(0.5, 0.75) == 2
    assert counts_to_test(0.99, 0.95, 1000) == (299, 473, 628, 773, 913)


def test_too_few_labels_are_refused_with_the_number_that_is_missing() -> None:
    few = of(*(judged(0.1, True) for _ in range(120)))
    with pytest.raises(
        InvalidParameterError,
        match=r"299 accepted without an error are needed for "
        r"99 % at 95 % confidence; there are 120\. Label 179 more",
    ):
        few.decisions(0.99)
    with pytest.raises(InvalidParameterError, match="Label 1 more"):
        of(*few.queries[:18]).sets(0.95)
    lost = Judged(0.5, (0.0, 0.1), None)
    with pytest.raises(InvalidParameterError, match="right product of 3 of 43 labelled queries"):
        of(*few.queries[:40], lost, lost, lost).sets(0.95)
    for share in (0.0, 1.0, -1.0, 1e-300, 1 - 1e-16, 0.49, 0.99999):
        for ask in (few.sets, few.decisions):
            with pytest.raises(InvalidParameterError, match=r"must be between 0\.5 and 0\.9999,"):
                ask(share)
    with pytest.raises(InvalidParameterError, match="9,999 labelled"):
        few.sets(0.9999)
    with pytest.raises(InvalidParameterError, match="29,956 accepted"):
        few.decisions(0.9999)


def test_a_decision_examines_each_label_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made within a request, which may ask for any share."""
    examined, is_right = [], Judged.is_right.fget

    def counted(one: Judged) -> bool:
        examined.append(one)
        return is_right(one)

    monkeypatch.setattr(Judged, "is_right", property(counted))
    queries = [judged(0.1 + n / 1e4, n % 7 > 0) for n in range(1000)]
    assert of(*queries).decisions(0.5).accepted == 1000
    assert len(queries) <= len(examined) <= 3 * len(queries)


def test_299_right_answers_suffice_and_one_error_among_the_surest_does_not() -> None:
    right = [judged(0.2 + n / 1e4, True) for n in range(299)]
    rule = of(*right).decisions(0.99)
    assert (rule.accepted, rule.wrong) == (299, 0)
    with pytest.raises(InvalidParameterError, match=r"there are 10\. Of 299"):
        of(*right[:288], judged(0.2288, False), *right[289:]).decisions(0.99)
    later = of(*right, judged(0.1, True), *[judged(0.01, False)] * 9).decisions(0.99)
    assert (later.accepted, later.wrong) == (299, 0)
    assert later.takes(0.11, "")
    assert not later.takes(0.1, "")


def test_ties_are_wrong_for_decisions_and_members_of_sets() -> None:
    tie = judged(0.0, True)
    assert not tie.is_right
    rule = of(*(judged(0.1, True) for _ in range(40)), tie).decisions(0.9)
    assert not rule.takes(0.0, "")
    sets = of(*(judged(0.1, n < 35) for n in range(40))).sets(0.95)
    groups = [Group(n, score, [Hit(n, str(n), score)]) for n, score in enumerate((0.8, 0.7, 0.69))]
    assert [group.value for group in sets.members(groups)] == [0, 1]  # 0.1 behind, in float32 too
    assert sets.members([]) == []
    assert sets.has_none([0.1]) is None


def test_a_category_with_enough_labels_has_a_limit_of_its_own() -> None:
    easy = [judged(0.1, True, "easy")] * 120
    hard = [judged(0.1 + n / 1e3, n < 60, "hard") for n in range(100)]
    rare = [judged(0.3, n < 3, "rare") for n in range(6)]
    rule = of(*easy, *hard, *rare, by="kind").sets(0.95)
    assert rule.limits["easy"] == 0
    assert rule.limits.keys() == {"easy", ""}  # the rare ones join the smaller category
    own = of(*easy, *hard, *rare * 4, by="kind").sets(0.95)
    assert own.limits["hard"] == pytest.approx(0.195)
    assert of(*easy, *hard).sets(0.95).limits.keys() == {""}
    assert of(*easy, *hard, by="kind").decisions(0.95).leads["easy"] < 0.1


def test_the_limits_of_all_categories_hold_together(studio: Guarantee) -> None:
    """Each alone at 95 % would let one of four err too often in more than one of twenty."""
    kinds = [f"c{n % 4}" for n in range(len(studio.queries))]
    population = [
        Judged(one.best, one.gaps, one.behind, one.absent, one.images, kind, kind)
        for one, kind in zip(studio.queries, kinds, strict=True)
    ]
    harmed = alone = 0
    for seed in range(300):
        chosen = np.random.default_rng(seed).integers(0, len(population), 480)
        own = of(*(population[n] for n in chosen), by="kind").model_copy(update={"at": str(seed)})
        try:
            leads = own.decisions(0.9).leads
        except InvalidParameterError:
            continue
        assert leads.keys() == {"c0", "c1", "c2", "c3", ""}
        assert leads[""] == inf  # categories that nobody labelled
        parts = {k: [q for q in own.queries if q.best_kind == k] for k in leads if k}
        plain = {kind: lowest_lead(part, 0.9, 0.95) for kind, part in parts.items()}
        harmed += _errs(population, leads, 0.9)
        alone += _errs(population, plain, 0.9)
    assert harmed <= 28  # a binomial of 300 and 5 % exceeds it once in 1,000 times
    assert harmed < alone


def _errs(population: list[Judged], leads: dict[str, float], accept: float) -> bool:
    """Whether more than allowed of what is accepted is wrong, in any category."""
    for kind, lead in leads.items():
        taken = [one.is_right for one in population if one.best_kind == kind and one.lead > lead]
        if taken and np.mean(taken) < accept:
            return True
    return False


def test_a_limit_of_a_category_needs_more_labels_than_one_for_all() -> None:
    right = [judged(0.1, True, f"c{n % 2}") for n in range(736)]
    assert of(*right[:299]).decisions(0.99).leads.keys() == {""}
    assert of(*right[:598], by="kind").decisions(0.99).leads.keys() == {""}  # 368 for each of two
    assert of(*right, by="kind").decisions(0.99).leads.keys() == {"c0", "c1", ""}


def test_a_gallery_judges_labelled_photos_as_a_naive_search_does(gallery: Gallery) -> None:
    stocked(gallery)
    gallery.compact()
    vectors = np.stack([entry.vector for batch in gallery.scan() for entry in batch])
    products = np.repeat(np.arange(PRODUCTS), VIEWS)
    queries = [*asked(80)]
    found = judge(gallery, "product", queries, Choices(by="kind"))
    for one, (vector, label, is_right, *_) in zip(found.queries, queries, strict=True):
        best = np.array([(vectors[products == p] @ vector).max() for p in range(PRODUCTS)])
        order = np.sort(best)[::-1]
        assert one.best == pytest.approx(order[0], abs=2e-6)
        assert one.gaps == pytest.approx(order[0] - order[:20], abs=3e-6)
        assert one.absent is (is_right is None)
        if not one.absent:
            product = int(label[1:])
            assert one.behind == pytest.approx(order[0] - best[product], abs=3e-6)
            assert (one.kind, one.images) == (f"c{product % 3}", VIEWS)
    copy = Labelled(vectors[0], "p0", lambda hit: True)
    assert judge(gallery, "product", [copy]).queries == ()


def test_items_of_the_gallery_are_judged_without_themselves(gallery: Gallery) -> None:
    stocked(gallery)
    found = judge(gallery, "product", None)
    assert len(found.queries) == PRODUCTS * VIEWS
    assert found.source == "gallery"
    assert max(one.best for one in found.queries) < 0.999
    assert not any(one.absent for one in found.queries)


def test_a_guarantee_is_stored_and_withdrawn_after_a_fifth_of_the_items_changed(
    gallery: Gallery,
) -> None:
    stocked(gallery)
    calibrator = Calibrator(gallery)
    with pytest.raises(InvalidParameterError, match="golden run"):
        calibrator.guarantee()
    calibrator.fit_golden(lambda product: asked(60))
    kept = Calibrator(gallery).guarantee()
    assert kept == calibrator.guarantee()
    assert kept.sets(0.95).queries == len(kept.present)
    gallery.remove([f"k{n}" for n in range(30)])
    assert calibrator.guarantee() == kept
    gallery.remove([f"k{n}" for n in range(30, 40)])
    with pytest.raises(InvalidParameterError, match="other items"):
        calibrator.guarantee()
    calibrator.fit_if_outdated()
    with pytest.raises(InvalidParameterError, match="other items"):
        Calibrator(gallery).guarantee()
    choices = Choices(by="kind", is_split=True, confidence=0.9)
    calibrator.fit_guarantee(lambda product: asked(60), choices)
    assert (calibrator.guarantee().by, calibrator.guarantee().confidence) == ("kind", 0.9)
    calibrator.fit_golden(lambda product: asked(60))  # keeps what the owner chose
    assert (calibrator.guarantee().by, calibrator.guarantee().confidence) == ("kind", 0.9)
    gallery.remove([f"k{n}" for n in range(40, 90)])
    calibrator.fit_if_outdated()
    with pytest.raises(InvalidParameterError, match="other items"):
        calibrator.guarantee()
    calibrator.fit_golden(lambda product: asked(60))  # also after it was withdrawn
    assert (calibrator.guarantee().by, calibrator.guarantee().confidence) == ("kind", 0.9)
    with pytest.raises(InvalidParameterError, match="No item has the attribute shade"):
        calibrator.fit_guarantee(None, Choices(by="shade"))


def test_a_guarantee_is_withdrawn_after_a_fifth_of_the_items_got_other_products(
    gallery: Gallery,
) -> None:
    """Of 180 items, 500 are compared at most: all of them."""
    stocked(gallery)
    calibrator = Calibrator(gallery)
    kept = calibrator.fit_guarantee(lambda product: asked(60), Choices(by="kind", is_split=True))
    gallery.update({f"k{n}": {"price": n} for n in range(180)})
    assert Calibrator(gallery).guarantee() == kept
    gallery.update({f"k{n}": {"product": "p99"} for n in range(20)})
    gallery.update({f"k{n}": {"kind": "c9"} for n in range(16, 36)})
    assert calibrator.guarantee() == kept
    gallery.update({"k100": {"product": None}})
    with pytest.raises(InvalidParameterError, match="other items or products"):
        calibrator.guarantee()
    gallery.update({"k100": {"product": "p33"}})
    assert calibrator.guarantee() == kept
    swapped = {f"k{n}": {"product": f"p{(n // VIEWS + 1) % PRODUCTS}"} for n in range(180)}
    gallery.update(swapped)  # as many products, each with as many items
    with pytest.raises(InvalidParameterError, match="other items or products"):
        Calibrator(gallery).guarantee()


def test_a_product_that_is_not_found_keeps_its_category(gallery: Gallery) -> None:
    """Otherwise its category would get a limit from the queries that were found."""
    stocked(gallery)
    lost = Labelled(units(1, 9)[0], "p4", lambda hit: False, gallery.stored(["k12"])["k12"])
    known = judge(gallery, "product", [*asked(60), lost], Choices(by="kind", is_split=True))
    assert [one.kind for one in known.queries[60:]] == ["c1"]
    names = {f"k{n}": {"name": f"n{n}"} for n in range(180)}
    gallery.update(names)
    alone = judge(gallery, "name", None, Choices(by="kind"))
    assert {one.kind for one in alone.queries} == {"c0", "c1", "c2"}
    assert {one.behind for one in alone.queries} == {None}


def test_python_answers_with_the_set_and_the_decision_of_the_rules(gallery: Gallery) -> None:
    stocked(gallery, CLEAR)
    shop = kinlens.Gallery(gallery)
    with pytest.raises(InvalidParameterError, match="golden run"):
        shop.search(units(1, 1)[0], guarantee=0.95)
    kept = Calibrator(gallery)
    kept.fit_golden(lambda product: asked(60, CLEAR))
    sets, decisions = kept.guarantee().sets(0.95), kept.guarantee().decisions(0.7)
    for vector, *_ in [*asked(90, CLEAR)][60:]:
        hits = shop.search(vector, k=60, guarantee=0.95, accept=0.7)
        [groups] = gallery.search_groups(vector[None], 60, Grouping("product"))
        best = groups[0].score
        members = [g.value for g in groups if best - g.score <= sets.limits[""] + 1e-5]
        assert [group.value for group in hits.guarantee.groups] == members
        assert hits.guarantee.holds
        assert hits.accepted is decisions.takes(best - groups[1].score, "")
        assert hits.guarantee.none is sets.has_none([best, groups[1].score])
        assert [hit.key for hit in hits] == [hit.key for hit in shop.search(vector, k=60)]
    assert shop.search(vector).accepted is None
    for query in (np.stack([vector, vector]), None):
        with pytest.raises(InvalidParameterError, match=r"one query|one whole image"):
            shop.search(query, positives=["k1"] if query is None else (), accept=0.7)


def test_customers_and_labelled_queries_are_ranked_among_as_many_products(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An approximate index may find another best product if it is asked for fewer."""
    stocked(gallery)
    depths, search = list[int](), gallery.search_groups

    def recorded(vectors: Embeddings, k: int, *more: Any) -> list[list[Group]]:
        depths.append(k)
        return search(vectors, k, *more)

    monkeypatch.setattr(gallery, "search_groups", recorded)
    known = judge(gallery, "product", asked(60))
    assert set(depths) <= {RANKED, 1000}
    [vector] = photos(np.random.default_rng(3), np.arange(1), NOISE)
    for k in (1, RANKED - 1, 2 * PRODUCTS):
        depths.clear()
        found = guaranteed(gallery, vector[None], known, 0.9, None, Wanted(k))
        assert depths == [RANKED]
        assert found.holds is (k > 1)
    depths.clear()
    wide = of(*(judged(0.1, True) for _ in range(40)), *[Judged(0.9, (0.0, 0.1), 2.0)] * 9)
    wide = wide.model_copy(update={"product": "product"})
    assert guaranteed(gallery, vector[None], wide, 0.9, None, Wanted(PRODUCTS + 1)).holds
    assert depths == [RANKED, PRODUCTS + 2]
    assert guaranteed(gallery, vector[None], wide, 0.9, None, Wanted(PRODUCTS - 1)).cut == "k"


def test_a_decision_is_about_the_first_hit_also_with_a_filter(gallery: Gallery) -> None:
    """The best product has a photo that matches, but that of another product is more similar."""
    axis = np.eye(DIM, dtype=np.float32)

    def at(cosine: float) -> Embeddings:
        vector: Embeddings = cosine * axis[0] + np.sqrt(1 - cosine**2) * axis[1]
        return vector.astype(np.float32)

    shown = ((0.9, "a", "red"), (0.5, "a", "blue"), (0.7, "b", "blue"), (0.1, "c", "blue"))
    gallery.add(
        Entry(f"k{n}", at(cosine), f"{n:064x}", {"product": product, "colour": colour})
        for n, (cosine, product, colour) in enumerate(shown)
    )
    known = of(*(judged(0.1, True) for _ in range(40))).model_copy(update={"product": "product"})

    def answer(where: str | None) -> Guaranteed:
        options = SearchOptions(where=where)
        return guaranteed(gallery, axis[:1], known, 0.9, 0.9, Wanted(5, options))

    for where, accepted, groups in (
        (None, True, ["a"]),
        ('colour = "red"', True, ["a"]),
        ('colour = "blue"', False, ["a"]),
        ('product = "b"', False, []),
    ):
        found = answer(where)
        assert (found.accepted, [group.value for group in found.groups]) == (accepted, groups)


def test_python_refuses_another_order_with_a_guarantee(gallery: Gallery) -> None:
    stocked(gallery, CLEAR)
    Calibrator(gallery).fit_golden(lambda product: asked(60, CLEAR))
    shop, [vector] = kinlens.Gallery(gallery), units(1, 1)
    for more in (
        {"offset": 1},
        {"sort_by": "kind"},
        {"diversity": 0.5},
        {"exact": True},
        {"min_score": 0.1},
        {"options": SearchOptions(exclude=frozenset([1]))},
        {"options": SearchOptions(effort=64)},
    ):
        for asks in ({"guarantee": 0.8}, {"accept": 0.7}):
            with pytest.raises(InvalidParameterError, match="Omit offset"):
                shop.search(vector, **asks, **more)
    with pytest.raises(InvalidParameterError):
        shop.search(np.full(DIM, np.nan, np.float32), accept=0.7)
    for kind in ("c0", "c1"):  # the first hit of all is of kind c1
        found = shop.search(vector, distinct=True, filter=f'kind = "{kind}"', accept=0.7)
        assert found.accepted is (kind == "c1")


def test_a_photo_that_was_labelled_twice_counts_once(gallery: Gallery) -> None:
    """It is no further draw of what comes, whatever its label is."""
    stocked(gallery)
    known = judge(gallery, "product", asked(60))
    again = [Labelled(one.vector.copy(), "other", None) for one in asked(60)]
    assert judge(gallery, "product", [*asked(60), *again]).queries == known.queries


@pytest.mark.parametrize(
    ("queries", "sets", "decisions"),
    [
        ((), "at least 1 labelled", "there are 0"),
        ([Judged(0.5, (0.0, 0.1), None, absent=True)] * 40, "there are 0", "there are 0"),
        ([judged(0.1, True)], None, "Label 4 more"),
        ([Judged(0.9, (0.0,), 0.0)] * 40, None, None),  # a gallery of one product
        ([judged(0.0, True)] * 40, None, "there are 0"),  # ties of the best two
    ],
)
def test_labels_at_the_edges_suffice_or_are_refused(
    queries: list[Judged], sets: str | None, decisions: str | None
) -> None:
    known = of(*queries)
    for ask, refusal in ((known.sets, sets), (known.decisions, decisions)):
        if refusal is None:
            assert ask(0.5)
        else:
            with pytest.raises(InvalidParameterError, match=refusal):
                ask(0.5)
    assert [*report_of(known, 0.5, 0.5).lines()]


def test_levels_may_be_numbers_of_numpy(gallery: Gallery) -> None:
    known = of(*(judged(0.1, True) for _ in range(80)))
    for kind in (np.float64, np.float32):
        assert known.sets(kind(0.75)) == known.sets(0.75)
        assert known.decisions(kind(0.75)) == known.decisions(0.75)
    assert report_of(known, np.float64(0.95), np.float64(0.9)).lines()


def test_a_gallery_without_the_attribute_of_a_product_guarantees_nothing(gallery: Gallery) -> None:
    vectors = units(30, 5)
    gallery.add(Entry(f"k{n}", vector, f"{n:064x}", {"n": n}) for n, vector in enumerate(vectors))
    with pytest.raises(InvalidParameterError, match="No item has the attribute product"):
        Calibrator(gallery).fit_guarantee(None, Choices())
    [groups] = gallery.search_groups(vectors[:1], 3, Grouping("n"))
    assert len(groups) == 3
