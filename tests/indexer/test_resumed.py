"""What a build, an import or a swap that was stopped has left harms nobody."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import InvalidParameterError
from kinlens.indexer.gallery import Gallery, current_generation
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.rebuild import Follower, rebuild, swap_in
from kinlens.indexer.ingest.sources import csv_source, folder_source
from kinlens.indexer.types import Entry, GalleryExport
from tests.indexer.conftest import CountingEmbedder, faults, query
from tests.indexer.oracle import units
from tests.indexer.test_rebuild import NEW, Photos, content
from tests.indexer.test_rebuild import photos as photos
from tests.support.seams import import_gallery
from tests.tiny import encoded, photo


class StoppedError(Exception):
    pass


def stops_at(point: str, time: int) -> Callable[[str], None]:
    left = time

    def hook(reached: str) -> None:
        nonlocal left
        left -= reached == point
        if reached == point and not left:
            raise StoppedError

    return hook


def dump(entries: Sequence[Entry]) -> GalleryExport:
    facts = {"name": "shop", "bundle_id": "b" * 64}
    return GalleryExport(facts, 8, len(entries), lambda: iter(entries))


def test_an_import_takes_no_vector_of_another_that_was_stopped(tmp_path: Path) -> None:
    first, second = (
        [Entry(f"k{n}", row, f"{n:064x}") for n, row in enumerate(units(5000, seed, dim=8))]
        for seed in (1, 2)
    )
    with pytest.raises(InvalidParameterError):
        import_gallery(dump([*first, replace(first[0], key="")]), tmp_path / "shop")
    import_gallery(dump(second), tmp_path / "shop")
    with closing(Gallery.open(tmp_path / "shop")) as gallery:
        stored = {entry.key: entry.vector for batch in gallery.scan() for entry in batch}
    for entry in second:
        np.testing.assert_allclose(stored[entry.key], entry.vector, atol=1e-6)


def test_a_build_that_died_after_its_publication_takes_nothing_from_readers(
    shop: Path, out: Path, tmp_path: Path, embedder: CountingEmbedder
) -> None:
    # The first time this point is passed, the draft itself is made.
    with faults(stops_at("current: after rename", 2)), pytest.raises(StoppedError):
        build_gallery(folder_source(shop), embedder, out)
    with closing(Gallery.open(out)) as reader:
        build_gallery(folder_source(shop), CountingEmbedder("c" * 64), out)
        other = tmp_path / "other"
        other.mkdir()
        (other / "new.png").write_bytes(encoded(photo(99)))
        build_gallery(folder_source(other), embedder, out)
        [hits] = reader.search(query(embedder, shop / "f.gif"), 1)
        assert (hits[0].key, reader.size) == ("f.gif", 6)
        assert current_generation(out) != reader.generation


def test_attributes_of_a_stopped_build_alone_are_forgotten(
    shop: Path, out: Path, embedder: CountingEmbedder
) -> None:
    file = shop / "list.csv"
    file.write_text("key,path,price\na,f.gif,low\n")
    with faults(stops_at("adopt: before commit", 1)), pytest.raises(StoppedError):
        build_gallery(csv_source(file), embedder, out)
    file.write_text("key,path\na,f.gif\n")
    assert build_gallery(csv_source(file), embedder, out).reused == 1
    with closing(Gallery.open(out)) as gallery:
        assert gallery.schema() == {}


def test_what_was_being_removed_goes_with_the_next_build(
    built: Path, build: Callable[[], object]
) -> None:
    (built / "versions" / ".stage-329411443671").mkdir()
    build()
    assert not [*(built / "versions").glob(".*")]


def test_a_swap_that_was_given_up_is_repeated_with_every_change(
    tmp_path: Path, photos: Photos
) -> None:
    shop = Gallery.create(tmp_path / "shop", name="shop", bundle_id="a" * 64, dim=NEW.dim // 2)
    shop.add([photos.entry(f"item {n}", n, stock=n) for n in range(8)])
    follower = Follower(tmp_path / "shop", NEW, photos.read)
    rebuild(follower, tmp_path / "candidate")
    shop.remove(["item 0"])
    shop.add([photos.entry("late", 500)])
    shop.update({"item 5": {"stock": 999}})
    wanted = {item.key: (item.sha256, dict(item.attributes)) for item in shop.items()}

    def give_up() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        swap_in(follower, tmp_path / "candidate", before_publish=give_up)
    swap_in(follower, tmp_path / "candidate")
    follower.close()
    shop.close()
    assert content(tmp_path / "shop") == wanted
