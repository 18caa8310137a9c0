"""A browser, the fake shop with its page, and a real service with both pages, each one a worker."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support import admin_page
from tests.support.admin_page import AdminShop
from tests.support.page_browser import OpenPage, browser, drop_item, opening, served
from tests.support.page_shop import Shop

__all__ = ["browser"]


@pytest.fixture(scope="package")
def shop_server() -> Iterator[tuple[Shop, str]]:
    shop = Shop()
    with served(shop) as url:
        yield shop, url


@pytest.fixture
def fake_shop(shop_server: tuple[Shop, str]) -> Shop:
    """The shop behind `shop_page`, as if new."""
    shop = shop_server[0]
    shop.reset()
    return shop


@pytest.fixture
def allowed() -> list[str]:
    """Errors that a console may log; a test adds those that it causes."""
    return []


@pytest.fixture
def open_shop(
    browser: Browser, fake_shop: Shop, shop_server: tuple[Shop, str], allowed: list[str]
) -> Iterator[OpenPage]:
    """Opens the fake shop's page."""
    with opening(browser, shop_server[1], allowed) as open_it:
        yield open_it


@pytest.fixture
def shop_page(open_shop: OpenPage) -> Page:
    """The start of the fake shop's page."""
    page = open_shop()
    expect(page.get_by_test_id("sample")).to_have_count(8)
    return page


@pytest.fixture
def results(shop_page: Page, fake_shop: Shop) -> Page:
    """The results of the first item's image."""
    drop_item(shop_page, fake_shop, 0)
    return shop_page


@pytest.fixture(scope="package")
def shop(tmp_path_factory: pytest.TempPathFactory, photos: list[bytes]) -> Iterator[AdminShop]:
    """A real service, the same for all tests, which refill its galleries."""
    made = AdminShop(tmp_path_factory.mktemp("state"), photos)
    yield made
    made.shop.close()


@pytest.fixture
def open_admin(browser: Browser, shop: AdminShop, allowed: list[str]) -> Iterator[OpenPage]:
    """Opens the pages of the real service with a key that may do all."""
    with admin_page.opening(browser, shop.url, shop.key, allowed) as open_it:
        yield open_it
