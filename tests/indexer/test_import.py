"""A gallery made of the entries of another: one step, and resumed where it was stopped."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from embedder.errors import GalleryWriteError, InvalidParameterError
from indexer.gallery import Gallery
from indexer.types import Dump, Entry
from tests.indexer.conftest import small_files
from tests.support.seams import import_gallery

DIM = 4
COUNT = 5000


def entries(count: int = COUNT) -> list[Entry]:
    vectors = np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [
        Entry(
            f"key-{number}",
            vectors[number],
            f"{number % 7:064x}",
            {"colour": "red" if number % 2 else "grün", "price": number / 3, "sale": number < 9},
            f"{number}.png",
            "PNG",
        )
        for number in range(count)
    ]


def dump(made: list[Entry]) -> Dump:
    facts = {"name": "shop", "bundle_id": "b" * 64}
    return Dump(facts, DIM, len(made), lambda: iter(made))


def content(path: Path) -> list[tuple[object, ...]]:
    gallery = Gallery.open(path)
    try:
        return [
            (e.key, e.sha256, e.attributes, e.path, e.format, e.vector.tobytes())
            for batch in gallery.scan()
            for e in batch
        ]
    finally:
        gallery.close()


def test_it_holds_what_adding_would_have_stored(tmp_path: Path) -> None:
    made = entries()
    told: list[int] = []
    report = import_gallery(dump(made), tmp_path / "made", on_progress=told.append)
    assert (report.items, sum(told)) == (COUNT, 2 * COUNT)
    slow = Gallery.create(tmp_path / "slow", name="shop", bundle_id="b" * 64, dim=DIM)
    slow.add(made)
    slow.close()
    assert content(tmp_path / "made") == content(tmp_path / "slow")


def test_an_import_that_was_stopped_goes_on_and_leaves_nothing_of_another(tmp_path: Path) -> None:
    made = entries()

    def broken() -> Iterator[Entry]:
        yield from [replace(made[0], key="of another"), *made[1:4500]]
        raise KeyError("source")

    with pytest.raises(KeyError):
        import_gallery(replace(dump(made), entries=broken), tmp_path / "shop")
    [draft] = (tmp_path / "shop" / "versions").iterdir()
    begun = Gallery.open(draft)
    numbers = {item.key: item.id for item in begun.items()}
    begun.close()
    assert len(numbers) == 4096
    import_gallery(dump(made), tmp_path / "shop")
    gallery = Gallery.open(tmp_path / "shop")
    found = {item.key: item.id for item in gallery.items()}
    gallery.close()
    assert found.keys() == {entry.key for entry in made}
    kept = numbers.keys() & found.keys()
    assert len(kept) == 4095
    assert all(found[key] == numbers[key] for key in kept)  # they were not written again
    assert not draft.exists()


def test_kinds_of_attributes_of_a_stopped_import_bind_nobody(tmp_path: Path) -> None:
    texts = [replace(entry, attributes={"price": "low"}) for entry in entries()]
    with pytest.raises(InvalidParameterError):
        import_gallery(dump([*texts, replace(texts[0], key="")]), tmp_path / "shop")
    import_gallery(dump(entries()), tmp_path / "shop")
    assert {entry[0] for entry in content(tmp_path / "shop")} == {e.key for e in entries()}


@pytest.mark.parametrize("distance", [1, 4500])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_key_twice_is_named_and_changes_nothing(
    tmp_path: Path, distance: int, is_resumed: bool
) -> None:
    made = entries()
    if is_resumed:
        with pytest.raises(InvalidParameterError):
            import_gallery(dump([*made, replace(made[0], key="")]), tmp_path / "shop")
    twins = [*made[:400], *made[400 : 400 + distance], replace(made[7], sha256="f" * 64)]
    with pytest.raises(InvalidParameterError, match="Key 'key-7' is there twice"):
        import_gallery(dump(twins), tmp_path / "shop")
    assert not (tmp_path / "shop" / "CURRENT").exists()


def test_a_wrong_entry_is_named(tmp_path: Path) -> None:
    made = entries()
    made[4500] = replace(made[4500], attributes={"price": "cheap"})
    with pytest.raises(InvalidParameterError, match="'price' is a number, and 'key-4500'"):
        import_gallery(dump(made), tmp_path / "shop")


def test_a_full_disk_is_named_and_the_work_is_kept(tmp_path: Path) -> None:
    with small_files(300_000), pytest.raises(GalleryWriteError, match=r"[Ff]ree"):
        import_gallery(dump(entries()), tmp_path / "shop")
    assert import_gallery(dump(entries()), tmp_path / "shop").items == COUNT
