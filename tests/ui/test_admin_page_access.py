"""Everybody can use the admin page: axe-core, keyboard only, any width, light and dark."""

import pytest
from playwright.sync_api import Page, expect

from tests.support.admin_page import AdminShop, added, drop, job, row, rows
from tests.support.page_browser import PHONE, SMALL_TARGETS, OpenPage, faults, tab_to, violations

pytestmark = pytest.mark.browser

REPORT = {
    "class_attribute": "class",
    "k": 10,
    "queries": 24,
    "judged": 20,
    "old": {"bundle_id": "a" * 64, "items": 24, "recall_at_1": 0.61, "recall_at_k": 0.8},
    "new": {"bundle_id": "b" * 64, "items": 24, "recall_at_1": 0.74, "recall_at_k": 0.9},
    "overlap_at_k": 0.43,
    "gate": {"passed": True, "reason": "recall@1 0.7400 after 0.6100, on 20 queries."},
    "swapped": False,
}


JOBS = [
    job(1, "running"),
    job(2, "succeeded", report=REPORT),
    job(3, "failed", error="Memory ran out. Start it again."),
    job(4, "queued", kind="train"),
]


@pytest.fixture
def open_view(open_admin: OpenPage, shop: AdminShop) -> OpenPage:
    """Opens a view of a gallery of twelve items."""
    shop.stock()

    def open_it(view: str, **settings: object) -> Page:
        page = open_admin(f"/admin?gallery=shop#{view}", **settings)
        expect(page.get_by_test_id("gallery-size")).not_to_be_empty()
        return page

    return open_it


def with_jobs(page: Page) -> None:
    """Jobs in every state, the running one and then the compared one open."""
    page.route("**/jobs?*", lambda route: route.fulfill(json={"jobs": JOBS}))
    text = {"offset": 0, "next_offset": 4, "text": "step\n"}
    end = {"offset": 4, "next_offset": 4, "text": ""}
    page.route("**/log?offset=0", lambda route: route.fulfill(json=text))
    page.route("**/log?offset=4", lambda route: route.fulfill(json=end))
    page.get_by_test_id("to-jobs").click()
    expect(page.get_by_test_id("job")).to_have_count(4)
    page.get_by_test_id("job").first.get_by_role("button").click()
    expect(page.get_by_test_id("job-log")).to_contain_text("step")


def test_no_view_or_dialog_has_a_violation(open_view: OpenPage, shop: AdminShop) -> None:
    page = open_view("items")
    page.get_by_test_id("pick").first.check()
    assert faults(page) == []
    page.get_by_test_id("edit-item").first.click()
    expect(page.get_by_test_id("edit-title")).not_to_be_empty()
    assert violations(page, "dialog[open]") == []
    page.keyboard.press("Escape")
    page.get_by_test_id("bulk-delete").click()
    assert violations(page, "dialog[open]") == []
    page.keyboard.press("Escape")
    page.get_by_test_id("to-add").click()
    drop(page, ("i/00.png", shop.images[0]), (f"{'long-name' * 12}.png", b"no image"))
    page.get_by_test_id("queue-send").click()
    assert len(added(page)) == 2
    assert faults(page) == []
    for view in ("status", "galleries"):
        page.get_by_test_id(f"to-{view}").click()
        expect(page.get_by_test_id(f"to-{view}")).to_have_attribute("aria-current", "page")
        assert faults(page) == []
    page.get_by_test_id("gallery-delete").first.click()
    assert violations(page, "dialog[open]") == []
    page.keyboard.press("Escape")
    with_jobs(page)
    page.get_by_test_id("open-train").locator("summary").first.click()
    assert violations(page) == []
    page.get_by_test_id("job").nth(1).get_by_role("button").click()
    expect(page.get_by_test_id("report-table")).to_be_visible()
    assert faults(page) == []


def test_a_phone_has_large_targets(open_view: OpenPage) -> None:
    page = open_view("items", **PHONE)
    page.get_by_test_id("pick").first.check()
    targets = SMALL_TARGETS.replace("input", "input:not([type=checkbox])", 1)
    assert page.evaluate(targets) == []
    for view in ("add", "status", "galleries", "keys", "audit"):
        page.get_by_test_id(f"to-{view}").tap()
        assert page.evaluate(targets) == []
    with_jobs(page)
    page.get_by_test_id("open-train").locator("summary").first.tap()
    assert page.evaluate(targets) == []


def test_the_keyboard_alone_edits_and_deletes(open_view: OpenPage, shop: AdminShop) -> None:
    page = open_view("items")
    expect(rows(page)).to_have_count(12)
    tab_to(page, "edit-item")
    page.keyboard.press("Enter")
    expect(page.get_by_test_id("edit")).to_be_visible()
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("pink")
    page.keyboard.press("Enter")
    expect(row(page, "i/00.png")).to_contain_text("colour pink")
    tab_to(page, "delete-item")
    page.keyboard.press("Space")
    expect(page.get_by_test_id("confirm")).to_be_visible()
    tab_to(page, "confirm-yes")
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_count(11)
    expect(page.locator("#items-title")).to_be_focused()

    page.get_by_role("link", name="Skip to the content").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    for view in ("add", "status", "jobs", "galleries", "items"):
        page.get_by_test_id(f"to-{view}").click()
    expect(rows(page).first).to_be_visible()
    assert asked
    assert [url for url in asked if not url.startswith((shop.url, "blob:"))] == []
