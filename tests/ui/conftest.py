"""Fixtures of a real Chromium."""

from tests.support.page_browser import (
    browser,
    fake_shop,
    open_shop,
    shop_page,
    shop_server,
)

__all__ = ["browser", "fake_shop", "open_shop", "shop_page", "shop_server"]
