"""The commands search and show: every kind of question, and what cannot be asked."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from kinlens.commands.__main__ import app
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.preprocess import WHOLE, windows
from kinlens.embedder.sources.names import printable
from kinlens.quality.calibration import GalleryCalibration
from kinlens.quality.calibrator import Calibrator
from tests.indexer.conftest import PHOTOS, failure, printed, query, usage
from tests.support.detectors import bright_photo, with_detector
from tests.support.market import CALIBRATION
from tests.tiny import photo


def found(result: Result, query: int = 0) -> list[str]:
    return [hit["key"] for hit in printed(result)["hits"][query]]


@pytest.fixture
def vectors(shop, tmp_path, embedder) -> Path:
    """The vectors of f.gif and cup/a.png in a file."""
    file = tmp_path / "queries.npy"
    np.save(file, np.concatenate([query(embedder, shop / n) for n in ("f.gif", "cup/a.png")]))
    return file


def test_an_image_finds_itself_first(run, built, shop) -> None:
    ask = ("search", built, "--image", shop / "f.gif", "--bundle", "b")
    [first, *_] = run(*ask, "-k", "2").stdout.splitlines()
    assert first == "1.0000  f.gif"
    answer = printed(run(*ask, "-k", "3", "--json"))
    [hits] = answer["hits"]
    assert (len(hits), hits[0]["key"], hits[0]["attributes"]) == (3, "f.gif", {})
    assert answer["gallery"] == "gallery"
    assert {*hits[0]} == {"id", "key", "score", "attributes", "has_image"}


def test_a_calibrated_gallery_says_how_likely_each_answer_is_right(
    run, built, shop, embedder, monkeypatch
) -> None:
    ask = ("search", built, "--image", shop / "f.gif", "--bundle", "b", "-k", "2")
    assert printed(run(*ask, "--json"))["probabilities"] is None
    known = GalleryCalibration(
        items=6, last=6, product="class", products=3, labelled=6, even=1, gallery="few"
    )
    monkeypatch.setattr(Calibrator, "stored", lambda _: known)
    curve = CALIBRATION.model_copy(
        update={"curves": (CALIBRATION.curves[0].model_copy(update={"products": 3}),)}
    )
    monkeypatch.setattr(embedder, "calibration", curve)
    answer = printed(run(*ask, "--json"))
    [likely] = answer["probabilities"]
    assert sum(likely) + answer["no_match_probability"] == pytest.approx(1)
    [line, _, last] = run(*ask).stdout.splitlines()
    assert line.split("  ")[1].strip() == f"{100 * likely[0]:.0f} %"
    assert last == f"None of these: {100 * answer['no_match_probability']:.0f} %"
    surer = printed(run(*ask, "--json", "--no-match-prior", "0"))["no_match_probability"]
    assert surer < answer["no_match_probability"]


def test_vectors_of_a_file_are_answered_one_by_one(run, built, vectors) -> None:
    lines = run("search", built, "--vector", vectors, "-k", "1").stdout.splitlines()
    assert lines == ["Query 0:", "1.0000  f.gif", "Query 1:", "1.0000  cup/a.png  class=cup"]


def test_the_search_command_passes_on_its_options(run, built, shop, vectors) -> None:
    ask = ("search", built, "--vector", vectors, "--json")
    assert found(run(*ask, "-k", "1"), 1) == ["cup/a.png"]
    assert sorted(found(run(*ask, "--where", "class = 'cup'"))) == ["cup/a.png", "cup/b.jpg"]
    assert found(run(*ask, "--min-score", "0.999")) == ["f.gif"]
    assert found(run(*ask, "--exact")) == found(run(*ask, "--effort", "5"))
    everything = found(run(*ask, "-k", "1000"))
    assert sorted(everything) == sorted(PHOTOS)
    assert found(run(*ask, "-k", "2", "--offset", "2")) == everything[2:4]
    mixed = found(run(*ask, "--diversity", "1"))
    assert (mixed[0], sorted(mixed)) == (everything[0], sorted(everything))
    assert mixed != everything
    for key, price in (("cup/b.jpg", 5), ("f.gif", 1)):
        assert run("update", built, key, "--set", f"price:number={price}").exit_code == 0
    ranked = [found(run(*ask, "--boost", f"price:{weight}")) for weight in ("0.2", "-0.2")]
    assert ranked[0].index("cup/b.jpg") <= ranked[1].index("cup/b.jpg")
    assert ranked[1][0] == "f.gif"
    assert "Write price:-0.1" in failure(run(*ask, "--boost", "price"))
    assert "from -0.2 to 0.2" in failure(run(*ask, "--boost", "price:1"))
    (shop / "copy.gif").write_bytes((shop / "f.gif").read_bytes())
    assert run("add", built, shop, "--bundle", "b").exit_code == 0
    assert found(run(*ask, "-k", "2")) == ["f.gif", "copy.gif"]
    assert "copy.gif" not in found(run(*ask, "-k", "2", "--distinct"))


def test_the_boxes_of_a_detector_are_the_parts_of_a_busy_photo(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    image, bundle = tmp_path / "busy.png", with_detector(tiny_bundle, tmp_path / "bundle")
    image.write_bytes(bright_photo((1, 1)))
    ask = ["search", str(tiny_gallery), "--image", str(image), "--crop", "auto", "--json"]
    with_boxes = CliRunner().invoke(app, [*ask, "--bundle", str(bundle.path)])
    without = CliRunner().invoke(app, [*ask, "--bundle", str(tiny_bundle.path)])
    [crops], [others] = printed(with_boxes)["crops"], printed(without)["crops"]
    assert {str(crop) for crop in crops} <= {"None", "[0.2375, 0.475, 0.275, 0.525]"}
    assert len({str(crop) for crop in others} - {"None"}) > 1
    failing = with_detector(tiny_bundle, tmp_path / "failing", fails_above=0.05)
    windows_alone = CliRunner().invoke(app, [*ask, "--bundle", str(failing.path)])
    assert printed(windows_alone)["hits"] == printed(without)["hits"]


def test_a_busy_photo_is_searched_by_parts_that_are_named(run, built, shop, tmp_path) -> None:
    scene = photo(40, (288, 216))
    with Image.open(shop / "cup" / "a.png") as product:
        scene.paste(product.convert("RGB").resize((192, 144)), (96, 72))
    scene.save(tmp_path / "scene.png")
    ask = ("search", built, "--image", tmp_path / "scene.png", "--bundle", "b")
    alone: dict[str, dict[str, float]] = {}
    for box in windows():
        crop = ",".join(map(str, box or WHOLE))
        [hits] = printed(run(*ask, "--crop", crop, "--json"))["hits"]
        alone[crop] = {hit["key"]: hit["score"] for hit in hits}
    [whole] = printed(run(*ask, "--json"))["hits"]
    assert {hit["key"]: hit["score"] for hit in whole} == alone[",".join(map(str, WHOLE))]

    answer = printed(run(*ask, "--crop", "auto", "--facets", "class", "--json"))
    [hits], [crops] = answer["hits"], answer["crops"]
    best = {key: max(scores[key] for scores in alone.values()) for key in PHOTOS}
    assert {hit["key"]: hit["score"] for hit in hits} == pytest.approx(best, abs=1e-6)
    assert hits == sorted(hits, key=lambda hit: -hit["score"])
    for hit, crop in zip(hits, crops, strict=True):  # null is the whole image
        found_by = ",".join(map(str, crop or WHOLE))
        assert alone[found_by][hit["key"]] == pytest.approx(hit["score"], abs=1e-6)
    assert (hits[0]["key"], crops[0]) == ("cup/a.png", pytest.approx([1 / 3, 1 / 3, 2 / 3, 2 / 3]))
    assert answer["facets"][0]["class"]["missing"] == 1

    auto = (*ask, "--crop", "auto")
    [second] = printed(run(*auto, "-k", "1", "--offset", "1", "--json"))["hits"]
    assert second == hits[1:2]
    line, *_ = run(*auto, "-k", "1").stdout.splitlines()
    assert line == f"{hits[0]['score']:.4f}  cup/a.png  (crop 0.333,0.333,0.667,0.667)  class=cup"
    grouped = printed(run(*auto, "--group-by", "class", "--json"))
    [groups] = grouped["groups"]
    assert groups[0]["value"] == "cup"
    assert grouped["crops"][0][0] == crops[0]
    assert len(groups) == len(grouped["crops"][0]) == 3
    [line, *_] = run(*auto, "--group-by", "class").stdout.splitlines()
    assert line.endswith("  cup  (crop 0.333,0.333,0.667,0.667)")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--image f.gif --crop car", "neither auto nor left,top,width,height"),
        ("--like f.gif --crop auto", "--crop needs --image"),
        ("--image f.gif --crop auto --distinct", "--crop auto searches with each"),
        ("--image f.gif --crop auto --near 0.9", "--crop auto searches with each"),
        ("--image f.gif --crop auto --boost price:0.1", "--crop auto searches with each"),
    ],
)
def test_crops_that_cannot_be_searched_are_wrong_usage(run, built, options, message) -> None:
    bundle = ["--bundle", "b"] if "--image" in options else []
    assert message in usage(run("search", built, *options.split(), *bundle))


def test_a_crop_beyond_the_image_is_refused(run, built, shop) -> None:
    ask = ("search", built, "--image", shop / "f.gif", "--bundle", "b", "--crop", "0.5,0,0.6,1")
    assert "crop = 0.5,0,0.6,1 extends beyond the image" in failure(run(*ask))


def test_liked_items_are_not_in_their_own_answer(run, built) -> None:
    keys = found(run("search", built, "--like", "f.gif", "--json"))
    assert sorted(keys) == sorted(set(PHOTOS) - {"f.gif"})
    mixed = ("search", built, "--like", "f.gif", "--unlike", keys[0], "--json")
    assert sorted(found(run(*mixed))) == sorted(set(PHOTOS) - {"f.gif", keys[0]})
    [groups] = printed(run(*mixed, "--group-by", "class", "--group-size", "9"))["groups"]
    grouped = [hit["key"] for group in groups for hit in group["hits"]]
    assert sorted(grouped) == sorted(set(PHOTOS) - {"f.gif", keys[0]})


def test_groups_are_shown_with_their_items(run, built, shop) -> None:
    ask = ("search", built, "--image", shop / "cup" / "a.png", "--bundle", "b")
    options = ("--group-by", "class", "--group-size", "2", "-k", "3")
    [groups] = printed(run(*ask, *options, "--json"))["groups"]
    assert sorted(str(group["value"]) for group in groups) == ["None", "cup", "hat"]
    [cup] = [group for group in groups if group["value"] == "cup"]
    assert [hit["key"] for hit in cup["hits"]] == ["cup/a.png", "cup/b.jpg"]
    lines = run(*ask, *options).stdout.splitlines()
    assert len([line for line in lines if not line.startswith(" ")]) == 3
    assert any(line.endswith("  (no value)") for line in lines)


@pytest.mark.parametrize(
    ("option", "name", "message"),
    [
        ("--vector", "short.npy", "dimension 32"),
        ("--vector", "none.npy", "contains no vectors: its shape is (0, 32)"),
        ("--vector", "many.npz", "is an archive of arrays (.npz)"),
        ("--vector", "gone.npy", "Cannot read the vectors in"),
        ("--image", "text.jpg", "The image"),
        ("--image", "gone.jpg", "gone.jpg does not exist"),
        ("--image", "text.jpg/inner.jpg", "inner.jpg does not exist"),
        ("--image", "album.jpg", "album.jpg is a folder"),
        ("--image", "\udcff.jpg", r"\xff.jpg does not exist"),
    ],
)
def test_a_file_without_usable_vectors_or_image_is_refused_by_name(
    run, built, tmp_path, option: str, name: str, message: str
) -> None:
    np.save(tmp_path / "short.npy", np.ones((1, 5), np.float32))
    np.save(tmp_path / "none.npy", np.zeros((0, 32), np.float32))
    np.savez(tmp_path / "many.npz", a=np.ones(3))
    (tmp_path / "text.jpg").write_text("not an image")
    (tmp_path / "album.jpg").mkdir()
    bundle = ["--bundle", "b"] if option == "--image" else []
    line = failure(run("search", built, option, tmp_path / name, *bundle))
    assert message in line
    assert printable(name) in line or name == "short.npy"


def test_an_empty_result_is_said_and_exits_with_1(run, built, vectors) -> None:
    ask = ("search", built, "--like", "f.gif", "--min-score", "1")
    commands = (
        (*ask, "--where", "class = 'cup'"),
        (*ask, "--group-by", "class"),
        ("search", built, "--vector", vectors, "--offset", "100"),
        ("golden", "list", built),
        ("golden", "runs", built),
        ("duplicates", built, "--min-score", "1"),
    )
    for command in commands:
        failure(run(*command))
        answer = printed(run(*command, "--json"), 1)
        lists = ("hits", "groups", "queries", "runs")
        assert not any(part for name in lists for part in answer.get(name) or ())
    some = ("search", built, "--vector", vectors, "--min-score", "0.999", "--where", "class='cup'")
    assert run(*some).exit_code == 0  # one of the two queries has a result


def test_an_item_is_shown_with_all_that_is_known(run, built) -> None:
    lines = run("show", built, "cup/a.png").stdout.splitlines()
    assert "key        cup/a.png" in lines
    assert "attributes class=cup" in lines
    shown = printed(run("show", built, "cup/a.png", "--json"))
    assert (shown["key"], shown["format"], len(shown["sha256"])) == ("cup/a.png", "PNG", 64)
    assert "no item with the key 'gone'" in failure(run("show", built, "gone"))


def test_the_values_of_attributes_are_counted_over_all_that_fits(run, built, shop, vectors) -> None:
    ask = ("search", built, "-k", "1", "--facets", "class")
    counts = {"hat": 3, "cup": 2}
    answer = printed(run(*ask, "--vector", vectors, "--json"))
    expected = [{"value": value, "count": count} for value, count in counts.items()]
    assert answer["facets"] == [{"class": {"values": expected, "other": 0, "missing": 1}}] * 2
    lines = run(*ask, "--image", shop / "f.gif", "--bundle", "b").stdout.splitlines()
    assert lines == ["1.0000  f.gif", "class: hat (3), cup (2), missing (1)"]
    [*_, last] = run(*ask, "--like", "f.gif", "--where", "class = 'cup'").stdout.splitlines()
    assert last == "class: cup (2)"


def test_two_images_are_drawn_with_the_regions_where_they_match(
    run, shop, embedder, tmp_path
) -> None:
    pair = (shop / "f.gif", shop / "cup" / "a.png")
    answer = printed(run("explain", *pair, "--bundle", "b", "--out", tmp_path / "m.png", "--json"))
    score = float(query(embedder, pair[0])[0] @ query(embedder, pair[1])[0])
    for found in (answer["score"], np.sum(answer["query"]), np.sum(answer["hit"])):
        assert found == pytest.approx(score, abs=1e-3)
    with Image.open(tmp_path / "m.png") as sheet:
        assert sheet.size == (960, 480)
    ask = ("explain", *pair, "--bundle", "b", "--out")
    assert run(*ask, tmp_path / "n.png").stdout.startswith(f"{score:.4f}  ")
    assert "Pass a .png" in failure(run(*ask, tmp_path / "m.txt"))
