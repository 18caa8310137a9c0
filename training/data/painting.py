"""Surfaces, patterns, lettering and shapes: how a rendered product is painted.

Lengths are in half sides of the canvas, which spans -1..1 with x to the right and y down; normals
look along +z at the viewer. h, w = height and width in pixels of the window that a surface covers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Plane = NDArray[np.float32]
Colour = tuple[float, float, float]
Point = tuple[float, float]
Window = tuple[slice, slice]

_STEEL: Colour = (0.72, 0.73, 0.76)
_DARK: Colour = (0.16, 0.15, 0.17)
_PAPER: Colour = (0.95, 0.93, 0.88)
_TURN = 2 * math.pi


def _edge(wave: Plane) -> Plane:
    return np.clip(wave * 4 + 0.5, 0, 1)


def _speckle(u: Plane, v: Plane, f: float) -> Plane:
    table = np.random.default_rng(5).random((32, 32), dtype=np.float32)
    columns, rows = np.floor(u * f * 4).astype(int) % 32, np.floor(v * f * 4).astype(int) % 32
    return (table[rows, columns] > 0.72).astype(np.float32)


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
    """What a product's main surface shows: a pattern of two colours and a word on a label.

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
        """The same skin with its word centred at height v, at most `width` wide."""
        return replace(self, v=v, width=width)

    def paint(self, u: Plane, v: Plane, side_px: int) -> Plane:
        """Colours (3, h, w) at the surface coordinates u, v (h, w)."""
        share = PATTERNS[self.pattern](u, v, self.frequency)
        colours = _mix(_column(self.body), _column(self.second), share)
        height_px = max(8, side_px // 9)
        texels = lettering(self.word, self.weight, self.slant, height_px)
        rows, columns = texels.shape
        texel = min(self.width / columns, 0.3 / rows)
        x, y = u / texel + columns / 2, (v - self.v) / texel + rows / 2
        if self.label != "bare":
            reach_u = (columns / 2 + 0.35 * rows) * texel if self.label == "plate" else np.inf
            inside = np.minimum(reach_u - np.abs(u), rows * texel * 0.85 - np.abs(v - self.v))
            colours = _mix(colours, _column(self.plate), np.clip(inside * side_px / 2, 0, 1))
        else:
            halo = lettering(self.word, self.weight + 4, self.slant, height_px)
            dx, dy = (halo.shape[1] - columns) / 2, (halo.shape[0] - rows) / 2
            colours = _mix(colours, _column(self.body), _sample(halo, x + dx, y + dy))
        return _mix(colours, _column(self.ink), _sample(texels, x, y))

    @property
    def plate(self) -> Colour:
        """The colour behind the word: paper, or the accent of a ribbon."""
        return _PAPER if self.label == "plate" else self.accent

    @property
    def ink(self) -> Colour:
        """Dark on light and light on dark."""
        behind = self.body if self.label == "bare" else self.plate
        return _DARK if sum(behind) > 1.55 else _PAPER


Paint = Skin | Colour


def _column(colour: Colour) -> Plane:
    return np.array(colour, dtype=np.float32).reshape(3, 1, 1)


def _mix(below: Plane, above: Plane, share: Plane) -> Plane:
    out: Plane = below + (above - below) * share
    return out


class Canvas:
    """Colour, normal, gloss and coverage of a product, laid on from back to front.

    `yaw` turns the product about its vertical axis (radians); `tilt` is how far one looks down.
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
        radius = table.astype(np.float32)[row]
        nx = np.clip(x / radius, -1, 1)
        depth, steep = np.sqrt(1 - nx**2), slope.astype(np.float32)[row]
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
        """A sphere on the vertical axis."""
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
        margin = round(depth * px)
        around = mask.crop((left - margin, top - margin, right + margin, bottom + margin))
        soft = around.filter(ImageFilter.GaussianBlur(depth * px / 2))
        height = np.asarray(soft, np.float32) * (depth * px / 2 / 255 * 2.2)
        dy, dx = np.gradient(height[margin:-margin, margin:-margin])
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


def _bottle(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.36 * g
    neck = 0.13 * g
    c.lathe([(-0.8, neck), (-0.5, neck), (-0.2, r), (0.8, r)], skin.at(0.28, 2 * r), 0.9)
    c.lathe([(-0.92, 0.16 * g), (-0.74, 0.16 * g)], skin.accent)
    c.disc(0, -0.92, (0.16 * g, 0.16 * g * c.tilt), skin.accent)


def _can(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.4 * g
    c.lathe([(-0.66, 0.88 * r), (-0.56, r), (0.62, r), (0.72, 0.88 * r)], _STEEL, 1.0)
    c.lathe([(-0.56, r), (0.62, r)], skin.at(0.0, 2 * r), 0.7)
    c.disc(0, -0.66, (0.88 * r, 0.88 * r * c.tilt), _STEEL, 0.5)
    c.disc(0, -0.65, (0.3 * r, 0.3 * r * c.tilt), _DARK)


def _mug(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.48 * g
    handle = [(0.9 * r, -0.25), (1.9 * r, -0.3), (1.9 * r, 0.4), (0.9 * r, 0.35)]
    c.pad(handle, skin.accent, 0.05, width=0.15)
    c.lathe([(-0.48, r), (0.45, r), (0.6, 0.86 * r)], skin.at(0.02, 1.7 * r), 0.7)
    c.disc(0, -0.48, (r, r * c.tilt), skin.body, 0.3)
    c.disc(0, -0.46, (0.9 * r, 0.86 * r * c.tilt), (0.3, 0.19, 0.12), 0.6)


def _jar(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.5 * g
    c.lathe([(-0.5, 0.7 * r), (-0.3, r), (0.5, r), (0.68, 0.8 * r)], skin.at(0.1, 1.8 * r), 0.9)
    c.lathe([(-0.74, 0.8 * r), (-0.44, 0.8 * r)], skin.accent, 0.3)
    c.disc(0, -0.74, (0.8 * r, 0.8 * r * c.tilt), skin.accent)


def _box(c: Canvas, skin: Skin, g: float) -> None:
    wide, deep, high = 0.9 * g, 0.5, 1.25
    turn, angle = math.copysign(1, c.yaw), 0.12 + abs(c.yaw)
    front = (-turn * wide * math.cos(angle), -c.tilt * wide * math.sin(angle))
    side = (turn * deep * math.sin(angle), -c.tilt * deep * math.cos(angle))
    near = (-(front[0] + side[0]) / 2, -0.48)
    left = (near[0] + front[0], near[1] + front[1])
    lean = (math.sin(angle), math.cos(angle))
    c.panel((near, front, side), (wide, deep), (0, -0.9, 0.44), skin.second)
    c.panel((near, side, (0, high)), (deep, high), (turn * lean[1], 0, lean[0]), skin.accent)
    if turn > 0:
        near, front = left, (-front[0], -front[1])
    face = skin.at(-0.1, 0.85 * wide)
    c.panel((near, front, (0, high)), (wide, high), (-turn * lean[0], 0, lean[1]), face)


def _bag(c: Canvas, skin: Skin, g: float) -> None:
    w = 0.62 * g
    for shift, colour in ((0.05, tuple(0.6 * part for part in skin.accent)), (0.0, skin.accent)):
        top = -0.9 - 0.6 * shift
        strap = [(-0.5 * w, -0.2), (-0.48 * w, top), (0.48 * w, top), (0.5 * w, -0.2)]
        c.pad([(x + shift, y) for x, y in strap], colour, 0.04, width=0.075)
    half = [(0.9 * w, -0.35), (0.93 * w, -0.3), (1.06 * w, 0.6), (1.06 * w, 0.68), (0.98 * w, 0.72)]
    c.pad([*half, *((-x, y) for x, y in reversed(half))], skin.at(0.2, 1.5 * w), 0.2)


def _ball(c: Canvas, skin: Skin, g: float) -> None:
    c.ball(0.1, 0.62 * g, skin.at(0.1, 0.95 * g))


def _lamp(c: Canvas, skin: Skin, g: float) -> None:
    c.lathe([(0.62, 0.2), (0.7, 0.34 * g), (0.78, 0.34 * g)], skin.accent, 0.6)
    c.lathe([(-0.1, 0.05), (0.68, 0.05)], _STEEL, 1.0)
    c.lathe([(0.22, 0.05), (0.34, 0.13 * g), (0.52, 0.13 * g), (0.62, 0.05)], skin.accent, 0.6)
    c.lathe([(-0.8, 0.3 * g), (0.1, 0.6 * g)], skin.at(-0.3, 0.9 * g), 0.1)
    c.disc(0, -0.8, (0.3 * g, 0.3 * g * c.tilt), _PAPER, 0.0)


def _shoe(c: Canvas, skin: Skin, g: float) -> None:
    rise = -0.42 * g
    lining = [(-0.7, rise), (-0.05, rise - 0.06), (-0.1, 0), (-0.6, 0)]
    c.pad(lining, _DARK, 0.04)
    heel = [(-0.3, rise + 0.2), (-0.62, rise), (-0.8, rise - 0.04), (-0.76, 0.0), (-0.84, 0.46)]
    toe = [(0.88, 0.46), (0.95, 0.3), (0.84, 0.14), (0.5, 0.04), (0.22, -0.12), (-0.02, rise - 0.1)]
    c.pad([*heel, *toe, (-0.16, rise - 0.06)], skin.at(0.16, 0.85), 0.16)
    c.pad([(0.62, 0.06), (0.86, 0.12), (0.97, 0.3), (0.92, 0.46), (0.58, 0.46)], skin.accent, 0.08)
    sole = [(-0.88, 0.4), (-0.88, 0.5), (-0.84, 0.58), (0.9, 0.58), (0.99, 0.48), (0.99, 0.4)]
    c.pad(sole, _PAPER, 0.06)
    for k in range(4):
        x, y = 0.0 + 0.115 * k, rise + 0.1 + 0.1 * k
        c.pad([(x - 0.1, y + 0.13), (x + 0.06, y - 0.03)], _PAPER, 0.02, width=0.045)


def _watch(c: Canvas, skin: Skin, g: float) -> None:
    w, r = 0.2 * g, 0.44 * g
    half = [(0.8 * w, -0.86), (w, -0.82), (w, -0.4), (1.5 * w, -0.2)]
    half += [(x, -y) for x, y in reversed(half)]
    c.pad([*half, *((-x, y) for x, y in reversed(half))], skin.at(3, 1), 0.1)
    c.pad([(r, 0), (r + 0.06, 0)], _STEEL, 0.03, width=0.1)
    for size, paint in ((1.0, _STEEL), (0.9, skin.accent), (0.82, skin.at(0.17, 1.2 * r))):
        c.disc(0, 0, (r * size * math.cos(c.yaw), r * size), paint, 0.6)
    for angle, length in ((-0.9, 0.6), (0.35, 0.42)):
        end = (r * length * math.sin(angle), -r * length * math.cos(angle))
        c.pad([(0, 0), end], skin.ink, 0.01, width=0.045)


SHAPES: dict[str, Callable[[Canvas, Skin, float], None]] = {
    "bottle": _bottle,
    "can": _can,
    "mug": _mug,
    "jar": _jar,
    "box": _box,
    "bag": _bag,
    "ball": _ball,
    "lamp": _lamp,
    "shoe": _shoe,
    "watch": _watch,
}
"""Painters of one product each: canvas, skin and girth (about 1)."""
