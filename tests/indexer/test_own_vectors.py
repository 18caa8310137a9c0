"""The command import reads tables and arrays that other programs wrote."""

import datetime
import shutil
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from kinlens.indexer.gallery import Gallery
from kinlens.values import date_text
from tests.indexer.conftest import failure, printed
from tests.indexer.oracle import units

VECTORS = units(3, dim=4)


def lists(kind: pa.DataType) -> pa.Array:
    flat = VECTORS.astype(kind.value_type.to_pandas_dtype())
    return pa.array([*flat] if kind.value_type == pa.float16() else flat.tolist(), kind)


def items(gallery: Path) -> dict[str, dict[str, Any]]:
    with closing(Gallery.open(gallery)) as store:
        assert np.allclose(np.linalg.norm(store.entries(["1"])[0].vector), 1)
        return {item.key: dict(item.attributes) for item in store.items()}


@pytest.mark.parametrize("width", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.parametrize("kind", [pa.list_, pa.large_list, lambda width: pa.list_(width, 4)])
def test_any_column_of_numbers_is_a_vector(run, tmp_path, width, kind) -> None:
    table = pa.table({"id": pa.array([1, 2, 3], pa.int32()), "emb": lists(kind(width))})
    pa.parquet.write_table(table, tmp_path / "own.parquet")
    run("import", tmp_path / "own.parquet", "--out", tmp_path / "g", "--model", "clip")
    with closing(Gallery.open(tmp_path / "g")) as store:
        assert store.bundle_id == "model:clip"
        for key, vector in zip("123", VECTORS, strict=True):
            [[hit]] = store.search(vector[None], 1)
            assert hit.key == key
            assert hit.score > 0.999


@pytest.mark.parametrize("kind", [pa.list_, pa.list_view, pa.large_list_view])
def test_streams_and_views_of_arrow_are_imported(run, tmp_path, kind) -> None:
    sizes = pa.array([["S", "M"], [], None], pa.list_view(pa.string()))
    vectors = pa.array(VECTORS.tolist(), kind(pa.float32()))
    table = pa.table({"id": ["1", "2", "3"], "emb": vectors, "sizes": sizes})
    parts = tmp_path / "parts"
    parts.mkdir()
    stream = parts / "stream.arrow"
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table.slice(1), max_chunksize=1)
    with pa.ipc.new_file(parts / "file.arrow", table.schema) as writer:
        writer.write_table(table.slice(0, 1))
    run("import", parts, "--out", tmp_path / "g", "--model", "m")
    assert items(tmp_path / "g") == {"1": {"sizes": ("S", "M")}, "2": {}, "3": {}}
    with closing(Gallery.open(tmp_path / "g")) as store:
        for key, vector in zip("123", VECTORS, strict=True):
            assert [hit.key for hit in store.search(vector[None], 1)[0]] == [key]
    whole = stream.read_bytes()
    for length in (0, 3, len(whole) // 2, len(whole) - 8):  # the last has all its vectors
        stream.write_bytes(whole[:length])
        line = failure(run("import", stream, "--out", tmp_path / "h", "--model", "m"))
        assert f"{stream} is not a valid Arrow file" in line


def test_other_columns_are_attributes_of_their_types(run, tmp_path) -> None:
    day = datetime.date(2026, 11, 28)
    table = pa.table(
        {
            "sku": pa.array(["1", "2", "3"], pa.large_string()).dictionary_encode(),
            "embedding": lists(pa.list_(pa.float32())),
            "colour": pa.array(["red", None, "red"]).dictionary_encode(),
            "price": pa.array([Decimal("1.50"), Decimal("2.00"), None], pa.decimal128(9, 2)),
            "stock": pa.array([1.0, float("nan"), 3.0]),
            "added": pa.array([day, None, day]),
            "seen": pa.array([datetime.datetime(2026, 11, 28, 10), None, None], pa.timestamp("ns")),
            "sizes": pa.array([["S", "M"], [], None], pa.large_list(pa.string())),
            "nothing": pa.nulls(3),
        }
    )
    for name in ("a", "b"):
        part = table.slice(0, 2) if name == "a" else table.slice(2)
        (tmp_path / "parts").mkdir(exist_ok=True)
        pa.feather.write_feather(part, tmp_path / "parts" / f"{name}.arrow")
    report = printed(
        run("import", tmp_path / "parts", "--out", tmp_path / "g", "--model", "m", "--json")
    )
    assert report["items"] == 3
    assert items(tmp_path / "g") == {
        "1": {
            "colour": "red",
            "price": 1.5,
            "stock": 1.0,
            "added": "2026-11-28",
            "seen": date_text(datetime.datetime(2026, 11, 28, 10)),
            "sizes": ("S", "M"),
        },
        "2": {"price": 2},
        "3": {"colour": "red", "stock": 3.0, "added": "2026-11-28"},
    }
    chosen = ("--columns", "colour", "--key-column", "sku", "--vector-column", "embedding")
    run("import", tmp_path / "parts" / "*.arrow", "--out", tmp_path / "h", "--model", "m", *chosen)
    assert items(tmp_path / "h") == {"1": {"colour": "red"}, "2": {}, "3": {"colour": "red"}}


def test_an_array_takes_its_keys_from_a_text_or_a_list(run, tmp_path) -> None:
    np.save(tmp_path / "own.npy", 5 * VECTORS.astype(np.float64))
    (tmp_path / "keys.txt").write_text("1\n2\n3\n")
    (tmp_path / "list.csv").write_text("key,price:number\n1,5\n2,\n3,7\n")
    ask = ("import", tmp_path / "own.npy", "--out", tmp_path / "g", "--model", "m")
    first = run(*ask, "--keys", tmp_path / "keys.txt")
    assert "3 vectors were not of norm 1 and were normalised" in first.stderr
    assert "3 of 3" in first.stderr
    assert items(tmp_path / "g") == {"1": {}, "2": {}, "3": {}}
    run(*ask, "--csv", tmp_path / "list.csv")
    assert items(tmp_path / "g") == {"1": {"price": 5}, "2": {}, "3": {"price": 7}}
    (tmp_path / "keys.txt").write_text("1\n2\n")
    assert "has 2 keys" in failure(run(*ask, "--keys", tmp_path / "keys.txt"))
    assert "has no keys" in failure(run(*ask))
    np.savez(tmp_path / "own.npz", VECTORS)
    shutil.copy(tmp_path / "own.npz", tmp_path / "zip.npy")
    for name in ("own.npz", "zip.npy"):
        line = failure(run("import", tmp_path / name, "--out", tmp_path / "g", "--model", "m"))
        assert f"{name} is an archive of arrays (.npz). Save the vectors alone" in line


def test_vectors_of_a_model_without_a_bundle_are_searched_by_vector_or_item(
    run, tmp_path, tiny_bundle
) -> None:
    table = pa.table({"key": ["1", "2"], "vector": units(2, dim=4).tolist()})
    pa.parquet.write_table(table, tmp_path / "own.parquet")
    out = tmp_path / "g"
    assert run("import", tmp_path / "own.parquet", "--out", out, "--model", "clip").exit_code == 0
    assert run("show", out, "1").exit_code == 0
    assert run("search", out, "--like", "1").stdout.split()[1] == "2"
    why = "of the model 'clip', which has no bundle, so they cannot be compared with images"
    image = ("--image", "x.jpg", "--bundle", tiny_bundle.path)
    assert why in failure(run("search", out, *image))


def test_vectors_of_a_bundle_must_fit_it(run, tmp_path, tiny_bundle) -> None:
    table = pa.table({"key": ["1"], "vector": [VECTORS[0].tolist()]})
    pa.parquet.write_table(table, tmp_path / "own.parquet")
    ask = ("import", tmp_path / "own.parquet", "--out", tmp_path / "g")
    assert "Pass --bundle BUNDLE if its vectors are of that model" in failure(run(*ask))
    assert "have 4 components" in failure(run(*ask, "--bundle", tiny_bundle.path))
    long = units(1, dim=tiny_bundle.manifest.dim)[0].tolist()
    pa.parquet.write_table(pa.table({"key": ["1"], "vector": [long]}), tmp_path / "own.parquet")
    assert run(*ask, "--bundle", tiny_bundle.path).exit_code == 0
    with closing(Gallery.open(tmp_path / "g")) as store:
        assert store.bundle_id == tiny_bundle.bundle_id


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"vector": [[1.0], [2.0]]}, "no column named key, id, sku or path"),
        ({"vector": [[1.0], [2.0]]}, "or name it with --key-column"),
        ({"key": ["a", "b"]}, "no such column"),
        ({"key": ["a", "b"]}, "or name it with --vector-column"),
        ({"key": ["a"], "vector": [[1.0]], "box": [{"x": 1}]}, "columns to store with --columns"),
        ({"key": ["a", None], "vector": [[1.0], [2.0]]}, "row 2 has no key"),
        ({"key": ["a", "a"], "vector": [[1.0], [2.0]]}, "Key 'a' occurs twice"),
        ({"key": [1.5, 2.5], "vector": [[1.0], [2.0]]}, "the column key is double"),
        ({"key": ["a", "b"], "vector": [[1.0], None]}, "the vector of 'b' is missing"),
        ({"key": ["a", "b"], "vector": [[1.0], [2.0, 3.0]]}, "of 'b' has 2 components"),
        ({"key": ["a", "b"], "vector": [[1.0], [0.0]]}, "the vector of 'b' is zero"),
        ({"key": ["a", "b"], "vector": [[float("nan")], [1.0]]}, "of 'a' has NaN"),
        ({"key": ["a"], "vector": [[1.0]], "box": [{"x": 1}]}, "the column box is struct<x: int64"),
        ({"key": ["a"], "one": [[1.0]], "two": [[1.0]]}, "several columns of vectors: one, two"),
    ],
)
def test_what_cannot_be_imported_is_named(run, tmp_path, columns, message) -> None:
    pa.parquet.write_table(pa.table(columns), tmp_path / "own.parquet")
    line = failure(run("import", tmp_path / "own.parquet", "--out", tmp_path / "g", "--model", "m"))
    assert message in line
