"""A catalogue of rendered products, for demos without real images.

A product is a shape, a colour scheme, a pattern and a made-up word; no single one of them
identifies a product. A view adds viewpoint, light, background and a lens.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFilter

from kinlens.embedder.errors import DatasetError
from kinlens.rendered.painting import PATTERNS, Canvas, Colour, Plane, Skin
from kinlens.rendered.shapes import SHAPES

_DRAWING = 1  # increase it when the same arguments give other pixels
_FILE = "catalogue.json"
_STEMS = "BEL COR DEL FEN GAL HAL JUN KOR LUN MIR NOR OLI PAL RIV SOL TOR URS VEN WIL YOR ZEP"
_ENDINGS = "- A O IA EN IK UNO VI ETTA MA DRA ANO IS ELLO OVA BY STA NEY ORIN ADE"
_WORDS = tuple(stem + ending.strip("-") for stem in _STEMS.split() for ending in _ENDINGS.split())
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


@dataclass(frozen=True, slots=True)
class Product:
    """Attributes of one product: the name of its shape, its skin and its girth."""

    shape: str
    skin: Skin
    girth: float


def describe(product: int, seed: int = 0) -> Product:
    """The attributes of a product; shape, scheme and pattern together repeat only after 1,080."""
    combination, word = (order[product % len(order)] for order in _orders(seed))
    s, c, p = np.unravel_index(combination, (len(SHAPES), len(SCHEMES), len(PATTERNS)))
    rng = np.random.default_rng((seed, product))
    body, second, accent = (_rgb(code, rng, 0.03) for code in list(SCHEMES.values())[c])
    skin = Skin(
        body,
        second,
        accent,
        pattern=list(PATTERNS)[p],
        frequency=rng.uniform(2.2, 4.0),
        word=_WORDS[word],
        label=("plate", "ribbon", "bare")[rng.integers(3)],
        weight=int(rng.integers(3)),
        slant=float(rng.choice([0.0, 0.0, 0.3])),
    )
    return Product(list(SHAPES)[s], skin, rng.uniform(0.86, 1.12))


def class_name(product: int, seed: int = 0) -> str:
    """Readable and unique: `p007-mug-TORVI`."""
    item = describe(product, seed)
    return f"p{product:03d}-{item.shape}-{item.skin.word}"


def render_view(product: int, view: int, *, size_px: int = 160, seed: int = 0) -> Image.Image:
    """One RGB image of size_px x size_px, deterministic in its arguments."""
    item = describe(product, seed)
    rng = np.random.default_rng((seed, product, view + 1))  # a last 0 would change nothing
    side = size_px * 5 // 4
    flat_lay = rng.random() < 0.35
    canvas = Canvas(side, yaw=rng.uniform(-0.6, 0.6), tilt=rng.uniform(0.1, 0.32))
    SHAPES[item.shape](canvas, item.skin, item.girth)
    light = np.array([rng.uniform(-0.9, 0.9), rng.uniform(-0.9, -0.25), 0.75], np.float32)
    light = np.asarray(light / np.linalg.norm(light))
    sprite = _warp(_lit(canvas, light, rng.uniform(0.45, 0.6)), rng, 0.5 if flat_lay else 0.12)
    scene = _backdrop(rng, side, flat_lay)
    scene = _shadowed(scene, sprite.getchannel("A"), light, flat_lay, rng.uniform(0.35, 0.7))
    scene.paste(sprite, mask=sprite.getchannel("A"))
    if rng.random() < 0.2:
        _occlude(scene, rng)
    return _camera(scene.resize((size_px, size_px), Image.Resampling.BILINEAR), rng)


def write_catalogue(
    root: Path,
    products: int,
    views: int,
    size_px: int = 160,
    seed: int = 0,
    on_image: Callable[[], None] | None = None,
) -> list[Path]:
    """Write `root/<class name>/<view>.jpg`, return the paths in order; call `on_image` after each.

    An existing view is kept; equal numbers give equal files.

    Raises: DatasetError if `root` contains other files or a catalogue of other numbers.
    """
    _claim(root, {"products": products, "views": views, "size_px": size_px, "seed": seed})
    paths = []
    for product in range(products):
        folder = root / class_name(product, seed)
        folder.mkdir(exist_ok=True)
        for view in range(views):
            path = folder / f"{view:02d}.jpg"
            if not path.exists():
                part = path.with_suffix(".part")
                quality = int(np.random.default_rng((view, product)).integers(85, 93))
                image = render_view(product, view, size_px=size_px, seed=seed)
                image.save(part, "JPEG", quality=quality, subsampling="4:2:0")
                part.replace(path)
            paths.append(path)
            if on_image is not None:
                on_image()
    return paths


def _claim(root: Path, numbers: dict[str, int]) -> None:
    """Create the folder with its numbers, or check that it has the same."""
    wanted = {"drawing": _DRAWING} | numbers
    record = root / _FILE
    try:
        if not root.exists() or not any(root.iterdir()):
            root.mkdir(parents=True, exist_ok=True)
            record.write_text(json.dumps(wanted, indent=2) + "\n")
        found = json.loads(record.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{root} is not a catalogue of rendered products ({error}). Give an empty folder."
        ) from error
    if found != wanted:
        raise DatasetError(
            f"{root} has a catalogue with {found}, not {wanted}. Give another folder."
        )


@lru_cache(maxsize=8)
def _orders(seed: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(seed)
    combinations = len(SHAPES) * len(SCHEMES) * len(PATTERNS)
    return rng.permutation(combinations).tolist(), rng.permutation(len(_WORDS)).tolist()


def _lit(canvas: Canvas, light: Plane, ambient: float) -> Image.Image:
    """Diffuse light and a specular highlight half way between light and viewer: canvas in RGBA."""
    box = Image.fromarray(canvas.coverage > 0).getbbox() or (0, 0, 1, 1)
    window = (slice(box[1], box[3]), slice(box[0], box[2]))
    normal = canvas.normal[:, *window]
    diffuse = np.clip(np.tensordot(light, normal, 1), 0, 1)
    half = light + np.array([0, 0, 1], np.float32)
    shine = np.clip(np.tensordot(half / np.linalg.norm(half), normal, 1), 0, 1) ** 32
    shade = (ambient + (1.15 - ambient) * diffuse) * (0.72 + 0.28 * normal[2])
    colour = canvas.colour[:, *window] * shade + canvas.gloss[window] * shine * 0.55
    rgba = np.zeros((*canvas.coverage.shape, 4), np.uint8)
    rgba[*window, :3] = (np.clip(colour, 0, 1) * 255).transpose(1, 2, 0)
    rgba[*window, 3] = canvas.coverage[window] * 255
    return Image.fromarray(rgba)


def _warp(sprite: Image.Image, rng: np.random.Generator, roll: float) -> Image.Image:
    """A camera: rotation by at most `roll` radians, scale, shift and a little perspective."""
    side = sprite.width
    angle, scale = rng.uniform(-roll, roll), rng.uniform(0.8, 1.08)
    turn = scale * np.array(
        [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    )
    corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
    seen = (corners + rng.uniform(-0.09, 0.09, (4, 2))) @ turn.T + rng.uniform(-0.08, 0.08, 2)
    source, target = (corners + 1) * side / 2, (seen + 1) * side / 2
    rows = [
        row
        for (x, y), (u, v) in zip(target, source, strict=True)
        for row in ([x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y])
    ]
    coefficients = np.linalg.solve(np.array(rows), source.ravel()).tolist()
    return sprite.transform(
        sprite.size, Image.Transform.PERSPECTIVE, coefficients, Image.Resampling.BILINEAR
    )


def _camera(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """Camera effects: exposure, colour temperature, light falloff, a soft lens and sensor noise."""
    size = image.width
    if rng.random() < 0.4:
        image = image.filter(ImageFilter.GaussianBlur(size / 160 * rng.uniform(0.3, 0.8)))
    warmth, exposure = rng.uniform(-1, 1), rng.uniform(0.85, 1.08)
    gain = exposure * np.array([1 + 0.06 * warmth, 1.0, 1 - 0.08 * warmth], np.float32)
    ramp = 1 + rng.uniform(-0.12, 0.12) * np.linspace(-1, 1, size, dtype=np.float32)[:, None]
    grain = rng.uniform(0.5, 3)
    noise = rng.standard_normal((size, size, 1), dtype=np.float32) * grain
    pixels = np.asarray(image, np.float32) * (ramp[..., None] * gain) + noise
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _rgb(code: str, rng: np.random.Generator, jitter: float) -> Colour:
    """A `#rrggbb` code as shares 0..1, each changed by at most `jitter`."""
    parts = np.array([int(code[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    r, g, b = np.clip(parts + rng.uniform(-jitter, jitter, 3), 0, 1).tolist()
    return r, g, b


def _backdrop(rng: np.random.Generator, side: int, flat_lay: bool) -> Image.Image:
    """A table top seen from above, or a table before a wall, with blurred objects around."""
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
    r, g, b = _rgb(codes[rng.integers(len(codes))], rng, 0.025)
    return int(r * 255), int(g * 255), int(b * 255)


def _shadowed(
    scene: Image.Image, alpha: Image.Image, light: Plane, flat_lay: bool, strength: float
) -> Image.Image:
    """The scene with a shadow: next to a lying product, slanted back from the foot of others."""
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


def _occlude(scene: Image.Image, rng: np.random.Generator) -> None:
    """An out-of-focus object in front of an edge of the image."""
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
