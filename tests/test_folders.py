"""A folder of photos means the same classes to training, gallery and demo."""

import os
import sys
import unicodedata
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import DatasetError, SourceError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.training.config.settings import FolderData
from kinlens.training.data.doctor import examine
from kinlens.training.data.load import load_split, read_folder
from tests.tiny import encoded, photo

RUBBISH = (
    *("@eaDir/0.png/SYNOPHOTO_THUMB_M.jpg", "#recycle/p9/1.jpg", "#SNAPSHOT/a/1.jpg"),
    *(".@__thumb/s.jpg", "@Recycle/1.jpg", "@Recently-Snapshot/x/1.jpg", ".Qsync/1.jpg"),
    *("$RECYCLE.BIN/S-1-5/$R1.jpg", "System Volume Information/1.png", "Thumbs.db"),
    *("__MACOSX/Hats/._0.png", "._0.png", ".Trashes/501/1.png", ".Trash-1000/files/1.png"),
    *("lost+found/1.jpg", ".recycle/user/1.jpg", "~snapshot/daily.0/1.jpg", ".git/1.png"),
    *("@SynoEAStream/1.jpg", "@appstore/x/1.png", "FOUND.012/1.jpg", "Temporary Items/1.jpg"),
    *("shop Previews.lrdata/A/1.jpg", ".ipynb_checkpoints/0-checkpoint.png", ".cache/1.jpg"),
)
PRODUCTS = ("Women/Dress", "Women/Coat", "Men/Coat", "Hats", "Bags/Recycled/Red")

FILES = {"PNG": ".png", "AVIF": ".AVIF", "HEIF": ".heic"}


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """Flat and nested product folders; two categories have a product of the same name."""
    root = tmp_path / "shop"
    for number, product in enumerate(PRODUCTS):
        (root / product).mkdir(parents=True)
        for view, (kind, suffix) in enumerate(FILES.items()):
            data = encoded(photo(10 * number + view), kind)
            (root / product / f"{view}{suffix}").write_bytes(data)
    (root / "loose.png").write_bytes(encoded(photo(99)))
    (root / "Hats" / ".hidden.png").write_bytes(encoded(photo(98)))
    return root


def test_training_gallery_and_demo_find_the_same_classes(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = load_split(FolderData(kind="folder", root=str(shop)))
    trained = {
        path: images.class_names[label]
        for images in (split.train, split.test)
        for path, label in zip(images.paths, images.labels, strict=True)
    }
    place = tmp_path / "gallery"
    build_gallery(folder_source(shop), OnnxEmbedder.open(tiny_bundle), place, BuildSettings("shop"))
    gallery = Gallery.open(place)
    stored = {item.key: item.attributes.get("class") for item in gallery.items()}
    gallery.close()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    classes = import_module("demo").trainable(shop)

    assert set(trained.values()) == classes == set(PRODUCTS)
    assert stored == {**trained, "loose.png": None}
    assert examine(shop).parts["all"] == (15, 5)


def test_without_its_extra_each_heic_is_omitted_with_the_cure(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    embedder = OnnxEmbedder.open(tiny_bundle)
    report = build_gallery(folder_source(shop), embedder, tmp_path / "gallery")
    assert len(report.failures) == len(PRODUCTS)
    for failure in report.failures:
        assert failure.key.endswith(".heic")
        assert "pip install 'kinlens[heif]'" in failure.reason


def seen(root: Path) -> dict[str, str | None]:
    """The class of each image by its path, the same for galleries and for training."""
    records = {r.path: r.attributes.get("class") for r in folder_source(root).records()}
    assert {r.path: r.label for r in read_folder(root)} == {
        path: label for path, label in records.items() if label
    }
    return records


def test_what_programs_leave_next_to_photos_is_omitted_and_counted(shop: Path) -> None:
    before = seen(shop)
    for name in RUBBISH:
        for path in (shop / name, shop / "Hats" / name.upper()):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(photo(5)))
    (shop / "Hats" / "0.nef").write_bytes(b"raw")
    assert seen(shop) == before
    omitted = folder_source(shop).omitted
    assert not omitted.faults
    text = "\n".join(omitted.lines())
    for name in RUBBISH:
        top = name.split("/")[0]
        assert f"Hats/{top.upper()}" in text
    assert "Omitted 1 files of formats that are not read (Hats/0.nef)." in text
    [finding] = [one for one in examine(shop).findings if one.code == "omitted"]
    assert "\n".join(finding.examples) == text
    own = folder_source(shop / "#recycle")
    assert own.count == 1, "a folder that the user names is read whatever its name is"


def test_a_linked_folder_is_read_once_and_bad_links_are_named(shop: Path, tmp_path: Path) -> None:
    before = seen(shop)
    for link, target in (
        ("A loop", shop),
        ("Hats/up", shop / "Hats"),
        ("A copy", shop / "Women"),
        ("First", shop / ".store"),
        ("Second", shop / ".store"),
        ("Third", shop / ".store" / "deep"),
        ("gone", tmp_path / "nowhere"),
        ("Hats/round.png", Path("round.png")),
        ("Hats/same.png", shop / "Hats" / "0.png"),
    ):
        (shop / ".store" / "deep").mkdir(parents=True, exist_ok=True)
        (shop / link).symlink_to(target)
    for name in ("1.png", "deep/2.png", "deep/3.png"):
        (shop / ".store" / name).write_bytes(encoded(photo(7)))
    added = {"First/1.png": "First", "Third/2.png": "Third", "Third/3.png": "Third"}
    added |= {"Hats/same.png": "Hats"}
    assert seen(shop) == before | added
    source = folder_source(shop)
    assert {kind: number for kind, number in source.omitted.counts.items() if "link" in kind} == {
        "links to a folder around them (loops)": 2,
        "links to folders that are read under another name": 3,
    }
    reasons = dict(source.omitted.faults)
    assert reasons.keys() == {"gone", "Hats/round.png"}
    assert f"a link to {tmp_path / 'nowhere'}, which does not exist" in reasons["gone"]
    assert "leads in a circle" in reasons["Hats/round.png"]
    for record in source.records():
        assert source.read_image(record, 10**6)


def test_links_out_of_the_folder_are_followed_by_a_training_alone(
    shop: Path, tmp_path: Path
) -> None:
    """A gallery shows its images to others, so it must not lead out of its root."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "9.png").write_bytes(encoded(photo(9)))
    (shop / "Hats" / "9.png").symlink_to(tmp_path / "other" / "9.png")
    (shop / "Other").symlink_to(tmp_path / "other")
    source = folder_source(shop)
    assert not {r.key for r in source.records()} & {"Hats/9.png", "Other/9.png"}
    for path, reason in source.omitted.faults:
        assert f"links to {(tmp_path / 'other').resolve()}" in reason, path
        assert f"outside of {shop}" in reason
    assert {r.path for r in read_folder(shop)} >= {"Hats/9.png", "Other/9.png"}


def test_a_name_is_one_name_in_both_unicode_forms(shop: Path) -> None:
    cafe, decomposed = "Caf\xe9", unicodedata.normalize("NFD", "Caf\xe9")
    for folder, view in ((cafe, "1"), (cafe, "2"), (decomposed, "2"), (decomposed, "3")):
        (shop / folder).mkdir(exist_ok=True)
        (shop / folder / f"{view}.png").write_bytes(encoded(photo(int(view))))
    (shop / "Hats ").mkdir()  # the space makes it another name
    (shop / "Hats " / "1.png").write_bytes(encoded(photo(8)))
    found = seen(shop)
    paths = [path for path, label in found.items() if label == cafe]
    assert paths == [f"{cafe}/1.png", f"{cafe}/2.png", f"{decomposed}/3.png"]
    assert found["Hats /1.png"] == "Hats "
    source = folder_source(shop)
    assert {f"{cafe}/{view}.png" for view in "123"} <= {r.key for r in source.records()}
    [(path, reason)] = source.omitted.faults
    assert path == f"{decomposed}/2.png"
    assert f"equals that of another file, {f'{cafe}/2.png'!a}, but for the Unicode form" in reason


def test_a_name_that_is_not_utf8_is_named_and_the_others_are_read(
    shop: Path, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    before = seen(shop)
    (shop / "Hats" / os.fsdecode(b"caf\xe9.png")).write_bytes(encoded(photo(5)))
    (shop / os.fsdecode(b"\xe9t\xe9")).mkdir()
    assert seen(shop) == before
    expected = {"Hats/caf\\xe9.png", "\\xe9t\\xe9"}
    report = build_gallery(
        folder_source(shop), OnnxEmbedder.open(tiny_bundle), tmp_path / "gallery"
    )
    assert {failure.key for failure in report.failures} == expected
    [finding] = [one for one in examine(shop).findings if one.code == "unusable"]
    assert {example.split(": ")[0] for example in finding.examples} == expected
    for text in (report.failures[0].reason, finding.examples[0]):
        assert "The name is not UTF-8" in text
        assert "convmv -r -f latin1 -t utf8" in text


def test_a_folder_that_cannot_be_read_is_named_instead_of_omitted(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = Mock(side_effect=PermissionError(13, "Permission denied", str(shop / "Hats")))
    monkeypatch.setattr(os, "scandir", refused)
    for error, read in ((SourceError, folder_source), (DatasetError, read_folder)):
        with pytest.raises(error, match=r"Hats cannot be read: Permission denied\. Allow"):
            read(shop)
