"""Power may go at any moment: what gets its final name is on the disk by then, and so is the name
before anything else gets one.

The calls to the system are recorded; what the disk makes of them is the system's promise. SQLite
does its own.
"""

import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.indexer.live.backup import restore_backup, write_backup
from kinlens.quality.calibrator import Calibrator
from tests.support.shops import start_shop
from tests.tiny import encoded, photo


def state(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns


class Disk:
    """Follows what is synced and named below `root`; a hidden name is for what is not done yet.

    `published` is every final name that was given, `faults` is what a loss of power could take.
    """

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.published: list[str] = []
        self.faults: list[str] = []
        self._root = root
        self._synced: dict[int, tuple[int, int]] = {}
        self._unsafe: dict[int, list[tuple[str, int]]] = {}  # by folder: names, who gave them
        self._fsync, self._mkdir = os.fsync, os.mkdir
        patch.setattr(os, "fsync", self._sync)
        patch.setattr(os, "mkdir", self._make)
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(self._move, getattr(os, name)))

    def check(self, part: str = "") -> None:
        """All that was published with `part` in its name stays, with the folders on its way."""
        published = [name for name in self.published if part in name]
        for name, _ in chain.from_iterable(self._unsafe.values()):
            if any(f"{one}/".startswith(f"{name}/") for one in published):
                self.faults.append(f"the name {name} was never synced")
        assert not self.faults

    def _sync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        self._synced[found.st_ino] = state(found)
        self._unsafe.pop(found.st_ino, None)

    def _make(self, path: Path | str, *mode: int) -> None:
        self._mkdir(path, *mode)
        self._note(Path(path))

    def _move(self, move: Callable[..., None], source: Path | str, target: Path | str) -> None:
        if name := self._name(Path(target)):
            self._expect_all_synced(Path(source), name)
        move(source, target)
        if name:
            self._note(Path(target))
            self.published.append(name)

    def _name(self, path: Path) -> str:
        is_final = path.is_relative_to(self._root) and not path.name.startswith(".")
        return str(path.relative_to(self._root)) if is_final else ""

    def _note(self, path: Path) -> None:
        if name := self._name(path):
            names = self._unsafe.setdefault(path.parent.stat().st_ino, [])
            names.append((name, threading.get_ident()))

    def _expect_all_synced(self, source: Path, name: str) -> None:
        for path in (source, *source.rglob("*")):
            found = path.stat()
            if self._synced.get(found.st_ino) != state(found):
                self.faults.append(f"{path} was not synced before it became {name}")
        for other, thread in chain.from_iterable(self._unsafe.values()):
            if other in self.published and thread == threading.get_ident():
                self.faults.append(f"the name {other} was not synced before {name} was given")


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(tmp_path, monkeypatch)


def entries(count: int) -> list[Entry]:
    vectors = np.eye(8, dtype=np.float32)
    return [Entry(f"item-{n}", vectors[n % 8], f"{n:064x}", {"n": n}) for n in range(count)]


def test_a_build_is_on_the_disk_before_it_is_current(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    for number in range(3):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(encoded(photo(number)))
    out = tmp_path / "shops" / "new"
    build_gallery(folder_source(tmp_path / "pictures"), FakeEmbedder(), out)
    assert disk.published[-1] == "shops/new/CURRENT"
    assert any(name.startswith("shops/new/versions/") for name in disk.published)
    disk.check()


def test_a_compaction_a_backup_and_its_restore_are_on_disk(disk: Disk, tmp_path: Path) -> None:
    gallery = Gallery.create(tmp_path / "shop", name="shop", bundle_id="b" * 64, dim=8)
    gallery.add(entries(20))
    gallery.compact()
    assert "/segments/" in disk.published[-1]
    assert Calibrator(gallery).fit_if_outdated()
    assert disk.published[-1].endswith("/calibration.json")
    gallery.close()
    write_backup(tmp_path / "shop", tmp_path / "backups" / "today")
    assert "backups/today" in disk.published
    restore_backup(tmp_path / "backups" / "today", tmp_path / "back")
    assert disk.published[-1] == "back/CURRENT"
    disk.check()


def test_an_upload_is_on_the_disk_when_it_is_acknowledged(disk: Disk, tmp_path: Path) -> None:
    shop = start_shop(tmp_path / "state")
    try:
        shop.put({f"{number}.png": encoded(photo(number)) for number in range(3)})
        assert sum("/pictures/" in name for name in disk.published) == 3
        disk.check("/pictures/")  # a calibration may be half written in the background
    finally:
        shop.close()
    disk.check()
