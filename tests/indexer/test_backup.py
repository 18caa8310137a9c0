"""Backups: one state of a gallery in use, whole or refused, and back without a moment of danger."""

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinlens.embedder.errors import GalleryCorruptError
from kinlens.indexer.entries import Entry
from kinlens.indexer.galleries import copy_bytes, current_generation
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.live.backup import restore_backup
from kinlens.quality.calibrator import Calibrator
from tests.indexer import oracle
from tests.indexer.conftest import flipped, generation_of, segment_of, truncated, zeroed
from tests.indexer.crasher import DIM, vector
from tests.support.seams import write_backup

QUERIES = np.eye(DIM, dtype=np.float32)


def entry(key: str, **attributes: Any) -> Entry:
    return oracle.entry(key, vector(key), attributes)


def fill(path: Path, count: int = 200) -> Path:
    """A gallery with a segment, items behind it, and some that were removed from it."""
    gallery = Gallery.create(path, name="shop", bundle_id="b" * 64, dim=DIM, source_root="/shop")
    gallery.add([entry(f"item {n}", stock=n, sale=n % 2 == 0) for n in range(count)])
    gallery.compact()
    Calibrator(gallery).fit()
    gallery.remove([f"item {n}" for n in range(0, count, 10)])
    gallery.add([entry(f"later {n}", price=n / 2) for n in range(20)])
    gallery.close()
    return path


def content(path: Path) -> dict[str, Any]:
    """All facts of a gallery except its generation."""
    with closing(Gallery.open(path, verify_hashes=True)) as gallery:
        items = [*gallery.items()]
        return {
            "items": items,
            "types": [[type(value) for value in item.attributes.values()] for item in items],
            "vectors": gallery.items_at([item.id for item in items])[1].tobytes(),
            "facts": gallery.facts().model_dump(exclude={"generation", "version"}),
            "answers": gallery.search(QUERIES, 10_000),
            "filtered": [gallery.page(0, 200, text) for text in ("stock > 90", "price > 3")],
            "calibration": Calibrator(gallery).stored(),
        }


def keys(path: Path) -> set[str]:
    with closing(Gallery.open(path)) as gallery:
        found = {item.key for item in gallery.items()}
        [hits] = gallery.search(QUERIES[:1], 10_000)
    assert {hit.key for hit in hits} == found
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    return fill(tmp_path_factory.mktemp("filled") / "shop")


@pytest.fixture
def shop(filled, tmp_path) -> Path:
    return Path(shutil.copytree(filled, tmp_path / "shop"))


@pytest.fixture
def saved(filled, tmp_path) -> Path:
    write_backup(filled, tmp_path / "saved")
    return tmp_path / "saved"


def repeated_page(file: Path) -> None:
    """A catalogue whose pages are whole, and do not hold together."""
    data, page = bytearray(file.read_bytes()), 16_384
    data[2 * page : 3 * page] = data[3 * page : 4 * page]
    file.write_bytes(data)


def test_a_backup_and_what_is_restored_from_it_are_the_same_under_other_generations(
    filled, tmp_path
) -> None:
    places = [tmp_path / name for name in ("saved", "one", "two")]
    copied: list[int] = []
    report = write_backup(filled, places[0], copied.append)
    assert sum(copied) == copy_bytes(filled) == pytest.approx(report.bytes, rel=0.1)
    assert content(filled)["calibration"] is not None
    assert (report.name, report.items) == ("shop", 200)
    assert report.source_generation == generation_of(filled).name
    assert report.generation == generation_of(places[0]).name
    assert json.loads((places[0] / "backup.json").read_text()) == report.model_dump()
    assert content(places[0]) == content(filled)  # to look into a backup does not spoil it
    for place in places[1:]:
        assert restore_backup(places[0], place).generation == generation_of(place).name
        assert len([*place.rglob("columns/*.bin")]) == 1  # no filter has to read every item
        assert content(place) == content(filled)
    facts = []
    for path in (filled, *places):
        with closing(Gallery.open(path)) as gallery:
            facts.append((gallery.generation, gallery.version))
    assert [len({*each}) for each in zip(*facts, strict=True)] == [4, 4]


def test_a_backup_taken_during_changes_is_one_state_with_all_that_was_acknowledged(
    shop, tmp_path
) -> None:
    """Each change adds a pair, takes an older pair away and compacts now and then."""
    stop, acknowledged = threading.Event(), 0

    def change() -> None:
        nonlocal acknowledged
        with closing(Gallery.open(shop)) as gallery:
            for number in itertools.takewhile(lambda _: not stop.is_set(), itertools.count()):
                gallery.add([entry(f"left {number}"), entry(f"right {number}")])
                acknowledged = number
                gallery.remove([f"left {number - 20}", f"right {number - 20}"])
                if number % 10 == 9:
                    gallery.compact(wait=True)

    with ThreadPoolExecutor(1) as pool:
        changing = pool.submit(change)
        try:
            acknowledgements = []
            for number in range(8):
                acknowledgements.append(acknowledged)
                write_backup(shop, tmp_path / f"saved {number}")
        finally:
            stop.set()
        changing.result()
    for number, last in enumerate(acknowledgements):
        known = keys(tmp_path / f"saved {number}")
        lefts, rights = (
            sorted(int(key.split()[1]) for key in known if key.startswith(side))
            for side in ("left", "right")
        )
        assert lefts == rights
        assert lefts == [*range(lefts[0], lefts[-1] + 1)] if lefts else last == 0
        assert len(lefts) <= 21
        assert last == 0 or lefts[-1] >= last
    assert acknowledgements[-1] > 0


def test_a_gallery_that_lacks_a_file_is_not_backed_up(shop, tmp_path) -> None:
    file = segment_of(shop) / "gone.bin"
    file.unlink()
    with pytest.raises(GalleryCorruptError, match=rf"{file}"):
        write_backup(shop, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("catalog.sqlite", flipped),
        ("catalog.sqlite", repeated_page),
        ("rows.f32", zeroed),
        ("manifest.json", truncated),
        ("report.json", Path.unlink),
        ("gone.bin", truncated),
    ],
)
def test_a_damaged_backup_is_refused_with_the_file_name_and_changes_nothing(
    shop, saved, name: str, damage: Callable[[Path], object]
) -> None:
    (file,) = saved.rglob(name)
    damage(file)
    before = content(shop)
    with pytest.raises(GalleryCorruptError, match=name.replace(".", r"\.")):
        restore_backup(saved, shop, replace=True)
    with pytest.raises(GalleryCorruptError):
        restore_backup(saved, saved.parent / "nowhere")
    assert current_generation(saved.parent / "nowhere") is None
    assert content(shop) == before
