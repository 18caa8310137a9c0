"""Near-duplicates: groups against a naive reference, searches without them, the command line."""

import csv
import json
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from embedder.calibration import SAME_PICTURE
from embedder.errors import InvalidParameterError
from embedder.types import Hit
from indexer.checks.duplicates import K, NearGroup, members_of, near_groups
from indexer.filters.tree import Not, Range
from indexer.gallery import Gallery
from indexer.index.plan import IndexSettings
from indexer.types import Grouping, SearchOptions
from tests.embedder.bundles import CALIBRATION
from tests.indexer.conftest import CountingEmbedder, Run, failure, printed, usage
from tests.indexer.oracle import entry, units
from tests.tiny import encoded, picture


def crowded(total: int = 400, seed: int = 0) -> np.ndarray:
    """Unit vectors, half of them near one of the others, forty of them in one crowd."""
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


def told(groups: list[NearGroup]) -> list[tuple[int, set[int]]]:
    return [(group[0][0], {number for number, _ in group[1:]}) for group in groups]


@pytest.mark.parametrize("least", [0.99, 0.95, 0.8, 0.4, -1.0])
def test_groups_equal_those_of_a_naive_reference(gallery: Gallery, least: float) -> None:
    stored = filled(gallery, crowded())
    done: list[int] = []
    groups = near_groups(gallery, least, on_progress=done.append)
    assert told(groups) == naive_groups(stored, least)
    assert sum(done) == gallery.size
    for (first, one), *others in groups:
        assert one == 1.0
        scores = [score for _, score in others]
        assert scores == sorted(scores, reverse=True)
        cosines = [float(stored[first] @ stored[number]) for number, _ in others]
        assert scores == pytest.approx(cosines, abs=1e-5)
        assert min(scores) >= least


def test_an_approximate_index_is_asked_and_exact_compares_all(gallery: Gallery) -> None:
    vectors = crowded(800)
    gallery.add([entry(f"k{n}", row) for n, row in enumerate(vectors)])
    gallery.compact(IndexSettings(kind="hnsw", target_recall=0.9))
    stored = {item.id: vectors[int(item.key[1:])] for item in gallery.items()}
    assert told(near_groups(gallery, 0.9, exact=True)) == naive_groups(stored, 0.9)
    found = {number for group in near_groups(gallery, 0.9) for number, _ in group}
    expected = {number for one, others in naive_groups(stored, 0.9) for number in (one, *others)}
    assert len(found & expected) > 0.9 * len(expected)


def test_a_chain_is_no_group_and_a_crowd_larger_than_what_is_asked_for_is_one(
    gallery: Gallery,
) -> None:
    turns = np.radians(np.arange(5) * 20.0)  # each near the next one, the ends at right angles
    chain = np.zeros((5, 16), np.float32)
    chain[:, 0], chain[:, 1] = np.cos(turns), np.sin(turns)
    crowd = np.zeros((3 * K, 16), np.float32)
    crowd[:, 5] = 1
    rows = enumerate([*chain, *crowd])
    gallery.add([entry(f"k{n}", row, content=f"{n // 2}") for n, row in rows])
    groups = list(members_of(gallery, near_groups(gallery, 0.9)))
    assert [len(group) for group in groups] == [3 * K, 3, 2]
    assert {m.item.key for m in groups[1]} == {"k0", "k1", "k2"}  # around k1
    assert [m.item.key for m in groups[1] if m.newest] == ["k2"]
    assert groups[0][0].item.key == "k5"  # of equals the oldest
    assert [m.item.key for m in groups[1] if m.same_content] == ["k0"]  # of k1, in the middle


def test_what_is_removed_meanwhile_is_in_no_group_and_an_empty_gallery_has_none(
    gallery: Gallery,
) -> None:
    assert near_groups(gallery, 0.5) == []
    [one] = units(1)
    gallery.add([entry(f"k{n}", one) for n in range(3)])
    groups = near_groups(gallery, 0.5)
    gallery.remove(["k1"])
    assert [[m.item.key for m in group] for group in members_of(gallery, groups)] == [["k0", "k2"]]
    gallery.remove(["k0"])
    assert list(members_of(gallery, groups)) == []
    assert near_groups(gallery, 0.5) == []
    with pytest.raises(InvalidParameterError, match=r"min_score = 1.5 is outside -1..1"):
        near_groups(gallery, 1.5)


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


@pytest.mark.parametrize("near", [0.99, 0.9, 0.5, 0.0, -1.0])
def test_pages_without_near_duplicates_are_the_ranked_list_collapsed(
    gallery: Gallery, near: float
) -> None:
    stored, query = filled(gallery, crowded()), crowded(2, seed=7)[:1]
    liked = frozenset(list(stored)[:3])
    for options in (
        SearchOptions(),
        SearchOptions(min_score=0.1, exclude=liked),
        SearchOptions(where=Not(Range("n", at_least=200))),
    ):
        [ranked] = gallery.search(query, len(stored), options)
        expected = collapsed(ranked, stored, near)
        pages: list[str] = []
        for number in count():
            given = {"offset": 23 * number, "near": near}
            wanted = SearchOptions(
                options.where, options.min_score, exclude=options.exclude, **given
            )
            [page] = gallery.search(query, 23, wanted)
            pages += [hit.key for hit in page]
            if not page:
                break
        assert pages == expected
        [whole] = gallery.search(query, len(stored), SearchOptions(near=near))
        assert [hit.score for hit in whole] == sorted((h.score for h in whole), reverse=True)


def test_near_duplicates_are_not_left_out_of_groups_and_the_score_is_a_cosine(
    gallery: Gallery,
) -> None:
    gallery.add([entry("k", units(1)[0], {"sku": "a"})])
    with pytest.raises(InvalidParameterError, match="not left out of groups"):
        gallery.search_groups(units(1), 3, Grouping("sku"), SearchOptions(near=0.9))
    with pytest.raises(InvalidParameterError, match=r"near = 2 is outside -1..1"):
        gallery.search(units(1), 3, SearchOptions(near=2))


@pytest.fixture
def twins(build: Callable[[], object], shop: Path, out: Path) -> Path:
    """The gallery of the shop with a picture twice as a file, and once more compressed."""
    (shop / "hat" / "twin.webp").write_bytes((shop / "hat" / "c.webp").read_bytes())
    (shop / "hat" / "small <b>.jpg").write_bytes(encoded(picture(3), "JPEG", quality=60))
    build()
    return out


def test_the_command_writes_a_report_of_each_kind(run: Run, twins: Path, tmp_path: Path) -> None:
    ask = ("duplicates", twins, "--min-score", "0.97")
    report = printed(run(*ask, "--json", "--out", tmp_path / "near.json"))
    assert report == json.loads((tmp_path / "near.json").read_text())
    assert (report["size"], report["items"], report["recall"]) == (8, 3, 1.0)
    [group] = report["groups"]
    assert {one["item"]["key"] for one in group} == {
        "hat/c.webp",
        "hat/small <b>.jpg",
        "hat/twin.webp",
    }
    assert [one["newest"] for one in group].count(True) == 1
    assert all(one["probability"] is None and one["score"] >= 0.97 for one in group)

    assert run(*ask, "--out", tmp_path / "near.csv").exit_code == 0
    with (tmp_path / "near.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [row["key"] for row in rows] == [one["item"]["key"] for one in group]
    assert {row["group"] for row in rows} == {"1"}

    shown = run(*ask, "--out", tmp_path / "near.html")
    assert "Groups of near-duplicates: 1, with 3 of the 8 items" in shown.stdout
    page = (tmp_path / "near.html").read_text(encoding="utf-8")
    assert page.count("data:image/jpeg;base64,") == 3
    assert "hat/small &lt;b&gt;.jpg" in page
    assert "<b>.jpg" not in page
    assert "same file as the first" in page
    assert run(*ask, "--pictures", "0", "--out", tmp_path / "near.html").exit_code == 0
    assert "largest 0 groups" in (tmp_path / "near.html").read_text(encoding="utf-8")


def test_the_calibration_says_what_is_near(
    run: Run, twins: Path, embedder: CountingEmbedder
) -> None:
    assert "has no calibration" in failure(run("duplicates", twins, "--bundle", "b"))
    embedder.calibration = CALIBRATION
    report = printed(run("duplicates", twins, "--bundle", "b", "--json"))
    assert report["min_probability"] == 0.99
    likely = CALIBRATION.for_gallery(8).probability(np.array(report["min_score"]))
    assert likely == pytest.approx(0.99, abs=1e-4)
    assert all(one["probability"] >= 0.99 for group in report["groups"] for one in group)
    steep = ("duplicates", twins, "--bundle", "b", "--min-probability", "1", "--json")
    assert printed(run(*steep))["min_score"] == 1.0
    embedder.calibration = CALIBRATION.model_copy(update={"slope": 2.0})  # reaches 0.99 nowhere
    assert printed(run("duplicates", twins, "--bundle", "b", "--json"))["min_score"] == SAME_PICTURE
    assert "probability 0.99 would take more" in run("duplicates", twins, "--bundle", "b").stdout


def test_what_cannot_be_asked_says_what_to_do(run: Run, twins: Path, tmp_path: Path) -> None:
    assert "Give --bundle" in usage(run("duplicates", twins))
    both = ("--bundle", "b", "--min-score", "0.9")
    assert "Give --bundle" in usage(run("duplicates", twins, *both))
    assert "must end with" in usage(run("duplicates", twins, "--min-score", "1", "--out", "x.pdf"))
    nowhere = ("--min-score", "0.9", "--out", tmp_path / "no" / "near.csv")
    assert "Cannot write" in failure(run("duplicates", twins, *nowhere))
    remote = failure(run("duplicates", "milvus://localhost:1/shop", "--min-score", "0.9"))
    assert "kinlens-index import" in remote
    one = printed(run("search", twins, "--like", "f.gif", "--near", "0.97", "-k", "9", "--json"))
    keys = [hit["key"] for hit in one["hits"][0]]
    assert len(keys) == 5
    assert sum(key.startswith(("hat/c", "hat/small", "hat/twin")) for key in keys) == 1
