"""Folders, CSV files and data set splits as sources."""

import os
from pathlib import Path

import pytest

from embedder.errors import ImageTooManyBytesError, SourceError
from indexer.images import Source, csv_source, folder_source, inside, read_image, split_source
from tests.indexer.conftest import PICTURES


def listed(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "list.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def keys(source: Source) -> list[str]:
    return [record.key for record in source.records]


def test_a_folder_gives_every_image_sorted_by_its_relative_path(shop: Path) -> None:
    source = folder_source(shop)
    assert keys(source) == sorted(PICTURES)
    assert source.root == shop.resolve()
    assert all(record.path == record.key for record in source.records)


def test_an_image_in_a_sub_folder_has_its_name_as_class(shop: Path) -> None:
    (shop / "hat" / "red").mkdir()
    (shop / "hat" / "red" / "g.PNG").write_bytes(b"x")
    classes = {r.key: dict(r.attributes) for r in folder_source(shop).records}
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


def test_further_columns_of_a_csv_are_attributes(tmp_path: Path) -> None:
    file = listed(
        tmp_path,
        "colour,key,path,note\n"
        'rot,Tasse №2,b.png,"gross, ""sehr"" gross"\n'
        '"",A1,"a, b.png","zwei\nZeilen"\n',
    )
    source = csv_source(file)
    assert keys(source) == ["A1", "Tasse №2"]
    assert [r.path for r in source.records] == ["a, b.png", "b.png"]
    assert source.records[0].attributes == {"colour": "", "note": "zwei\nZeilen"}
    assert source.records[1].attributes == {"colour": "rot", "note": 'gross, "sehr" gross'}


def test_a_csv_with_a_byte_order_mark_and_windows_lines_is_read(tmp_path: Path) -> None:
    file = listed(tmp_path, b"\xef\xbb\xbfkey,path\r\na,a.png\r\n\r\nb,b.png\r\n")
    assert keys(csv_source(file)) == ["a", "b"]


def test_paths_of_a_csv_start_from_the_given_root(tmp_path: Path, shop: Path) -> None:
    file = listed(tmp_path, f"key,path\na,cup/a.png\nf,{shop}/./hat/../f.gif\n")
    source = csv_source(file, shop)
    assert [record.path for record in source.records] == ["cup/a.png", "f.gif"]
    assert source.root == shop.resolve()


@pytest.mark.parametrize("path", ["../a.png", "/etc/passwd", "cup/../../a.png", "..", "", "a\0b"])
def test_a_path_that_leaves_the_root_is_refused_with_its_line(tmp_path: Path, path: str) -> None:
    file = listed(tmp_path, f'key,path\ngood,a.png\nbad,"{path}"\n')
    with pytest.raises(SourceError, match=r"list\.csv:3.*path"):
        csv_source(file)


@pytest.mark.parametrize("key", ["../a", "x/../../y", "", "  ", "a\tb"])
def test_a_key_that_is_empty_or_climbs_is_refused_with_its_line(tmp_path: Path, key: str) -> None:
    file = listed(tmp_path, f'key,path\n"{key}",a.png\n')
    with pytest.raises(SourceError, match=r"list\.csv:2.*key"):
        csv_source(file)


def test_a_repeated_key_names_both_lines(tmp_path: Path) -> None:
    file = listed(tmp_path, "key,path\na,1.png\nb,2.png\na,3.png\n")
    with pytest.raises(SourceError, match=r"'a' is on line 2 and on line 4"):
        csv_source(file)
    with pytest.raises(SourceError, match=r"'a' is on line 2 and on line 3"):
        split_source(listed(tmp_path, "b, 1\na, 1\na, 2\n"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no column key and no column path"),
        ("key;path\na;b\n", r"no column key.*'key;path'.*commas"),
        ("key,file\na,b\n", r"no column path; its first line names \['key', 'file'\]"),
        ("key,path,path\na,b,c\n", "names a column twice"),
        ("key,path,\na,b,c\n", "names a column twice or not at all"),
        ("key,path\n", "lists no images"),
        ("key,path\na\n", r"list\.csv:2 has 1 values for 2 columns"),
        ("key,path\na,b,c\n", r"list\.csv:2 has 3 values for 2 columns.*quotes"),
        ('key,path\na,"b\n', "not a valid CSV file.*quotes"),
        ("key,path\na,\u00fc.png\n".encode("latin-1"), "not UTF-8.*Save it as UTF-8"),
    ],
)
def test_a_malformed_csv_is_refused_precisely(
    tmp_path: Path, content: str | bytes, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        csv_source(listed(tmp_path, content))


def test_a_missing_list_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.csv: No such file"):
        csv_source(tmp_path / "none.csv")
    with pytest.raises(SourceError, match=r"none\.txt: No such file"):
        split_source(tmp_path / "none.txt")


def test_the_fields_of_a_split_are_classes(tmp_path: Path) -> None:
    source = split_source(listed(tmp_path, "b/2.jpg, 7, 3\na/1.jpg,6\nplain.jpg\n"))
    assert keys(source) == ["a/1.jpg", "b/2.jpg", "plain.jpg"]
    attributes = [dict(record.attributes) for record in source.records]
    assert attributes == [{"class": "6"}, {"class": "7", "class_2": "3"}, {}]


def test_a_split_that_leaves_its_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"list\.csv:2.*leads out"):
        split_source(listed(tmp_path, "a.jpg, 1\n../b.jpg, 1\n"))


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
    [record] = [r for r in folder_source(shop).records if r.key.startswith("caf")]
    assert record.key == "caf\\xe9.png"
    with pytest.raises(SourceError, match="not valid UTF-8"):
        read_image(shop, record.path, 10**6)


@pytest.mark.real_data
def test_the_splits_of_the_grocery_store_data_set_are_read(shared_data: Path) -> None:
    root = shared_data / "data" / "grocery-store"
    if not root.is_dir():
        pytest.skip("the grocery-store data set is absent from KINLENS_SHARED")
    source = split_source(root / "train.txt")
    assert len(source.records) == 2640
    assert len({record.attributes["class"] for record in source.records}) == 81
    assert all(inside(source.root, record.path).is_file() for record in source.records)
