"""Boxes of a detector: alone, and as the parts of `crops` = auto."""

import base64
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kinlens.client import Client
from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.views.boxes import MOST_BOXES
from kinlens.service import app as service_app
from tests.support.detectors import bright_photo, with_detector
from tests.support.seams import ForkServer, Workers
from tests.support.servers import DEFAULTS, Running, create_app, run, settings_of, workers_of
from tests.support.shops import assert_problem

PHOTO = bright_photo((1, 1), (3, 0))
CROPS = [[0.7375, 0.0, 0.2625, 0.525], [0.2375, 0.475, 0.275, 0.525]]
BUSY = bright_photo(*[(x, y) for x in range(4) for y in range(2)])

Start = Callable[..., Running]


@pytest.fixture
def start(
    tiny_bundle: Bundle, tiny_settings: dict[str, Any], tmp_path: Path
) -> Iterator[Callable[..., Running]]:
    """Serve the gallery of the tiny bundle with a copy that has a detector."""
    running: list[Running] = []

    def started(*, settings: dict[str, Any] | None = None, **more: Any) -> Running:
        bundle = with_detector(tiny_bundle, tmp_path / f"bundle{len(running)}", **more)
        own = DEFAULTS | tiny_settings | {"bundle": bundle.path} | (settings or {})
        running.append(run(create_app(settings_of(**own))))
        return running[-1]

    yield started
    for service in running:
        service.close()


@pytest.fixture(scope="module")
def served(
    tiny_bundle: Bundle, tiny_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """The same, once for all tests that only ask."""
    bundle = with_detector(tiny_bundle, tmp_path_factory.mktemp("served") / "bundle")
    own = DEFAULTS | tiny_settings | {"bundle": bundle.path}
    with closing(run(create_app(settings_of(**own)))) as service:
        yield service


def boxes_of(service: Running, data: bytes) -> Any:
    answer = service.client.post("/boxes", files={"image": ("a.png", data)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def sorted_crops(boxes: Any) -> list[list[float]]:
    return sorted((one["box"] for one in boxes), reverse=True)


def auto(service: Running, data: bytes, **more: Any) -> Any:
    answer = service.search(data, crop="auto", **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_boxes_are_crops_with_score_and_label(start: Start, tiny_bundle: Bundle) -> None:
    service = start()
    found = boxes_of(service, PHOTO)
    assert found.keys() == {"boxes", "bundle_id", "gallery"}
    assert (found["bundle_id"], found["gallery"]) == (tiny_bundle.bundle_id, "shop")
    assert sorted_crops(found["boxes"]) == CROPS
    assert {one["label"] for one in found["boxes"]} == {"thing"}
    assert all(0.5 <= one["score"] <= 1 for one in found["boxes"])
    [listed] = service.client.get("/galleries").json()["galleries"]
    assert listed["has_boxes"] is True
    assert service.client.get("/galleries/shop").json()["has_boxes"] is True
    text = base64.b64encode(PHOTO).decode()
    sent = [
        service.client.post("/boxes", json={"images": [{"data": text}], "gallery": "shop"}),
        service.client.post(
            "/boxes?gallery=shop", content=PHOTO, headers={"Content-Type": "image/png"}
        ),
        service.client.post("/boxes", files={"image": ("a.png", PHOTO)}, data={"gallery": "shop"}),
    ]
    assert [one.json() for one in sent] == [found] * 3
    with Client(service.url) as client:
        answer = client.boxes(PHOTO, gallery="shop")
        assert sorted([list(one.box) for one in answer.boxes], reverse=True) == CROPS
        hits = client.search(PHOTO, crops=[one.box for one in answer.boxes]).hits
        assert hits
    assert boxes_of(service, bright_photo())["boxes"] == []
    assert service.metric("kinlens_cache_lookups_total", kind="boxes", level="miss") == 2


def test_a_bundle_without_a_detector_names_the_cure(tiny_settings: dict[str, Any]) -> None:
    with closing(run(create_app(settings_of(**DEFAULTS | tiny_settings)))) as service:
        answer = service.client.post("/boxes", files={"image": ("a.png", PHOTO)})
        problem = assert_problem(answer, 422, "invalid-parameter")
        assert "has no detector. Attach one with kinlens-train attach" in problem["detail"]
        assert service.client.get("/galleries/shop").json()["has_boxes"] is False
        crops = [hit["view"]["crop"] for hit in auto(service, PHOTO)["hits"]]
        assert all(crop is None or crop[2] == pytest.approx(2 / 3) for crop in crops)


@pytest.mark.parametrize(
    ("fields", "files", "named"),
    [
        ({}, [], "image"),
        ({}, [PHOTO, PHOTO], "image"),
        ({"k": "5"}, [PHOTO], "k"),
        ({"crop": "0,0,1,1"}, [PHOTO], "crop"),
    ],
)
def test_other_fields_are_refused(
    served: Running, fields: Any, files: list[bytes], named: str
) -> None:
    sent: Any = [("image", ("a.png", data)) for data in files] or [("gallery", (None, "shop"))]
    answer = served.client.post("/boxes", files=sent, data=fields)
    problem = assert_problem(answer, 422, "invalid-parameter")
    assert named in str(problem["errors"])


def test_a_damaged_image_is_refused_and_the_worker_stays(served: Running) -> None:
    pids = workers_of(served).pids
    for data, status in ((b"", 400), (b"no image", 415), (PHOTO[:60], 422)):
        answer = served.client.post("/boxes", content=data, headers={"Content-Type": "image/png"})
        assert answer.status_code == status
        assert served.search(data, crop="auto").status_code == status
    assert boxes_of(served, PHOTO)["boxes"]
    assert workers_of(served).pids == pids
    missing = served.client.post("/boxes", files={"image": PHOTO}, data={"gallery": "none"})
    assert_problem(missing, 404, "unknown-gallery")


def test_boxes_replace_the_windows_of_a_search(served: Running) -> None:
    found = auto(served, PHOTO, k=12)
    by_hand = served.client.post(
        "/search",
        files={"image": ("a.png", PHOTO)},
        data={"crop": ["0,0,1,1", *(",".join(map(str, crop)) for crop in CROPS)]}
        | {"combine": "best", "k": "12"},
    ).json()
    expected = [(hit["key"], hit["score"], hit["view"]["crop"]) for hit in by_hand["hits"]]
    whole = [0.0, 0.0, 1.0, 1.0]
    crops = [hit["view"]["crop"] or whole for hit in found["hits"]]
    assert [(hit["key"], hit["score"]) for hit in found["hits"]] == [one[:2] for one in expected]
    assert crops == [one[2] for one in expected]
    assert {tuple(crop) for crop in crops} <= {tuple(crop) for crop in [whole, *CROPS]}
    again = auto(served, PHOTO, k=12)
    assert (again["cached"], again["hits"]) == (True, found["hits"])
    files = [("image", ("a.png", PHOTO)), ("image", ("b.png", BUSY))]
    batch = served.client.post("/search/batch", files=files, data={"crop": "auto", "k": "12"})
    first, second = batch.json()["answers"]
    assert first["answer"]["hits"] == found["hits"]
    assert second["answer"]["hits"] == auto(served, BUSY, k=12)["hits"]


def test_a_search_decodes_once_and_costs_what_the_windows_cost(start: Start) -> None:
    state = {"rate_limit_per_address": "5/minute"}
    service = start(settings=state)
    orders: list[Any] = []
    workers = workers_of(service)
    find, embed = workers.find, workers.embed
    workers.find = lambda *sent: orders.append("find") or find(*sent)  # type: ignore[method-assign]
    workers.embed = lambda *sent: orders.append("embed") or embed(*sent)  # type: ignore[method-assign]
    busy = auto(service, BUSY)
    assert orders == ["find"]
    assert len({str(hit["view"]["crop"]) for hit in busy["hits"]}) <= 5
    assert_problem(service.search(BUSY), 429, "rate-limited")


def test_without_a_cache_the_image_is_still_decoded_once(start: Start) -> None:
    service = start(settings={"cache_max_bytes": 0})
    workers = workers_of(service)
    workers.embed = None  # type: ignore[assignment,method-assign]
    assert auto(service, PHOTO)["hits"]
    assert auto(service, PHOTO)["cached"] is False


@pytest.mark.parametrize(
    "more",
    [
        {"times": 0.0},
        {"plus": float("nan")},
        {"moved": 1e6},
        {"moved": float("nan")},
    ],
)
def test_a_detector_that_finds_nothing_leaves_the_whole_photo(start: Start, more: Any) -> None:
    service = start(**more)
    assert boxes_of(service, PHOTO)["boxes"] == []
    hits = auto(service, PHOTO)["hits"]
    plain = service.search(PHOTO).json()["hits"]
    assert [(hit["key"], hit["score"]) for hit in hits] == [
        (hit["key"], hit["score"]) for hit in plain
    ]
    assert {hit["view"]["crop"] for hit in hits} == {None}


def test_a_photo_on_which_the_detector_fails_is_searched_with_windows(
    start: Start, tiny_settings: dict[str, Any]
) -> None:
    service = start(fails_above=0.4)
    pids = workers_of(service).pids
    refused = service.client.post("/boxes", files={"image": ("a.png", BUSY)})
    assert "detector" in assert_problem(refused, 422, "unusable-image")["detail"]
    failed = auto(service, BUSY, k=12)
    with closing(run(create_app(settings_of(**DEFAULTS | tiny_settings)))) as without:
        assert failed["hits"] == auto(without, BUSY, k=12)["hits"]
    files = [("image", ("a.png", PHOTO)), ("image", ("b.png", BUSY))]
    batch = service.client.post("/search/batch", files=files, data={"crop": "auto", "k": "12"})
    first, second = batch.json()["answers"]
    crops = [hit["view"]["crop"] for hit in first["answer"]["hits"]]
    assert all(crop is None or crop in CROPS for crop in crops)
    assert second["answer"]["hits"] == failed["hits"]
    assert {*pids} <= {*workers_of(service).pids}
    assert workers_of(service).restarts == 0


def test_ten_thousand_boxes_are_a_few(start: Start) -> None:
    service = start(copies=625, plus=1.0)
    boxes = boxes_of(service, BUSY)["boxes"]
    assert len(boxes) == 8, "near copies are dropped"
    assert len(boxes) <= MOST_BOXES
    assert auto(service, BUSY)["hits"]


def test_two_photos_have_their_own_boxes(served: Running) -> None:
    texts = [base64.b64encode(data).decode() for data in (PHOTO, bright_photo((0, 0)), PHOTO)]
    images = [{"data": text, "crops": "auto"} for text in texts[:2]]
    images.append({"data": texts[2], "crops": [[0.0, 0.0, 0.5, 0.5]]})
    hits = served.client.post("/search", json={"images": images, "k": 12}).json()["hits"]
    allowed = {
        1: [None, *CROPS],
        2: [None, [0.0, 0.0, 0.2625, 0.525]],
        3: [[0.0, 0.0, 0.5, 0.5]],
    }
    assert hits
    for hit in hits:
        assert hit["view"]["crop"] in allowed[hit["view"]["image"]]
    images[1]["data"] = base64.b64encode(b"no image").decode()
    answer = served.client.post("/search", json={"images": images})
    assert "Image 2: " in assert_problem(answer, 415, "unsupported-format")["detail"]


@pytest.mark.parametrize("are_given", [True, False])
def test_a_model_in_the_process_of_the_service_gets_boxes_from_its_workers(
    served: Running,
    tiny_bundle: Bundle,
    tiny_settings: dict[str, Any],
    tmp_path: Path,
    are_given: bool,
) -> None:
    """As a model on a GPU does; those that the service starts open the detector of the model."""
    expected = auto(served, PHOTO, k=12)["hits"]
    bundle = with_detector(tiny_bundle, tmp_path / "bundle")
    workers = Workers(ForkServer(1024, 30.0, bundle), 30.0, 4) if are_given else None
    if workers is not None:
        workers.start()
    settings = settings_of(**DEFAULTS | tiny_settings)
    app = service_app.create_app(settings, OnnxEmbedder.open(bundle), workers=workers)
    with closing(run(app)) as service:
        hits = auto(service, PHOTO, k=12)["hits"]
        assert sorted_crops(boxes_of(service, PHOTO)["boxes"]) == CROPS
    assert [(hit["key"], hit["view"]) for hit in hits] == [
        (hit["key"], hit["view"]) for hit in expected
    ]


def test_galleries_of_the_bundle_without_the_detector_are_served(
    served: Running, tiny_bundle: Bundle, tiny_settings: dict[str, Any], tmp_path: Path
) -> None:
    state = tmp_path / "state"
    copy = with_detector(tiny_bundle, tmp_path / "copy")
    shutil.copytree(copy.path, state / "bundles" / "copy")
    with closing(run(create_app(settings_of(**DEFAULTS | tiny_settings, state=state)))) as service:
        [listed] = service.client.get("/galleries").json()["galleries"]
        assert listed["has_boxes"] is False, "the bundle of the settings comes first"
        plain = service.search(PHOTO).json()
    assert served.search(PHOTO).json()["hits"] == plain["hits"]
    assert served.client.get("/galleries").json()["bundle_id"] == plain["bundle_id"]
