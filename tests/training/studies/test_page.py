import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.training.studies.fakes import combination, finished, played
from tests.training.studies.published import LOSSES, RANKING, RECALL_AT_1
from training.studies.page import write_report
from training.studies.runs import Run


def written(folder: Path, runs: list[Run], missing_last: bool = False) -> tuple[str, str]:
    page = write_report(folder, "cub", runs, missing_last)
    return page.read_text(), (folder / "report.md").read_text()


def published() -> list[Run]:
    return [
        finished(combination(loss, network, dim), score)
        for network, sizes in RECALL_AT_1.items()
        for dim, scores in sizes.items()
        for loss, score in zip(LOSSES, scores, strict=True)
    ]


def row_of(markdown: str, name: str) -> list[str]:
    """The cells of the first table row of a competitor."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_published_figures_give_the_published_page(tmp_path: Path) -> None:
    html, markdown = written(tmp_path, published())
    ranks = markdown[: markdown.index("![Average")]
    for name, (total, average, deviation) in RANKING.items():
        cells = [float(cell) for cell in row_of(ranks, name)[-3:]]
        assert cells == pytest.approx([total, average, deviation], abs=0.0101)
    order = [ranks.index(f"| {name} |") for name in RANKING]
    assert order == sorted(order)
    assert html.count("<table>") == markdown.count("### ") == 1 + 12
    assert html.count("<img") == len(list((tmp_path / "charts").iterdir())) == 1 + 12


def test_a_cell_is_mean_and_deviation_over_seeds_and_the_best_is_bold(tmp_path: Path) -> None:
    scores = {"a": (60.0, 61.0, 62.0), "b": (50.0, 50.0, None), "c": (None, None, None)}
    runs = [
        Run(one) if score is None else finished(one, score)
        for loss, values in scores.items()
        for seed, score in enumerate(values)
        for one in [combination(loss, seed=seed)]
    ]
    _, markdown = written(tmp_path, runs)
    table = markdown[markdown.index("### net, 64-d") :]
    assert "|  | R@1 | R@2 | R@4 | R@8 | MAP@R | seconds per epoch | seeds |" in table
    assert row_of(table, "a")[:2] == ["**61.00 ± 1.00**", "**62.00 ± 1.00**"]
    assert row_of(table, "a")[4:] == ["30.50 ± 0.50", "2.00 ± 0.00", "3"]
    assert row_of(table, "b")[0] == "50.00 ± 0.00"
    assert row_of(table, "b")[-1] == "2 of 3"
    assert row_of(table, "c") == ["–"] * 6 + ["0 of 3"]
    assert row_of(markdown, "a") == ["1", "1", "1.00", "–"]
    one_seed = written(tmp_path, [finished(combination("a"), 60.0)])[1]
    assert row_of(one_seed[one_seed.index("### net") :], "a")[0] == "**60.00**"


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    html, markdown = written(tmp_path, published()[:20])
    assert not re.search(r"<(script|link|iframe|object)|href=|url\(|@import|https?:", html)
    charts = re.findall('src="data:image/svg[+]xml;base64,([^"]*)"', html)
    assert len(charts) == html.count("src=")
    names = re.findall(r"\]\((.*?)\)", markdown)
    for chart, name in zip(charts, names, strict=True):
        assert base64.b64decode(chart) == (tmp_path / name).read_bytes()
        root = ElementTree.parse(tmp_path / name).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    runs = published()[:20]
    assert written(tmp_path / "a", runs) == written(tmp_path / "b", runs)


def test_charts_tell_every_mean_with_its_deviation(tmp_path: Path) -> None:
    runs = [finished(combination("a", "timm-vit_s.14", seed=n), 20.0 + n) for n in range(3)]
    written(tmp_path, runs)
    chart = (tmp_path / "charts" / "r1-timm-vit_s.14-64-d.svg").read_text()
    assert "21.00 ± 1.00" in chart
    assert "R@1, timm-vit_s.14, 64-d" in chart


def test_texts_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> a|b *c* `d`\nnext & line'
    (_, bad), _, _ = played(
        [combination("a", seed=seed) for seed in (0, 1)],
        tmp_path,
        lambda job: evil if job.seed else 60.0,
    )
    html, markdown = written(tmp_path, [finished(combination("a"), 60.0), bad])
    assert "<script" not in html + markdown
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt; a|b *c* `d` next &amp; line" in html
    assert "a\\|b \\*c\\* \\`d\\` next &amp; line" in markdown


def test_failed_runs_are_listed_with_their_reason(tmp_path: Path) -> None:
    failed = Run(combination("b"), reason="killed by SIGKILL", attempts=2)
    for page in written(tmp_path, [finished(combination("a"), 60.0), failed]):
        assert "1 of 2 runs finished, 1 failed" in page
        assert "Failed runs" in page
        assert "killed by SIGKILL" in page
        assert "not ranked, no finished run: b" in page


def test_experiments_left_out_and_missing_competitors_ranked_last_are_said(tmp_path: Path) -> None:
    runs = [finished(combination(loss, dim=dim), 60.0) for dim in (16, 32) for loss in "ab"]
    runs[-1] = Run(combination("b", dim=32))
    assert "left out of the ranking: net, 32-d, which lacks b" in written(tmp_path, runs)[1]
    page = written(tmp_path, runs, missing_last=True)[1]
    assert "a competitor that an experiment lacks is ranked last in it" in page
    assert row_of(page, "b") == ["1.5", "2", "3.5", "1.75", "0.35"]


def test_a_tournament_that_cannot_be_ranked_yet_says_so(tmp_path: Path) -> None:
    runs = [combination(loss, dim=dim) for loss, dim in (("a", 16), ("b", 32))]
    crossed = [finished(run, 60.0) for run in runs]
    crossed += [Run(combination("a", dim=32)), Run(combination("b", dim=16))]
    assert "there is no ranking" in written(tmp_path, crossed)[1]
    assert "0 of 2 runs finished" in written(tmp_path, [Run(run) for run in runs])[1]


def test_the_page_says_how_epochs_were_chosen(tmp_path: Path) -> None:
    def page(*protocols: dict[str, object]) -> str:
        runs = [combination("a", seed=n, protocol=p) for n, p in enumerate(protocols)]
        return written(tmp_path, [finished(run, 50.0) for run in runs])[1]

    last: dict[str, object] = {}
    held = {"choose_by": "validation", "validation_fraction": 0.1}
    by_test = {"choose_by": "test"}
    assert "last epoch; nothing was chosen by test" in page(last)
    assert "best R@1 on validation classes" in page(held)
    assert "10% of the train classes were held out" in page(held)
    assert "CHOSEN BY TEST" in page(by_test)
    assert "CHOSEN BY TEST" not in page(last, held)
    assert "MIXED" in page(last, by_test)
    assert "MIXED" not in page(last, last)
    assert "seeds 0, 1; epochs 30; batch 90" in page(last, last)
