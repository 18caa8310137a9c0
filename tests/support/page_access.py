"""What axe-core finds wrong with a page, and the sizes that a finger needs."""

from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Page

AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
RUN_AXE = """async () => (await axe.run(document, { runOnly: [
    "wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice",
] })).violations.map(({ id, nodes }) => `${id}: ${nodes.map(({ html }) => html).join(" | ")}`)"""
SMALL_TARGETS = """() => [...document.querySelectorAll(
        "button, a[href], select, summary, label.option, input")]
    .filter((node) => node.checkVisibility({ visibilityProperty: true }))
    .filter((node) => !node.matches(".skip, label input"))
    .map((node) => [node, node.getBoundingClientRect()])
    .filter(([, { width, height }]) => width > 1 && (width < 43.5 || height < 43.5))
    .map(([node, { width, height }]) => `${node.outerHTML.slice(0, 80)} ${width} x ${height}`)"""
SCHEMES = ["light", "dark"]
PHONE: dict[str, Any] = {
    "viewport": {"width": 360, "height": 740},
    "has_touch": True,
    "is_mobile": True,
}


def violations(page: Page) -> list[str]:
    """What axe-core finds wrong with the page as it is now."""
    page.evaluate(AXE)
    found: list[str] = page.evaluate(RUN_AXE)
    return found
