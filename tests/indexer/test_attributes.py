"""Types of attributes: those that no item has can change, and all values can be converted."""

import pytest

from kinlens.embedder.errors import FilterError, InvalidParameterError
from kinlens.indexer.checks.verify import check_files
from kinlens.indexer.filters.text import parse_filter
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import SearchOptions, SortBy
from tests.indexer.conftest import failure, printed, usage
from tests.indexer.oracle import entry, units

VECTORS = units(30)


def priced(gallery: Gallery, where: str) -> set[str]:
    """The keys of the items that match, by a page and by a search."""
    keys = {item.key for item in gallery.page(0, 100, parse_filter(where)).items}
    [hits] = gallery.search(units(1, 5), 100, SearchOptions(where=parse_filter(where)))
    assert {hit.key for hit in hits} == keys
    return keys


@pytest.mark.parametrize("is_compacted", [False, True])
def test_an_attribute_that_no_item_has_takes_the_type_of_its_next_value(
    gallery, is_compacted
) -> None:
    gallery.add([entry(f"k{n}", row, {"n": n}) for n, row in enumerate(VECTORS)])
    gallery.update({"k0": {"price": "12"}, "k1": {"price": "13"}})
    if is_compacted:
        gallery.compact()
    other = Gallery.open(gallery.path)
    assert priced(other, 'price = "12"') == {"k0"}
    with pytest.raises(InvalidParameterError, match="'price' is a text"):
        gallery.update({"k2": {"price": 5}})
    gallery.remove(["k0"])
    with pytest.raises(InvalidParameterError, match="'price' is a text"):
        gallery.update({"k1": {"price": 5}})
    gallery.update({"k1": {"price": None}})
    with pytest.raises(InvalidParameterError, match="'price' is a number"):
        gallery.update({"k2": {"price": 5}, "k3": {"price": "6"}})
    with pytest.raises(InvalidParameterError, match="'price' is a text"):
        gallery.update({"k2": {"price": "5"}, "k3": {"price": 6}})
    gallery.update({"k2": {"price": 5}, "k3": {"price": 7.5}})
    for opened in (gallery, other):
        assert opened.schema()["price"] == "number"
        assert priced(opened, "price >= 5 and n < 20") == {"k2", "k3"}
        assert [item.key for item in opened.page(0, 2, sort_by=SortBy("price")).items] == [
            "k2",
            "k3",
        ]
        with pytest.raises(FilterError, match="'price' is a number"):
            priced(opened, 'price = "12"')
    with pytest.raises(InvalidParameterError, match="'price' is a number"):
        gallery.restore(["k0"])
    gallery.compact()
    assert priced(other, "price > 5") == {"k3"}
    check_files(gallery.path)
    other.close()


def test_dropping_an_attribute_frees_its_name(gallery) -> None:
    gallery.add([entry(f"k{n}", row, {"n": n, "of": "a"}) for n, row in enumerate(VECTORS)])
    gallery.compact()
    seen: list[int] = []
    assert gallery.drop_attribute("n", seen.append) == sum(seen) == 30
    assert gallery.schema() == {"of": "text"}
    with pytest.raises(FilterError, match="'n'"):
        gallery.drop_attribute("n")
    gallery.update({"k1": {"n": "one"}})
    assert priced(gallery, 'n = "one"') == {"k1"}
    gallery.update({"k1": {"n": None}})
    assert gallery.drop_attribute("n") == 0
    assert gallery.schema() == {"of": "text"}


def test_values_are_converted_all_or_none(gallery) -> None:
    values = {"k0": "12", "k1": ("3", "4.5"), "k2": "-1"}
    gallery.add(
        [
            entry(f"k{n}", row, {"n": values.get(f"k{n}", "7")} if n < 20 else {})
            for n, row in enumerate(VECTORS)
        ]
    )
    gallery.compact()
    other = Gallery.open(gallery.path)
    gallery.update({"k19": {"n": "cheap"}})
    with pytest.raises(InvalidParameterError, match="'n' of 'k19' is 'cheap'"):
        gallery.retype_attribute("n", "number")
    assert gallery.schema() == {"n": "text"}
    assert priced(gallery, 'n = "12"') == {"k0"}
    gallery.update({"k19": {"n": None}})
    assert priced(other, 'n > "3"') >= {"k1", "k3"}
    assert gallery.retype_attribute("n", "number") == 19
    assert gallery.retype_attribute("n", "number") == 0
    for opened in (gallery, other):
        assert priced(opened, "n >= 4.5 and n < 7") == {"k1"}
        assert priced(opened, "n < 0") == {"k2"}
    gallery.compact()
    assert priced(other, "n = 3") == {"k1"}
    with pytest.raises(InvalidParameterError, match="boolean"):
        gallery.retype_attribute("n", "boolean")
    gallery.retype_attribute("n", "text")
    assert priced(other, 'n = "4.5"') == {"k1"}
    check_files(gallery.path)
    other.close()


def test_the_command_lists_drops_and_converts_attributes(run, built) -> None:
    for key, price in (("f.gif", "5"), ("cup/a.png", "12.5")):
        assert run("update", built, key, "--set", f"price={price}").exit_code == 0
    listed = {"name": "price", "type": "text", "items": 2}
    assert listed in printed(run("attributes", built, "--json"))
    assert "price  text  2 items" in run("attributes", built).stdout
    shown = run("attributes", built, "retype", "price", "number")
    assert shown.stdout == "2 values of price converted.\n"
    assert printed(run("search", built, "--like", "f.gif", "--where", "price > 6", "--json"))
    assert "'price' of 'cup/a.png' is 12.5" in failure(
        run("attributes", built, "retype", "price", "boolean")
    )
    dropped = printed(run("attributes", built, "drop", "price", "--json"))
    assert dropped == {"name": "price", "items": 2}
    assert "'price'" in failure(run("attributes", built, "drop", "price"))
    for wrong in (["drop"], ["retype", "price"], ["drop", "price", "text"]):
        assert "or retype NAME" in usage(run("attributes", built, *wrong))
    failed = failure(run("attributes", "milvus://localhost:1/shop", "drop", "price"))
    assert "localhost:1" in failed


def test_a_list_of_another_type_names_the_command_that_changes_it(
    run, built, shop, tmp_path
) -> None:
    assert run("update", built, "f.gif", "--set", "price=cheap").exit_code == 0
    table = tmp_path / "shop.csv"
    table.write_text("key,path,price:number\nf.gif,f.gif,3\n")
    add = ("add", built, shop, "--csv", table, "--bundle", "b")
    assert "attributes GALLERY retype price number" in failure(run(*add))
    assert "cannot be a number" in failure(run("attributes", built, "retype", "price", "number"))
    assert run("attributes", built, "drop", "price").exit_code == 0
    added = run(*add)
    assert added.exit_code == 0, added.output
    assert printed(run("show", built, "f.gif", "--json"))["attributes"]["price"] == 3
