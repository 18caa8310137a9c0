"""Rebuild: a gallery by another model beside the old one, which is searched and changed."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embedder.errors import GalleryBusyError, SourceError
from indexer.gallery import Gallery
from indexer.ingest.rebuild import Follower, rebuild, swap_in
from indexer.types import Entry
from tests.indexer.rebuilds import NEW, OLD, Pictures, content, fill
from tests.support.seams import EmbedSettings


@pytest.fixture
def pictures() -> Pictures:
    return Pictures()


@pytest.fixture
def shop(tmp_path: Path, pictures: Pictures) -> Iterator[Gallery]:
    gallery = fill(tmp_path / "shop", pictures)
    yield gallery
    gallery.close()


@pytest.fixture
def follower(shop: Gallery, tmp_path: Path, pictures: Pictures) -> Iterator[Follower]:
    one = Follower(tmp_path / "shop", NEW, pictures.read, EmbedSettings(batch_size=4, workers=2))
    yield one
    one.close()


def test_every_item_gets_a_vector_of_the_new_model_and_keeps_the_rest(
    follower: Follower, tmp_path: Path
) -> None:
    told: list[int] = []
    report = rebuild(follower, tmp_path / "candidate", on_progress=told.append)
    assert (report.found, report.items, report.embedded, report.missing) == (40, 40, 40, 0)
    assert sum(told) == 40
    assert content(tmp_path / "candidate") == content(tmp_path / "shop")
    made = Gallery.open(tmp_path / "candidate", expected_bundle_id=NEW.bundle_id)
    assert made.dim == NEW.dim != OLD.dim
    assert made.facts().delta == 0


def test_equal_contents_are_embedded_once(
    shop: Gallery, follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    shop.add([pictures.entry(f"copy {n}", 3) for n in range(3)])
    report = rebuild(follower, tmp_path / "candidate")
    assert (report.items, report.embedded) == (43, 40) or report.embedded <= 42
    assert content(tmp_path / "candidate") == content(tmp_path / "shop")


def test_items_whose_picture_is_gone_are_listed_and_a_limit_decides(
    follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    pictures.gone = {"item 3", "item 7"}
    report = rebuild(follower, tmp_path / "some", max_missing=0.05)
    assert (report.items, report.missing) == (38, 2)
    assert [f.key for f in report.failures] == ["item 3", "item 7"]
    assert "gone" in report.failures[0].reason
    assert content(tmp_path / "shop").keys() - content(tmp_path / "some").keys() == pictures.gone


def test_too_many_missing_pictures_are_refused_by_number_and_limit(
    follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    pictures.gone = {"item 3", "item 7"}
    with pytest.raises(SourceError, match=r"2 of 40 items.*4\.9%.*'item 3'.*max_missing"):
        rebuild(follower, tmp_path / "none", max_missing=0.049)


def test_a_picture_that_was_changed_is_not_taken_for_the_indexed_one(
    follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    first, second, *_ = pictures.data
    pictures.data[first] = pictures.data[second]
    report = rebuild(follower, tmp_path / "candidate", max_missing=1)
    assert report.missing == 1
    assert "changed" in report.failures[0].reason


def test_a_rebuild_that_was_stopped_continues_where_it_was(
    follower: Follower, tmp_path: Path, shop: Gallery, pictures: Pictures
) -> None:
    class StoppedError(Exception):
        pass

    done = 0

    def stop(count: int) -> None:
        nonlocal done
        done += count
        if done >= 20:
            raise StoppedError

    with pytest.raises(StoppedError):
        rebuild(follower, tmp_path / "candidate", on_progress=stop)
    shop.remove(["item 0"])
    again = Follower(tmp_path / "shop", NEW, pictures.read)
    report = rebuild(again, tmp_path / "candidate")
    again.close()
    assert (report.items, report.embedded) == (39, 20)
    assert content(tmp_path / "candidate") == content(tmp_path / "shop")


def test_changes_during_the_rebuild_are_in_the_new_generation(
    shop: Gallery, follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    calls: list[Callable[[], object]] = [
        lambda: shop.add([pictures.entry("added", 500, stock=1)]),
        lambda: shop.update({"item 0": {"stock": 777}, "item 39": {"stock": None, "new": True}}),
        lambda: shop.remove(["item 1", "item 38"]),
        lambda: shop.add([pictures.entry("item 2", 501, stock=5)]),  # other content, old key
        lambda: shop.compact(),
        lambda: shop.add([pictures.entry("item 1", 502)]),  # a removed key comes back
    ]

    def change(_: int) -> None:
        if calls:
            calls.pop(0)()

    rebuild(follower, tmp_path / "candidate", on_progress=change)
    assert not calls
    swap_in(follower, tmp_path / "candidate")
    found = content(tmp_path / "shop")
    assert Gallery.open(tmp_path / "shop").bundle_id == NEW.bundle_id
    assert found == {item.key: (item.sha256, dict(item.attributes)) for item in shop.items()}
    assert found["added"][1] == {"stock": 1}
    assert found["item 39"][1]["new"] is True
    assert "item 38" not in found


def test_no_acknowledged_change_is_lost_under_steady_writes(
    shop: Gallery, follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    entries = [pictures.entry(f"steady {n}", 1000 + n) for n in range(400)]
    acknowledged: list[Entry] = []
    done = threading.Event()

    def write() -> None:
        for entry in entries:
            if done.is_set():
                return
            with contextlib.suppress(GalleryBusyError):  # the client is told, and asks again
                shop.add([entry])
                acknowledged.append(entry)

    writer = threading.Thread(target=write)
    rebuild(follower, tmp_path / "candidate")
    writer.start()
    try:
        swap_in(follower, tmp_path / "candidate")
    finally:
        done.set()
        writer.join()
    found = content(tmp_path / "shop")
    assert acknowledged
    assert {entry.key for entry in acknowledged} <= found.keys()
    assert len(found) == 40 + len(acknowledged)


def test_a_candidate_is_put_in_place_later_by_another_process_with_what_changed_since(
    shop: Gallery, follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    rebuild(follower, tmp_path / "candidate")
    shop.remove(["item 5"])
    shop.add([pictures.entry("added", 500)])
    later = Follower(tmp_path / "shop", NEW, pictures.read)
    swap_in(later, tmp_path / "candidate")
    later.close()
    found = content(tmp_path / "shop")
    assert "item 5" not in found
    assert "added" in found
    assert later.embedded == 1


def test_a_gallery_that_a_build_replaced_meanwhile_is_left_alone(
    follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    rebuild(follower, tmp_path / "candidate")
    other = Gallery.create(tmp_path / "shop", name="shop", bundle_id=OLD.bundle_id, dim=OLD.dim)
    other.add([pictures.entry("the only one", 9)])
    with pytest.raises(GalleryBusyError, match="replaced"):
        swap_in(follower, tmp_path / "candidate")
    assert content(tmp_path / "shop").keys() == {"the only one"}


def test_changes_without_end_are_refused(
    shop: Gallery, follower: Follower, tmp_path: Path, pictures: Pictures
) -> None:
    rebuild(follower, tmp_path / "candidate")
    before = Gallery.open(tmp_path / "shop").generation
    real = Follower.catch_up
    rounds: list[int] = []

    def catch_up(self: Follower, made: Gallery) -> int:
        rounds.append(len(rounds))
        shop.update({f"item {n}": {"stock": 1000 * len(rounds) + n} for n in range(40)})
        return real(self, made) + 60

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Follower, "catch_up", catch_up)
        with pytest.raises(GalleryBusyError, match="faster"):
            swap_in(follower, tmp_path / "candidate")
    assert len(rounds) == 8
    assert Gallery.open(tmp_path / "shop").generation == before
