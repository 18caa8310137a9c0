"""Which items were missing when a candidate was made: numbers of one generation of the gallery."""

import contextlib
import json

from indexer.ingest.rebuild import Follower
from service.jobs.folders import JobFolders


def write_missing(folders: JobFolders, follower: Follower) -> None:
    """Remember the items whose pictures `follower` could not read. Raises: OSError."""
    found = {"generation": follower.gallery.generation, "items": sorted(follower.failures)}
    folders.missing.write_text(json.dumps(found), encoding="utf-8")


def read_missing(folders: JobFolders, generation: str) -> frozenset[int]:
    """The numbers of these items; none if the gallery was at another generation, or unknown."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(folders.missing.read_text(encoding="utf-8"))
        if isinstance(found, dict) and found.get("generation") == generation:
            return frozenset(found["items"])
    return frozenset()
