"""The commands update and remove: typed values, all or nothing, and nothing by mistake."""

from pathlib import Path
from typing import Any

import pytest

from tests.indexer.conftest import Run, failure, printed


def attributes(run: Run, gallery: Path, key: str) -> dict[str, Any]:
    return dict(printed(run("show", gallery, key, "--json"))["attributes"])


def size(run: Run, gallery: Path) -> int:
    return int(printed(run("stats", gallery, "--json"))["size"])


@pytest.fixture
def priced(run, built) -> Path:
    for key, price, sale in (("f.gif", 5, "true"), ("cup/a.png", 12.5, "false")):
        changes = ("--set", f"price:number={price}", "--set", f"sale:boolean={sale}")
        assert run("update", built, key, *changes).exit_code == 0
    return built


def test_values_have_the_type_of_the_attribute_or_the_one_that_is_written(run, priced) -> None:
    assert attributes(run, priced, "f.gif") == {"price": 5, "sale": True}
    changes = ("--set", "price=7.25", "--set", "sale=false", "--set", "size=12")
    result = run("update", priced, "f.gif", "hat/c.webp", *changes)
    assert result.stdout == "2 of 2 items changed.\n"
    assert attributes(run, priced, "f.gif") == {"price": 7.25, "sale": False, "size": "12"}
    assert attributes(run, priced, "hat/c.webp")["class"] == "hat"
    taken = run("update", priced, "f.gif", "--unset", "price", "--json")
    assert printed(taken) == {"named": 1, "changed": 1}
    assert attributes(run, priced, "f.gif") == {"sale": False, "size": "12"}


def test_a_list_changes_many_items_or_none(run, priced, tmp_path) -> None:
    changes = tmp_path / "changes.csv"
    changes.write_text("key,price,note\nf.gif,,new\nhat/c.webp,3,\n")
    assert run("update", priced, "--csv", changes).stdout == "2 of 2 items changed.\n"
    assert attributes(run, priced, "f.gif") == {"sale": True, "note": "new"}
    assert attributes(run, priced, "hat/c.webp") == {"class": "hat", "price": 3, "note": ""}
    changes.write_text("key,price\nf.gif,9\ngone,1\n")
    assert "'gone'" in failure(run("update", priced, "--csv", changes))
    assert "price" not in attributes(run, priced, "f.gif")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "price=cheap"], "price is a number and cannot be 'cheap': expected a finite"),
        (["--set", "price:text=1"], "'price' is a number"),
        (["--set", "price"], "--set price: there is no '='. Write --set name=value."),
        (["--set", "price=1", "--unset", "price"], "price occurs twice"),
        (["gone", "--set", "price=1"], "'gone'"),
    ],
)
def test_a_change_that_cannot_be_made_is_refused_and_changes_nothing(
    run, priced, arguments: list[str], message: str
) -> None:
    assert message in failure(run("update", priced, "f.gif", *arguments))
    assert attributes(run, priced, "f.gif") == {"price": 5, "sale": True}


def test_items_are_removed_by_key_and_unknown_keys_are_named(run, built, tmp_path) -> None:
    result = run("remove", built, "f.gif", "gone", "f.gif")
    assert result.stdout == "1 items removed; 5 items in the gallery.\n"
    assert "Not in the gallery: gone" in result.stderr
    keys = tmp_path / "keys.txt"
    keys.write_text("cup/b.jpg\n\n cup/a.png \n", encoding="utf-8-sig")
    assert "2 items would be" in run("remove", built, "--keys-from", keys, "--dry-run").stdout
    assert run("remove", built, "--keys-from", keys).stdout.startswith("2 items removed")
    keys.write_text("\n")
    assert "has no keys" in failure(run("remove", built, "--keys-from", keys))
    assert "Cannot read the keys" in failure(run("remove", built, "--keys-from", tmp_path / "no"))


def test_items_are_removed_by_filter_and_counted_before(run, priced) -> None:
    where = ("--where", "price < 10 or class = 'hat'")
    counted = run("remove", priced, *where, "--dry-run")
    assert counted.stdout == "4 items would be removed; 6 items in the gallery.\n"
    assert size(run, priced) == 6
    removed = printed(run("remove", priced, *where, "--json"))
    assert removed == {"removed": 4, "dry_run": False, "unknown": []}
    assert size(run, priced) == 2
