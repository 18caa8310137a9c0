"""The golden set: its figures compared with numpy, its storage and its commands."""

from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import (
    FilterError,
    GalleryCorruptError,
    ImageError,
    InvalidParameterError,
)
from kinlens.golden import Label
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.backup import restore_backup
from kinlens.quality.golden import MAX_QUERIES, GoldenSet, NewQuery
from kinlens.quality.judging import GoldenResults, change
from kinlens.quality.judging import labelled as golden_labels
from tests.indexer.conftest import Run, failure, flipped, printed, usage
from tests.indexer.oracle import DIM, clumped, entry, units
from tests.support.seams import adopt, compare, write_backup
from tests.tiny import encoded, photo

TIE = 1e-5


def stocked(gallery: Gallery, count: int = 400) -> tuple[np.ndarray, list[int]]:
    """Vectors (N, D) and products of some eight items each."""
    vectors = clumped(count)
    products = np.random.default_rng(1).integers(0, count // 8, count).tolist()
    gallery.add(
        entry(f"k{n}", vector, {"product": product, "odd": n % 2 == 1})
        for n, (vector, product) in enumerate(zip(vectors, products, strict=True))
    )
    return vectors, products


def labelled(golden: GoldenSet, gallery: Gallery, *labels: Label) -> None:
    golden.add([NewQuery(b"%d" % n, label, f"{n}.jpg") for n, label in enumerate(labels)], gallery)


def vectors_of(golden: GoldenSet, vectors: np.ndarray) -> dict[str, np.ndarray]:
    return dict(zip([query.sha256 for query in golden.queries()], vectors, strict=True))


def naive(scores: np.ndarray, is_right: np.ndarray) -> tuple[int, float]:
    """Rank of the first right item and average precision at R, from the definitions."""
    lowered = scores - TIE * is_right
    rank = 1 + int((lowered > lowered[is_right].max()).sum())
    order = np.argsort(-lowered)[: is_right.sum()]
    precision = [is_right[order[: i + 1]].mean() for i in range(len(order)) if is_right[order[i]]]
    return rank, sum(precision) / len(order)


def test_a_label_by_key_means_the_product_and_missing_items_are_omitted(gallery: Gallery) -> None:
    vectors, products = stocked(gallery)
    golden = GoldenSet(gallery.path)
    stranger = next(n for n in range(1, 400) if products[n] != products[0])
    labels = [Label(keys=("k0",)), Label(keys=(f"k{stranger}",)), Label(no_match=True)]
    labels.append(Label(attribute="product", value=products[-1]))
    labelled(golden, gallery, *labels)
    gallery.remove([f"k{stranger}"])
    known = vectors_of(golden, vectors[:4])
    found = [*golden_labels(gallery, golden.queries(), known, "product")]
    assert [one.label for one in found] == [str(products[0]), "no match", str(products[-1])]
    assert (found[1].is_right, found[1].item) == (None, None)
    named = [one.item.attributes["product"] for one in (found[0], found[2])]
    assert named == [products[0], products[-1]]
    is_right = found[0].is_right
    [hits] = gallery.search(vectors[:1], 400)
    same = {f"k{n}" for n, product in enumerate(products) if product == products[0]}
    assert {hit.key for hit in hits if is_right(hit)} == same
    assert len(same) > 1


def test_figures_are_those_of_a_naive_reference_on_random_vectors(gallery: Gallery) -> None:
    vectors, products = stocked(gallery)
    gallery.compact()
    rng = np.random.default_rng(2)
    chosen = rng.integers(0, len(vectors), 60)
    queries = vectors[chosen] + 0.3 * units(60, 3)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    golden, rights, labels = GoldenSet(gallery.path), [], []
    for number, item in enumerate(chosen.tolist()):
        if number % 2:
            labels.append(Label(attribute="product", value=products[item]))
            rights.append(np.array(products) == products[item])
        else:
            keys = {item, *rng.integers(0, len(vectors), number % 5).tolist()}
            labels.append(Label(keys=tuple(f"k{n}" for n in keys)))
            rights.append(np.isin(np.arange(len(vectors)), [*keys]))
    labelled(golden, gallery, *labels, *[Label(no_match=True)] * 10)
    nothing = units(10, 4)
    asked = GoldenResults.of(
        gallery, golden.queries(), vectors_of(golden, np.vstack([queries, nothing]))
    )
    best, best_of_nothing = ((side @ vectors.T).max(axis=1) for side in (queries, nothing))
    threshold = float(np.median(best_of_nothing))
    report = asked.report(threshold)

    every = [naive(vectors @ query, right) for query, right in zip(queries, rights, strict=True)]
    ranks, precisions = np.array([rank for rank, _ in every]), [part for _, part in every]
    assert (report.queries, report.judged, report.no_match, report.left_out) == (70, 60, 10, 0)
    for k, found in ((1, report.recall_at_1), (5, report.recall_at_5), (10, report.recall_at_10)):
        assert found == pytest.approx((ranks <= k).mean(), abs=1e-6)
        assert 0 < found < 1
    assert report.map_at_r == pytest.approx(np.mean(precisions), abs=1e-6)
    assert report.no_match_precision == pytest.approx(0.5, abs=1e-6)
    assert report.found == pytest.approx(((ranks == 1) & (best >= threshold)).mean(), abs=1e-6)
    shown = [asked.outcomes[n].precision for n in range(60)]
    assert shown == pytest.approx(precisions, abs=1e-9)
    assert len(report.worst) == 20
    assert report.version == gallery.version


def test_ties_count_against_the_gallery_and_what_cannot_be_judged_is_reported(gallery) -> None:
    same = units(1)
    gallery.add(entry(f"k{n}", same[0], {"n": n}) for n in range(40))
    golden = GoldenSet(gallery.path)
    labelled(golden, gallery, *[Label(keys=(f"k{n}",)) for n in range(3)])
    gallery.remove(["k0"])
    found = dict(vectors_of(golden, np.repeat(same, 3, axis=0)))
    found[golden.queries()[1].sha256] = ImageError("too large")
    report = GoldenResults.of(gallery, golden.queries(), found).report(0.5)
    assert (report.judged, report.left_out, report.no_match_precision) == (1, 2, None)
    assert (report.recall_at_10, report.map_at_r) == (0, 0)
    problems = " ".join(one.problem for one in report.worst)
    assert "match its label" in problems
    assert "too large" in problems


def test_one_label_that_does_not_fit_the_gallery_refuses_them_all(gallery: Gallery) -> None:
    stocked(gallery, 40)
    golden = GoldenSet(gallery.path)
    good = NewQuery(b"good", Label(keys=("k0",)))
    bad = NewQuery(b"bad", Label(attribute="product", value="12"))
    for queries, message in (
        ([good, bad], "product"),
        ([good, NewQuery(b"bad", Label(attribute="odd", value=1))], "odd"),
        ([good] * 2, "2 queries have only 1"),
        ([NewQuery(b"%d" % n, good.label) for n in range(MAX_QUERIES + 1)], "limit is 1,000"),
    ):
        with pytest.raises((FilterError, InvalidParameterError), match=message):
            golden.add(queries, gallery)
    assert golden.queries() == []


def test_a_golden_set_stays_through_swap_build_and_compaction_and_is_in_the_backup(
    gallery: Gallery, tmp_path: Path
) -> None:
    vectors, _ = stocked(gallery, 40)
    other = Gallery.create(tmp_path / "other", name="other", bundle_id="c" * 64, dim=DIM)
    stocked(other, 20)
    golden = GoldenSet(gallery.path)
    labelled(golden, gallery, Label(keys=("k0",)), Label(no_match=True))
    report = GoldenResults.of(gallery, golden.queries(), vectors_of(golden, vectors[:2])).report(
        0.5
    )
    for number in range(3):
        golden.keep(report.model_copy(update={"items": number}))
    assert [run.items for run in golden.runs()] == [2, 1, 0]
    before = (golden.queries(), golden.runs(), golden.image(golden.queries()[0].sha256))

    gallery.compact()
    write_backup(gallery.path, tmp_path / "backup")
    adopt(gallery.path, other.path)
    assert Gallery.open(gallery.path).generation != gallery.generation
    assert (golden.queries(), golden.runs(), golden.image(before[0][0].sha256)) == before
    Gallery.create(gallery.path, name="shop", bundle_id="b", dim=DIM).close()
    assert golden.queries() == before[0]
    for target in (tmp_path / "new", other.path):
        restore_backup(tmp_path / "backup", target, replace=True)
        there = GoldenSet(target)
        assert (there.queries(), there.runs(), there.image(before[0][0].sha256)) == before
        check_files(target)


def test_a_damaged_golden_set_is_reported_and_neither_backed_up_nor_used(
    gallery: Gallery, tmp_path: Path, run: Run
) -> None:
    stocked(gallery, 40)
    golden = GoldenSet(gallery.path)
    golden.add([NewQuery(bytes(100_000), Label(keys=("k0",)))], gallery)
    write_backup(gallery.path, tmp_path / "good")
    flipped(golden.file)
    for work in (
        golden.check,
        lambda: golden.image(golden.queries()[0].sha256),
    ):
        with pytest.raises(GalleryCorruptError, match=r"golden\.sqlite"):
            work()
    for command in (("backup", gallery.path, "--out", tmp_path / "bad"), ("verify", gallery.path)):
        assert "golden.sqlite" in failure(run(*command))
    assert not (tmp_path / "bad").exists()
    golden.file.write_bytes(b"no database at all" * 100)
    with pytest.raises(GalleryCorruptError, match="damaged"):
        golden.queries()
    golden.file.write_bytes((tmp_path / "good" / golden.file.name).read_bytes())
    assert len(golden.queries()) == 1


def test_two_models_are_judged_on_what_both_can_answer_with_a_paired_interval(
    gallery: Gallery, tmp_path: Path
) -> None:
    vectors, _ = stocked(gallery, 200)
    worse = Gallery.create(tmp_path / "worse", name="shop", bundle_id="c" * 64, dim=DIM)
    entries = [one for part in gallery.scan() for one in part]
    worse.add(one for one in entries if one.key != "k0")
    golden = GoldenSet(gallery.path)
    labelled(golden, gallery, *[Label(keys=(f"k{n}",)) for n in range(40)])
    queries = golden.queries()
    good = GoldenResults.of(gallery, queries, vectors_of(golden, vectors[:40]))
    lost = vectors[:40].copy()
    lost[:11] *= -1
    bad = GoldenResults.of(worse, queries, vectors_of(golden, lost))
    found = change(good, bad, 0.5, 0.6)
    assert (found.judged, found.labels, found.decides) == (39, 39, True)
    assert (found.old_recall_at_1, found.new_recall_at_1) == (1, pytest.approx(29 / 39, abs=1e-6))
    low, high = found.change_interval
    # The paired differences are 39 draws of 0 or -1: half the width of their mean is about 0.14.
    assert low < -10 / 39 < high < 0
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(10 / 39 * 29 / 39 / 39), abs=0.03)
    passed, reason = found.verdict(0.1, None)
    assert not passed
    assert "is lost; 0.1000 is allowed" in reason
    assert found.verdict(0.3, None)[0]
    assert "at least 0.9000 is required" in found.verdict(0.3, 0.9)[1]
    same = change(good, good, 0.5, 0.5)
    assert same.change_interval == (0, 0)
    assert same.verdict(0.0, 1.0)[0]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos of customers, and a list of what is right for them."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in ((1, "a.png"), (2, "b.png"), (50, "c.png")):
        (folder / name).write_bytes(encoded(photo(seed)))
    (folder / "list.csv").write_text(
        'image,keys,class\na.png,"cup/a.png, cup/b.jpg",\nb.png,,cup\nc.png,,\n'
    )
    return folder


def test_the_commands_label_list_run_and_remove(run: Run, built: Path, photos: Path) -> None:
    made = printed(run("golden", "add", built, "--csv", photos / "list.csv", "--json"))["queries"]
    assert [query["keys"] for query in made] == [["cup/a.png", "cup/b.jpg"], [], []]
    assert (made[1]["attribute"], made[1]["value"], made[2]["no_match"]) == ("class", "cup", True)
    one = ("golden", "add", built, "--query", photos / "a.png")
    assert "3 in all" in run(*one, "--keys", "f.gif").stdout
    assert "3 in all" in run(*one, "--attribute", "class=cup").stdout
    lines = run("golden", "list", built).stdout.splitlines()
    assert [line.split("  ")[1:] for line in lines] == [
        ["a.png", "class = cup"],
        ["b.png", "class = cup"],
        ["c.png", "no match"],
    ]
    ask = ("golden", "run", built, "--bundle", "b")
    report = printed(run(*ask, "--min-score", "0.99", "--json"))
    assert (report["judged"], report["no_match"], report["own_pictures"]) == (2, 1, 1)
    assert (report["recall_at_1"], report["no_match_precision"]) == (1, 1)
    text = run(*ask).stdout
    assert "recall@1   1.0000 (0.3424 to 1.0000)" in text
    assert "pass --min-score" in text
    assert len(printed(run("golden", "runs", built, "--json"))["runs"]) == 2
    assert len(run("golden", "runs", built).stdout.splitlines()) == 3
    left = printed(run("golden", "remove", built, lines[0][:12], "--json"))
    assert [query["name"] for query in left["queries"]] == ["b.png", "c.png"]


def test_the_command_prints_what_labelled_queries_guarantee(
    run: Run, built: Path, tmp_path: Path
) -> None:
    words = ("guarantee", built)
    assert "run kinlens-index golden run" in failure(run(*words))
    assert "is empty" in failure(run(*words, "--bundle", "b"))
    lines = ["image,class"]
    for seed in range(60):
        is_cup = seed % 5 < 4
        data = encoded(photo(1), "JPEG", quality=10 + seed) if is_cup else encoded(photo(50 + seed))
        (tmp_path / f"{seed}.png").write_bytes(data)
        lines.append(f"{seed}.png,{'cup' if is_cup else ''}")
    (tmp_path / "list.csv").write_text("\n".join(lines))
    run("golden", "add", built, "--csv", tmp_path / "list.csv")
    run("golden", "run", built, "--bundle", "b")
    found = printed(run(*words, "--json"))
    assert (found["queries"], found["absent"], found["source"]) == (60, 12, "golden")
    assert found["sets"]["queries"] == 48
    assert found["none_needs"] == 7  # to 19
    assert "299 accepted without an error are needed" in found["decisions"]
    assert {part["name"] for part in found["parts"]} >= {"all", "none of these"}
    text = run(*words, "--bundle", "b", "--by", "class", "--accept", "0.5").stdout
    assert "class = cup" in text
    assert "with 100 more labels like these" in text
    assert "With --separate, each class with 19 labels" in text
    again = printed(run(*words, "--json", "--accept", "0.5"))
    assert again["by"] == "class"
    assert again["decisions"]["accepted"] > 0
    asks = ("search", built, "--image", tmp_path / "0.png", "--bundle", "b", "--guarantee", "0.9")
    answer = printed(run(*asks, "--accept", "0.5", "--json"))["guarantee"]
    assert (answer["accepted"], answer["groups"][0]["value"]) == (True, "cup")
    text = run(*asks, "--accept", "0.5").stdout
    assert "Products (right for 90 %): cup" in text
    assert "Accepted: cup" in text
    assert "Omit offset" in failure(run(*asks, "--offset", "1"))
    split = run(*words, "--bundle", "b", "--by", "class", "--separate", "--confidence", "0.9")
    assert ", others" in split.stdout
    assert "at 90 % confidence" in split.stdout
    line = failure(run(*words, "--by", "class"))
    assert "--by and --confidence need a bundle or --from-items" in line
    assert "--separate needs --by" in failure(run(*words, "--bundle", "b", "--separate"))
    stated = printed(run(*words, "--from-items", "--json"))
    assert stated["source"] == "gallery"
    assert "needs at least 19 labelled queries" in stated["sets"]
    shown = printed(run("calibrate", built, "--json"))
    assert "labelled queries of" in shown["guarantee"]


def test_the_commands_label_words_and_parts_of_photos(run: Run, built: Path, photos: Path) -> None:
    (photos / "asked.csv").write_text(
        'image,text,crop,keys\na.png,,auto,cup/a.png\na.png,,"0,0,0.5,0.5",cup/a.png\n'
        "a.png,in green,,cup/a.png\n,green cup,,f.gif\n"
    )
    made = printed(run("golden", "add", built, "--csv", photos / "asked.csv", "--json"))["queries"]
    assert [(one.get("crop"), len(one.get("texts", ()))) for one in made] == [
        ("auto", 0),
        ([0, 0, 0.5, 0.5], 0),
        (None, 1),
        (None, 1),
    ]
    one = ("golden", "add", built, "--query", photos / "a.png", "--keys", "cup/a.png")
    assert "4 in all" in run(*one, "--crop", "auto").stdout
    words = ("golden", "add", built, "--text", "blue cup", "--no-match")
    assert "5 in all" in run(*words).stdout
    assert "(blue cup)  no match" in run("golden", "list", built).stdout
    assert "files are intact" in run("verify", built).stdout
    report = printed(run("golden", "run", built, "--bundle", "b", "--json"))
    assert (report["judged"], report["left_out"]) == (2, 3)
    problems = [one["problem"] for one in report["worst"] if one["problem"]]
    assert len(problems) == 3
    assert all("no text tower" in problem for problem in problems)
    (photos / "no.csv").write_text("image,text,keys\n,,f.gif\n")
    none = run("golden", "add", built, "--csv", photos / "no.csv")
    assert "no image and no text" in failure(none)
    assert "--crop needs --query" in usage(run(*words, "--crop", "auto"))


def test_a_wrong_label_is_one_line_of_what_to_do(run: Run, built: Path, photos: Path) -> None:
    (photos / "two.csv").write_text("image,keys,class\na.png,f.gif,cup\n")
    (photos / "none.csv").write_text("image,keys\n")
    for words, message in [
        (("--query", "a.png", "--keys", "nowhere"), "no item 'nowhere'"),
        (("--query", "a.png", "--keys", ","), "exactly one of"),
        (("--query", "a.png", "--keys", '"a'), "double quotes"),
        (("--query", "a.png", "--attribute", "colour=red"), "one of the attributes class"),
        (("--query", "a.png", "--attribute", "class=hut"), "0 items"),
        (("--query", "gone.png", "--no-match"), "gone.png"),
        (("--query", "list.csv", "--no-match"), "list.csv cannot be used"),
        (("--csv", "two.csv"), "two.csv:2"),
        (("--csv", "none.csv"), "lists no images"),
    ]:
        option, name, *more = words
        assert message in failure(run("golden", "add", built, option, photos / name, *more))
    assert printed(run("golden", "list", built, "--json"), 1) == {"queries": []}
    assert "is empty" in failure(run("golden", "run", built, "--bundle", "b"))
    assert "0 queries have an id that starts with" in failure(run("golden", "remove", built, "0f"))


# Two models, by a class attribute.


def noisy(path: Path, noise: float) -> Gallery:
    """Ten clusters of six items; much noise mixes them up."""
    made = Gallery.create(path, name="shop", bundle_id=f"{noise}", dim=DIM)
    rng = np.random.default_rng(0)
    vectors = np.tile(rng.standard_normal((10, DIM)), (6, 1))
    vectors += noise * rng.standard_normal((60, DIM))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    made.add(
        entry(f"{n}", vector, {"class": n % 10, "colour": f"{n}"})
        for n, vector in enumerate(vectors.astype(np.float32))
    )
    made.compact()
    return made


def test_equal_galleries_overlap_fully_and_a_worse_model_has_other_answers(tmp_path) -> None:
    pair = noisy(tmp_path / "good", 0.01), noisy(tmp_path / "bad", 3.0)
    same, found = compare(pair[0], pair[0], k=5), compare(*pair, k=5)
    assert same.overlap_at_k == 1
    assert same.old.recall_at_1 == same.new.recall_at_1 == same.old.recall_at_k == 1
    assert (same.queries, same.judged, same.old.items) == (60, 60, 60)
    assert found.old.recall_at_1 == 1
    assert found.new.recall_at_1 < 0.7
    assert found.new.recall_at_1 <= found.new.recall_at_k
    assert found.overlap_at_k < 0.8
    assert (found.old.bundle_id, found.new.bundle_id) == ("0.01", "3.0")
    unjudged = compare(*pair, "colour")  # each has its own; the query itself is no answer
    assert (unjudged.queries, unjudged.judged, unjudged.new.recall_at_1) == (60, 0, None)
    assert compare(*pair, sample=20).queries == 20
