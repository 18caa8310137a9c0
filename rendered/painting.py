"""Surfaces, patterns and lettering of rendered products.

Lengths are in half sides of the canvas, which spans -1..1 with x to the right and y down; normals
point along +z to the viewer. h, w = height and width in pixels of the window of a surface.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Plane = NDArray[np.floating[Any]]
Colour = tuple[float, float, float]
Point = tuple[float, float]
Window = tuple[slice, slice]

DARK: Colour = (0.16, 0.15, 0.17)
PAPER: Colour = (0.95, 0.93, 0.88)
_TURN = 2 * math.pi


def _edge(wave: Plane) -> Plane:
    return np.asarray(np.clip(wave * 4 + 0.5, 0, 1))


def _speckle(u: Plane, v: Plane, f: float) -> Plane:
    table = np.random.default_rng(5).random((32, 32), dtype=np.float32)
    columns, rows = np.floor(u * f * 4).astype(int) % 32, np.floor(v * f * 4).astype(int) % 32
    return np.asarray(table[rows, columns] > 0.72, np.float32)


PATTERNS: dict[str, Callable[[Plane, Plane, float], Plane]] = {
    "plain": lambda u, _v, _f: np.zeros_like(u),
    "hoops": lambda _u, v, f: _edge(np.sin(_TURN * f * v)),
    "stripes": lambda u, _v, f: _edge(np.sin(_TURN * f * u)),
    "diagonal": lambda u, v, f: _edge(np.sin(_TURN * f * 0.7 * (u + v))),
    "checks": lambda u, v, f: _edge(np.sin(_TURN * f * u) * np.sin(_TURN * f * v) * 2),
    "dots": lambda u, v, f: _edge(np.cos(_TURN * f * u) + np.cos(_TURN * f * v) - 0.9),
    "zigzag": lambda u, v, f: _edge(np.sin(_TURN * f * (v + np.abs((u * f) % 1 - 0.5) / f))),
    "fade": lambda _u, v, _f: np.clip(v * 0.8 + 0.5, 0, 1),
    "speckle": _speckle,
}
"""Share 0..1 of the second colour at (u, v), for f periods a unit of length."""


@lru_cache(maxsize=256)
def lettering(word: str, weight: int, slant: float, height_px: int) -> Plane:
    """Coverage 0..1 of a word's ink as (about height_px, w), in Pillow's built-in font."""
    font = ImageFont.load_default(height_px * 1.25)
    stroke = weight * height_px / 28
    box = font.getbbox(word, stroke_width=stroke)
    lean = slant * (box[3] - box[1])
    size = (math.ceil(box[2] - box[0] + lean) + 2, math.ceil(box[3] - box[1]) + 2)
    image = Image.new("L", size)
    ImageDraw.Draw(image).text(
        (1 - box[0], 1 - box[1]), word, fill=255, font=font, stroke_width=stroke
    )
    shear = (1, slant, -lean, 0, 1, 0)
    image = image.transform(size, Image.Transform.AFFINE, shear, Image.Resampling.BILINEAR)
    return np.asarray(image, dtype=np.float32) / 255


def _sample(texels: Plane, x: Plane, y: Plane) -> Plane:
    """Bilinear values of texels (rows, columns) at x, y (h, w) in texels; 0 outside."""
    rows, columns = texels.shape
    out = np.zeros_like(x)
    inside = (x > -0.5) & (x < columns + 0.5) & (y > -0.5) & (y < rows + 0.5)
    x, y = x[inside] + 0.5, y[inside] + 0.5
    left, top = x.astype(np.intp), y.astype(np.intp)
    a, b = x - left, y - top
    flat, at = np.pad(texels, 1).ravel(), top * (columns + 2) + left
    upper = flat[at] * (1 - a) + flat[at + 1] * a
    lower = flat[at + columns + 2] * (1 - a) + flat[at + columns + 3] * a
    out[inside] = upper * (1 - b) + lower * b
    return out


@dataclass(frozen=True, slots=True)
class Skin:
    """Appearance of a product's main surface: a pattern of two colours and a word on a label.

    `label` is "plate", "ribbon" or "bare"; `v` and `width` place the word on the surface.
    """

    body: Colour
    second: Colour
    accent: Colour
    pattern: str
    frequency: float
    word: str
    label: str
    weight: int
    slant: float
    v: float = 0.0
    width: float = 0.8

    def at(self, v: float, width: float) -> "Skin":
        return replace(self, v=v, width=width)

    def paint(self, u: Plane, v: Plane, side_px: int) -> Plane:
        """Colours (3, h, w) at the surface coordinates u, v (h, w)."""
        share = PATTERNS[self.pattern](u, v, self.frequency)
        colours = _mix(_column(self.body), self.second, share)
        height_px = max(8, side_px // 9)
        texels = lettering(self.word, self.weight, self.slant, height_px)
        rows, columns = texels.shape
        texel = min(self.width / columns, 0.3 / rows)
        x, y = u / texel + columns / 2, (v - self.v) / texel + rows / 2
        if self.label != "bare":
            reach_u = (columns / 2 + 0.35 * rows) * texel if self.label == "plate" else np.inf
            inside = np.minimum(reach_u - np.abs(u), rows * texel * 0.85 - np.abs(v - self.v))
            colours = _mix(colours, self.plate, np.clip(inside * side_px / 2, 0, 1))
        else:
            halo = lettering(self.word, self.weight + 4, self.slant, height_px)
            dx, dy = (halo.shape[1] - columns) / 2, (halo.shape[0] - rows) / 2
            colours = _mix(colours, self.body, _sample(halo, x + dx, y + dy))
        return _mix(colours, self.ink, _sample(texels, x, y))

    @property
    def plate(self) -> Colour:
        return PAPER if self.label == "plate" else self.accent

    @property
    def ink(self) -> Colour:
        behind = self.body if self.label == "bare" else self.plate
        return DARK if sum(behind) > 1.55 else PAPER


Paint = Skin | Colour


def _column(colour: Colour) -> Plane:
    return np.array(colour, dtype=np.float32).reshape(3, 1, 1)


def _mix(below: Plane, above: Colour, share: Plane) -> Plane:
    return np.asarray(below + (_column(above) - below) * share)


class Canvas:
    """Colour, normal, gloss and coverage of a product, painted from back to front.

    `yaw` turns the product about its vertical axis (radians); `tilt` is how far the camera looks
    down.
    """

    def __init__(self, side_px: int, yaw: float, tilt: float) -> None:
        self.side_px, self.yaw, self.tilt = side_px, yaw, tilt
        self.axis = ((np.arange(side_px) + 0.5) * (2 / side_px) - 1).astype(np.float32)
        self.colour = np.zeros((3, side_px, side_px), np.float32)
        self.normal = np.zeros((3, side_px, side_px), np.float32)
        self.gloss = np.zeros((side_px, side_px), np.float32)
        self.coverage = np.zeros((side_px, side_px), np.float32)

    def lathe(self, profile: Sequence[Point], paint: Paint, gloss: float = 0.4) -> None:
        """A surface of revolution about x = 0; profile = (y, radius) from top to bottom."""
        heights, radii = zip(*profile, strict=True)
        widest, span = max(radii), max(3, self.side_px // 24)
        table = np.pad(np.interp(self.axis, heights, radii), span // 2, mode="edge")
        table = np.convolve(table, np.ones(span) / span, "valid")[: self.side_px]
        slope = np.gradient(table, 2 / self.side_px)
        window, x, y = self._window(
            -widest, heights[0], widest, heights[-1] + self.tilt * widest * 1.1
        )
        radius = table.astype(np.float32)[window[0], None]
        depth = np.sqrt(1 - np.clip(x / radius, -1, 1) ** 2)
        v = y - self.tilt * radius * depth
        row = np.clip(((v + 1) * (self.side_px / 2)).astype(np.intp), 0, self.side_px - 1)
        steep = slope.astype(np.float32)[row]
        radius = table.astype(np.float32)[row] + steep * (v - self.axis[row])
        nx = np.clip(x / np.maximum(radius, 1e-3), -1, 1)
        depth = np.sqrt(1 - nx**2)
        inside = np.minimum(
            radius - np.abs(x), np.minimum(v - heights[0], heights[-1] - v) + 1 / self.side_px
        )
        normal = np.stack([nx, -steep, depth]) / np.sqrt(1 + steep**2)
        self._lay(window, inside, normal, ((np.arcsin(nx) + self.yaw) * widest, v), paint, gloss)

    def disc(self, x: float, y: float, radius: Point, paint: Paint, gloss: float = 0.2) -> None:
        """A flat ellipse with half axes `radius`, facing the viewer and a little upwards."""
        window, gx, gy = self._window(x - radius[0], y - radius[1], x + radius[0], y + radius[1])
        far = np.hypot((gx - x) / radius[0], (gy - y) / radius[1])
        normal = np.array([0, -0.5, 0.87], np.float32).reshape(3, 1, 1)
        self._lay(
            window, (1 - far) * min(radius), normal, (gx - x + 0 * gy, gy + 0 * gx), paint, gloss
        )

    def ball(self, y: float, radius: float, paint: Paint, gloss: float = 0.6) -> None:
        window, gx, gy = self._window(-radius, y - radius, radius, y + radius)
        nx, ny = gx / radius, (gy - y) / radius
        square = nx**2 + ny**2
        depth = np.sqrt(np.clip(1 - square, 0, 1))
        normal = np.stack([nx + 0 * ny, ny + 0 * nx, depth])
        u = (np.arctan2(nx, depth + 1e-3) + self.yaw) * radius
        v = np.arcsin(np.clip(ny, -1, 1)) * radius + y + 0 * nx
        self._lay(window, (1 - np.sqrt(square)) * radius, normal, (u, v), paint, gloss)

    def panel(
        self, sides: tuple[Point, Point, Point], size: Point, normal: Colour, paint: Paint
    ) -> None:
        """A rectangle of `size` (width, height) seen as a parallelogram (corner, across, down)."""
        corner, across, down = sides
        ends = [[corner[i] + a * across[i] + b * down[i] for a, b in _CORNERS] for i in (0, 1)]
        window, x, y = self._window(min(ends[0]), min(ends[1]), max(ends[0]), max(ends[1]))
        area = across[0] * down[1] - across[1] * down[0]
        dx, dy = x - corner[0], y - corner[1]
        a = (dx * down[1] - dy * down[0]) / area
        b = (dy * across[0] - dx * across[1]) / area
        inside = np.minimum(
            np.minimum(a, 1 - a) * math.hypot(*across), np.minimum(b, 1 - b) * math.hypot(*down)
        )
        uv = ((a - 0.5) * size[0], (b - 0.5) * size[1])
        self._lay(window, inside, _column(normal), uv, paint, 0.15)

    def pad(
        self, points: Sequence[Point], paint: Paint, depth: float = 0.1, width: float = 0.0
    ) -> None:
        """A cushion over a rounded polygon, or along a line of that `width`; the yaw narrows it."""
        squeeze, px = math.cos(self.yaw), self.side_px  # drawn at twice the size
        line = [((x * squeeze + 1) * px, (y + 1) * px) for x, y in _rounded(points, not width)]
        mask = Image.new("L", (2 * px, 2 * px))
        if width:
            ImageDraw.Draw(mask).line(line, fill=255, width=round(width * px), joint="curve")
        else:
            ImageDraw.Draw(mask).polygon(line, fill=255)
        mask = mask.reduce(2)
        left, top, right, bottom = mask.getbbox() or (0, 0, 2, 2)
        window = (slice(top, bottom), slice(left, right))
        margin = max(1, round(depth * px))
        around = mask.crop((left - margin, top - margin, right + margin, bottom + margin))
        soft = around.filter(ImageFilter.GaussianBlur(depth * px / 2))
        height = np.asarray(soft, np.float32) * (depth * px / 2 / 255 * 2.2)
        dy, dx = (d[margin:-margin, margin:-margin] for d in np.gradient(height))
        normal = np.stack([-dx, -dy, np.ones_like(dx)])
        normal /= np.sqrt((normal**2).sum(0))
        u = np.broadcast_to(self.axis[window[1]] / squeeze, dx.shape)
        v = np.broadcast_to(self.axis[window[0], None], dx.shape)
        inside = (np.asarray(mask, np.float32)[window] / 255 - 0.5) * (2 / px)
        self._lay(window, inside, normal, (u, v), paint, 0.15)

    def _window(self, x0: float, y0: float, x1: float, y1: float) -> tuple[Window, Plane, Plane]:
        def span(low: float, high: float) -> slice:
            start, stop = ((end + 1) * self.side_px / 2 for end in (low, high))
            return slice(max(0, int(start) - 1), max(1, min(self.side_px, int(stop) + 2)))

        rows, columns = span(y0, y1), span(x0, x1)
        return (rows, columns), self.axis[None, columns], self.axis[rows, None]

    def _lay(
        self,
        window: Window,
        inside: Plane,
        normal: Plane,
        uv: tuple[Plane, Plane],
        paint: Paint,
        gloss: float,
    ) -> None:
        share = np.clip(inside * (self.side_px / 2) + 0.5, 0, 1)
        below = self.coverage[window]
        self.coverage[window] = covered = below + (1 - below) * share
        share = share / np.maximum(covered, 1e-6)
        every = (slice(None), *window)
        colour = paint.paint(*uv, self.side_px) if isinstance(paint, Skin) else _column(paint)
        self.colour[every] += (colour - self.colour[every]) * share
        self.normal[every] += (normal - self.normal[every]) * share
        self.gloss[window] += (gloss - self.gloss[window]) * share


_CORNERS = ((0, 0), (1, 0), (0, 1), (1, 1))


def _rounded(points: Sequence[Point], closed: bool) -> list[Point]:
    """Chaikin's corner cutting, twice."""
    line = list(points)
    for _ in range(2):
        ends = list(zip(line, line[1:] + line[:1] if closed else line[1:], strict=False))
        cut = [
            (p[0] + (q[0] - p[0]) * t, p[1] + (q[1] - p[1]) * t)
            for p, q in ends
            for t in (0.25, 0.75)
        ]
        line = cut if closed else [line[0], *cut, line[-1]]
    return line
