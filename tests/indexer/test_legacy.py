"""Galleries of the first format: read as they were, refused where they are damaged."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embedder.errors import SourceError
from indexer.exchange.legacy import import_legacy
from indexer.gallery import Gallery
from tests.support.seams import import_gallery

DATA = Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "gallery-v1.json").read_text(encoding="utf-8"))
"""What the program that wrote the gallery said of it, and answered."""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of a gallery of the first format: six items, two of equal content."""
    return Path(shutil.copytree(DATA / "gallery-v1", tmp_path / "old"))


def version(gallery: Path) -> Path:
    (folder,) = (gallery / "versions").iterdir()
    return folder


def edit_manifest(gallery: Path, **values: Any) -> None:
    path = version(gallery) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_every_item_comes_with_its_vector_attributes_and_facts(old: Path) -> None:
    dump = import_legacy(old)
    entries = list(dump.entries())
    assert (dump.count, dump.dim) == (6, 8)
    assert dump.facts == {
        "name": "shop",
        "bundle_id": "b" * 64,
        "source": "list /shop/images/list.csv",
        "source_root": "/shop/images",
        "created_at": dump.facts["created_at"],
    }
    assert {entry.key: entry.vector.tolist() for entry in entries} == EXPECTED["vectors"]
    assert {entry.key: entry.attributes for entry in entries} == EXPECTED["attributes"]
    assert {entry.format for entry in entries} == {"PNG", "JPEG", "WEBP", "BMP"}
    assert len({entry.sha256 for entry in entries}) == 5
    again = [entry.key for entry in dump.entries()]  # each reading starts from the first
    assert again == [entry.key for entry in entries]


def test_the_answers_are_those_of_the_program_that_wrote_it(old: Path) -> None:
    entries = list(import_legacy(old).entries())
    vectors = np.stack([entry.vector for entry in entries])
    for query, answer in zip(EXPECTED["queries"], EXPECTED["answers"], strict=True):
        scores = vectors @ np.array(query, np.float32)
        found = [(entries[i].key, scores[i]) for i in np.argsort(-scores, kind="stable")]
        assert [key for key, _ in found] == [key for key, _ in answer]
        assert [score for _, score in found] == pytest.approx([s for _, s in answer], abs=1e-6)


def test_reading_changes_nothing(old: Path) -> None:
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    list(import_legacy(old).entries())
    assert before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}


def test_a_newer_gallery_is_refused_with_the_way_to_copy_it(old: Path) -> None:
    edit_manifest(old, schema_version=2)
    with pytest.raises(SourceError, match=r"schema 2.*kinlens-index backup"):
        import_legacy(old)


@pytest.mark.parametrize("name", ["catalog.sqlite", "index.faiss", "report.json"])
@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_file_is_named(old: Path, name: str, damage: str) -> None:
    file = version(old) / name
    data = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(data[:-3])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    with pytest.raises(SourceError, match=name):
        import_legacy(old)


@pytest.mark.parametrize(
    "values", [{"size": 5}, {"dim": 4}, {"name": "other"}, {"files": {}}, {"version": "0" * 64}]
)
def test_an_edited_manifest_is_refused(old: Path, values: dict[str, Any]) -> None:
    edit_manifest(old, **values)
    with pytest.raises(SourceError, match=r"manifest\.json"):
        import_legacy(old)


def test_a_folder_that_is_no_gallery_is_refused_by_name(tmp_path: Path, old: Path) -> None:
    with pytest.raises(SourceError, match="CURRENT"):
        import_legacy(tmp_path)
    (old / "CURRENT").write_text("../../elsewhere\n")
    with pytest.raises(SourceError, match="elsewhere"):
        import_legacy(old)


def test_an_imported_gallery_gives_the_answers_of_the_old_program(
    old: Path, tmp_path: Path
) -> None:
    import_gallery(import_legacy(old), tmp_path / "new")
    gallery = Gallery.open(tmp_path / "new")
    assert (gallery.name, gallery.bundle_id, gallery.dim, gallery.size) == ("shop", "b" * 64, 8, 6)
    assert str(gallery.image_root) == "/shop/images"
    assert gallery.manifest.source == "list /shop/images/list.csv"
    queries = np.array(EXPECTED["queries"], np.float32)
    for found, expected in zip(gallery.search(queries, 6), EXPECTED["answers"], strict=True):
        assert [hit.key for hit in found] == [key for key, _ in expected]
        assert [hit.score for hit in found] == pytest.approx([s for _, s in expected], abs=1e-6)
    found = {item.key: item.attributes for item in gallery.items()}
    assert found == EXPECTED["attributes"]
    gallery.close()
