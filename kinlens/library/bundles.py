"""Bundles in the caller's process: the models of galleries."""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from kinlens.embedder.bundle import MANIFEST
from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleNotFoundError, InvalidParameterError, KinlensError
from kinlens.embedder.preprocess import ImageLimits, render_jpeg
from kinlens.embedder.session import OnnxEmbedder
from kinlens.reports import THUMBNAIL_PX, Report, photo_card, photo_grid

Device = Literal["cpu", "cuda"]
_ADDRESS = re.compile(r"[A-Za-z0-9+.-]{2,}:/")  # a Path has one slash
_NAMED, _FOLDERS = 3, 100
_QUERIES, _RESULTS = 4, 4
"""Of the photos in a report: queries, and results of each."""


class ModelReport(Report):
    """What was measured of a model that was just written.

    Attributes:
        figures: by name, see the function that wrote the model.
        model: the model, which searches among some of the test photos for a notebook.
        photos: these photos, with the names of their products.
    """

    def __init__(
        self,
        lines: list[str],
        figures: dict[str, Any],
        model: OnnxEmbedder,
        photos: Mapping[Path, str],
    ) -> None:
        self.figures = figures
        self._lines, self._model, self._photos = lines, model, photos

    def lines(self) -> list[str]:
        return self._lines

    def _repr_html_(self) -> str:
        """The lines, and some photos with their results."""
        try:
            photos = "".join(self._results()) if self._photos else ""
        except (KinlensError, OSError) as error:  # a photo was removed after the test
            photos = f"<p>{escape(str(error))}</p>"
        return super()._repr_html_() + photos

    def _results(self) -> Iterator[str]:
        paths, names = [*self._photos], [*self._photos.values()]
        vectors = self._model.embed_files(paths)
        scores = vectors @ vectors.T
        yield "<p>Photos of the test, each with its first results</p>"
        with_pair = [row for row, name in enumerate(names) if names.count(name) > 1]
        for query in with_pair[:: max(1, len(with_pair) // _QUERIES)][:_QUERIES]:
            order = [row for row in scores[query].argsort()[::-1].tolist() if row != query]
            cards = []
            for row in (query, *order[:_RESULTS]):
                jpeg = render_jpeg(paths[row].read_bytes(), ImageLimits(), THUMBNAIL_PX)
                found = "right" if names[row] == names[query] else "wrong"
                cards.append(photo_card(names[row], {}, jpeg, "photo" if row == query else found))
            yield photo_grid(cards)


class LoadedBundle(OnnxEmbedder):
    """A bundle in this process, as `load_bundle` and the functions that write one return it.

    Attributes:
        report: what was measured by the function that wrote it, such as `kinlens.adapt`.
    """

    report: Any = None

    def __repr__(self) -> str:
        return f"<Bundle {self._about_model()}; {self._about_result()}>"

    def _repr_html_(self) -> str:
        """What it is and how good, in a notebook: by its report, if there is one."""
        known = f"<p>{escape(self._about_result())}</p>"
        report = known if self.report is None else self.report._repr_html_()
        return f"<p>{escape(self._about_model())}</p>{report}"

    def _about_model(self) -> str:
        made_from = self.bundle.manifest.backbone
        return f"{self.bundle.path.name}: {self.dim:,} numbers for each photo, by {made_from}"

    def _about_result(self) -> str:
        first = self.bundle.manifest.recall.get("R@1")
        if first is None:
            return "not tested"
        return f"for {first:.0f} of 100 photos of its test, the first result is right"

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
    check_choice("device", device, get_args(Device))
    folder = check_folder(bundle_folder(path), BundleNotFoundError, MANIFEST)
    return LoadedBundle.open(folder, SessionSettings(device=device))


def bundle_folder(path: Path | str) -> Path | str:
    """The folder of a bundle. That of an address on the Hugging Face Hub is in a cache, to which it
    is downloaded.

    Raises: BundleError if it cannot be downloaded.
    """
    address = re.fullmatch(r"hf:/{1,2}(.*)", str(path), re.DOTALL)  # a Path has one slash
    if address is None:
        return path
    from kinlens.library.hub import download

    return download(f"hf://{address[1]}")


def user_path(path: str | os.PathLike[str]) -> str:
    """A path whose `~` is the home folder, as in a shell."""
    return os.path.expanduser(os.fsdecode(path))  # noqa: PTH111 (Path drops a part of addresses)


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises: InvalidParameterError for a value that is none of the choices."""
    if value not in (known := [*choices]):
        listed = ", ".join(repr(choice) for choice in known if choice is not None)
        raise InvalidParameterError(f"{name} = {value!r:.80} is not one of {listed}.")


def check_folder(path: Any, kind: type[Exception], needed: str | None = None) -> str:
    """The path of a folder, or of one that does not exist, which others name.

    needed: a file that the folder must have.

    Raises: `kind` for a path that is a file or cannot be read, and for a folder without the file,
        with what is there instead.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise kind(f"path = {path!r:.80} must be the path of a folder.")
    if needed and _ADDRESS.match(str(path)):
        raise kind(
            f"path = {str(path)!r} is an address. Copy it into a folder; that of a model on the "
            "Hugging Face Hub is hf://org/name, for load_bundle, and kinlens.restore_gallery "
            "copies galleries."
        )
    folder = user_path(path)
    try:
        is_folder = stat.S_ISDIR(os.stat(folder).st_mode)  # noqa: PTH116 (Path hides a zero byte)
        names = {p.name for p in Path(folder).iterdir()} if needed and is_folder else set()
    except (FileNotFoundError, NotADirectoryError):
        return folder
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it has a zero byte"
        raise kind(f"path = {folder!r} cannot be read: {reason}. Use another path.") from error
    if not is_folder:
        raise kind(f"path = {folder!r} is a file. {_use_of(folder)}")
    if needed and needed not in names:
        raise kind(f"path = {folder!r} {_content(Path(folder), sorted(names))}")
    return folder


def _use_of(file: str) -> str:
    if file.lower().endswith(".onnx"):
        return "Use the folder of its bundle, or make one of the model with kinlens.import_model."
    return "Use the folder that the file is in."


def _content(folder: Path, names: list[str]) -> str:
    """What is in a folder that is not the one that was meant, and what can be done with it."""
    from kinlens.indexer.folder.layout import CURRENT  # which a model does not need

    if not names:
        return "is an empty folder. Check the name."
    if CURRENT in names:
        return "is a gallery. Open it with kinlens.open_gallery."
    if MANIFEST in names and any(name.endswith(".onnx") for name in names):
        return "is a bundle, a model. Load it with kinlens.load_bundle."
    for file, about in ((CURRENT, "galleries"), (MANIFEST, "bundles")):
        if inner := [name for name in names if (folder / name / file).is_file()]:
            return f"is a folder of {about}: {_first(inner)}. Use the path of one of them."
    if any(name.lower().endswith(SUFFIXES) for _, _, files in _top(folder) for name in files):
        return "is a folder of images. Make a gallery of them with kinlens.build."
    return f"has neither a gallery nor a bundle; it has {_first(names)}. Check the name."


def _top(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    return islice(os.walk(folder), _FOLDERS)


def _first(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
