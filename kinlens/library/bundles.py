"""Bundles in the caller's process: the models of galleries."""

import os
import re
import stat
from pathlib import Path
from typing import Any, Literal

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleNotFoundError
from kinlens.embedder.session import OnnxEmbedder

Device = Literal["cpu", "cuda"]


class LoadedBundle(OnnxEmbedder):
    """A bundle in this process, as `load_bundle` and the functions that write one return it.

    Attributes:
        report: what was measured by the function that wrote it, such as `kinlens.adapt`.
    """

    report: Any = None

    def _repr_html_(self) -> str | None:
        """The report in a notebook."""
        return None if self.report is None else str(self.report._repr_html_())

    def push_to_hub(self, repo: str, *, private: bool = True, token: str | None = None) -> str:
        """Push the bundle to the Hugging Face Hub, with a model card made from its manifest.

        It needs `kinlens[hub]`. Whoever can read the repository gets all files of the bundle: also
        the manifest with the training job and its paths, and hashes of the images trained on.
        Files and card of an earlier push are replaced; they stay in the history of the repository.

        Args:
            repo: `org/name`, created if there is none.
            private: refuse a repository that everybody can read.
            token: by default HF_TOKEN, or that of `hf auth login`.

        Returns:
            The address of this version for `load_bundle`, `hf://org/name@COMMIT`.

        Raises:
            BundleError: the Hub refuses it or cannot be reached.
        """
        from kinlens.library.hub import push

        return push(self.bundle, repo, private=private, token=token)


def load_bundle(path: Path | str, *, device: Device = "cpu") -> LoadedBundle:
    """Load the model of a bundle and check it against the golden vectors in the bundle.

    Args:
        path: a folder that `kinlens-train export` or `adapt` wrote; or `hf://org/name[@revision]`,
            a bundle on the Hugging Face Hub, which needs `kinlens[hub]`. Load only bundles of
            owners that you trust; with a commit as revision it is always the same.
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
    folder = bundle_folder(path)
    check_folder(folder, BundleNotFoundError)
    return LoadedBundle.open(folder, SessionSettings(device=device))


def bundle_folder(path: Path | str) -> Path | str:
    """The folder of a bundle. That of an address on the Hugging Face Hub is in a cache, to which it
    is downloaded; every other path is returned unchanged.

    Raises: BundleError if it cannot be downloaded.
    """
    address = re.fullmatch(r"hf:/{1,2}(.*)", str(path), re.DOTALL)  # a Path has one slash
    if address is None:
        return path
    from kinlens.library.hub import download

    return download(f"hf://{address[1]}")


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
