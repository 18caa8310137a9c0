"""Small sets of unit vectors for tests of indexes."""

import numpy as np

from embedder.types import Embeddings


def unit(count: int, dim: int = 16, seed: int = 0) -> Embeddings:
    """Directions without any structure, (count, dim)."""
    rows = np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def clumped(count: int, dim: int = 16, seed: int = 0) -> Embeddings:
    """Some fifty vectors around each of many centres, (count, dim), in random order."""
    rng = np.random.default_rng(seed)
    centres = unit(max(2, count // 50), dim, seed=1)
    rows = centres[rng.integers(0, len(centres), count)] + 0.15 * unit(count, dim, seed + 2)
    rows += 0.05 * rng.standard_normal(rows.shape).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def bitmap(chosen: np.ndarray) -> np.ndarray:
    """A mask (N,) as a little-endian bitmap."""
    return np.packbits(chosen, bitorder="little")
