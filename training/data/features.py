"""Pooled features of a frozen trunk, computed once and cached under the hash of their image.

Shapes: N images, V views an image, C channels of the trunk.
"""

import hashlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from kinlens.embedder.errors import DatasetError
from kinlens.embedder.machine import cache_folder
from kinlens.embedder.preprocess import preprocess, to_chw
from kinlens.training.config.settings import AUGMENTATIONS, TIMM, Input, Runtime
from kinlens.training.data.images import (
    ImageFiles,
    Index,
    Item,
    at_once,
    batches,
    build_loader,
    random_view,
)
from kinlens.training.data.records import LabelledImages, content_digest
from kinlens.training.distributed import local_world
from kinlens.training.models.embedding import EmbeddingNet, device_of, evaluating
from kinlens.training.parts.own import source_sha256

Vectors = NDArray[np.float32]
Computed = Callable[[int, int], None]
"""Called with the number of available features and the total."""

_LARGEST = 2 * 10**9  # bytes of the file: 400,000 views of MobileNetV2
_DEFAULTS = {name: Input.model_fields[name].default for name in AUGMENTATIONS}
_FORMAT = "2"  # increase it when features of the same image and trunk change


class CachedFeatures(Dataset[Item]):
    """Rows of `pooled` (N, V, C), indexed by (epoch, image, view): (C,) and the label.

    Only index and seed choose one of the V views.
    """

    def __init__(self, pooled: Tensor, labels: NDArray[np.int64], seed: int) -> None:
        self.pooled = pooled
        self.labels = torch.from_numpy(labels)
        self.seed = seed

    def __len__(self) -> int:
        return len(self.pooled)

    def __getitem__(self, index: Index) -> Item:
        epoch, number, view = index
        rng = np.random.default_rng((self.seed, epoch, number, view))
        return self.pooled[number, int(rng.integers(self.pooled.shape[1]))], self.labels[number]


class FeatureStore:
    """Features in an SQLite file, whose keys identify image, view and trunk.

    Several trainings may use it at the same time. Above `largest` bytes the oldest are removed.
    """

    def __init__(self, path: Path, largest: int = _LARGEST) -> None:
        self.path = path
        self.largest = largest

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=60)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute(
                    "CREATE TABLE IF NOT EXISTS vectors (number INTEGER PRIMARY KEY, "
                    "key BLOB UNIQUE, vector BLOB)"
                )
                yield connection
        except (OSError, sqlite3.Error) as error:
            raise DatasetError(
                f"The feature store {self.path} cannot be used ({error}). Delete it, or set "
                "XDG_CACHE_HOME to a folder with free space."
            ) from error

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Vectors]:
        found = {}
        with self._opened() as connection:
            for key in keys:
                row = connection.execute(
                    "SELECT vector FROM vectors WHERE key = ?", (key,)
                ).fetchone()
                if row is not None:
                    found[key] = np.frombuffer(row[0], dtype=np.float32)
        return found

    def put(self, keys: Sequence[bytes], vectors: Vectors) -> None:
        rows = [(key, vector.tobytes()) for key, vector in zip(keys, vectors, strict=True)]
        with self._opened() as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO vectors VALUES (NULL, ?, ?)", rows)
            (used,) = connection.execute(
                "SELECT (page_count - freelist_count) * page_size "
                "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
            ).fetchone()
            if used > self.largest:  # removing a quarter keeps this rare
                connection.execute(
                    "DELETE FROM vectors WHERE number < "
                    "(SELECT min(number) + (max(number) - min(number)) / 4 FROM vectors)"
                )


def pooled_views(
    net: EmbeddingNet,
    images: LabelledImages,
    spec: Input,
    runtime: Runtime,
    views: int = 1,
    store: FeatureStore | None = None,
    computed: Computed | None = None,
) -> Tensor:
    """The pooled features (N, V, C) of `views` views of each image, on the CPU.

    View 0 is the image as the service preprocesses it, the others are random training views, seeded
    by the content of the image.

    Raises: DatasetError naming an image that cannot be read.
    """
    store = store or FeatureStore(cache_folder() / "features.sqlite")
    plain = spec.model_copy(update={name: _DEFAULTS[name] for name in AUGMENTATIONS})
    served, varied = _digest(net, plain), _digest(net, spec)
    contents = [content_digest(images.root / path) for path in images.paths]
    wanted = [(number, view) for number in range(len(images)) for view in range(views)]
    keys = {
        (number, view): hashlib.sha256(
            (varied if view else served) + contents[number] + bytes([view])
        ).digest()
        for number, view in wanted
    }
    found = store.get([*keys.values()])
    missing = [index for index in wanted if keys[index] not in found]
    device = device_of(net.trunk)
    size = at_once(runtime)
    dataset = _Views(images, spec, contents)
    with evaluating(net), torch.inference_mode():
        for of_training in (False, True):  # the two have different sizes
            part = [index for index in missing if (index[1] > 0) == of_training]
            if not part:  # start no processes without work
                continue
            order = [part[start : start + size] for start in range(0, len(part), size)]
            loader = build_loader(dataset, cast(Any, order), runtime, device, 0, local_world())
            for indices, (pixels, _) in zip(order, batches(loader), strict=True):
                vectors = net.pooled(pixels.to(device)).float().cpu().numpy()
                made = [keys[index] for index in indices]
                store.put(made, vectors)
                found |= zip(made, vectors, strict=True)
                if computed is not None:
                    computed(len(found), len(wanted))
    rows = np.stack([found[keys[index]] for index in wanted])
    return torch.from_numpy(rows.reshape(len(images), views, -1))


class _Views(ImageFiles):
    """Views seeded by the content of an image, by (image, view): uint8 (3, S, S) and the label."""

    def __init__(self, images: LabelledImages, spec: Input, contents: Sequence[bytes]) -> None:
        super().__init__(images)
        self.spec = spec
        self.contents = contents

    def __getitem__(self, index: tuple[int, int]) -> Item:
        number, view = index
        if view == 0:
            return self.item(number, lambda data: preprocess(data, self.spec.preprocessing()))
        rng = np.random.default_rng((*self.contents[number][:16], view))
        return self.item(number, lambda data: to_chw(random_view(data, self.spec, rng)))


def _digest(net: EmbeddingNet, spec: Input) -> bytes:
    """Digest of all that determines a feature except the image."""
    trunk = f"{net.backbone} {version('timm')}" if net.backbone.startswith(TIMM) else net.backbone
    # Without augmentations the keys are those of version 0.2.
    off = {name for name in AUGMENTATIONS if getattr(spec, name) == _DEFAULTS[name]}
    given = spec.model_dump_json(exclude=off)
    settings = f"{_FORMAT} {trunk} {net.pool.kind} {given}"
    if spec.augment is not None:
        settings += source_sha256(spec.augment)
    digest = hashlib.sha256(settings.encode())
    for module in (net.normalize, net.trunk, net.pool):
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            digest.update(name.encode() + value.detach().cpu().numpy().tobytes())
    return digest.digest()
