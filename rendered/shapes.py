"""The shapes of rendered products, in units of their canvas."""

import math
from collections.abc import Callable

from kinlens.rendered.painting import DARK, PAPER, Canvas, Colour, Skin

_STEEL: Colour = (0.72, 0.73, 0.76)


def bottle(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.36 * g
    neck = 0.13 * g
    c.lathe([(-0.8, neck), (-0.5, neck), (-0.2, r), (0.8, r)], skin.at(0.28, 1.7 * r), 0.9)
    c.lathe([(-0.92, 0.16 * g), (-0.74, 0.16 * g)], skin.accent)
    c.disc(0, -0.92, (0.16 * g, 0.16 * g * c.tilt), skin.accent)


def can(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.4 * g
    c.lathe([(-0.66, 0.88 * r), (-0.56, r), (0.62, r), (0.72, 0.88 * r)], _STEEL, 1.0)
    c.lathe([(-0.56, r), (0.62, r)], skin.at(0.0, 1.75 * r), 0.7)
    c.disc(0, -0.66, (0.88 * r, 0.88 * r * c.tilt), _STEEL, 0.5)
    c.disc(0, -0.65, (0.3 * r, 0.3 * r * c.tilt), DARK)


def mug(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.48 * g
    handle = [(0.9 * r, -0.25), (1.9 * r, -0.3), (1.9 * r, 0.4), (0.9 * r, 0.35)]
    c.pad(handle, skin.accent, 0.05, width=0.15)
    c.lathe([(-0.48, r), (0.45, r), (0.6, 0.86 * r)], skin.at(0.02, 1.7 * r), 0.7)
    c.disc(0, -0.48, (r, r * c.tilt), skin.body, 0.3)
    c.disc(0, -0.46, (0.9 * r, 0.86 * r * c.tilt), (0.3, 0.19, 0.12), 0.6)


def jar(c: Canvas, skin: Skin, g: float) -> None:
    r = 0.5 * g
    c.lathe([(-0.5, 0.7 * r), (-0.3, r), (0.5, r), (0.68, 0.8 * r)], skin.at(0.1, 1.7 * r), 0.9)
    c.lathe([(-0.74, 0.8 * r), (-0.44, 0.8 * r)], skin.accent, 0.3)
    c.disc(0, -0.74, (0.8 * r, 0.8 * r * c.tilt), skin.accent)


def box(c: Canvas, skin: Skin, g: float) -> None:
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


def bag(c: Canvas, skin: Skin, g: float) -> None:
    w = 0.62 * g
    r, green, b = skin.accent
    for shift, colour in ((0.05, (0.6 * r, 0.6 * green, 0.6 * b)), (0.0, skin.accent)):
        top = -0.9 - 0.6 * shift
        strap = [(-0.5 * w, -0.2), (-0.48 * w, top), (0.48 * w, top), (0.5 * w, -0.2)]
        c.pad([(x + shift, y) for x, y in strap], colour, 0.04, width=0.075)
    half = [(0.9 * w, -0.35), (0.93 * w, -0.3), (1.06 * w, 0.6), (1.06 * w, 0.68), (0.98 * w, 0.72)]
    c.pad([*half, *((-x, y) for x, y in reversed(half))], skin.at(0.2, 1.5 * w), 0.2)


def ball(c: Canvas, skin: Skin, g: float) -> None:
    c.ball(0.1, 0.62 * g, skin.at(0.1, 0.95 * g))


def lamp(c: Canvas, skin: Skin, g: float) -> None:
    c.lathe([(0.62, 0.2), (0.7, 0.34 * g), (0.78, 0.34 * g)], skin.accent, 0.6)
    c.lathe([(-0.1, 0.05), (0.68, 0.05)], _STEEL, 1.0)
    c.lathe([(0.22, 0.05), (0.34, 0.13 * g), (0.52, 0.13 * g), (0.62, 0.05)], skin.accent, 0.6)
    c.lathe([(-0.8, 0.3 * g), (0.1, 0.6 * g)], skin.at(-0.3, 0.9 * g), 0.1)
    c.disc(0, -0.8, (0.3 * g, 0.3 * g * c.tilt), PAPER, 0.0)


def shoe(c: Canvas, skin: Skin, g: float) -> None:
    rise = -0.42 * g
    lining = [(-0.7, rise), (-0.05, rise - 0.06), (-0.1, 0), (-0.6, 0)]
    c.pad(lining, DARK, 0.04)
    heel = [(-0.3, rise + 0.2), (-0.62, rise), (-0.8, rise - 0.04), (-0.76, 0.0), (-0.84, 0.46)]
    toe = [(0.88, 0.46), (0.95, 0.3), (0.84, 0.14), (0.5, 0.04), (0.22, -0.12), (-0.02, rise - 0.1)]
    c.pad([*heel, *toe, (-0.16, rise - 0.06)], skin.at(0.16, 0.85), 0.16)
    c.pad([(0.62, 0.06), (0.86, 0.12), (0.97, 0.3), (0.92, 0.46), (0.58, 0.46)], skin.accent, 0.08)
    sole = [(-0.88, 0.4), (-0.88, 0.5), (-0.84, 0.58), (0.9, 0.58), (0.99, 0.48), (0.99, 0.4)]
    c.pad(sole, PAPER, 0.06)
    for k in range(4):
        x, y = 0.0 + 0.115 * k, rise + 0.1 + 0.1 * k
        c.pad([(x - 0.1, y + 0.13), (x + 0.06, y - 0.03)], PAPER, 0.02, width=0.045)


def watch(c: Canvas, skin: Skin, g: float) -> None:
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


_PAINTERS = (bottle, can, mug, jar, box, bag, ball, lamp, shoe, watch)
SHAPES: dict[str, Callable[[Canvas, Skin, float], None]] = {
    painter.__name__: painter for painter in _PAINTERS
}
"""Painters of one product each: canvas, skin and girth (about 1)."""
