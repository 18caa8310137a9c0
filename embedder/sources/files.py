"""One image file that a user names, such as a query."""

from pathlib import Path

from kinlens.embedder.errors import ImageTooManyBytesError, SourceError
from kinlens.embedder.sources.names import printable


def read_file(path: Path | str, max_bytes: int) -> bytes:
    """The bytes of an image file.

    Raises: SourceError naming a file that does not exist or cannot be read;
        ImageTooManyBytesError.
    """
    file, name = Path(path), printable(str(path))
    try:
        if file.exists() and not file.is_file():
            kind = "folder" if file.is_dir() else "device or pipe"
            raise SourceError(f"{name} is a {kind}. Use an image file.")
        if (size := file.stat().st_size) > max_bytes:
            raise ImageTooManyBytesError(
                f"The image {name} has {size:,} bytes; the limit is {max_bytes:,}. Resize or "
                "compress it."
            )
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceError(f"{name} does not exist. Check the name of the image.") from error
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        reason = getattr(error, "strerror", None) or "it has a zero byte"
        raise SourceError(f"{name} cannot be read: {reason}. Check the name and rights.") from error
