import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile

from kinlens.embedder import errors
from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import (
    ImageLimits,
    ImageParts,
    central_box,
    check_box,
    decode,
    preprocess,
    render_jpeg,
    resize_box,
    windows,
)
from tests.support.odd_images import (
    FORMATS,
    claiming,
    colour_spaces,
    grey_tiff,
    street_photo,
    turned,
)
from tests.support.profiles import grey, named
from tests.tiny import encoded, photo

SPEC = Preprocessing(resize_px=40, crop_px=32)


def cosine(a: bytes, b: bytes) -> float:
    fake = FakeEmbedder(size_px=32)
    vectors = fake.embed(np.stack([fake.preprocess(a), fake.preprocess(b)]))
    return float(vectors[0] @ vectors[1])


@pytest.mark.parametrize(("kind", "loss"), [("JPEG", 3), ("PNG", 1e-9), ("HEIF", 3)])
def test_an_exif_turn_is_undone_before_a_crop_box_is_cut(kind: str, loss: float) -> None:
    image = photo(2, (400, 200))
    alone = preprocess(encoded(image.crop((40, 100, 140, 180))), SPEC)
    for orientation in range(1, 9):
        cropped = preprocess(turned(image, kind, orientation), SPEC, box=(0.1, 0.5, 0.25, 0.4))
        assert np.abs(cropped.astype(int) - alone).mean() < loss


def test_a_refusal_names_the_installed_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(errors.UnsupportedFormatError, match=r"Use one of JPEG.*, AVIF, HEIC\. "):
        decode(b"no image")
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(errors.UnsupportedFormatError, match=r"Use one of JPEG.*, AVIF\. "):
        decode(b"no image")
    with pytest.raises(errors.CorruptImageError, match=r"JPEG image is truncated or damaged\. Exp"):
        decode(encoded(photo(3), "JPEG")[:-60])


COLOUR_SPACES = colour_spaces()


@pytest.mark.parametrize("name", COLOUR_SPACES)
def test_an_image_looks_the_same_in_any_colour_space(name: str) -> None:
    data, photo = COLOUR_SPACES[name], np.asarray(street_photo(), dtype=float)
    thumbnail = Image.open(io.BytesIO(render_jpeg(data, ImageLimits(), 96)))
    assert np.abs(np.asarray(decode(data)) - photo).mean() < 2.5
    assert np.abs(np.asarray(thumbnail) - photo).mean() < 3.5
    assert not {"icc_profile", "exif"} & thumbnail.info.keys()
    assert np.abs(np.asarray(decode(data, colour="stored")) - photo).mean() > 5


@pytest.mark.parametrize(("bits", "inverted"), [(12, False), (16, False), (16, True)])
def test_deep_grey_of_a_tiff_keeps_its_tones(bits: int, inverted: bool) -> None:
    rows = np.linspace(0, 2**bits - 1, 32).astype(np.uint16)
    content = rows.astype("<u2").tobytes()
    if bits == 12:
        pairs = rows.astype(np.uint32).reshape(-1, 2) @ np.array([4096, 1], np.uint32)
        content = b"".join(int(pair).to_bytes(3, "big") for pair in pairs)
    kind = 0 if inverted else 1
    data = grey_tiff(32, 1, content, t258=(3, 1, bits), t262=(3, 1, kind))
    shown = np.asarray(decode(data)).astype(int)[0, :, 0]
    assert np.abs((255 - shown if inverted else shown) - np.linspace(0, 255, 32)).max() < 1.5


def test_a_thumbnail_keeps_no_metadata() -> None:
    exif = Image.Exif()
    exif[0x010E] = "secret"
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF"):
        options = {"comment": b"secret"} if kind == "JPEG" else {}
        data = encoded(photo(1), kind, exif=exif.tobytes(), xmp=b"<secret/>", **options)
        assert b"secret" in data
        assert b"secret" not in render_jpeg(data, ImageLimits(), 160)


def test_a_profile_that_says_srgb_or_nothing_changes_no_pixel() -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    wide = named("prophoto")
    for kind in ("JPEG", "PNG", "WEBP", "TIFF", "AVIF", "HEIF"):
        plain = np.asarray(decode(encoded(street_photo(), kind)))
        for profile in (srgb, wide[:300], wide[:16] + b"LUV " + wide[20:], grey(1.4), b"x" * 9):
            data = encoded(street_photo(), kind, icc_profile=profile)
            assert np.array_equal(np.asarray(decode(data)), plain)


def test_transparency_is_laid_on_white() -> None:
    clear = Image.new("RGBA", (32, 32), (255, 0, 0, 0))
    assert decode(encoded(clear)).getpixel((5, 5)) == (255, 255, 255)
    half = Image.new("RGBA", (32, 32), (255, 0, 0, 128))
    assert decode(encoded(half)).getpixel((5, 5)) == (255, 127, 127)
    palette = Image.new("P", (32, 32), 3)
    assert decode(encoded(palette, "GIF", transparency=3)).getpixel((5, 5)) == (255, 255, 255)


def test_draft_decoding_keeps_the_embedding() -> None:
    large = photo(5, (1600, 1200))
    data = encoded(large, "JPEG", quality=90)
    assert min(decode(data, min_side_px=40).size) < 200
    assert min(decode(data, min_side_px=40).size) >= 40
    box = central_box(large.size, SPEC)
    full = np.asarray(resize_box(decode(data), box, 32)).transpose(2, 0, 1).astype(int)
    assert np.abs(preprocess(data, SPEC) - full).mean() < 3


def test_the_result_is_the_centre_of_the_resized_image() -> None:
    image = Image.new("RGB", (100, 50), "white")
    image.paste("black", (30, 5, 70, 45))  # exactly the central crop of 40 px at scale 40/50
    pixels = preprocess(encoded(image), SPEC)
    assert pixels.shape == (3, 32, 32)
    assert pixels.dtype == np.uint8
    assert pixels[:, 2:-2, 2:-2].max() == 0
    assert central_box((100, 50), SPEC) == (30, 5, 70, 45)


def test_an_image_that_needs_no_scaling_keeps_its_pixels() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 53, 3), dtype=np.uint8)  # an odd margin: (53 - 32) / 2
    kept = preprocess(encoded(Image.fromarray(pixels)), SPEC)
    assert np.array_equal(kept, pixels[4:36, 10:42].transpose(2, 0, 1))


def test_a_header_that_claims_too_much_is_refused_with_the_limit() -> None:
    with pytest.raises(errors.ImageTooLargeError, match=r"9000 x 9000 px \(81.0 MP\).*64 MP"):
        decode(claiming(9000, 9000))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Pillow warns about the damage
def test_random_damage_never_raises_anything_but_our_errors() -> None:
    rng = np.random.default_rng(1)
    for kind in FORMATS:
        original = bytearray(encoded(photo(6), kind))
        for _ in range(25):
            damaged = bytearray(original)
            for position in rng.integers(0, len(damaged), 6):
                damaged[position] = rng.integers(0, 256)
            try:
                image = decode(bytes(damaged), min_side_px=32)
            except errors.ImageError:
                continue
            assert image.mode == "RGB"


@pytest.mark.parametrize("mode", ["I;16", "RGBA"])
def test_a_large_image_needs_little_more_memory_than_its_pixels(mode: str, tmp_path: Path) -> None:
    side = 6000  # 36 megapixels in a file of some kilobytes
    Image.new(mode, (side, side)).save(tmp_path / "large.png")
    code = """
import resource, sys
from pathlib import Path
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import preprocess
data = Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
preprocess(data, Preprocessing(resize_px=40, crop_px=32))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "large.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 11 * side * side


def test_a_crop_box_treats_its_part_as_a_whole_image() -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (90, 120, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(pixels))
    boxes = (0, 0, 60, 45), (30, 9, 90, 81), (60, 45, 1, 1), (7, 0, 50, 8)
    for left, top, width, height in boxes:
        box = (left / 120, top / 90, width / 120, height / 90)
        alone = Image.fromarray(pixels[top : top + height, left : left + width])
        assert np.array_equal(preprocess(data, SPEC, box=box), preprocess(encoded(alone), SPEC))
        assert decode(data, box=box).size == (width, height)
    assert np.array_equal(preprocess(data, SPEC, box=(0, 0, 1, 1)), preprocess(data, SPEC))


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_is_decoded_at_the_scale_that_suits_its_crop_box(orientation: int) -> None:
    image = photo(5, (1600, 1200))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, "JPEG", quality=95, exif=exif.tobytes())
    width, height = (1600, 1200) if orientation == 1 else (1200, 1600)
    for part, scale in ((1.0, 8), (0.5, 8), (0.2, 4), (0.1, 2), (0.03, 1)):
        box = (0.3 * (1 - part), 0.6 * (1 - part), part, part)
        size = decode(data, min_side_px=40, box=box).size
        assert size[0] == pytest.approx(width * part / scale, abs=1.01)
        assert size[1] == pytest.approx(height * part / scale, abs=1.01)
        assert min(size) >= min(40, round(1200 * part))
    narrow = decode(data, min_side_px=40, box=(0.5, 0.0, 0.05, 1.0))
    assert min(narrow.size) >= 40


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_parts_have_the_pixels_that_each_has_alone(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = turned(photo(5, (1600, 1200)), kind, 6)
    boxes = [*windows(), (0.3, 0.3, 0.05, 0.1)]
    alone = [preprocess(data, SPEC, box=box) for box in boxes]
    decoded, load = [], ImageFile.ImageFile.load

    def counted(image: Any) -> Any:
        if image.fp is not None:
            decoded.append(image.size)
        return load(image)

    monkeypatch.setattr(ImageFile.ImageFile, "load", counted)
    assert np.array_equal(ImageParts(data).pixels(boxes, SPEC), alone)
    assert len(set(decoded)) <= (4 if kind == "JPEG" else 1)
    assert len(decoded) == len(set(decoded))


@pytest.mark.parametrize(
    ("box", "fault"),
    [
        ((0.9, 0.1, 0.5, 0.5), r"crop = 0\.9,0\.1,0\.5,0\.5 extends beyond the image"),
        ((-0.1, 0.1, 0.5, 0.5), "extends beyond the image"),
        ((0.0, 0.0, 1.0, 1.001), "extends beyond the image"),
        ((1.0, 0.0, 1e-7, 1.0), "has no area"),
        ((0.1, 0.1, 0.5, -0.5), "has no area"),
        ((0.1, 0.1, 0.5), "is not four finite numbers"),
        ((float("nan"), 0.1, 0.5, 0.5), "is not four finite numbers"),
        ((0.5, 0.5, 0.01, 0.5), "smaller than one pixel"),
    ],
)
def test_a_crop_box_that_cannot_be_cut_is_refused(box: tuple[float, ...], fault: str) -> None:
    for kind in ("PNG", "JPEG"):
        with pytest.raises(errors.InvalidParameterError, match=fault):
            preprocess(encoded(photo(1), kind), SPEC, box=box)


def test_what_rounding_adds_to_a_crop_box_is_cut_off() -> None:
    assert check_box((0.7, 0.0, 0.3 + 1e-9, 1.0)) == (0.7, 0.0, 1 - 0.7, 1.0)
    assert check_box([0, 0, 1, 1]) == (0.0, 0.0, 1.0, 1.0)


@pytest.mark.parametrize("size", [(300, 200), (40, 900), (60, 50)])
def test_a_small_image_fits_its_side_and_keeps_its_shape(size: tuple[int, int]) -> None:
    made = Image.open(io.BytesIO(render_jpeg(encoded(photo(1, size)), ImageLimits(), 160)))
    scale = min(1.0, 160 / max(size))
    assert (made.format, max(made.size)) == ("JPEG", min(160, max(size)))
    assert [abs(a - b * scale) <= 1 for a, b in zip(made.size, size, strict=True)] == [True, True]


def test_a_small_image_shows_what_the_original_shows_upright_on_white() -> None:
    whole = photo(1, (320, 200))
    data = turned(whole, "JPEG", 6)
    made = Image.open(io.BytesIO(render_jpeg(data, ImageLimits(), 160)))
    difference = np.asarray(made, dtype=float) - np.asarray(whole.resize((160, 100)), dtype=float)
    assert np.abs(difference).mean() < 4
    clear = render_jpeg(encoded(Image.new("RGBA", (64, 64), (0, 0, 0, 0))), ImageLimits(), 160)
    assert Image.open(io.BytesIO(clear)).getpixel((5, 5)) == (255, 255, 255)
