"""Cache of speed measurements on this machine: how much faster each mode of a bundle is.

One small file per bundle and machine, in `kinlens/engines` below XDG_CACHE_HOME or ~/.cache.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kinlens.embedder.durable import write_whole
from kinlens.embedder.engines.models import engine_versions
from kinlens.embedder.machine import cache_folder, processor
from kinlens.embedder.manifest import Mode


class Measured(NamedTuple):
    """Speed of each mode relative to the first one, and the reasons why others were refused."""

    gains: Mapping[Mode, float]
    refused: Mapping[Mode, str]


def read_measured(bundle_id: str, modes: Sequence[Mode], threads: int) -> Measured | None:
    """The stored measurement for this machine and these versions and modes; None without one."""
    try:
        found = json.loads(_file(bundle_id, modes, threads).read_text(encoding="utf-8"))
        gains = {
            mode: float(found["gains"][mode.key]) for mode in modes if mode.key in found["gains"]
        }
        refused = {mode: str(found["refused"][mode.key]) for mode in modes if mode not in gains}
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None
    return Measured(gains, refused) if gains else None


def write_measured(bundle_id: str, modes: Sequence[Mode], threads: int, measured: Measured) -> None:
    """Store a measurement, if the cache folder is writable."""
    content = {
        "gains": {mode.key: gain for mode, gain in measured.gains.items()},
        "refused": {mode.key: why for mode, why in measured.refused.items()},
    }
    with contextlib.suppress(OSError, RuntimeError):
        file = _file(bundle_id, modes, threads)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content).encode(), "measured")


def _file(bundle_id: str, modes: Sequence[Mode], threads: int) -> Path:
    known = [
        bundle_id,
        processor(),
        engine_versions(),
        [mode.key for mode in modes],
        threads,
    ]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_folder() / "engines" / f"{digest[:32]}.json"
