"""The command sync makes a gallery equal to a folder or list, and reports what it did."""

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from PIL.Image import Image
from typer.testing import Result

from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from tests.indexer.conftest import failure
from tests.indexer.oracle import units
from tests.tiny import encoded, photo

OLD_NS = 10**18
"""A time of change that is not recent."""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Five products of four images each."""
    root = tmp_path / "shop"
    for product in range(5):
        for view in range(4):
            write(root / f"p{product}" / f"{view}.png", photo(4 * product + view))
    return root


def write(file: Path, image: Image, time_ns: int = OLD_NS) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(encoded(image))
    os.utime(file, ns=(time_ns, time_ns))


def contents(gallery: Path) -> dict[str, tuple[str, dict, bytes]]:
    with closing(Gallery.open(gallery)) as store:
        entries = [entry for part in store.scan() for entry in part]
    return {e.key: (e.path, dict(e.attributes), e.vector.tobytes()) for e in entries}


def counts(result: Result, status: int = 0) -> tuple[int, ...]:
    """Added, replaced, updated, renamed, removed, unchanged, embedded and skipped images."""
    assert result.exit_code == status, result.output
    found = json.loads(result.stdout)
    names = ("added", "replaced", "updated", "renamed", "removed", "unchanged", "embedded")
    return *(found[name] for name in names), len(found["failures"])


def test_a_night_adds_replaces_renames_and_removes_what_differs(run, built, shop) -> None:
    sync = ("sync", built, shop, "--bundle", "b", "--json")
    assert counts(run(*sync)) == (0, 0, 0, 0, 0, 20, 0, 0)
    run("update", built, "p1/0.png", "--set", "price:number=5")
    with closing(Gallery.open(built)) as store:  # as of an upload, without a file
        store.add([Entry("upload", units(1, dim=32)[0])])
    old = contents(built)
    shutil.rmtree(shop / "p0")
    (shop / "p1").rename(shop / "moved")
    write(shop / "p2" / "0.png", photo(100), OLD_NS + 1)
    write(shop / "p2" / "new.png", photo(101))

    refused = run(*sync)
    assert counts(refused, 1) == (1, 1, 0, 4, 4, 11, 0, 0)
    assert "4 of 20 items (20.0%) would be removed" in refused.stderr
    assert "--max-removed 4" in refused.stderr
    planned = run(*sync[:-1], "--max-removed", "20%", "--dry-run")
    assert planned.exit_code == 0
    assert "4 would be removed" in planned.stdout
    assert "renamed: p1/0.png -> moved/0.png" in planned.stdout
    assert contents(built) == old

    assert counts(run(*sync, "--max-removed", "4")) == (1, 1, 0, 4, 4, 11, 2, 0)
    new = contents(built)
    files = {file.relative_to(shop).as_posix() for file in shop.rglob("*.png")}
    assert new.keys() == {*files, "upload"}
    assert new["moved/0.png"][1:] == ({"class": "moved", "price": 5}, old["p1/0.png"][2])
    assert new["p2/0.png"] != old["p2/0.png"]
    assert counts(run(*sync)) == (0, 0, 0, 0, 0, 17, 0, 0)
    assert counts(run(*sync, "--uploads")) == (0, 0, 0, 0, 1, 17, 0, 0)


def test_only_files_with_another_size_or_date_are_read_unless_asked(run, built, shop) -> None:
    sync = ("sync", built, shop, "--bundle", "b", "--json")
    run(*sync)
    file = shop / "p0" / "0.png"
    size = file.stat().st_size
    data = encoded(photo(7)) + bytes(size)
    file.write_bytes(data[:size])  # another content of the same size and date
    os.utime(file, ns=(OLD_NS, OLD_NS))
    assert counts(run(*sync)) == (0, 0, 0, 0, 0, 20, 0, 0)
    checked = counts(run(*sync, "--checksum"), 0 if len(encoded(photo(7))) <= size else 3)
    assert checked[5] == 19


def test_a_file_that_comes_back_with_its_size_and_date_is_read(run, built, shop) -> None:
    sync = ("sync", built, shop, "--bundle", "b", "--json", "--max-removed", "1")
    run(*sync)
    file, old = shop / "p0" / "0.png", contents(built)["p0/0.png"][2]
    size = file.stat().st_size
    file.unlink()
    assert counts(run(*sync))[4] == 1
    data = encoded(photo(7).resize((4, 4)))
    file.write_bytes(data + bytes(size - len(data)))
    os.utime(file, ns=(OLD_NS, OLD_NS))
    assert counts(run(*sync))[0] == 1
    assert contents(built)["p0/0.png"][2] != old


@pytest.mark.parametrize("fault", ["missing", "empty", "outside", "files gone", "listed only"])
def test_a_share_that_is_away_empties_no_shop(run, built, shop, tmp_path, fault) -> None:
    old, place, csv = contents(built), shop, []
    rows = [f"{key},{key}" for key in old]
    if fault in ("files gone", "listed only"):
        (tmp_path / "list.csv").write_text("\n".join(["key,path", *rows]))
        csv = ["--csv", tmp_path / "list.csv"]
    if fault == "missing":
        shop.rename(tmp_path / "away")
    elif fault == "outside":
        place = tmp_path
    else:
        shutil.rmtree(shop)
        shop.mkdir()
    if fault == "listed only":
        write(shop / "p0/0.png", photo(0))
        found = run("sync", built, shop, *csv, "--bundle", "b", "--json")
        assert counts(found, 3)[3:] == (0, 0, 1, 0, 19)
    else:
        failure(run("sync", built, place, *csv, "--bundle", "b"))
    after = contents(built)
    assert {key: value[2] for key, value in after.items()} == {k: v[2] for k, v in old.items()}


def test_a_link_to_a_share_that_is_away_keeps_its_items(run, built, shop, tmp_path) -> None:
    shutil.rmtree(shop / "p0")
    (shop / "p0").symlink_to(tmp_path / "away")
    sync = ("sync", built, shop, "--bundle", "b", "--json", "--max-removed", "100%")
    assert counts(run(*sync), 3) == (0, 0, 0, 0, 0, 16, 0, 1)
    assert len(contents(built)) == 20


def test_a_link_that_is_no_image_is_no_skipped_image(run, built, shop) -> None:
    (shop / "read me.txt").symlink_to("nowhere.txt")
    result = run("sync", built, shop, "--bundle", "b")
    assert result.exit_code == 0, result.output
    assert "Omitted 1 links to what does not exist (read me.txt)" in result.stdout


def test_a_row_per_product_is_followed_and_a_list_must_be_passed(
    run, shop, out, tmp_path, embedder
) -> None:
    def write_list(*rows: str) -> None:
        (tmp_path / "list.csv").write_text("\n".join(["key,path,price:number", *rows]))

    rest = "b,p1/0.png|p1/1.png,2"
    write_list("a,p0,1", rest)
    csv = ("--csv", tmp_path / "list.csv")
    run("build", shop, *csv, "--bundle", "b", "--out", out)
    sync = ("sync", out, shop, "--bundle", "b", "--max-removed", "0", "--json")
    embedder.batches.clear()
    for row, changes in (("a,p0,1", (0, 0)), ("a,p0,9", (4, 0)), ("new,p0,9", (0, 4))):
        write_list(row, rest)
        updated, renamed = changes
        unchanged = 6 - updated - renamed
        assert counts(run(*sync, *csv)) == (0, 0, updated, renamed, 0, unchanged, 0, 0)
    assert contents(out)["new/0.png"][1] == {"price": 9, "product": "new"}
    assert not embedder.batches
    before = contents(out)
    line = failure(run(*sync, "--max-removed", "100%"))
    assert "was built from the list" in line
    assert "--csv" in line
    assert contents(out) == before


def test_a_dry_run_writes_nothing(run, built, shop) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        # SQLite keeps the locks of readers in -shm, next to an empty -wal.
        files = [f for f in built.rglob("*") if f.is_file() and f.suffix != ".sqlite-shm"]
        found = {str(file): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}
        return {name: (time, data) for name, (time, data) in found.items() if data}

    sync = ("sync", built, shop, "--bundle", "b", "--max-removed", "100%", "--json")
    shutil.rmtree(shop / "p0")
    write(shop / "p1" / "9.png", photo(99))
    for damaged in (False, True):  # there is no file of hashes, or a useless one
        if damaged:
            (built / "files.sqlite").write_bytes(b"damaged" * 99)
        before = state()
        assert counts(run(*sync, "--dry-run")) == (1, 0, 0, 0, 4, 16, 0, 0)
        assert state() == before
    assert counts(run(*sync)) == (1, 0, 0, 0, 4, 16, 1, 0)
    before = state()
    assert counts(run(*sync, "--dry-run")) == (0, 0, 0, 0, 0, 17, 0, 0)
    assert state() == before


def test_a_source_is_named_as_the_walk_of_the_root_names_it(
    run, built, shop, tmp_path, monkeypatch
) -> None:
    """Absolute, relative or linked: also a link in the root, to a folder with a name of its own or
    to one that is omitted."""
    hidden = shop / ".store" / "p9"
    write(hidden / "0.png", photo(90))
    for link, target in (("again", "p1"), ("p9", ".store/p9")):
        (shop / link).symlink_to(target)
    (tmp_path / "shop link").symlink_to(shop)
    run("sync", built, shop, "--bundle", "b")
    assert "p9/0.png" in contents(built)
    monkeypatch.chdir(tmp_path)
    for place, found in (
        ("shop", 21),
        ("shop link", 21),
        (shop, 21),
        ("shop/p1", 4),
        ("shop/again", 4),
        ("shop link/p9", 1),
    ):
        result = run("sync", built, place, "--bundle", "b", "--json")
        assert counts(result) == (0, 0, 0, 0, 0, found, 0, 0), place


def test_a_damaged_file_keeps_its_item(run, built, shop) -> None:
    old = contents(built)
    (shop / "p0/0.png").write_bytes(encoded(photo(0))[:40])
    (shop / "p0/1.png").write_text("no image")
    (shop / "p0/2.png").unlink()
    (shop / "p0/2.png").mkdir()
    result = run("sync", built, shop, "--bundle", "b", "--json")
    assert counts(result, 3) == (0, 0, 0, 0, 1, 17, 0, 2)
    old.pop("p0/2.png")
    assert contents(built) == old


def test_a_list_below_the_image_root_changes_attributes_without_embedding(
    run, built, shop, tmp_path, embedder
) -> None:
    rows = "key,path,price:number\n" + "".join(f"p0/{n}.png,{n}.png,{n}\n" for n in range(4))
    (tmp_path / "list.csv").write_text(rows)
    embedder.batches.clear()
    sync = ("sync", built, shop / "p0", "--csv", tmp_path / "list.csv", "--bundle", "b", "--json")
    assert counts(run(*sync)) == (0, 0, 4, 0, 0, 0, 0, 0)
    (tmp_path / "list.csv").write_text(rows.rsplit("\n", 2)[0])
    assert counts(run(*sync, "--max-removed", "25%")) == (0, 0, 0, 0, 1, 3, 0, 0)
    assert len(contents(built)) == 19  # other folders are not those of the list
    assert not embedder.batches


@pytest.mark.parametrize("step", ["add", "remove_items"])
def test_a_sync_that_was_killed_is_completed_by_the_next_one(
    run, built, shop, monkeypatch, step
) -> None:
    """Also if its first half has renamed more items than may be removed."""
    for product in range(4):
        (shop / f"p{product}").rename(shop / f"moved{product}")
    method, calls = getattr(Gallery, step), []

    def killed(*arguments: object) -> object:
        calls.append(step)
        if len(calls) == (2 if step == "add" else 1):
            raise KeyboardInterrupt
        return method(*arguments)

    sync = ("sync", built, shop, "--bundle", "b", "--batch-size", "4", "--json")
    with monkeypatch.context() as patch:
        patch.setattr(Gallery, step, killed)
        assert run(*sync).exit_code == 1
    assert run(*sync).exit_code == 0
    assert counts(run(*sync)) == (0, 0, 0, 0, 0, 20, 0, 0)
    files = {file.relative_to(shop).as_posix() for file in shop.rglob("*.png")}
    assert contents(built).keys() == files


def test_the_bundle_is_that_of_the_build_and_a_wrong_limit_is_named(
    run, shop, out, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run("build", shop, "--bundle", "b", "--out", out)
    line = failure(run("sync", out, shop, "--max-removed", "200%"))
    assert "max-removed = '200%' must be a percentage from 0% to 100%" in line
    write(shop / "p0" / "new.png", photo(50))
    assert "no longer in" in failure(run("sync", out, shop))
    Path("b").mkdir()
    assert counts(run("sync", out, shop, "--json"))[0] == 1


def test_a_build_over_a_gallery_embeds_only_new_images(run, built, shop, out, tmp_path) -> None:
    write(shop / "p0" / "new.png", photo(50))
    (tmp_path / "list.csv").write_text("key,path\na,p0/new.png\nb,p0/0.png\nc,p0/gone.png\n")
    found = run("build", shop, "--csv", tmp_path / "list.csv", "--bundle", "b", "--out", out)
    assert found.exit_code == 3
    assert "2 items (1 embedded, 1 reused, 0 copies)" in found.stdout
    assert "Skipped 1 of 3 images" in found.stdout


def test_a_small_shop_may_lose_one_item_and_no_image_that_is_still_there(run, built, shop) -> None:
    sync = ("sync", built, shop, "--bundle", "b", "--json", "--max-removed", "1%")
    with closing(Gallery.open(built)) as store:  # as of a version that read such folders
        entry = Entry("lost+found/0.png", units(1, dim=32)[0], path="lost+found/0.png")
        store.add([entry])
    write(shop / "lost+found" / "0.png", photo(90))
    (shop / "p1" / "0.png").unlink()
    assert counts(run(*sync)) == (0, 0, 0, 0, 1, 19, 0, 0)
    assert "lost+found/0.png" in contents(built)
    (shop / "p1" / "1.png").unlink()
    (shop / "p1" / "2.png").unlink()
    assert counts(run(*sync), 1)[4] == 2
