import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kinlens.embedder.errors import DatasetError
from kinlens.rendered.catalogue import class_name, describe, render_view, write_catalogue
from kinlens.rendered.painting import lettering
from kinlens.rendered.shapes import SHAPES

SMALL = {"products": 3, "views": 2, "size_px": 48}


def _pixels(product: int, view: int, seed: int = 0) -> bytes:
    return render_view(product, view, size_px=48, seed=seed).tobytes()


def _files(root: Path) -> dict[str, bytes]:
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_seed_product_and_view_alone_decide_the_pixels_in_any_order() -> None:
    which = [(p, v, s) for p in range(3) for v in range(3) for s in range(2)]
    forwards = [_pixels(*one) for one in which]
    lettering.cache_clear()
    assert [_pixels(*one) for one in reversed(which)] == forwards[::-1]
    assert len(set(forwards)) == len(forwards)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_drawn_at_every_size(shape: str) -> None:
    product = next(p for p in range(200) if describe(p).shape == shape)
    for view, size_px in enumerate((32, 33, 200)):
        image = render_view(product, view, size_px=size_px)
        assert (image.mode, image.size) == ("RGB", (size_px, size_px))
        assert np.asarray(image).std() > 8


def test_a_catalogue_is_one_folder_of_jpegs_a_product_and_its_settings(tmp_path: Path) -> None:
    seen: list[None] = []
    paths = write_catalogue(tmp_path / "new" / "shop", **SMALL, on_image=lambda: seen.append(None))
    root = tmp_path / "new" / "shop"
    names = [f"{class_name(p)}/{v:02d}.jpg" for p in range(3) for v in range(2)]
    assert [str(path.relative_to(root)) for path in paths] == names
    assert set(_files(root)) == {*names, "catalogue.json"}
    assert len(seen) == 6
    settings = json.loads((root / "catalogue.json").read_text())
    assert settings.items() >= {"products": 3, "views": 2, "size_px": 48, "seed": 0}.items()
    with Image.open(paths[0]) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (48, 48))


def test_a_folder_of_other_settings_or_of_somebody_else_is_refused_and_left_alone(
    tmp_path: Path,
) -> None:
    own = tmp_path / "own"
    write_catalogue(own, **SMALL)
    before = _files(own)
    for other in ({"products": 4}, {"views": 3}, {"size_px": 64}, {"seed": 1}):
        with pytest.raises(DatasetError, match=f"{own}.*another folder"):
            write_catalogue(own, **(SMALL | other))
    assert _files(own) == before
    shutil.rmtree(own)
    for name in ("holiday.jpg", "catalogue.json"):
        (tmp_path / name).write_bytes(b"not ours")
        for place in (tmp_path, tmp_path / name):
            with pytest.raises(DatasetError, match="not a catalogue of rendered products"):
                write_catalogue(place, **SMALL)
        assert _files(tmp_path) == {name: b"not ours"}
        (tmp_path / name).unlink()
