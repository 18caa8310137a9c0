"""The admin page's jobs: started from forms, followed, cancelled, compared, swapped; and status."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from kinlens.embedder.bundle import Bundle
from tests.support.admin_page import fill_row, job, opening
from tests.support.job_shops import JobShop
from tests.support.page_browser import OpenPage, until
from tests.support.servers import Running, create_app, run

pytestmark = pytest.mark.browser

LONG_MS = 60_000


@pytest.fixture(scope="module")
def shop(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_bundle: Callable[..., Bundle],
    tiny_bundle: Bundle,
) -> JobShop:
    """Galleries `shop` and `other`, and a trainer that takes its time."""
    made = JobShop(
        *(tmp_path_factory.mktemp("jobs"), tiny_bundle, make_tiny_bundle(seed=1)),
        search_threads=1,
        request_timeout_ms=60_000,
        feedback="pairs",
        training_weights=("mobilenet=/weights/mobilenet.pth",),
    )
    made.build("other")
    slow = made.trainer(seconds=0.2, epochs=500)
    made.settings = made.settings.model_copy(update={"training_command": slow})
    return made


@pytest.fixture(scope="module")
def served(shop: JobShop) -> Iterator[Running]:
    service = run(create_app(shop.settings))
    yield service
    for active in shop.manager.store.active():
        shop.manager.cancel(active.id)
    service.close()


@pytest.fixture
def open_admin(browser: Browser, served: Running, allowed: list[str]) -> Iterator[OpenPage]:
    store = served.runtime.keys
    assert store is not None
    secret = store.create(f"office-{os.urandom(4).hex()}", ("admin",))
    with opening(browser, served.url, secret, allowed) as open_it:
        yield open_it


@pytest.fixture
def page(open_admin: OpenPage) -> Page:
    """The jobs of the gallery `shop`."""
    page = open_admin("/admin?gallery=shop#jobs")
    expect(page.get_by_test_id("open-train")).to_be_visible()
    return page


def start(page: Page, kind: str, **fields: str) -> None:
    """Open the form of a kind, fill its fields (choose from lists) and send it."""
    form = page.get_by_test_id(f"open-{kind}")
    form.locator("summary").first.click()
    for name, value in fields.items():
        field = form.get_by_test_id(f"field-{name}")
        if field.evaluate("(node) => node.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    form.get_by_test_id(f"start-{kind}").click()


def ended(page: Page, state: str) -> None:
    badge = page.get_by_test_id("job-detail").get_by_test_id("job-state")
    expect(badge).to_have_text(state, timeout=LONG_MS)


def test_the_model_is_compared_first_and_put_in_place_by_hand(page: Page, shop: JobShop) -> None:
    model = page.get_by_test_id("field-bundle_id").locator("option")
    expect(model).to_have_count(1)  # its own is not among them
    expect(model).to_have_text(f"{shop.new.bundle_id[:12]} · 2026-01-01 · tiny")
    start(page, "rebuild", bundle_id=shop.new.bundle_id, swap="never")
    ended(page, "done")
    detail = page.get_by_test_id("job-detail")
    for step in ("embed images", "compare old and new", "good enough: recall@1"):
        expect(detail.get_by_test_id("job-log")).to_contain_text(step)
    expect(detail.get_by_test_id("job-step")).to_contain_text("ready to be put in place")
    expect(detail.get_by_test_id("report-gate")).to_contain_text("Good enough")
    expect(detail.get_by_test_id("report-table")).to_contain_text(shop.new.bundle_id[:12])
    assert shop.bundle_id() == shop.old.bundle_id
    detail.get_by_test_id("job-swap").click()
    expect(detail).to_contain_text("Swap: shop")
    ended(page, "done")
    expect(detail.get_by_test_id("report-swapped")).to_be_visible()
    assert shop.bundle_id() == shop.new.bundle_id


def test_a_training_shows_progress_and_a_log_that_follows_and_is_cancelled(page: Page) -> None:
    form = page.get_by_test_id("open-train")
    expect(form.get_by_test_id("field-job")).to_have_value("shop")
    expect(form.get_by_test_id("field-data").locator("option")).to_have_count(1)
    chosen = {"weights": "mobilenet", "epochs": "3", "max_recall_loss": "2"}
    start(page, "train", **chosen, feedback="yes")
    detail = page.get_by_test_id("job-detail")
    expect(detail.get_by_test_id("job-step")).to_contain_text("epochs", timeout=LONG_MS)
    expect(page.get_by_test_id("to-jobs")).to_contain_text("1 running")
    expect(detail.get_by_test_id("job-log")).to_contain_text("epoch 1: grün", timeout=LONG_MS)
    expect(detail.get_by_test_id("job-log")).to_contain_text("epoch 2: grün", timeout=LONG_MS)
    until(page, "document.querySelector('#job-detail progress').value > 0")
    detail.locator("details summary", has_text="Details").click()
    expect(detail).to_contain_text('{"optimizer.epochs":3,"model.weights":"mobilenet"}')
    expect(detail).to_contain_text('"max_recall_loss":0.02')
    expect(detail).to_contain_text("feedbacktrue")  # a term and its value
    detail.get_by_test_id("job-cancel").click()
    page.get_by_test_id("confirm-yes").click()
    ended(page, "cancelled")
    expect(page.get_by_test_id("to-jobs")).to_have_text("Jobs")
    expect(detail.get_by_test_id("job-resume")).to_be_visible()


def open_job(page: Page, report: dict[str, Any]) -> None:
    """Show a training that has ended with a report, and wrote nothing."""
    listed = job(1, "succeeded", kind="train", done=1000, params={}, report=report)
    log = {"text": "", "next_offset": 0, "size": 0}
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": [listed]}))
    page.route("**/jobs/*/log?*", lambda route: route.fulfill(json=log))
    page.reload()
    page.get_by_test_id("job").get_by_role("button").click()


def side(recall: float) -> dict[str, Any]:
    """A gallery as a comparison reports it."""
    return {"bundle_id": "a" * 64, "items": 349, "recall_at_1": recall, "ms_per_query": 1.0}


REFUSED = {
    "gate": {
        "passed": False,
        "by": "golden",
        "reason": "On the golden set: recall@1 0.3571 after 0.5179: 0.1608 is lost.",
        "note": "",
    },
    "golden": {
        "judged": 56,
        "old_recall_at_1": 0.5179,
        "new_recall_at_1": 0.3571,
        "old": {"map_at_r": 0.41, "no_match_precision": None},
        "new": {"map_at_r": 0.33, "no_match_precision": None},
    },
    "old": side(0.504),
    "new": side(0.573),
    "training": {
        "figures": {"R@1": 64.9},
        "trunk": {"R@1": 71.8},
        "epochs": [2, 2],
        "verdict": "Worse: the model answers worse than the untrained trunk.",
    },
    "swapped": False,
}


def test_a_finished_job_shows_the_figures_that_decided(page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(f"{request.method} {request.url}"))
    open_job(page, REFUSED)
    detail = page.get_by_test_id("job-detail")
    expect(detail.get_by_test_id("job-state")).to_have_text("refused")
    expect(page.get_by_test_id("job").get_by_test_id("job-state")).to_have_text("refused")
    expect(detail.get_by_test_id("job-step")).to_contain_text("The old version stays in place")
    decided = detail.get_by_test_id("report-golden")
    expect(decided).to_be_visible()
    for figure in ("51.79%", "35.71%", "-16.08 points"):
        expect(decided).to_contain_text(figure)
    expect(detail).not_to_contain_text("not measured")
    expect(detail.get_by_test_id("report-table")).to_be_hidden()
    expect(detail.get_by_test_id("report-training")).to_be_hidden()
    detail.get_by_test_id("report-others").locator("summary").click()
    expect(detail.get_by_test_id("report-table")).to_be_visible()
    expect(detail.get_by_test_id("report-gain")).to_contain_text("Worse")
    expect(detail.locator(".job-buttons .primary")).to_have_text("Keep the old version")
    detail.get_by_test_id("job-swap").click()
    page.get_by_test_id("confirm-no").click()
    assert not [line for line in asked if line.startswith("POST")]
    detail.get_by_test_id("job-keep").click()
    expect(detail).to_be_hidden()

    gate = {"passed": None, "by": "items", "note": "", "reason": "This cannot be judged: few."}
    open_job(page, {"gate": gate, "swapped": False})
    expect(detail.get_by_test_id("report-gate")).to_contain_text("you decide")
    expect(detail.get_by_test_id("job-state")).to_have_text("done")

    figures = {"R@1": 200 / 3, "MAP@R": 11.456619, "density": 0.891141}
    training = {"figures": figures, "trunk": {"R@1": 61.0}, "epochs": [2, 2]}
    open_job(page, {"training": training, "swapped": True})
    recall = "on unseen classes: R@1 66.7%, MAP@R 11.5%; before: R@1 61.0%."
    expect(page.get_by_test_id("report-training")).to_have_text(
        f"Trained for 2 of 2 epochs; {recall}"
    )


def test_forms_start_jobs_or_show_what_is_wrong(open_admin: OpenPage, allowed: list[str]) -> None:
    allowed.append("422")
    page = open_admin("/admin?gallery=other#jobs")
    start(page, "compact")
    expect(page.get_by_test_id("job-detail")).to_contain_text("Compact: other")
    ended(page, "done")

    form = page.get_by_test_id("open-train")
    form.locator("summary").first.click()
    form.get_by_text("Further settings").click()
    form.get_by_test_id("attributes-add-row").click()
    fill_row(page, 0, "data.root", "text", "pictures")
    form.get_by_test_id("start-train").click()
    expect(form.get_by_test_id("start-error")).to_contain_text("'data.root' cannot be changed here")
    expect(form.get_by_label("Name")).to_have_value("data.root")


def test_a_new_gallery_gets_a_model_and_the_status_shows_index_and_readiness(
    page: Page, shop: JobShop
) -> None:
    page.get_by_test_id("to-galleries").click()
    form = page.get_by_test_id("gallery-form")
    form.get_by_label("Model").select_option(shop.new.bundle_id)
    page.get_by_test_id("gallery-name").fill("spring")
    page.get_by_test_id("gallery-create").click()
    row = page.get_by_test_id("gallery-row").filter(has_text="spring")
    expect(row).to_contain_text(f"model {shop.new.bundle_id[:12]}")
    page.get_by_test_id("gallery").select_option("shop")

    page.get_by_test_id("to-status").click()
    index = page.get_by_test_id("status-index")
    expect(index).to_contain_text("No compaction needed")
    expect(index).to_contain_text("Recall")
    expect(page.get_by_test_id("status-model")).to_contain_text("CPUExecutionProvider")
    expect(page.get_by_test_id("status-attributes")).to_contain_text("class-0 (4)")
    expect(page.get_by_test_id("status-feedback")).to_contain_text("Marked wrong")
    expect(page.get_by_test_id("status-ready")).to_contain_text("Ready to answer")
