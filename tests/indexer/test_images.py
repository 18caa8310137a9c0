"""Folders of images as sources, and reading their files."""

import os
from pathlib import Path

import pytest

from embedder.errors import ImageTooManyBytesError, SourceError
from indexer.ingest.sources import Source, folder_source, inside, read_image
from tests.indexer.conftest import PICTURES


def keys(source: Source) -> list[str]:
    return [record.key for record in source.records()]


def test_a_folder_gives_every_image_sorted_by_its_relative_path(shop: Path) -> None:
    source = folder_source(shop)
    assert keys(source) == sorted(PICTURES)
    assert source.root == shop.resolve()
    assert all(record.path == record.key for record in source.records())


def test_an_image_in_a_sub_folder_has_its_name_as_class(shop: Path) -> None:
    (shop / "hat" / "red").mkdir()
    (shop / "hat" / "red" / "g.PNG").write_bytes(b"x")
    classes = {r.key: dict(r.attributes) for r in folder_source(shop).records()}
    assert classes["cup/a.png"] == {"class": "cup"}
    assert classes["hat/red/g.PNG"] == {"class": "hat/red"}
    assert classes["f.gif"] == {}


def test_hidden_files_and_files_that_are_no_images_are_left_out(shop: Path) -> None:
    (shop / ".thumbnails").mkdir()
    for name in (".thumbnails/t.jpg", "._f.gif", "notes.txt", "Thumbs.db"):
        (shop / name).write_bytes(b"x")
    assert keys(folder_source(shop)) == sorted(PICTURES)


def test_links_to_folders_are_not_followed(shop: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "secret.png").write_bytes(b"x")
    (shop / "link").symlink_to(elsewhere)
    (shop / "loop").symlink_to(shop)
    assert keys(folder_source(shop)) == sorted(PICTURES)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no folder .*nowhere.*Check the name"):
        folder_source(tmp_path / "nowhere")


def test_a_file_in_place_of_a_folder_points_to_the_list_options(shop: Path) -> None:
    with pytest.raises(SourceError, match=r"is a file.*--csv or --split"):
        folder_source(shop / "f.gif")


def test_a_folder_without_images_is_refused_with_the_names_looked_for(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SourceError, match=r"holds no images.*\.jpg.*--csv"):
        folder_source(tmp_path)


@pytest.mark.parametrize("name", ["", "hat"])
def test_a_folder_that_cannot_be_read_is_named_instead_of_left_out(
    shop: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scandir = os.scandir

    def closed(path: str) -> object:
        if Path(path) == shop / name:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    message = rf"{shop / name} cannot be read: Permission denied\. Allow .*--csv"
    with pytest.raises(SourceError, match=message):
        folder_source(shop)


def test_a_link_inside_the_root_is_read_and_one_out_of_it_is_not(
    shop: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (shop / "out.png").symlink_to(tmp_path / "secret.png")
    (shop / "in.png").symlink_to(shop / "f.gif")
    assert read_image(shop, "in.png", 10**6) == (shop / "f.gif").read_bytes()
    with pytest.raises(SourceError, match="leads out of"):
        read_image(shop, "out.png", 10**6)


def test_a_neighbour_whose_name_begins_like_the_root_is_outside(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop2").mkdir()
    with pytest.raises(SourceError, match="leads out"):
        inside(tmp_path / "shop", "../shop2/a.png")


def test_a_root_that_is_a_link_itself_is_no_obstacle(shop: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(shop)
    assert keys(folder_source(tmp_path / "alias")) == sorted(PICTURES)
    assert read_image(tmp_path / "alias", "f.gif", 10**6)


def test_a_file_over_the_limit_is_not_read(shop: Path) -> None:
    with pytest.raises(ImageTooManyBytesError, match=r"has [\d,]+ bytes; the limit is 10\."):
        read_image(shop, "f.gif", 10)


def test_what_is_no_regular_file_is_refused(shop: Path) -> None:
    os.mkfifo(shop / "pipe.png")
    for name in ("pipe.png", "cup"):
        with pytest.raises(SourceError, match=rf"{name} below .* is not a regular file"):
            read_image(shop, name, 10**6)
    for name in ("gone.png", "f.gif/gone.png"):
        with pytest.raises(SourceError, match=rf"{name} is missing below "):
            read_image(shop, name, 10**6)


def test_a_file_that_cannot_be_read_is_not_taken_for_a_missing_one(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(PermissionError):
        read_image(shop, "f.gif", 10**6)


def test_a_name_that_is_not_unicode_gets_a_printable_key_and_a_reason(shop: Path) -> None:
    Path(os.fsdecode(os.fsencode(shop) + b"/caf\xe9.png")).write_bytes(b"x")
    [record] = [r for r in folder_source(shop).records() if r.key.startswith("caf")]
    assert record.key == "caf\\xe9.png"
    with pytest.raises(SourceError, match="not valid UTF-8"):
        read_image(shop, record.path, 10**6)


def test_a_sub_folder_keeps_the_keys_that_the_whole_folder_gives(shop: Path) -> None:
    part = folder_source(shop / "hat", shop)
    whole = {record.key: record for record in folder_source(shop).records()}
    assert part.root == shop.resolve()
    assert keys(part) == [key for key in sorted(PICTURES) if key.startswith("hat/")]
    assert all(whole[record.key] == record for record in part.records())


def test_a_folder_outside_the_root_is_refused_by_name(shop: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(SourceError, match=r"other is outside .*shop, the image root.*Move or copy"):
        folder_source(other, shop)
