"""The viewer of the OpenAPI document: it shows every operation and sends requests."""

import pytest
from playwright.sync_api import Page, expect

from tests.support.admin_page import AdminShop
from tests.support.page_browser import OpenPage


@pytest.mark.long
def test_the_docs_show_every_operation_and_try_one(open_admin: OpenPage, shop: AdminShop) -> None:
    """The policy of the pages applies to it, so it loads nothing from another host."""
    page: Page = open_admin("/docs")
    document = page.request.get(f"{shop.url}/openapi.json").json()
    operations = page.locator(".opblock")
    expect(operations).to_have_count(sum(map(len, document["paths"].values())))
    page.locator(".opblock-summary-path[data-path='/live']").click()
    page.get_by_role("button", name="Try it out").click()
    page.get_by_role("button", name="Execute").click()
    expect(page.locator(".live-responses-table .microlight").first).to_contain_text(
        '"status": "live"'
    )
    page.set_viewport_size({"width": 390, "height": 800})
    page.locator(".opblock-summary-path[data-path='/galleries/{name}/items']").first.click()
    expect(page.locator(".responses-table").last).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
