"""Bundles in the caller's process: the models of galleries."""

import os
import stat
from pathlib import Path
from typing import Literal

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleNotFoundError
from kinlens.embedder.session import OnnxEmbedder

Device = Literal["cpu", "cuda"]


def load_bundle(path: Path | str, *, device: Device = "cpu") -> OnnxEmbedder:
    """Load the model of a bundle and check it against the golden vectors in the bundle.

    Args:
        path: a folder that `kinlens-train export` or `adapt` wrote.
        device: "cuda" needs `kinlens[gpu]` and an NVIDIA GPU.

    Returns:
        An embedder. `embed_files(paths)` and `embed_images(contents)` return vectors (N, D) of unit
        norm as float32; `bundle_id` names the model.

    Raises:
        BundleError: the bundle is missing, damaged, or fails its golden vectors.

    Examples:
        >>> bundle = kinlens.load_bundle("bundles/shop")
        >>> bundle.embed_files(["photo.jpg"]).shape == (1, bundle.dim)
        True
    """
    check_folder(path, BundleNotFoundError)
    return OnnxEmbedder.open(path, SessionSettings(device=device))


def check_folder(path: Path | str, kind: type[Exception]) -> None:
    """Raises: `kind` for a path that is a file or cannot be read; others name a missing one."""
    try:
        is_folder = stat.S_ISDIR(os.stat(path).st_mode)  # noqa: PTH116 (Path hides a zero byte)
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it has a zero byte"
        raise kind(f"path = {str(path)!r} cannot be read: {reason}. Use another path.") from error
    if not is_folder:
        raise kind(f"path = {str(path)!r} is a file. Use the folder that the file is in.")
