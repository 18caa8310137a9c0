"""The bundles that a service knows: the one of its settings, and those in its state folder."""

import json
from collections.abc import Iterator
from pathlib import Path

from embedder.bundle import MANIFEST, Bundle
from embedder.errors import BundleNotFoundError
from embedder.preprocess import ImageLimits
from embedder.session import Embedder, OnnxEmbedder, SessionSettings
from embedder.types import SHORT
from service.settings import Settings

_FOLDER_DIGITS = 16


class Bundles:
    """Finds a bundle by its id and opens it; the hashes of its files are checked each time."""

    def __init__(self, settings: Settings) -> None:
        self._primary = settings.bundle
        self._stored = None if settings.state is None else settings.state / "bundles"
        self._limits: ImageLimits = settings.image_limits()
        self._session = SessionSettings(
            settings.device,
            settings.threads,
            settings.allow_cpu_fallback,
            settings.precision,
            settings.gpu_memory_mb,
        )

    def primary(self) -> str:
        """The id of the bundle that the settings name. Raises: BundleNotFoundError, BundleError."""
        if self._primary is None:
            raise BundleNotFoundError(
                "No model bundle was given. Name its folder with --bundle or KINLENS_BUNDLE."
            )
        return id_of(self._primary) or Bundle.open(self._primary).bundle_id

    def open(self, bundle_id: str) -> Embedder:
        """A bundle in a session of its own. Raises: BundleNotFoundError, BundleError."""
        return OnnxEmbedder.open(self.folder(bundle_id), self._session, self._limits)

    def folder(self, bundle_id: str) -> Path:
        """Where a bundle is. Raises: BundleNotFoundError naming the known ones."""
        known = {id_of(folder): folder for folder in self._folders(bundle_id)}
        if bundle_id not in known:
            ids = ", ".join(other[:SHORT] for other in known if other) or "none"
            raise BundleNotFoundError(
                f"The bundle {bundle_id[:SHORT]} is unknown to this service. Known are: {ids}. "
                "Name its folder with --bundle, or put it into the folder bundles of --state under "
                f"the first {_FOLDER_DIGITS} digits of its id."
            )
        return known[bundle_id]

    def _folders(self, bundle_id: str) -> Iterator[Path]:
        if self._stored is not None and bundle_id.isalnum():
            yield self._stored / bundle_id[:_FOLDER_DIGITS]
        if self._primary is not None:
            yield self._primary


class OneBundle:
    """The same calls for an embedder that is open already; ships beside the real ones."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder

    def primary(self) -> str:
        """The id of its bundle."""
        return self._embedder.bundle_id

    def open(self, bundle_id: str) -> Embedder:
        """The embedder. Raises: BundleNotFoundError for another bundle."""
        if bundle_id != self._embedder.bundle_id:
            raise BundleNotFoundError(
                f"The bundle {bundle_id[:SHORT]} is unknown to this service. Known are: "
                f"{self._embedder.bundle_id[:SHORT]}."
            )
        return self._embedder


def id_of(folder: Path) -> str | None:
    """The id that the manifest in a folder names, unchecked; None if there is no such manifest."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = content.get("bundle_id") if isinstance(content, dict) else None
    return found if isinstance(found, str) else None
