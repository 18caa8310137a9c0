"""Models from Python: adapt, import, attach and teach, with photos as a shop has them."""

import html
import re
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

import kinlens
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import (
    BundleError,
    DatasetError,
    ExportError,
    InvalidParameterError,
    JobError,
)
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.rendered.catalogue import render_view
from kinlens.training import Figures, doctor, evaluate, new, render, tournament
from tests.support.detectors import bright_photo, write_detector
from tests.support.words import COLOURS, SHAPES, write_encoder, write_tokenizer
from tests.tiny import TINY_DIM, write_tiny_onnx
from tests.training.jobs import TINY_TRUNK

HOSTILE = "Äpfel, <b>&grün"
"""A product whose name is read by a file system, a CSV and a page."""
SETTINGS = ("input={size_px=32,resize_px=36}", "model.dim=16", "runtime={workers=0,device='cpu'}")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 10 products of 3 photos; the test runs next to it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = [HOSTILE, *(f"product <i>{number}" for number in range(9))]
    for number, name in enumerate(names):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for view in range(3):
            file = tmp_path / "photos" / name / f"{view}.jpg"
            render_view(number, view, size_px=40).save(file)
    return tmp_path / "photos"


@pytest.fixture
def adapt(weights: Path) -> Callable[..., Any]:
    def adapted(images: Any, out: str | Path, **more: Any) -> Any:
        options = {"backbone": TINY_TRUNK, "weights": weights, "settings": SETTINGS}
        return kinlens.adapt(images, out, **options | more)

    return adapted


def page(shown: Any) -> str:
    """What a notebook shows."""
    html: str = getattr(shown, "_repr_html_")()  # noqa: B009 (the name is one of IPython)
    return html


def pairs(photos: Path) -> list[tuple[Path, str]]:
    return [(path, path.parent.name) for path in sorted(photos.glob("*/*.*"))]


def test_adapt_takes_a_folder_or_a_table(photos: Path, adapt: Callable[..., Any]) -> None:
    listed = pairs(photos)
    table = pd.DataFrame(
        {"path": [str(path) for path, _ in listed], "product": [name for _, name in listed]}
    )
    made = [adapt(source, f"bundles/{n}") for n, source in enumerate(("photos", table))]
    for number, bundle in enumerate(made):
        assert Bundle.open(Path("bundles", str(number))).bundle_id == bundle.bundle_id
        assert bundle.embed_files([listed[0][0]]).shape == (1, bundle.dim)
        figures = bundle.report.figures
        assert (figures["photos"], figures["products"]) == (30, 10)
        assert figures["first_right"] == made[0].report.figures["first_right"]
        assert figures["gain"] in (True, False)
        assert (figures["run"] / "report.md").is_file()
    first, second = str(made[0].report).splitlines()
    assert first.startswith("photos: 30 photos of 10 products; 5 are learnt")
    assert re.match(r"For \d+ of 100 photos of products that were not learnt, the first", second)
    shown = page(made[1])
    assert html.escape(second) in shown
    assert shown.count("data:image/jpeg;base64,") == 4 * 5  # photos, each with its first results
    assert "product &lt;i&gt;" in shown
    assert "<i>" not in shown
    assert "R@" not in shown
    shutil.rmtree(photos)
    assert "does not exist" in page(made[1])


def test_adapt_takes_a_list_and_skips_a_damaged_photo_of_it(
    photos: Path, adapt: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(10):  # at most 5 % may be damaged
        Image.open(photos / HOSTILE / "0.jpg").save(photos / HOSTILE / f"more{number}.png")
    (photos / HOSTILE / "broken ü.jpg").write_bytes(b"no image")
    bundle = adapt(pairs(photos), "bundles/shop")
    assert bundle.report.figures["photos"] == 40
    assert f"1 image(s) are missing or damaged, and skipped: {HOSTILE}/broken ü.jpg" in (
        capsys.readouterr().err
    )


def one_product(photos: Path) -> Any:
    return [(path, "mug") for path, _ in pairs(photos)]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda _: "nowhere", JobError, "nowhere does not exist"),
        (lambda photos: photos.parent / "empty", DatasetError, "empty has no images"),
        (lambda photos: [], JobError, "The list of images is empty"),
        (one_product, DatasetError, r"has 1 class\(es\) to train and test with"),
        (lambda photos: [photos / "a.jpg"], JobError, "is not a pair"),
        (lambda photos: ["a.jpg", "b.jpg"], JobError, r"'a.jpg' is not a pair \(path, class\)"),
        (lambda photos: pd.DataFrame({"file": ["a.jpg"]}), JobError, "must have path and class"),
        (
            lambda photos: [*pairs(photos), *((f"gone{n}.jpg", "a") for n in range(9))],
            DatasetError,
            r"gone0\.jpg: The file is missing",
        ),
    ],
)
def test_adapt_refuses_what_cannot_be_learnt_from(
    photos: Path,
    adapt: Callable[..., Any],
    change: Callable[[Path], Any],
    kind: type[Exception],
    message: str,
) -> None:
    (photos.parent / "empty").mkdir()
    with pytest.raises(kind, match=message):
        adapt(change(photos), "bundles/shop")
    assert not Path("bundles/shop").exists()


def test_adapt_writes_over_nothing(photos: Path, adapt: Callable[..., Any]) -> None:
    Path("bundles/shop").mkdir(parents=True)
    with pytest.raises(BundleError, match="bundles/shop exists already"):
        adapt(photos, "bundles/shop")
    with pytest.raises(InvalidParameterError, match="--bundle has a network"):
        adapt(photos, "bundles/other", bundle="bundles/shop")


def test_a_file_of_others_is_imported_measured_and_adapted(photos: Path, tmp_path: Path) -> None:
    write_tiny_onnx(tmp_path / "tiny.onnx")
    given: dict[str, Any] = {"size": 16, "mean": 0, "std": 1, "scale": 255, "licence": "mit"}
    base = kinlens.import_model("tiny.onnx", "bundles/base", **given, images=photos)
    first, second = base.report.lines()[:2]
    assert first == "tiny: a model of 8 numbers for each photo, licence mit"
    assert re.match(r"For \d+ of 100 photos, the first result is right \(15 photos of 5", second)
    assert "data:image/jpeg" in page(base)
    figures = evaluate("bundles/base", pairs(photos))
    assert isinstance(figures, Figures)
    assert figures.queries == 30
    assert figures.lines()[0].startswith(f"R@1 {figures['R@1']:.1f} (")
    adapted = kinlens.adapt(photos, "bundles/shop", bundle="bundles/base")
    assert adapted.bundle.manifest.licence == "mit"
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"licence": " "}, "--licence is missing"),
        ({"mean": (1, 2)}, "--mean 1,2 must be one number or three"),
        ({"std": 0}, "--std 0 must be above 0"),
        ({"resize": 8}, "--resize 8 is smaller than --size 16"),
        ({"precisions": ["int8"]}, "--precision compares with fp32 on images"),
    )
    for change, message in wrong:
        with pytest.raises(InvalidParameterError, match=message):
            kinlens.import_model("tiny.onnx", "bundles/x", **given | change)
    with pytest.raises(ExportError, match=r"absent\.onnx does not exist"):
        kinlens.import_model("absent.onnx", "bundles/x", **given)


def test_a_detector_is_attached(tiny_bundle: Bundle, tmp_path: Path) -> None:
    file = write_detector(tmp_path / "boxes.onnx")
    out = tmp_path / "out"
    made = kinlens.attach(tiny_bundle.path, out, boxes=file, labels=["nichts", "Schuh"])
    assert made.boxes is not None
    assert made.boxes.labels == ("nichts", "Schuh")
    assert made.bundle_id == tiny_bundle.bundle_id
    assert f"with a detector in {out}" in str(made.report)
    (tmp_path / "photo.png").write_bytes(bright_photo((1, 1)))
    with pytest.raises(ExportError, match=r"photo\.png is not usable.*cannot be loaded"):
        kinlens.attach(tiny_bundle.path, tmp_path / "b", boxes=tmp_path / "photo.png")
    with pytest.raises(ExportError, match=r"The labels .*absent.txt cannot be read"):
        kinlens.attach(tiny_bundle.path, tmp_path / "b", boxes=file, labels=tmp_path / "absent.txt")


def test_words_of_a_catalogue_are_taught(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs kinlens[text]")
    rng = np.random.default_rng(2)
    by_word = {word: rng.standard_normal(TINY_DIM) for word in (*COLOURS, *SHAPES)}
    gallery = Gallery.create(
        tmp_path / "shop", name="shop", bundle_id=tiny_bundle.bundle_id, dim=TINY_DIM
    )
    entries = []
    for colour, shape, view in product(COLOURS, SHAPES, range(4)):
        vector = by_word[colour] + by_word[shape] + 0.1 * rng.standard_normal(TINY_DIM)
        unit = (vector / np.linalg.norm(vector)).astype(np.float32)
        named = {"product": f"{colour}_{shape}", "colour": colour, "kind": shape}
        entries.append(Entry(f"{colour}-{shape}-{view}", unit, attributes=named))
    gallery.add(entries)
    gallery.close()
    files: dict[str, Any] = {
        "text_model": write_encoder(tmp_path / "encoder.onnx"),
        "tokenizer": write_tokenizer(tmp_path / "words.json"),
    }
    words = kinlens.teach_words(tiny_bundle.path, tmp_path / "shop", tmp_path / "out", **files)
    assert words.report.figures["held_out"].keys() == {"photos", "products", "titles"}
    assert words.embed_texts(["white lamp"]).shape == (1, TINY_DIM)
    with pytest.raises(DatasetError, match="'name'"):
        kinlens.teach_words(
            tiny_bundle.path, tmp_path / "shop", tmp_path / "b", **files, attributes=["name"]
        )


def test_the_rest_of_a_training_is_called_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    render("products", products=6, views=3, size_px=40)
    report = doctor("products")
    assert report.healthy
    assert "Healthy." in page(report)
    job = new("products", "shop.toml")
    assert (job.name, job.data.root) == ("products", str(tmp_path / "products"))
    Path("grid.toml").write_text('job = "shop.toml"\nseeds = [0, 1]\n')
    assert [run.result for run in tournament("grid.toml", plan=True)] == [None, None]


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path) -> None:
    for name, words in (("tomli_w", r"tomli_w.*kinlens\[cpu,training\]"), ("my_net", "my_net")):
        error = ModuleNotFoundError(f"No module named {name!r}", name=name)
        monkeypatch.setattr("kinlens.library.models.shop_of", raising(error))
        with pytest.raises(ModuleNotFoundError, match=words):
            kinlens.adapt(tmp_path, tmp_path / "out")


def raising(error: Exception) -> Callable[..., None]:
    def call(*_: object) -> None:
        raise error

    return call
