"""Adopt: one gallery becomes the next generation of another, in one step or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from embedder.errors import GalleryBusyError, GalleryNotFoundError
from indexer.gallery import Gallery
from tests.indexer.rebuilds import Pictures, content, fill
from tests.support.seams import GalleryFolder, adopt

ROOT = Path(__file__).parents[2]

KILLED = """
import os, signal, sys
from pathlib import Path
from indexer.ingest.rebuild import adopt
from embedder.durable import set_fault_hook
from tests.indexer.rebuilds import content

target, source = Path(sys.argv[1]), Path(sys.argv[2])

def dies_at(point):
    child = os.fork()
    if child == 0:
        left = point
        def hook(_):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        set_fault_hook(hook)
        adopt(target, source)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

old, new = content(target), content(source)
point, seen = 0, []
while dies_at(point):
    found = content(target)
    assert found in (old, new), point
    seen.append(found == new)
    point += 1
assert content(target) == new and content(source) == new
assert point > 10 and seen == sorted(seen) and not seen[0] and seen[-1], seen
stages = [p.name for p in (target / "versions").iterdir() if p.name.startswith(".")]
assert stages == [], stages
"""


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two galleries with nothing in common."""
    pictures = Pictures()
    fill(tmp_path / "old", pictures, 8).close()
    other = Gallery.create(
        tmp_path / "new", name="other", bundle_id="b" * 64, dim=32, source_root="/elsewhere"
    )
    other.add([pictures.entry(f"new {n}", 100 + n) for n in range(12)])
    other.compact()
    other.add([pictures.entry("later", 200)])
    other.close()
    return tmp_path / "old", tmp_path / "new"


def test_the_target_takes_state_and_bundle_but_keeps_its_name_and_image_root(
    pair: tuple[Path, Path],
) -> None:
    target, source = pair
    before = content(source)
    manifest = adopt(target, source)
    assert content(target) == content(source) == before
    opened = Gallery.open(target, expected_bundle_id="b" * 64)
    assert (opened.name, opened.manifest.source_root) == ("shop", "")
    assert opened.generation == manifest.generation != Gallery.open(source).generation
    opened.add([Pictures().entry("after", 300)])  # it can be changed, the source does not see it
    assert len(content(target)) == len(before) + 1
    assert content(source) == before


def test_another_image_root_can_be_taken_over(pair: tuple[Path, Path]) -> None:
    adopt(*pair, image_root="/pictures")
    assert Gallery.open(pair[0]).manifest.source_root == "/pictures"


def test_a_kill_at_any_step_leaves_the_old_gallery_or_the_new_one(pair: tuple[Path, Path]) -> None:
    subprocess.run([sys.executable, "-c", KILLED, *map(str, pair)], cwd=ROOT, check=True)


def test_a_target_at_another_version_is_left_alone(pair: tuple[Path, Path]) -> None:
    target, source = pair
    gallery = Gallery.open(target)
    seen = gallery.version
    gallery.update({"item 1": {"stock": 99}})
    before = content(target)
    with pytest.raises(GalleryBusyError, match="changed meanwhile"):
        adopt(target, source, seen)
    assert content(target) == before
    adopt(target, source, gallery.version)
    assert content(target) == content(source)


def test_a_change_during_the_copy_is_noticed(pair: tuple[Path, Path]) -> None:
    target, source = pair
    gallery = Gallery.open(target)

    def change(_: Path) -> None:
        gallery.update({"item 1": {"stock": 99}})

    with pytest.raises(GalleryBusyError, match="changed meanwhile"):
        adopt(target, source, gallery.version, catch_up=change)
    assert gallery.stored(["item 1"])["item 1"].attributes["stock"] == 99
    assert GalleryFolder(target).current_name() == gallery.generation


def test_nobody_changes_the_target_while_the_last_changes_are_repeated(
    pair: tuple[Path, Path],
) -> None:
    target, source = pair
    gallery, refused = Gallery.open(target), []

    def change(_: Path) -> None:
        try:
            gallery.update({"item 1": {"stock": 1000 + len(refused)}})
            refused.append(False)
        except GalleryBusyError:
            refused.append(True)

    adopt(target, source, catch_up=change)
    assert refused == [False, True]
    assert content(target) == content(source)
    with pytest.raises(GalleryBusyError, match="replaced"):
        gallery.remove(["item 1"])  # the old generation takes no change that would be lost


def test_a_build_in_the_target_keeps_others_out(pair: tuple[Path, Path]) -> None:
    target, source = pair
    before = content(target)
    with GalleryFolder(target).locked(), pytest.raises(GalleryBusyError, match="Another build"):
        adopt(target, source)
    assert content(target) == before


def test_there_must_be_two_galleries(pair: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(GalleryNotFoundError):
        adopt(tmp_path / "nothing", pair[1])
    before = content(pair[0])
    with pytest.raises(GalleryNotFoundError):
        adopt(pair[0], tmp_path / "nothing")
    assert content(pair[0]) == before
