"""Sources of images: folders, CSV lists, splits of data sets; and CSV lists of changes."""

import os
from pathlib import Path

import pytest

from kinlens.embedder.errors import ImageTooManyBytesError, SourceError
from kinlens.indexer.images import inside, read_image
from kinlens.indexer.ingest.sources import csv_source, folder_source, split_source


def test_a_folder_that_is_no_source_is_refused_by_name(shop, tmp_path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("x")
    for arguments, message in (
        ((tmp_path / "nowhere",), r"no folder .*nowhere.*Check the name"),
        ((other,), r"have no images.*\.jpg.*--csv"),
        ((other, shop), r"other is outside .*shop, the image root.*Move or copy"),
    ):
        with pytest.raises(SourceError, match=message):
            folder_source(*arguments)


def test_a_link_out_of_the_root_and_what_is_no_regular_file_are_not_read(shop, tmp_path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (shop / "out.png").symlink_to(tmp_path / "secret.png")
    (shop / "in.png").symlink_to(shop / "f.gif")
    assert read_image(shop, "in.png", 10**6) == (shop / "f.gif").read_bytes()
    with pytest.raises(SourceError, match="leads out of"):
        read_image(shop, "out.png", 10**6)
    shop.with_name("shop2").mkdir()  # begins like the root
    with pytest.raises(SourceError, match="leads out"):
        inside(shop, "../shop2/a.png")
    with pytest.raises(ImageTooManyBytesError, match=r"has [\d,]+ bytes; the limit is 10\."):
        read_image(shop, "f.gif", 10)
    os.mkfifo(shop / "pipe.png")
    for name in ("pipe.png", "cup"):
        with pytest.raises(SourceError, match=rf"{name} below .* is not a regular file"):
            read_image(shop, name, 10**6)


def listed(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "list.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_further_columns_of_a_csv_are_attributes_of_a_type(tmp_path) -> None:
    file = listed(
        tmp_path,
        "colour,Key, PATH,price:number,sale:boolean,size:text,ns:tag:text\n"
        'rot,Tasse №2,b.png, 12.50 ,TRUE,12,"gross, ""sehr"" gross"\n'
        '"",A1,"a, b.png",-12345678901234567,false,,"zwei\nZeilen"\n'
        "\n,,,,,,\n"  # empty lines of a spreadsheet
        "blue,c,c.png,,,1e3,y\n",
    )
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))  # as Windows does
    a, b, c = csv_source(file).records()
    assert [(one.key, one.path) for one in (a, b)] == [("Tasse №2", "b.png"), ("A1", "a, b.png")]
    tag = 'gross, "sehr" gross'
    expected = {"colour": "rot", "price": 12.5, "sale": True, "size": "12", "ns:tag": tag}
    assert a.attributes == expected
    assert a.attributes["sale"] is True
    expected = {"colour": "", "price": -12345678901234567, "sale": False, "size": ""}
    assert b.attributes == expected | {"ns:tag": "zwei\r\nZeilen"}
    assert isinstance(b.attributes["price"], int)
    assert c.attributes == {"colour": "blue", "size": "1e3", "ns:tag": "y"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("key,path\na,1.png\nb,2.png\na,3.png\n", "'a' is on line 2 and on line 4"),
        ("key;path\na;b\n", r"separated by semicolons.*'key;path'.*commas"),
        ("sep=;\nkey;path\na;b\n", r"separated by semicolons"),
        ("key\tpath\na\tb\n", r"separated by tabs.*commas"),
        ("key,path\na,1.png\n".encode("utf-16"), r"list\.csv is UTF-16.*Save it as CSV UTF-8"),
        ("key,path\na,https://a.shop/1.png\n", r"list\.csv:2.*is a URL.*Download"),
        ("key,path\na,mug\\1.png\n", r"list\.csv:2.*backslashes.*slashes"),
        ("key,path\ncafe\u0301,1.png\ncaf\xe9,2.png\n", "'caf\xe9' is on line 2 and on line 3"),
        ("key,file\na,b\n", r"no column path; its first line has the columns \['key', 'file'\]"),
        ("key,path,\na,b,c\n", "same name or without a name"),
        ("key,path\n", "lists no images"),
        ("key,path\na,b,c\n", r"list\.csv:2 has 3 values for 2 columns.*quotes"),
        ('key,path\na,"b\n', r"list\.csv:2 is not valid CSV.*quotes"),
        (
            "key,path\na,\u00fc.png\n".encode("cp1252"),
            "csv:2 is not UTF-8.* 0xfc.*Save it",
        ),
        *(
            (f'key,path\na,1.png\nb,"{path}"\n', r"list\.csv:3.*path")
            for path in ("/etc/passwd", "cup/../../a.png", "..", "", "a\0b")
        ),
        *(
            (f'key,path\na,1.png\n"{key}",2.png\n', r"list\.csv:3.*key")
            for key in ("x/../../y", "  ", "a\tb")
        ),
    ],
)
def test_a_malformed_csv_or_one_that_leaves_the_root_is_refused_precisely(
    tmp_path, content: str | bytes, message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        csv_source(listed(tmp_path, content))


def test_the_fields_of_a_split_are_classes_and_its_keys_are_checked(tmp_path) -> None:
    source = split_source(listed(tmp_path, "b/2.jpg, 7, 3\na/1.jpg,6\nplain.jpg\n"))
    assert {record.key: record.attributes for record in source.records()} == {
        "b/2.jpg": {"class": "7", "class_2": "3"},
        "a/1.jpg": {"class": "6"},
        "plain.jpg": {},
    }
    with pytest.raises(SourceError, match=r"list\.csv:2.*leads out"):
        split_source(listed(tmp_path, "a.jpg, 1\n../b.jpg, 1\n"))
    with pytest.raises(SourceError, match=r"'a' is on line 2 and on line 3"):
        split_source(listed(tmp_path, "b, 1\na, 1\na, 2\n"))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("price:number", "12;50", r"list\.csv:3: column price has '12;50', expected a finite num"),
        ("price:number", "1e999", "column price has '1e999', expected a finite number"),
        ("sale:boolean", "yes", "column sale has 'yes', expected true or false.*sale:text"),
        ("price:nubmer", "1", "names the type 'nubmer'; the types are text, number.*:text"),
        ("weight:number", "1", "conflicts with the gallery, where weight has the type text"),
        ("sale", "True", r"list\.csv:3: column sale has 'True'.*sale:boolean, or sale:text"),
        ("n:number", "9" * 19, "64-bit integer, or a number with a point"),
    ],
)
def test_a_value_of_another_type_is_named_with_line_and_column(
    tmp_path, column: str, value: str, message: str
) -> None:
    file = listed(tmp_path, f"key,path,{column}\na,a.png,\nb,b.png,{value}\n")
    with pytest.raises(SourceError, match=message):
        csv_source(file, kinds={"weight": "text"})


@pytest.mark.parametrize("column", ["key", "product"])
def test_a_row_per_product_gives_an_item_for_each_image(shop, tmp_path, column: str) -> None:
    (shop / "cup" / "back").mkdir()
    for name in ("cup/back/a.png", "cup/@eaDir/t.jpg"):
        (shop / name).parent.mkdir(exist_ok=True)
        (shop / name).write_bytes(b"x")
    (shop / "empty").mkdir()
    file = listed(
        tmp_path,
        f"{column},path,price:number\n"
        "A,cup,1\n"
        "B,hat/c.webp|f.gif,2\n"
        'C,"[""hat/d.bmp"", ""cup/a.png"", ""cup/back/a.png""]",3\n'
        "D,hat/e.tiff,4\n"
        "E,empty,5\n",
    )
    source = csv_source(file, shop)
    found = {r.key: (r.path, *r.attributes.values()) for r in source.records()}
    assert found == {
        "A/a.png": ("cup/a.png", 1, "A"),
        "A/b.jpg": ("cup/b.jpg", 1, "A"),
        "A/back/a.png": ("cup/back/a.png", 1, "A"),
        "B/c.webp": ("hat/c.webp", 2, "B"),
        "B/f.gif": ("f.gif", 2, "B"),
        "C/hat/d.bmp": ("hat/d.bmp", 3, "C"),
        "C/cup/a.png": ("cup/a.png", 3, "C"),
        "C/cup/back/a.png": ("cup/back/a.png", 3, "C"),
        ("D" if column == "key" else "D/e.tiff"): ("hat/e.tiff", 4, "D"),
    }
    assert source.count == len(found)
    assert source.names == {"price", "product"}
    assert source.omitted.faults == [
        ("empty", f"{file}:6: the folder empty has no images. Add some, or remove the line.")
    ]
    assert [*source.omitted.counts] == ["@eaDir: thumbnails of a Synology NAS"]
    named = listed(tmp_path, "key,path,product\nA,cup,Mug\nB,f.gif,\n")
    products = {r.key: r.attributes["product"] for r in csv_source(named, shop).records()}
    assert products["A/a.png"] == "Mug"
    assert products["B"] == "B"


def test_the_paths_of_a_list_may_be_relative_to_a_folder_below_the_root(shop, tmp_path) -> None:
    file = listed(tmp_path, "key,path\na,a.png\nb,../f.gif\n")
    records = csv_source(file, shop, folder=shop / "cup").records()
    assert [record.path for record in records] == ["cup/a.png", "f.gif"]
    with pytest.raises(SourceError, match=r"list\.csv:2.*leads out of"):
        csv_source(listed(tmp_path, "key,path\na,../../x.png\n"), shop, folder=shop / "cup")


def test_a_path_in_a_list_finds_its_file_in_both_unicode_forms(shop, tmp_path) -> None:
    composed, decomposed = "Caf\xe9", "Cafe\u0301"
    for folder in (decomposed, "mug"):
        (shop / folder).mkdir()
        (shop / folder / f"{decomposed}.png").write_bytes(b"x")
    rows = f"a,{composed}/{composed}.png\nb,{decomposed}/{composed}.png\nc,mug/{composed}.png\n"
    paths = [
        record.path for record in csv_source(listed(tmp_path, "key,path\n" + rows), shop).records()
    ]
    stored = [f"{decomposed}/{decomposed}.png"] * 2 + [f"mug/{decomposed}.png"]
    assert paths == stored
    split = split_source(listed(tmp_path, f"{composed}/{composed}.png,{decomposed}\n"), shop)
    [record] = split.records()
    assert (record.key, record.path) == (f"{composed}/{composed}.png", stored[0])
