"""Vectors of a build that is under way, so that a killed build continues where it stopped."""

import contextlib
import json
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from embedder.types import Embeddings
from indexer.folder.layout import disk_errors_explained

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS vectors (
    bundle_id TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    vector BLOB NOT NULL,
    PRIMARY KEY (bundle_id, sha256)
) STRICT, WITHOUT ROWID;
"""
_SELECT = """
SELECT sha256, vector FROM vectors
WHERE bundle_id = ? AND sha256 IN (SELECT value FROM json_each(?))
"""
_HAS_OTHERS = """
SELECT EXISTS (SELECT 1 FROM vectors WHERE bundle_id < ?1)
    OR EXISTS (SELECT 1 FROM vectors WHERE bundle_id > ?1)
"""


class WorkFile:
    """Vectors by the sha256 of the image, for one bundle; used from one thread.

    Raises: OSError, sqlite3.Error where nothing else is said.
    """

    def __init__(self, path: Path, bundle_id: str, dim: int) -> None:
        self._path = path
        self._bundle_id = bundle_id
        self._dim = dim
        self._connection = _connect(path)

    def known(self) -> set[str]:
        """sha256 of every image whose vector is there."""
        rows = self._connection.execute(
            "SELECT sha256 FROM vectors WHERE bundle_id = ? AND length(vector) = ?",
            (self._bundle_id, 4 * self._dim),
        )
        return {sha256 for (sha256,) in rows}

    def add(self, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        """Keep vectors (D,) under the sha256 of their images; they survive `kill -9`.

        Raises: GalleryError if they cannot be written.
        """
        rows = [(self._bundle_id, key, vector.tobytes()) for key, vector in vectors.items()]
        with disk_errors_explained(self._path.parent), self._connection:
            self._connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)

    def vectors(self, sha256s: Sequence[str]) -> Embeddings:
        """The vectors (N, D) of known images, in the order asked for."""
        rows = self._connection.execute(_SELECT, (self._bundle_id, json.dumps(list(set(sha256s)))))
        found = dict(rows.fetchall())
        return np.stack([np.frombuffer(found[sha256], np.float32) for sha256 in sha256s])

    def close(self) -> None:
        """Close and keep the file."""
        self._connection.close()

    def remove(self) -> None:
        """Close and drop the vectors of this bundle, once they are published.

        The file goes too, unless it holds the vectors of a build with another bundle.
        """
        [(is_shared,)] = self._connection.execute(_HAS_OTHERS, (self._bundle_id,))
        if is_shared:
            with self._connection:
                self._connection.execute(
                    "DELETE FROM vectors WHERE bundle_id = ?", (self._bundle_id,)
                )
        self.close()
        if not is_shared:
            _delete(self._path)


def _connect(path: Path) -> sqlite3.Connection:
    connection = _opened(path)
    if connection is None:
        # The file only saves time: a damaged one is dropped and its images are embedded again.
        _delete(path)
        connection = sqlite3.connect(path)
        connection.executescript(_SCHEMA)
    return connection


def _opened(path: Path) -> sqlite3.Connection | None:
    connection = sqlite3.connect(path)
    try:
        connection.executescript(_SCHEMA)
        if connection.execute("PRAGMA quick_check").fetchone() == ("ok",):
            return connection
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError:
        pass
    connection.close()
    return None


def _delete(path: Path) -> None:
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        with contextlib.suppress(FileNotFoundError):
            (path.parent / name).unlink()
