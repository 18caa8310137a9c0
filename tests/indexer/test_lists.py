"""CSV files and data set splits as sources, and CSV files of changes."""

from pathlib import Path

import pytest

from embedder.errors import SourceError
from indexer.ingest.sources import Source, csv_changes, csv_source, inside, split_source


def listed(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "list.csv"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def keys(source: Source) -> list[str]:
    return [record.key for record in source.records()]


def test_further_columns_of_a_csv_are_attributes(tmp_path: Path) -> None:
    file = listed(
        tmp_path,
        "colour,key,path,note\n"
        'rot,Tasse №2,b.png,"gross, ""sehr"" gross"\n'
        '"",A1,"a, b.png","zwei\nZeilen"\n',
    )
    source = csv_source(file)
    assert keys(source) == ["Tasse №2", "A1"]
    second, first = source.records()
    assert [first.path, second.path] == ["a, b.png", "b.png"]
    assert first.attributes == {"colour": "", "note": "zwei\nZeilen"}
    assert second.attributes == {"colour": "rot", "note": 'gross, "sehr" gross'}


def test_a_csv_with_a_byte_order_mark_and_windows_lines_is_read(tmp_path: Path) -> None:
    file = listed(tmp_path, b"\xef\xbb\xbfkey,path\r\na,a.png\r\n\r\nb,b.png\r\n")
    assert keys(csv_source(file)) == ["a", "b"]


def test_paths_of_a_csv_start_from_the_given_root(tmp_path: Path, shop: Path) -> None:
    file = listed(tmp_path, f"key,path\na,cup/a.png\nf,{shop}/./hat/../f.gif\n")
    source = csv_source(file, shop)
    assert [record.path for record in source.records()] == ["cup/a.png", "f.gif"]
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("key,path\na,1.png\nb,2.png\na,3.png\n", "'a' is on line 2 and on line 4"),
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
    assert keys(source) == ["b/2.jpg", "a/1.jpg", "plain.jpg"]
    attributes = [dict(record.attributes) for record in source.records()]
    assert attributes == [{"class": "7", "class_2": "3"}, {"class": "6"}, {}]


def test_a_split_that_leaves_its_root_or_repeats_a_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"list\.csv:2.*leads out"):
        split_source(listed(tmp_path, "a.jpg, 1\n../b.jpg, 1\n"))
    with pytest.raises(SourceError, match=r"'a' is on line 2 and on line 3"):
        split_source(listed(tmp_path, "b, 1\na, 1\na, 2\n"))


@pytest.mark.real_data
def test_the_splits_of_the_grocery_store_data_set_are_read(shared_data: Path) -> None:
    root = shared_data / "data" / "grocery-store"
    if not root.is_dir():
        pytest.skip("the grocery-store data set is absent from KINLENS_SHARED")
    source = split_source(root / "train.txt")
    assert source.count == 2640
    assert len({record.attributes["class"] for record in source.records()}) == 81
    assert all(inside(source.root, record.path).is_file() for record in source.records())


def test_typed_columns_become_numbers_booleans_and_text(tmp_path: Path) -> None:
    file = listed(
        tmp_path,
        "key,path,colour,price:number,sale:boolean,size:text,ns:tag:text\n"
        "a,a.png,red, 12.50 ,TRUE,12,x\n"
        "b,b.png,,-12345678901234567,false,,\n"
        "c,c.png,blue,,,1e3,y\n",
    )
    a, b, c = (dict(record.attributes) for record in csv_source(file).records())
    assert a == {"colour": "red", "price": 12.5, "sale": True, "size": "12", "ns:tag": "x"}
    assert b == {"colour": "", "price": -12345678901234567, "sale": False, "size": "", "ns:tag": ""}
    assert c == {"colour": "blue", "size": "1e3", "ns:tag": "y"}
    assert isinstance(b["price"], int)
    assert a["sale"] is True


def test_a_column_without_a_type_has_the_one_that_the_gallery_knows(tmp_path: Path) -> None:
    file = listed(tmp_path, "key,path,price,note\na,a.png,5,5\n")
    [record] = csv_source(file, kinds={"price": "number"}).records()
    assert record.attributes == {"price": 5, "note": "5"}


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("price:number", "12;50", r"list\.csv:3: column price has '12;50', expected a finite num"),
        ("price:number", "nan", "column price has 'nan', expected a finite number"),
        ("price:number", "1e999", "column price has '1e999', expected a finite number"),
        ("price:number", "1_000", "column price has '1_000', expected a finite number"),
        ("sale:boolean", "yes", "column sale has 'yes', expected true or false.*sale:text"),
        (
            "price:nubmer",
            "1",
            "names the type 'nubmer'; the types are text, number, boolean.*:text",
        ),
        ("weight:number", "1", "does not fit the gallery, where weight is a text"),
        ("sale", "True", r"list\.csv:3: column sale has 'True'.*sale:boolean, or sale:text"),
        ("sale", "false", "sale:boolean"),
        ("n:number", "9" * 19, "whole number of 64 bits, or one with a point"),
        ("n:number", "9" * 5000, "whole number of 64 bits"),
    ],
)
def test_a_value_of_another_type_is_named_with_line_and_column(
    tmp_path: Path, column: str, value: str, message: str
) -> None:
    file = listed(tmp_path, f"key,path,{column}\na,a.png,\nb,b.png,{value}\n")
    with pytest.raises(SourceError, match=message):
        csv_source(file, kinds={"weight": "text"})


def test_changes_are_listed_by_key_and_empty_cells_take_values_away(tmp_path: Path) -> None:
    file = listed(tmp_path, "key,price:number,colour\na,5,\nb,,red\n")
    assert csv_changes(file) == {
        "a": {"price": 5, "colour": ""},
        "b": {"price": None, "colour": "red"},
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("key,colour\na,red\nb,blue\na,green\n", "'a' is on line 2 and on line 4"),
        ("name,colour\na,red\n", "no column key; its first line names .*key,colour"),
        ("key,colour\n", "lists no changes"),
        ("key,colour\na\n", "1 values for 2 columns"),
    ],
)
def test_malformed_changes_are_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        csv_changes(listed(tmp_path, content))
