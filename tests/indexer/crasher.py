"""A process that changes a gallery until it is killed, and the oracle that knows what it did.

Every operation is drawn from a seed, so the process and the oracle agree on what operation 17 of
seed 3 does. The process writes "begin N" before an operation and "done N" when it is acknowledged,
straight to a file, which outlives `kill -9`. What is imported here is imported by each process.
"""

import contextlib
import dataclasses
import hashlib
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from kinlens.embedder.durable import set_fault_hook
from kinlens.embedder.errors import GalleryBusyError
from kinlens.embedder.types import Embeddings
from kinlens.indexer.entries import Entry
from kinlens.indexer.exchange.follow import Follower
from kinlens.indexer.exchange.publish import publish
from kinlens.indexer.filters.tree import Range
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import import_gallery
from kinlens.indexer.ingest.rebuild import adopt
from kinlens.indexer.live.backup import restore_backup, write_backup
from kinlens.indexer.types import GalleryExport, SearchOptions
from kinlens.values import AttributeValue

DIM = 8
KEYS = 60
BUNDLE = "b" * 64

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["tests.indexer.crasher"])

Model = dict[str, tuple[str, int]]
"""What is in the gallery: content and attribute `stock` by key."""

Contents = dict[str, tuple[str, AttributeValue, bytes]]
"""The same as it is stored: sha256, attribute `stock` and vector by key."""


@dataclasses.dataclass(frozen=True)
class Operation:
    """One change: `kind` is add, update, remove, remove_where or compact."""

    kind: str
    entries: tuple[tuple[str, str, int], ...] = ()
    below: int = 0

    def applied(self, model: Model) -> Model:
        if self.kind == "add":
            return model | {key: (content, stock) for key, content, stock in self.entries}
        if self.kind == "update":
            known = [(key, stock) for key, _, stock in self.entries if key in model]
            return model | {key: (model[key][0], stock) for key, stock in known}
        if self.kind == "remove":
            gone = {key for key, _, _ in self.entries}
            return {key: value for key, value in model.items() if key not in gone}
        if self.kind == "remove_where":
            return {key: value for key, value in model.items() if value[1] >= self.below}
        return dict(model)

    def run(self, gallery: Gallery) -> None:
        if self.kind == "add":
            gallery.add([entry(*item) for item in self.entries])
        elif self.kind == "update":
            known = gallery.stored([key for key, _, _ in self.entries])
            gallery.update(
                {key: {"stock": stock} for key, _, stock in self.entries if key in known}
            )
        elif self.kind == "remove":
            gallery.remove([key for key, _, _ in self.entries])
        elif self.kind == "remove_where":
            gallery.remove_where(Range("stock", below=self.below))
        else:
            gallery.compact(wait=True)


def operations(seed: int) -> Iterator[Operation]:
    """What a process with this seed does, without end."""
    rng = np.random.default_rng(seed)
    kinds = ["add", "update", "remove", "remove_where", "compact"]
    while True:
        kind = str(rng.choice(kinds, p=[0.5, 0.1, 0.2, 0.1, 0.1]))
        keys = rng.choice(KEYS, size=int(rng.integers(1, 6)), replace=False)
        # Half of the items share three images, which are one candidate of the index each.
        contents = np.where(rng.random(len(keys)) < 0.5, 3, 10**9)
        entries = tuple(
            (f"item-{key}", f"content-{rng.integers(most)}", int(rng.integers(100)))
            for key, most in zip(keys, contents, strict=True)
        )
        yield Operation(kind, entries, int(rng.integers(0, 20)))


def vector(content: str) -> Embeddings:
    digest = hashlib.sha256(content.encode()).digest()
    drawn = np.random.default_rng(list(digest[:8])).standard_normal(DIM)
    unit: Embeddings = (drawn / np.linalg.norm(drawn)).astype(np.float32)
    return unit


def entry(key: str, content: str, stock: int) -> Entry:
    attributes: dict[str, AttributeValue] = {"stock": stock}
    return Entry(key, vector(content), hashlib.sha256(content.encode()).hexdigest(), attributes)


def change(path: Path, log: Path, seed: int, dies_at: tuple[str, int] | None) -> None:
    """Change the gallery until somebody kills this process, or it comes to the fault point of this
    name for this time, from 0.
    """
    if dies_at is not None:
        set_fault_hook(Dies(*dies_at))
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    gallery = Gallery.open(path)
    for number, operation in enumerate(operations(seed)):
        os.write(descriptor, f"begin {number}\n".encode())
        operation.run(gallery)
        os.write(descriptor, f"done {number}\n".encode())


def obey(path: Path, orders: Connection) -> None:
    """Remove the key of "-key", add 20 items for a name, and tell each time; until None."""
    gallery = Gallery.open(path)
    while (order := orders.recv()) is not None:
        if order[0] == "-":
            gallery.remove([order[1:]])
        else:
            for number in range(20):
                gallery.add([entry(f"{order}-{number}", order, number)])
        orders.send("done")
    gallery.close()


def compact(path: Path) -> None:
    """Compact the gallery again and again while another process changes it, until killed."""
    gallery = Gallery.open(path)
    while True:
        with contextlib.suppress(GalleryBusyError):
            gallery.compact(wait=True)


def build(path: Path, keys: int) -> None:
    entries = [entry(f"new-{n}", f"new content {n}", n) for n in range(keys)]
    facts = {"name": "g", "bundle_id": BUNDLE}
    import_gallery(GalleryExport(facts, DIM, keys, lambda: iter(entries)), path)


def rebuild(place: Path) -> None:
    build(place / "target", 12)


def remove_and_restore(place: Path) -> None:
    with contextlib.closing(Gallery.open(place / "target")) as gallery:
        gallery.remove(["new-1", "new-4"])
        gallery.restore(["new-1", "new-4"])


def adopt_source(place: Path) -> None:
    adopt(place / "target", place / "source")


def save(place: Path) -> None:
    write_backup(place / "source", place / "saved")


def restore_saved(place: Path) -> None:
    restore_backup(place / "saved", place / "target", replace=True)


def contents(path: Path) -> Contents:
    """What each item is, by key; a search finds every item, and nothing else."""
    with contextlib.closing(Gallery.open(path, verify_hashes=True)) as gallery:
        return stored(gallery)


def stored(gallery: Gallery) -> Contents:
    """The same of an open gallery."""
    found = {
        item.key: (item.sha256, item.attributes["stock"], item.vector.tobytes())
        for batch in gallery.scan()
        for item in batch
    }
    query = vector("a query")
    [hits] = gallery.search(query[None], 1000)
    assert {hit.key for hit in hits} == found.keys()
    assert len(hits) == len(found) == gallery.size
    for hit in hits:
        exact = float(np.frombuffer(found[hit.key][2], np.float32) @ query)
        assert abs(hit.score - exact) < 1e-5
    return found


def publish_shop(path: Path, address: str, _: Path, point: str) -> None:
    set_fault_hook(Dies(point, 0))
    publish(path, address)


def follow_shop(_: Path, address: str, copy: Path, point: str) -> None:
    set_fault_hook(Dies(point, 0))
    Follower(address, copy).update()


class Dies:
    """Kills its process at this crash point, after a number of passes of that one."""

    def __init__(self, name: str, before: int) -> None:
        self._name, self._before = name, before

    def __call__(self, point: str) -> None:
        if named(point) == self._name:
            self._before -= 1
            if self._before < 0:
                os.kill(os.getpid(), signal.SIGKILL)


def named(point: str) -> str:
    """A point without what differs from run to run: names of stages, segments, generations."""
    return re.sub(
        r"\.stage-\w+|[0-9a-f]{64}|[0-9a-f]{12}(-[0-9a-f]{8})?|\b[0-9a-f]{8}\b", "*", point
    )


def possible(model: Model, log: Path, seed: int) -> list[Model]:
    """What may be in the gallery after the process ended: with or without its last operation."""
    lines = log.read_text().split("\n")[:-1] if log.exists() else []
    begun = sum(line.startswith("begin") for line in lines)
    done = sum(line.startswith("done") for line in lines)
    drawn = operations(seed)
    for _ in range(done):
        model = next(drawn).applied(model)
    return [model] if begun == done else [model, next(drawn).applied(model)]


def check(gallery: Gallery, models: list[Model]) -> Model:
    """Which of the models is in the gallery, in its catalogue, index and filters alike."""
    found = stored(gallery)
    [model] = [model for model in models if found == expected(model)][:1] or [None]
    assert model is not None, f"{found.keys()} is none of {[m.keys() for m in models]}"
    options = SearchOptions(where=Range("stock", below=50))
    [cheap] = gallery.search(vector("a query")[None], KEYS, options)
    assert {hit.key for hit in cheap} == {key for key, value in model.items() if value[1] < 50}
    return model


def expected(model: Model) -> Contents:
    items = (entry(key, *value) for key, value in model.items())
    return {i.key: (i.sha256, i.attributes["stock"], i.vector.tobytes()) for i in items}
