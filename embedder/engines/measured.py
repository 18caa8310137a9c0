"""Cache of speed measurements on this machine: how much faster each mode of a bundle is.

One small file per bundle and machine, in `kinlens/engines` below XDG_CACHE_HOME or ~/.cache.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kinlens.embedder.durable import write_whole
from kinlens.embedder.engines.models import engine_versions
from kinlens.embedder.machine import cache_folder, processor
from kinlens.embedder.manifest import Mode

Outcome = float | str
"""The speed of a mode relative to the first one, or why it was refused."""


def read_measured(
    bundle_id: str, modes: Sequence[Mode], threads: int
) -> dict[Mode, Outcome] | None:
    """The stored measurement for this machine and these versions and modes; None without one."""
    try:
        found = json.loads(_file(bundle_id, modes, threads).read_text(encoding="utf-8"))
        outcomes = {mode: found[mode.key] for mode in modes}
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None
    return outcomes if any(isinstance(outcome, float) for outcome in outcomes.values()) else None


def write_measured(
    bundle_id: str, modes: Sequence[Mode], threads: int, outcomes: Mapping[Mode, Outcome]
) -> None:
    """Store a measurement, if the cache folder is writable."""
    content = {mode.key: outcome for mode, outcome in outcomes.items()}
    with contextlib.suppress(OSError, RuntimeError):
        file = _file(bundle_id, modes, threads)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(content).encode(), "measured")


def _file(bundle_id: str, modes: Sequence[Mode], threads: int) -> Path:
    known = [bundle_id, processor(), engine_versions(), [mode.key for mode in modes], threads]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
    return cache_folder() / "engines" / f"{digest[:32]}.json"
