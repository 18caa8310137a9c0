"""Numbers of items belong to one generation of a gallery; in another they name other items."""

from embedder.errors import ItemNotFoundError

VERSION_DIGITS = 12
"""Hex digits of a generation in links."""

VERSION_PATTERN = rf"^[0-9a-f]{{{VERSION_DIGITS},64}}$"
VERSION_TEXT = "The gallery generation that the number is from; default: the one being served."


def check_generation(name: str, current: str, version: str | None) -> None:
    """Raises: ItemNotFoundError for a number from another generation than the current one."""
    if version is not None and not current.startswith(version):
        raise ItemNotFoundError(
            f"This link is from version {version[:VERSION_DIGITS]} of gallery {name}, which was "
            f"built again and is at version {current[:VERSION_DIGITS]} now. Search again."
        )
