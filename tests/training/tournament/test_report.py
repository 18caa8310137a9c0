import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.training.tournament.fakes import FakeLaunch, Notes, combination, finished
from tests.training.tournament.published import LOSSES, RANKING, RECALL_AT_1
from training.config.job import Job
from training.tournament.chart import Bar, bar_chart
from training.tournament.ledger import Ledger
from training.tournament.protocol import protocol_lines
from training.tournament.report import write_report
from training.tournament.runs import play
from training.tournament.standings import standings
from training.tournament.tables import Table, other_table, rank_table, recall_table


class Tags(HTMLParser):
    """Checks that tags are closed in order and remembers them with the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert not tags.open
    return tags


def written(folder: Path, ledger: Ledger, **options: str) -> tuple[str, str]:
    page = write_report(folder, "cub", ledger, **options)
    return page.read_text(), (folder / "report.md").read_text()


def published_ledger(folder: Path) -> Ledger:
    names = [
        (loss, net, dim) for net, sizes in RECALL_AT_1.items() for dim in sizes for loss in LOSSES
    ]
    scores = {
        combination(loss, net, dim).job.name: RECALL_AT_1[net][dim][LOSSES.index(loss)]
        for loss, net, dim in names
    }
    launch = FakeLaunch(lambda job: scores[job.name])
    return play([combination(*name) for name in names], folder, Notes(), launch)


def test_the_published_figures_give_the_published_page(tmp_path: Path) -> None:
    html, markdown = written(tmp_path, published_ledger(tmp_path))
    for name, (total, average, deviation) in RANKING.items():
        (row,) = [
            line
            for line in markdown.splitlines()
            if line.startswith(f"| {name}") and "–" not in line and line.count("|") == 17
        ]
        cells = [float(cell) for cell in row.split("|")[-4:-1]]
        assert cells == pytest.approx([total, average, deviation], abs=0.0101)
    order = [markdown.rindex(f"| {name} |", 0, markdown.index("![Average")) for name in RANKING]
    assert order == sorted(order)
    assert markdown.count("### ") == 1 + 2 * 12
    tags = parsed(html)
    assert len([tag for tag, _ in tags.seen if tag == "table"]) == 1 + 2 * 12
    assert len([tag for tag, _ in tags.seen if tag == "svg"]) == 1 + 12
    assert "ProxyAnchor" in tags.text


def test_a_cell_is_mean_and_deviation_over_seeds_and_the_best_is_bold() -> None:
    runs = [combination(loss, seed=seed) for seed in (0, 1, 2) for loss in "abc"]
    scores = {"a": (60.0, 61.0, 62.0), "b": (50.0, 50.0, None), "c": (None, None, None)}
    done = [finished(c, value) for c in runs if (value := scores[c.loss][c.seed]) is not None]
    found = standings(runs, done)
    table = recall_table(found, "net, 64-d")
    assert table.header == ("", "R@1", "R@2", "R@4", "R@8", "seeds")
    assert table.rows[0][:2] == ("a", "61.00 ± 1.00")
    assert [row[-1] for row in table.rows] == ["3", "2 of 3", "0 of 3"]
    assert table.rows[2][1:5] == ("–",) * 4
    assert table.bold == {(0, column) for column in (1, 2, 3, 4)}
    others = other_table(found, "net, 64-d")
    assert others is not None
    assert others.header == ("", "MAP@R", "seconds per epoch", "seeds")
    assert [p.competitor for p in found.ranking("leave-out").places] == ["a", "b"]
    assert rank_table(found.ranking("leave-out")).rows[0] == ("a", "1", "1", "1.00", "–")


def test_one_seed_has_no_deviation() -> None:
    runs = [combination("a")]
    table = recall_table(standings(runs, [finished(runs[0], 60.0)]), "net, 64-d")
    assert table.rows[0][1] == "60.00"


def test_a_regularizer_makes_another_competitor() -> None:
    runs = [combination("a", regularizer=name) for name in ("none", "nir")]
    assert standings(runs, []).competitors == ["a", "a + nir"]
    alone = [combination("a"), combination("b")]
    assert standings(alone, []).competitors == ["a", "b"]


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    html, markdown = written(tmp_path, published_ledger(tmp_path))
    for tag, attributes in parsed(html).seen:
        assert tag not in ("script", "link", "img", "iframe", "object")
        assert not attributes.keys() & {"src", "href", "srcset"}
    assert not re.search(r"url\(|@import|https?:", html)
    for name in re.findall(r"\]\((.*?)\)", markdown):
        root = ElementTree.fromstring((tmp_path / name).read_text())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_texts_from_outside_are_escaped(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script> a|b *c* `d`\nnext & line'
    launch = FakeLaunch(lambda job: evil if job.seed else 60.0)
    runs = [combination("a", seed=seed) for seed in (0, 1)]
    ledger = play(runs, tmp_path, Notes(), launch)
    html, markdown = written(tmp_path, ledger)
    assert "<script" not in html + markdown
    assert '<script>alert("x")</script> a|b *c* `d`' in parsed(html).text
    assert "a\\|b \\*c\\* \\`d\\` next &amp; line" in markdown
    table = Table("<b>", ("<i>", "|"), (("<u>", "&"),))
    assert "&lt;u&gt;" in table.html()
    assert "&lt;b&gt;" in table.html()
    assert "<" not in table.markdown()
    chart = bar_chart("<b> & co", [Bar('<i>"', 1.0)], file=True)
    assert ElementTree.fromstring(chart)[1].text == '<i>"'


def test_failed_runs_are_listed_with_their_reason(tmp_path: Path) -> None:
    launch = FakeLaunch(lambda job: "killed by SIGKILL" if "b-" in job.name else 60.0)
    runs = [combination(loss) for loss in "ab"]
    html, markdown = written(tmp_path, play(runs, tmp_path, Notes(), launch))
    for page in (html, markdown):
        assert "1 of 2 runs finished, 1 failed" in page
        assert "Failed runs" in page
        assert "killed by SIGKILL" in page
        assert "not ranked, no finished run: b" in page


def test_experiments_left_out_and_missing_competitors_ranked_last_are_said(tmp_path: Path) -> None:
    launch = FakeLaunch(lambda job: "died" if job.name == "b-none-net-32-s0" else 60.0)
    runs = [combination(loss, dim=dim) for dim in (16, 32) for loss in "ab"]
    ledger = play(runs, tmp_path, Notes(), launch)
    assert "left out of the ranking: net, 32-d, which lacks b" in written(tmp_path, ledger)[1]
    page = written(tmp_path, ledger, missing="last")[1]
    assert "a competitor that an experiment lacks is ranked last in it" in page
    assert "| b | 1.5 | 2 | 3.5 | 1.75 | 0.35 |" in page


def test_a_tournament_that_cannot_be_ranked_yet_says_so(tmp_path: Path) -> None:
    runs = [combination(loss, dim=dim) for dim in (16, 32) for loss in "ab"]
    launch = FakeLaunch(lambda job: 60.0 if (job.name[0] == "a") == (job.model.dim == 16) else "x")
    assert "there is no ranking" in written(tmp_path, play(runs, tmp_path, Notes(), launch))[1]
    empty = Ledger(tmp_path / "empty", runs)
    html, markdown = written(tmp_path / "empty", empty)
    assert "0 of 4 runs finished" in markdown
    parsed(html)


def stamped(*protocols: dict[str, object]) -> str:
    runs = [combination("a", seed=n, protocol=p) for n, p in enumerate(protocols)]
    return "\n".join(protocol_lines([finished(run, 50.0) for run in runs]))


def test_the_page_says_how_epochs_were_chosen() -> None:
    last: dict[str, object] = {}
    held = {"choose_by": "validation", "validation_fraction": 0.1}
    by_test = {"choose_by": "test"}
    assert "last epoch; nothing was chosen by test" in stamped(last)
    assert "best R@1 on validation classes" in stamped(held)
    assert "10% of the train classes were held out" in stamped(held)
    assert "CHOSEN BY TEST" in stamped(by_test)
    assert "CHOSEN BY TEST" not in stamped(last, held)
    assert "MIXED" in stamped(last, by_test)
    assert "MIXED" not in stamped(last, last)
    assert "seeds 0, 1; epochs 30; batch 90" in stamped(last, last)
    assert protocol_lines([]) == ()


def test_bars_are_as_long_as_their_values() -> None:
    chart = ElementTree.fromstring(bar_chart("t", [Bar("a", 40.0), Bar("b", 20.0)], file=True))
    widths = [
        float(rect.attrib["width"]) for rect in chart.iter("{http://www.w3.org/2000/svg}rect")
    ]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert "20.00 ± 5.00" in bar_chart("t", [Bar("a", 20.0, 5.0)])
    assert bar_chart("t", [Bar("a", 0.0)]).count("<rect") == 1


def test_jobs_may_be_named_by_any_grid(tmp_path: Path) -> None:
    def fine(job: Job) -> float:
        return 60.0

    ledger = play([combination("a", backbone="timm-vit_s.14")], tmp_path, Notes(), FakeLaunch(fine))
    written(tmp_path, ledger)
    assert (tmp_path / "charts" / "r1-timm-vit_s.14-64-d.svg").exists()
