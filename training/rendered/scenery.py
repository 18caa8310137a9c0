"""Where rendered products stand: colours, table and wall, neighbours, shadow, occluder."""

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from training.rendered.painting import Colour, Plane

_TONES = ("#d9cbb8", "#b39b84", "#9aa5ab", "#cfd6d2", "#8a7565", "#e8e2d9", "#b3bdae", "#ccb09b")
SCHEMES: dict[str, tuple[str, str, str]] = {
    "reef": ("#1f7a7a", "#f3e6cf", "#e4573d"),
    "berry": ("#8e2a4f", "#f0c9c4", "#3a2f5b"),
    "citrus": ("#f2b632", "#f7efdc", "#2f6d4f"),
    "navy": ("#24406e", "#e9e3d5", "#d9772b"),
    "moss": ("#5e7d3a", "#e6dfb8", "#7a4a2b"),
    "ember": ("#c8402c", "#f6d9a8", "#33302e"),
    "lilac": ("#8d7cc0", "#efe9f5", "#f0b429"),
    "slate": ("#55606b", "#dfe3e6", "#c8402c"),
    "sky": ("#5ba3cf", "#f5f3ea", "#24406e"),
    "sand": ("#d8b98a", "#8a5a3a", "#1f7a7a"),
    "rose": ("#e58fa0", "#fbeee6", "#5e7d3a"),
    "snow": ("#eceae4", "#b9bec4", "#24406e"),
}
"""Body, second and accent colour of products, by name."""


def rgb(code: str, rng: np.random.Generator, jitter: float) -> Colour:
    """A `#rrggbb` code as shares 0..1, each off by at most `jitter`."""
    parts = np.array([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    r, g, b = np.clip(parts + rng.uniform(-jitter, jitter, 3), 0, 1).tolist()
    return r, g, b


def backdrop(rng: np.random.Generator, side: int, flat_lay: bool) -> Image.Image:
    """A table top seen from above, or a table before a wall, with blurred things about."""
    size = side // 2
    table, wall = (_ink(rng, _TONES) for _ in range(2))
    image = Image.new("RGB", (size, size), table)
    draw = ImageDraw.Draw(image)
    horizon = 0 if flat_lay else int(size * rng.uniform(0.45, 0.72))
    _grain(image, rng)
    if horizon:
        draw.rectangle((0, 0, size, horizon), fill=wall)
    for _ in range(int(rng.integers(0, 5))):
        _thing(draw, rng, size, horizon)
    image = image.filter(ImageFilter.GaussianBlur(size * rng.uniform(0.004, 0.025)))
    return image.resize((side, side), Image.Resampling.BILINEAR)


def _grain(image: Image.Image, rng: np.random.Generator) -> None:
    """Boards, tiles or a smooth sheet."""
    kind, size, draw = rng.integers(3), image.width, ImageDraw.Draw(image)
    count = int(rng.integers(4, 8))
    step = size / count
    wide = step if kind == 1 else size
    base = image.getpixel((0, 0))
    assert isinstance(base, tuple)
    for row in range(count):
        for column in range(count if kind == 1 else 1):
            tone = rng.uniform(0.86, 1.1) if kind < 2 else 1.0
            x, y = column * wide, row * step
            fill = tuple(min(255, int(value * tone)) for value in base)
            draw.rectangle((x, y, x + wide, y + step), fill)


def _thing(draw: ImageDraw.ImageDraw, rng: np.random.Generator, size: int, horizon: int) -> None:
    """A blurred neighbour in a product's colours, standing behind or lying about."""
    codes = [code for scheme in SCHEMES.values() for code in scheme]
    wide, high = (size * rng.uniform(0.08, 0.3) for _ in range(2))
    x = rng.uniform(-0.1, 1.0) * size
    y = horizon + size * 0.06 - high if horizon else rng.uniform(-0.1, 1.0) * size
    box = (x, y, x + wide, y + high)
    if rng.random() < 0.5:
        draw.ellipse(box, _ink(rng, codes))
    else:
        draw.rounded_rectangle(box, min(wide, high) * 0.2, _ink(rng, codes))


def _ink(rng: np.random.Generator, codes: tuple[str, ...] | list[str]) -> tuple[int, int, int]:
    r, g, b = rgb(codes[rng.integers(len(codes))], rng, 0.025)
    return int(r * 255), int(g * 255), int(b * 255)


def shadowed(
    scene: Image.Image, alpha: Image.Image, light: Plane, flat_lay: bool, strength: float
) -> Image.Image:
    """The product's shadow: beside it when it lies, slanting back from its foot when it stands."""
    side, quarter = alpha.width, alpha.width // 4
    small = alpha.resize((quarter, quarter), Image.Resampling.BILINEAR)
    box = small.getbbox() or (0, 0, quarter, quarter)
    if flat_lay:
        aside, along = (light[:2] * (quarter * 0.08)).tolist()
        fall = (1.0, 0.0, aside, 0.0, 1.0, along)
    else:
        shear, flat, foot = float(light[0]) * 1.1, 0.4, box[3] + 1.0
        fall = (1.0, shear, -shear * foot, 0.0, 1 / flat, foot - foot / flat)
    cast = small.transform(small.size, Image.Transform.AFFINE, fall, Image.Resampling.BILINEAR)
    cast = cast.filter(ImageFilter.GaussianBlur(quarter * 0.025))
    cast = cast.point([255 - int(value * strength) for value in range(256)])
    grey = cast.resize((side, side), Image.Resampling.BILINEAR)
    return ImageChops.multiply(scene, Image.merge("RGB", (grey, grey, grey)))


def occlude(scene: Image.Image, rng: np.random.Generator) -> None:
    """Something out of focus in front of an edge of the picture."""
    side = scene.width
    reach, along = side * rng.uniform(0.12, 0.24), rng.uniform(0.1, 0.9) * side
    box = [
        (-reach, along - 2 * reach, reach, along + reach),
        (along - reach, side - reach, along + reach, side + reach),
    ]
    mask = Image.new("L", scene.size)
    ImageDraw.Draw(mask).ellipse(box[rng.integers(2)], fill=255)
    mask = mask.filter(ImageFilter.GaussianBlur(side * 0.015))
    scene.paste(_ink(rng, _TONES), mask=mask)
