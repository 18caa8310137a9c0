"""What axe-core finds wrong with a page, and the sizes that a finger needs."""

from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Page, expect

from tests.support.page_browser import FITS

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
RULES = {
    "light": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
    "dark": ["color-contrast"],  # colours are all that the dark page has of its own
}
RUN_AXE = """async (runOnly) => (await axe.run(document, { runOnly })).violations
    .map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" | ")}`)"""
SMALL_TARGETS = """() => [...document.querySelectorAll(
        "button, a[href], select, summary, label.option, input")]
    .filter((node) => node.checkVisibility({ visibilityProperty: true }))
    .filter((node) => !node.matches(".skip, label input"))
    .map((node) => [node, node.getBoundingClientRect()])
    .filter(([, { width, height }]) => width > 1 && (width < 43.5 || height < 43.5))
    .map(([node, { width, height }]) => `${node.outerHTML.slice(0, 80)} ${width} x ${height}`)"""
WIDTHS_PX = (320, 360, 768, 1024, 1920)
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now, in light and in dark colours."""
    found: list[str] = []
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    for scheme, rules in RULES.items():
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("html")).to_have_attribute("data-theme", scheme)
        found += page.evaluate(RUN_AXE, rules)
    page.emulate_media(color_scheme="light")
    return found


def too_wide(page: Page) -> list[int]:
    """The widths at which the page as it is now scrolls sideways."""
    found = []
    for width_px in WIDTHS_PX:
        page.set_viewport_size({"width": width_px, "height": 800})
        if not page.evaluate(FITS):
            found.append(width_px)
    return found
