"""The pictures of a gallery as a folder with a sub-folder for each class, to train on."""

import re
import shutil
from collections import Counter
from pathlib import Path

from embedder.errors import GalleryError, ImageError, SourceError
from embedder.types import AttributeValue
from indexer.gallery import Gallery
from indexer.ingest.rebuild import ReadImage
from indexer.types import Progress

_MIN_CLASSES = 4  # of 2 pictures: half of them are held out, and a search needs more than one
_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "BMP": ".bmp", "TIFF": ".tif"}


def write_classes(
    gallery: Gallery,
    class_attribute: str,
    read_image: ReadImage,
    root: Path,
    on_progress: Progress,
) -> list[str]:
    """Copy each item's picture to `root`/CLASS/NUMBER; what was left out, a line for each.

    Raises: SourceError if fewer than four classes have two pictures; OSError.
    """
    shutil.rmtree(root, ignore_errors=True)
    names: dict[AttributeValue, str] = {}
    sizes: Counter[AttributeValue] = Counter()
    left_out = []
    for item in gallery.items():
        on_progress(1)
        value = item.attributes.get(class_attribute)
        suffix = _SUFFIXES.get(item.format)
        if value is None or suffix is None:
            left_out.append(f"{item.key}: no {class_attribute}, or no format to train on")
            continue
        try:
            data = read_image(item)
        except (ImageError, GalleryError, OSError) as error:
            left_out.append(f"{item.key}: {error}")
            continue
        folder = root / names.setdefault(value, _folder_name(len(names), value))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{item.id:09d}{suffix}").write_bytes(data)
        sizes[value] += 1
    enough = sum(size > 1 for size in sizes.values())
    if enough < _MIN_CLASSES:
        raise SourceError(
            f"The pictures of gallery {gallery.name} have {enough} values of the attribute "
            f"{class_attribute!r} with 2 pictures or more; a training needs {_MIN_CLASSES}. Give "
            "the items that attribute, or name another one with class_attribute."
        )
    return left_out


def _folder_name(number: int, value: AttributeValue) -> str:
    return f"{number:05d}-{re.sub(r'[^A-Za-z0-9]+', '-', str(value))[:40]}"
