"""kinlens.plot: what is drawn of evaluations, galleries and vectors."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import FilterError, InvalidParameterError
from kinlens.golden import wilson
from kinlens.training.library.measure import Figures
from tests.tiny import TINY_DIM, encoded, photo

PRODUCTS, VIEWS = 20, 4


@pytest.fixture(autouse=True)
def plt() -> Iterator[Any]:
    from matplotlib import pyplot  # here, since its import takes half a second

    pyplot.switch_backend("agg")
    yield pyplot
    pyplot.close("all")


@pytest.fixture(scope="module")
def gallery(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> kinlens.Gallery:
    """20 products of 4 vectors each, some near each other, and an image of the first view."""
    bundle = kinlens.load_bundle(tiny_bundle.path)
    made = kinlens.create_gallery(tmp_path_factory.mktemp("plots") / "g", bundle=bundle)
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((PRODUCTS, TINY_DIM))
    centres[1::2] = centres[::2] + 0.2 * rng.standard_normal((PRODUCTS // 2, TINY_DIM))
    for n in range(PRODUCTS):
        made.put(f"{n}/0", encoded(photo(n)), {"product": f"p{n}", "price": n})
    rows = centres.repeat(VIEWS, axis=0) + 0.15 * rng.standard_normal((PRODUCTS * VIEWS, TINY_DIM))
    made.put_many(
        [
            kinlens.NewItem(f"{n // VIEWS}/{1 + n % VIEWS}", vector=row, attributes=attributes)
            for n, row in enumerate(rows)
            for attributes in [{"product": f"p{n // VIEWS}"}]
        ]
    )
    return made


def test_recall_is_drawn_in_percent_with_its_interval() -> None:
    measured = Figures({"R@1": 50.0, "R@10": 80.0, "MAP@R": 40.0}, 40)
    axes = kinlens.plot.recall(measured, {"R@1": 60.0, "R@2": 70.0}, labels=["new", "old"])
    new, old = (line.get_xydata().tolist() for line in axes.lines)
    assert (new, old) == ([[1, 50], [10, 80]], [[1, 60], [2, 70]])
    [band] = axes.collections  # a mapping has no number of queries
    low, high = wilson(20, 40)
    sides = [y for x, y in band.get_paths()[0].vertices if x == 1]
    assert (min(sides), max(sides)) == pytest.approx((100 * low, 100 * high))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["new", "old"]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "2", "10"]


def test_recall_of_a_golden_run_is_that_of_its_report(gallery: kinlens.Gallery) -> None:
    for n in range(6):
        gallery.add_golden(encoded(photo(n)), keys=[f"{n}/0"])
    report = gallery.evaluate()
    [line] = kinlens.plot.recall(report).lines
    parts = (report.recall_at_1, report.recall_at_5, report.recall_at_10)
    assert line.get_xdata().tolist() == [1, 5, 10]
    assert line.get_ydata() == pytest.approx([100 * part for part in parts])


@pytest.mark.parametrize("evaluations", [(), ({"MAP@R": 3.0},), (5,)])
def test_what_has_no_recall_is_refused_before_a_figure_is_made(
    plt: Any, evaluations: tuple
) -> None:
    with pytest.raises(InvalidParameterError, match=r"evaluations|no R@K"):
        kinlens.plot.recall(*evaluations)
    assert not plt.get_fignums()


def test_each_label_names_one_curve() -> None:
    with pytest.raises(InvalidParameterError, match="1 evaluations and 2 labels"):
        kinlens.plot.recall({"R@1": 1.0}, labels=["a", "b"])
    with pytest.raises(InvalidParameterError, match="a list with a label for each"):
        kinlens.plot.spectrum(np.eye(3), labels="a")


def test_a_spectrum_has_the_shares_of_the_variance_and_the_effective_rank() -> None:
    rng = np.random.default_rng(0)
    even = np.concatenate([np.eye(4), -np.eye(4)])
    line = np.outer(rng.standard_normal(50), np.ones(4)) + 7
    axes = kinlens.plot.spectrum(even, line.astype(np.float32), labels=["even", "line"])
    first, second = axes.lines
    assert first.get_ydata() == pytest.approx([25.0] * 4)
    assert second.get_ydata()[0] == pytest.approx(100, abs=1e-3)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["even, effective rank 4.0", "line, effective rank 1.0"]


def test_the_spectrum_of_a_gallery_is_that_of_its_vectors(gallery: kinlens.Gallery) -> None:
    own, given = (kinlens.plot.spectrum(x).lines[0] for x in (gallery, gallery.vectors()))
    assert np.array_equal(own.get_xydata(), given.get_xydata())
    assert own.get_ydata().sum() == pytest.approx(100)
    for wrong in (np.ones((5, 3)), np.ones(3), np.ones((1, 3))):
        with pytest.raises(InvalidParameterError, match=r"are equal|must be \(N, D\)"):
            kinlens.plot.spectrum(wrong)


def test_a_calibration_compares_probabilities_with_the_share_that_is_right(
    gallery: kinlens.Gallery, tmp_path: Path
) -> None:
    gallery.calibrate()
    axes = kinlens.plot.calibration(gallery)
    searches, error = axes.get_title().replace(" %", "").split(" searches, calibration error ")
    assert int(searches) == PRODUCTS * (VIEWS + 1)
    points = np.array([bar.lines[0].get_xydata()[0] for bar in axes.containers])
    assert points.shape == (10, 2)
    assert (np.diff(points[:, 0]) >= 0).all()
    right = [
        gallery.search(positives=[item.key], k=1)[0].attributes["product"]
        == item.attributes["product"]
        for item in gallery.each_item()
    ]
    assert points[:, 1].mean() == pytest.approx(100 * np.mean(right))
    assert float(error) == pytest.approx(abs(points[:, 0] - points[:, 1]).mean(), abs=5)
    with (
        kinlens.create_gallery(tmp_path / "plain", dim=3) as plain,
        pytest.raises(InvalidParameterError, match="gives no probabilities"),
    ):
        kinlens.plot.calibration(plain)


def test_a_map_shows_thumbnails_or_colours_and_is_the_same_for_the_same_seed(
    gallery: kinlens.Gallery,
) -> None:
    from matplotlib.offsetbox import AnnotationBbox

    axes = kinlens.plot.map(gallery)
    photos = [one for one in axes.artists if isinstance(one, AnnotationBbox)]
    assert 1 < len(photos) <= PRODUCTS
    [points] = axes.collections
    assert len(points.get_offsets()) == gallery.size
    coloured = kinlens.plot.map(gallery, "product")
    assert not coloured.artists
    [same] = coloured.collections
    assert np.array_equal(same.get_offsets(), points.get_offsets())
    assert len(coloured.get_legend().get_texts()) == PRODUCTS
    buffer = io.BytesIO()
    coloured.figure.savefig(buffer)
    assert len(Image.open(buffer).convert("RGB").getcolors(1 << 20)) > PRODUCTS


def test_a_map_colours_numbers_by_a_bar_and_items_without_one_grey(
    gallery: kinlens.Gallery,
) -> None:
    axes = kinlens.plot.map(gallery, "price", filter="price < 10 or product = 'p3'")
    grey, points = axes.collections
    assert points.get_array().tolist() == [*range(10)]
    assert len(grey.get_offsets()) == VIEWS
    assert axes.figure.axes[1].get_ylabel() == "price"
    assert axes.get_title() == f"{10 + VIEWS} of {gallery.size} items"


def test_a_map_draws_on_given_axes_a_sample_of_a_large_gallery(
    plt: Any, gallery: kinlens.Gallery
) -> None:
    given = plt.figure().subplots()
    assert kinlens.plot.map(gallery, "product", limit=30, ax=given) is given
    assert len(given.collections[0].get_offsets()) == 30
    assert len(plt.get_fignums()) == 1
    with pytest.raises(InvalidParameterError, match="by = 'color' is no attribute"):
        kinlens.plot.map(gallery, "color")
    with pytest.raises(InvalidParameterError, match="needs two items"):
        kinlens.plot.map(gallery, filter='product = "p0" and price = 0')
    with pytest.raises(FilterError):
        kinlens.plot.map(gallery, filter="price <")


def test_without_matplotlib_the_error_names_the_extra_and_the_module_loads_nothing() -> None:
    code = (
        "import sys, kinlens\n"
        "kinlens.plot.recall\n"
        "assert not {'numpy', 'matplotlib', 'sklearn'} & {*sys.modules}\n"
        "sys.modules['matplotlib'] = None\n"
        "kinlens.plot.recall({'R@1': 1.0})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "kinlens.plot.recall needs the package matplotlib" in done.stderr
    assert done.stderr.rstrip().endswith("pip install 'kinlens[plot]'.")
