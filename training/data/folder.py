"""A folder with a sub-folder for each class, in folders of categories if there are any."""

from pathlib import Path

from embedder.errors import DatasetError
from training.data.records import IMAGE_SUFFIXES


def read_folder(root: Path) -> list[tuple[str, str]]:
    """(path relative to root, class name) of each image; hidden files and folders are left out.

    The class is the folder that holds the image, named by its path below root: "mug", or
    "Women/Dress", which is another class than "Men/Dress". Galleries built from a folder have the
    same names.

    Raises: DatasetError if the folder is missing or holds no images in sub-folders.
    """
    if not root.is_dir():
        raise DatasetError(f"The data set folder {root} does not exist. Check data.root.")
    records = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.suffix.lower() in IMAGE_SUFFIXES and len(relative.parts) > 1 and not hidden:
            records.append((relative.as_posix(), relative.parent.as_posix()))
    if not records:
        raise DatasetError(
            f"{root} has no images in sub-folders. Put the images of each class into a sub-folder "
            "of its own: shop/mug-17/front.jpg, or shop/mugs/mug-17/front.jpg."
        )
    return records
