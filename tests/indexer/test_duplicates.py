"""Near-duplicates: groups against a naive reference, searches without them, the command line."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.types import Hit
from kinlens.indexer.checks.duplicates import (
    LEAST_SCORE,
    K,
    NearGroup,
    clusters_of,
    find_duplicates,
    floor_of,
    members_of,
    near_groups,
)
from kinlens.indexer.filters.tree import Not, Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import SearchOptions
from tests.indexer.conftest import Run, failure, printed, usage
from tests.indexer.oracle import DIM, entry, units
from tests.tiny import encoded, photo


def clustered(total: int = 400, seed: int = 0) -> np.ndarray:
    """Unit vectors, half of them near one of the others, forty of them in one cluster."""
    rng = np.random.default_rng(seed)
    alone = units(total // 2, seed)
    chosen = rng.integers(0, 60, total - len(alone))
    chosen[:40] = 0
    near = alone[chosen] + rng.uniform(0, 0.5, (len(chosen), 1)) * units(len(chosen), seed + 1)
    rows = rng.permutation(np.concatenate([alone, near])).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def filled(gallery: Gallery, vectors: np.ndarray) -> dict[int, np.ndarray]:
    """The vectors, added and most of them indexed, by number; some have been removed again."""
    entries = [entry(f"k{n}", row, {"n": n}) for n, row in enumerate(vectors)]
    cut = len(entries) * 3 // 4
    gallery.add(entries[:cut])
    gallery.compact()
    gallery.add(entries[cut:])
    gone = [f"k{n}" for n in range(5, len(entries), 13)]
    gallery.remove(gone)
    return {item.id: vectors[int(item.key[1:])] for item in gallery.items()}


def naive_groups(stored: dict[int, np.ndarray], least: float) -> list[tuple[int, set[int]]]:
    """The first and the others of each group, from all cosines."""
    numbers, rows = np.array([*stored]), np.array([*stored.values()], np.float64)
    near = {
        number: {*numbers[rows @ row >= least].tolist()} - {number}
        for number, row in zip(numbers.tolist(), rows, strict=True)
    }
    taken: set[int] = set()
    groups = []
    for one in sorted(near, key=lambda number: (-min(len(near[number]), K), number)):
        if one not in taken and near[one] - taken:
            groups.append((one, near[one] - taken))
            taken |= {one} | near[one]
    return sorted(groups, key=lambda group: (-len(group[1]), group[0]))


def reported(groups: list[NearGroup]) -> list[tuple[int, set[int]]]:
    return [(group[0][0], {number for number, _ in group[1:]}) for group in groups]


@pytest.mark.parametrize("least", [0.95, 0.4, -1.0])
def test_groups_equal_those_of_a_naive_reference(gallery: Gallery, least: float) -> None:
    stored = filled(gallery, clustered())
    done: list[int] = []
    groups = near_groups(gallery, least, on_progress=done.append)
    assert reported(groups) == naive_groups(stored, least)
    assert sum(done) == gallery.size
    for (first, one), *others in groups:
        assert one == 1.0
        scores = [score for _, score in others]
        assert scores == sorted(scores, reverse=True)
        cosines = [float(stored[first] @ stored[number]) for number, _ in others]
        assert scores == pytest.approx(cosines, abs=1e-5)
        assert min(scores) >= least


def test_an_approximate_index_is_asked_and_exact_compares_all(gallery: Gallery) -> None:
    vectors = clustered(800)
    gallery.add([entry(f"k{n}", row) for n, row in enumerate(vectors)])
    gallery.compact(IndexSettings(kind="hnsw", target_recall=0.9))
    expected = naive_groups(dict(enumerate(vectors, 1)), 0.9)
    assert reported(near_groups(gallery, 0.9, exact=True)) == expected
    found = {number for group in near_groups(gallery, 0.9) for number, _ in group}
    grouped = {number for one, others in expected for number in (one, *others)}
    assert len(found & grouped) > 0.9 * len(grouped)


def test_a_chain_is_not_a_group_and_a_cluster_larger_than_the_search_depth_is_one(gallery) -> None:
    turns = np.radians(np.arange(5) * 20.0)  # each near the next one, the ends at right angles
    chain = np.zeros((5, 16), np.float32)
    chain[:, 0], chain[:, 1] = np.cos(turns), np.sin(turns)
    cluster = np.zeros((3 * K, 16), np.float32)
    cluster[:, 5] = 1
    rows = enumerate([*chain, *cluster])
    gallery.add([entry(f"k{n}", row, content=f"{n // 2}") for n, row in rows])
    groups = list(members_of(gallery, near_groups(gallery, 0.9)))
    assert [len(group) for group in groups] == [3 * K, 3, 2]
    assert {m.item.key for m in groups[1]} == {"k0", "k1", "k2"}  # around k1
    assert [m.item.key for m in groups[1] if m.newest] == ["k2"]
    assert groups[0][0].item.key == "k5"  # of equals the oldest
    assert [m.item.key for m in groups[1] if m.same_content] == ["k0"]  # of k1, in the middle
    found = near_groups(gallery, 0.9)
    gallery.remove(["k1", "k3"])  # meanwhile
    left = [{m.item.key for m in group} for group in members_of(gallery, found)]
    assert left[1:] == [{"k0", "k2"}]


def views(
    products: int, each: int, spread: float, closeness: float, seed: int = 0, dim: int = DIM
) -> np.ndarray:
    """Unit vectors of `each` views of products: `spread` around a centre of their own, all of them
    around one common direction, the nearer the higher `closeness`.
    """
    rng = np.random.default_rng(seed)
    centres = closeness * units(1, seed + 1, dim) + units(products, seed + 2, dim)
    rows = np.repeat(centres / np.linalg.norm(centres, axis=1, keepdims=True), each, axis=0)
    rows = rows + spread * rng.standard_normal(rows.shape) / np.sqrt(dim)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)


def rare_cosine(rows: np.ndarray, products: np.ndarray) -> float:
    """The cosine that one in 1,000 pairs of different products reaches, from all pairs."""
    cosines = rows.astype(np.float64) @ rows.T
    of_others = cosines[np.triu(products[:, None] != products[None, :], 1)]
    return float(np.sort(of_others)[::-1][int(np.ceil(len(of_others) / 1000)) - 1])


@pytest.mark.parametrize(
    ("products", "each", "closeness", "name"),
    [(90, 16, 1.0, "product"), (90, 16, 6.0, "class"), (30, 2, 7.0, "product")],
)
def test_the_default_is_what_one_pair_in_a_thousand_of_different_products_reaches(
    gallery: Gallery, products: int, each: int, closeness: float, name: str
) -> None:
    rows, numbers = views(products, each, 0.1, closeness), np.repeat(np.arange(products), each)
    gallery.add(
        [entry(f"k{n}", row, {name: f"p{numbers[n]}", "n": n}) for n, row in enumerate(rows)]
    )
    expected = rare_cosine(rows, numbers)
    floor = floor_of(gallery)
    assert floor.attribute == name
    assert floor.score == pytest.approx(max(LEAST_SCORE, expected), abs=1e-6)
    assert (expected > LEAST_SCORE) == (closeness > 1)  # both sides are tried
    assert find_duplicates(gallery).min_score == floor.score


def test_without_labels_the_nearest_of_an_item_is_no_evidence_and_errors_raise_the_score(
    gallery: Gallery,
) -> None:
    rows = views(300, 1, 0.1, 6.0)
    again = rows[:20] + 0.01 * units(20, 5)
    rows = np.concatenate([rows, again / np.linalg.norm(again, axis=1, keepdims=True)])
    numbers = np.concatenate([np.arange(300), np.arange(20)])
    gallery.add([entry(f"k{n}", row) for n, row in enumerate(rows)])
    floor = floor_of(gallery)
    assert floor.attribute is None
    assert LEAST_SCORE < floor.score < 0.999
    assert floor.score == pytest.approx(rare_cosine(rows, numbers), abs=0.005)
    groups = [{number for number, _ in group} for group in find_duplicates(gallery).groups]
    together = [n for n in range(20) if any({n + 1, n + 301} <= group for group in groups)]
    assert len(together) > 15


def test_a_placeholder_is_a_cluster_with_advice_and_not_a_group(gallery: Gallery, run: Run) -> None:
    rows = np.concatenate([views(500, 2, 0.05, 0.5), np.tile(units(1, 9), (500, 1))])
    gallery.add(
        entry(f"k{n}", row, {"product": max(n // 2, n - 500)}, "no photo" if n >= 1000 else None)
        for n, row in enumerate(rows)
    )
    found = find_duplicates(gallery)
    assert found.min_score < 0.99  # copies of one image say nothing about others
    [cluster] = clusters_of(gallery, found)
    assert cluster.items == 500
    assert len({item.sha256 for item in cluster.examples}) == 1
    assert "500 items, 33% of the gallery" in cluster.detail
    assert "placeholder" in cluster.detail
    assert f"(min_score) above {found.min_score:.4f}" in cluster.detail
    assert {len(group) for group in found.groups} == {2}
    assert len(found.groups) > 400
    members = {number for group in found.groups for number, _ in group}
    assert members.isdisjoint(number for number, _ in found.clusters[0])
    text = " ".join(run("duplicates", gallery.path).stdout.split())
    assert f"Groups of near-duplicates: {len(found.groups)}, with" in text
    assert "Warning: 500 items, 33% of the gallery" in text
    [shown] = printed(run("duplicates", gallery.path, "--json"))["crowds"]
    assert (shown["items"], shown["examples"][0]["key"]) == (500, "k1000")


@pytest.mark.parametrize(("placeholders", "size"), [(60, 1000), (400, 2000)])
def test_placeholders_that_differ_a_little_are_a_cluster_and_not_groups(
    gallery: Gallery, placeholders: int, size: int
) -> None:
    """The number of each product on its placeholder: their own pairs raise the default score."""
    middle = units(1, 9) + 0.1 * units(placeholders, 10)
    rows = np.concatenate([middle, units(size - placeholders, 11)])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    gallery.add([entry(f"k{n}", row, {"product": n}) for n, row in enumerate(rows)])
    found = find_duplicates(gallery)
    assert found.groups == []
    [cluster] = clusters_of(gallery, found)
    assert cluster.items == placeholders
    assert f"a cosine of at least {LEAST_SCORE:.4f}" in cluster.detail


@pytest.mark.parametrize(
    ("products", "each", "spread", "is_warned"),
    [(90, 16, 0.1, True), (90, 16, 0.6, False), (6, 3, 0.1, False), (600, 2, 0.0, False)],
)
def test_a_gallery_of_which_a_quarter_is_alike_is_warned_of_unless_it_has_copies(
    gallery: Gallery, products: int, each: int, spread: float, is_warned: bool
) -> None:
    rows = views(products, each, spread, 0.5)
    gallery.add([entry(f"k{n}", row, {"class": f"p{n // each}"}) for n, row in enumerate(rows)])
    found = find_duplicates(gallery)
    assert (found.warning is not None) == is_warned
    if is_warned:
        assert f"of {products * each:,} items are similar to another item" in str(found.warning)
        assert f"(min_score) above {found.min_score:.4f}" in str(found.warning)


@pytest.mark.parametrize(
    ("copies", "others", "is_cluster"), [(20, 0, False), (21, 0, True), (21, 2079, False)]
)
def test_a_cluster_has_more_than_20_items_and_more_than_one_in_100(
    gallery: Gallery, copies: int, others: int, is_cluster: bool
) -> None:
    rows = [*np.tile(units(1), (copies, 1)), *units(others, 8)]
    gallery.add([entry(f"k{n}", row, content=f"{n}") for n, row in enumerate(rows)])
    found = find_duplicates(gallery, min_score=0.9999)
    sizes = [len(group) for group in found.clusters], [len(group) for group in found.groups]
    assert sizes == (([copies], []) if is_cluster else ([], [copies]))


def test_a_large_gallery_is_sampled_within_a_bound_and_the_same_each_time(gallery: Gallery) -> None:
    rows, numbers = views(800, 4, 0.1, 6.0), np.repeat(np.arange(800), 4)
    gallery.add([entry(f"k{n}", row, {"product": f"p{numbers[n]}"}) for n, row in enumerate(rows)])
    floor = floor_of(gallery)
    assert floor_of(gallery) == floor
    assert 500_000 < floor.pairs <= 2_000_000
    assert floor.score == pytest.approx(rare_cosine(rows, numbers), abs=0.003)


def collapsed(ranked: list[Hit], stored: dict[int, np.ndarray], near: float) -> list[str]:
    """The ranked hits without those that are near a better one that stays."""
    kept: list[Hit] = []
    rows: list[np.ndarray] = []
    for hit in ranked:
        vector = stored[hit.id].astype(np.float64)
        if not rows or (np.array(rows) @ vector).max() < near:
            kept.append(hit)
            rows.append(vector)
    return [hit.key for hit in kept]


@pytest.mark.parametrize("near", [0.99, 0.5, -1.0])
def test_pages_without_near_duplicates_are_the_ranked_list_collapsed(gallery, near: float) -> None:
    stored, query = filled(gallery, clustered()), clustered(2, seed=7)[:1]
    liked = frozenset(list(stored)[:3])
    for options in (
        SearchOptions(),
        SearchOptions(min_score=0.1, exclude=liked),
        SearchOptions(where=Not(Range("n", at_least=200))),
    ):
        [ranked] = gallery.search(query, len(stored), options)
        expected = collapsed(ranked, stored, near)
        pages: list[str] = []
        for offset in range(0, len(stored) + 46, 46):
            [page] = gallery.search(query, 46, replace(options, offset=offset, near=near))
            pages += [hit.key for hit in page]
        assert pages == expected
        [whole] = gallery.search(query, len(stored), SearchOptions(near=near))
        assert [hit.score for hit in whole] == sorted((h.score for h in whole), reverse=True)


@pytest.fixture
def twins(build: Callable[[], object], shop: Path, out: Path) -> Path:
    """The gallery of the shop with an image twice as a file, and once more compressed."""
    (shop / "hat" / "twin.webp").write_bytes((shop / "hat" / "c.webp").read_bytes())
    (shop / "hat" / "small <b>.jpg").write_bytes(encoded(photo(3), "JPEG", quality=60))
    build()
    return out


def test_the_command_reports_groups_by_a_score_of_its_own_or_a_given_one(run, twins) -> None:
    ask = ("duplicates", twins, "--min-score", "0.97")
    report = printed(run(*ask, "--json"))
    assert (report["size"], report["items"], report["recall"]) == (8, 3, 1.0)
    [group] = report["groups"]
    near = {"hat/c.webp", "hat/small <b>.jpg", "hat/twin.webp"}
    assert {one["item"]["key"] for one in group} == near
    shown = run(*ask).stdout
    assert "Groups of near-duplicates: 1, with 3 of the 8 items" in shown
    assert all(key in shown for key in near)
    own = printed(run("duplicates", twins, "--json"))
    assert own["min_score"] == own["floor"]["score"] == LEAST_SCORE
    shown = run("duplicates", twins, "--min-score", "0.5").stdout
    assert "Warning: min_score = 0.5 is below 0.9500" in " ".join(shown.split())
    assert "less than or equal to 1" in usage(run("duplicates", twins, "--min-score", "1.5"))


def test_near_duplicates_of_a_remote_gallery_are_refused_and_search_excludes_them(
    run: Run, twins: Path
) -> None:
    remote = failure(run("duplicates", "milvus://localhost:1/shop", "--min-score", "0.9"))
    assert "kinlens-index import" in remote
    one = printed(run("search", twins, "--like", "f.gif", "--near", "0.97", "-k", "9", "--json"))
    keys = [hit["key"] for hit in one["hits"][0]]
    assert len(keys) == 5
    assert sum(key.startswith(("hat/c", "hat/small", "hat/twin")) for key in keys) == 1
    wrong = ("search", twins, "--like", "f.gif", "--near")
    assert "near = 2.0; give a number, from -1 to 1" in failure(run(*wrong, "2"))
    line = failure(run(*wrong, "0.9", "--group-by", "class"))
    assert "--near cannot be combined with groups. Use --distinct" in line
