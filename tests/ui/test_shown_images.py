"""Kinlens reads the pixels that a browser shows."""

import base64

import numpy as np
import pytest
from numpy.typing import NDArray
from playwright.sync_api import Browser

from kinlens.embedder.preprocess import decode
from tests.support.odd_images import odd_images

_DRAW = """async (files) => {
  const canvas = document.createElement("canvas");
  const context = canvas.getContext("2d", { willReadFrequently: true, colorSpace: "srgb" });
  const draw = async (file) => {
    const image = new Image();
    image.src = "data:;base64," + file;
    try { await image.decode(); } catch { return null; }
    const [width, height] = [image.naturalWidth, image.naturalHeight];
    [canvas.width, canvas.height] = [width, height];
    context.fillStyle = "white";
    context.fillRect(0, 0, width, height);
    context.drawImage(image, 0, 0);
    const pixels = context.getImageData(0, 0, width, height).data;
    return [width, height, btoa(Array.from(pixels, (p) => String.fromCharCode(p)).join(""))];
  };
  const drawn = {};
  for (const [name, file] of Object.entries(files)) drawn[name] = await draw(file);
  return drawn;
}"""
_LARGEST_BYTES, _LARGEST_SIDE_PX = 10**6, 1000
_LEVELS, _MEAN = 6, 1.2  # two colour engines round differently, most of all with inks
_OTHERS = (
    *(f"orientation-{n}-WEBP" for n in range(2, 9)),  # Chromium ignores it
    "animated-AVIF-is-its-first-frame",  # Chromium rounds its colours more coarsely
)


@pytest.mark.long
def test_each_encoding_has_the_pixels_that_a_browser_shows(browser: Browser) -> None:
    files = {
        image.name: image.data
        for image in odd_images()
        if image.status == 200
        and len(image.data) < _LARGEST_BYTES
        and not image.name.startswith(("tall-", "just-below-", "jpeg-scan-of-garbage"))
        and image.name not in _OTHERS
    }
    page = browser.new_page()
    shown = page.evaluate(_DRAW, {n: base64.b64encode(d).decode() for n, d in files.items()})
    page.close()
    faults = {name: fault(files[name], drawn) for name, drawn in shown.items() if drawn is not None}
    assert len(faults) >= 150
    assert {name: text for name, text in faults.items() if text} == {}


def fault(data: bytes, drawn: tuple[int, int, str]) -> str | None:
    width, height, pixels = drawn
    expected = np.frombuffer(base64.b64decode(pixels), np.uint8).reshape(height, width, 4)[..., :3]
    found: NDArray[np.int16] = np.asarray(decode(data), np.int16)
    if found.shape != expected.shape:
        return f"{found.shape[:2]} instead of {expected.shape[:2]}"
    difference = np.abs(found - expected)
    if difference.max() > _LEVELS or difference.mean() > _MEAN:
        return f"differs by {difference.max()} levels, {difference.mean():.2f} on average"
    return None
