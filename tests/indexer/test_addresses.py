"""Images that stay in an object store: built, added to and synced where they are."""

import unicodedata
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kinlens.embedder.errors import (
    EngineUnavailableError,
    ImageMissingError,
    ImageTooManyBytesError,
    InvalidParameterError,
    SourceError,
    UnreachableError,
)
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.images import ImageAddress, image_root_of
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.sources import source_at
from tests.indexer.conftest import printed
from tests.indexer.oracle import units
from tests.support.stores import HUGE, Store
from tests.tiny import encoded, photo

ODD = "hat/a b+c%41&#[x]*'ü=@!.png"
IMAGES = {
    name: encoded(photo(n)) for n, name in enumerate(("cup/a.png", "cup/b.png", ODD, "f.png"))
}


@pytest.fixture
def stocked(image_store: Store) -> Store:
    for path, data in IMAGES.items():
        image_store.write(path, data)
    image_store.write("notes.txt", b"no image")
    image_store.write(".hidden/x.png", IMAGES["f.png"])
    return image_store


def items_of(gallery: Path) -> dict[str, tuple[dict, bytes]]:
    with closing(Gallery.open(gallery)) as opened:
        items = [*opened.items()]
        return {one.key: (dict(one.attributes), opened.image(one.id).data) for one in items}


def test_images_of_a_store_are_built_added_and_synced_without_a_copy(
    stocked, run, out, tmp_path
) -> None:
    report = printed(run("build", f"{stocked.address}/", "--bundle", "b", "--out", out, "--json"))
    assert (report["indexed"], report["failures"]) == (len(IMAGES), [])
    found = items_of(out)
    assert {key: data for key, (_, data) in found.items()} == IMAGES
    assert found[ODD][0] == {"class": "hat"}
    files = [file.read_bytes() for file in out.rglob("*") if file.is_file()]
    assert not any(IMAGES["f.png"] in data for data in files)
    with closing(Gallery.open(out)) as opened:
        assert str(opened.image_root) == opened.manifest.source_root == stocked.address

    stocked.write("new/n.png", encoded(photo(20)))
    below = f"{stocked.address}/new"
    added = printed(run("add", out, below, "--bundle", "b", "--json"))
    assert (added["found"], added["added"]) == (1, 1)
    sync = ("sync", out, stocked.address, "--bundle", "b", "--max-removed", "1", "--json")
    before = printed(run(*sync))
    assert (before["unchanged"], before["removed"]) == (len(IMAGES) + 1, 0)
    stocked.write("cup/b.png", encoded(photo(21)))
    stocked.remove("f.png")
    stocked.remove("cup/a.png")
    stocked.write("cup/renamed.png", IMAGES["cup/a.png"])
    after = printed(run(*sync))
    counts = {name: after[name] for name in ("replaced", "renamed", "removed", "unchanged")}
    assert counts == {"replaced": 1, "renamed": 1, "removed": 1, "unchanged": 2}
    assert items_of(out).keys() == {"cup/b.png", "cup/renamed.png", ODD, "new/n.png"}


def test_a_list_names_images_by_path_or_by_their_whole_address(stocked, run, out, tmp_path) -> None:
    rows = ["key,path,price:number", "a,cup/a.png,1", f"b,{stocked.address}/cup/b.png,2"]
    listed = tmp_path / "list.csv"
    listed.write_text("\n".join([*rows, "c,cup/none.png,3"]))
    command = ("build", stocked.address, "--csv", listed, "--bundle", "b", "--out", out, "--json")
    report = printed(run(*command), 3)
    [failure] = report["failures"]
    assert failure["key"] == "c"
    assert "cup/none.png is missing below" in failure["reason"]
    assert items_of(out) == {
        "a": ({"price": 1}, IMAGES["cup/a.png"]),
        "b": ({"price": 2}, IMAGES["cup/b.png"]),
    }
    listed.write_text("\n".join([*rows, f"d,{stocked.address}-other/x.png,4"]))
    assert "is a URL outside of the image root" in run(*command).stderr
    listed.write_text("\n".join(rows))
    synced = printed(run("sync", out, listed, "--bundle", "b", "--json"))
    assert (synced["unchanged"], synced["embedded"]) == (2, 0)
    elsewhere = run("add", out, f"{stocked.address}-other", "--bundle", "b")
    assert elsewhere.exit_code == 1
    assert "is outside of" in elsewhere.stderr


def test_only_changed_images_of_a_store_are_read_again(
    s3_store, embedder, out, run, monkeypatch
) -> None:
    for path, data in IMAGES.items():
        s3_store.write(path, data)
    build_gallery(source_at(s3_store.address), embedder, out)
    read: list[str] = []
    original = ImageAddress.read

    def counted(self: ImageAddress, path: str, max_bytes: int) -> bytes:
        read.append(path)
        return original(self, path, max_bytes)

    monkeypatch.setattr(ImageAddress, "read", counted)
    sync = ("sync", out, s3_store.address, "--bundle", "b", "--json")
    printed(run(*sync))
    assert sorted(read) == sorted(IMAGES)
    read.clear()
    s3_store.write("f.png", encoded(photo(9)))
    assert printed(run(*sync))["replaced"] == 1
    assert {*read} == {"f.png"}


@pytest.mark.parametrize(
    "path", ["../x.png", "cup/../../x.png", "/x.png", "a//b.png", "a\\..\\b", ""]
)
def test_nothing_outside_of_an_address_is_asked_for(web_store, path: str) -> None:
    (web_store.folder.parent / "x.png").write_bytes(b"outside")
    with pytest.raises(SourceError):
        ImageAddress(web_store.address).read(path, 100)
    assert web_store.requests == []


def test_a_server_cannot_lead_out_of_its_address_or_send_without_end(web_store) -> None:
    (web_store.folder.parent / "outside.png").write_bytes(IMAGES["f.png"])
    place = ImageAddress(web_store.address)
    with pytest.raises(SourceError, match="is a redirect"):
        place.read("moved.png", 10**6)
    with pytest.raises(UnreachableError, match="403"):
        place.read("secret.png", 10**6)
    with pytest.raises(ImageTooManyBytesError, match="more than 1,000,000 bytes"):
        place.read("huge.png", 10**6)
    assert web_store.sent < HUGE / 16
    assert not any("outside" in path for path in web_store.requests)
    web_store.write("%2e%2e%2foutside.png", b"inside")
    assert place.read("%2e%2e%2foutside.png", 100) == b"inside"


def test_an_image_with_too_many_bytes_and_an_empty_one_are_skipped(s3_store, run, out) -> None:
    s3_store.write("big.png", bytes(21 * 2**20))
    s3_store.write("empty.png", b"")
    s3_store.write("a.png", IMAGES["f.png"])
    report = printed(run("build", s3_store.address, "--bundle", "b", "--out", out, "--json"), 3)
    reasons = {failure["key"]: failure["reason"] for failure in report["failures"]}
    assert reasons.keys() == {"big.png", "empty.png"}
    assert "more than 20,971,520 bytes" in reasons["big.png"]
    assert report["indexed"] == 1


def test_a_store_that_goes_away_ends_a_build_that_can_be_resumed(s3_store, out, embedder) -> None:
    for number in range(12):
        s3_store.write(f"{number:02}.png", encoded(photo(number)))
    source = source_at(s3_store.address)
    read = 0

    def read_image(record, max_bytes: int) -> bytes:
        nonlocal read
        read += 1
        if read > 6:
            raise UnreachableError("away")
        return ImageAddress(s3_store.address).read(record.path, max_bytes)

    small = BuildSettings(embed=EmbedSettings(batch_size=2, workers=1))
    with pytest.raises(UnreachableError):
        build_gallery(replace(source, read=read_image), embedder, out, small)
    assert not (out / "CURRENT").exists()
    report = build_gallery(source, embedder, out, small)
    assert (report.indexed, report.failures) == (12, ())
    assert report.reused >= 2


def test_names_that_differ_in_their_unicode_form_alone_are_named(s3_store, run, out) -> None:
    composed = "ü.png"
    s3_store.write(composed, IMAGES["f.png"])
    s3_store.write(unicodedata.normalize("NFD", composed), IMAGES["cup/a.png"])
    report = printed(run("build", s3_store.address, "--bundle", "b", "--out", out, "--json"), 3)
    [fault] = report["failures"]
    assert "equals that of another file" in fault["reason"]
    assert items_of(out).keys() == {composed}


def test_an_image_root_that_moved_to_a_store_is_named_when_it_is_opened(
    shop, built, image_store
) -> None:
    for file in filter(Path.is_file, shop.rglob("*")):
        image_store.write(file.relative_to(shop).as_posix(), file.read_bytes())
    with closing(Gallery.open(built, image_root=image_store.address)) as opened:
        [item] = opened.stored(["cup/a.png"]).values()
        assert opened.image(item.id).data == (shop / "cup/a.png").read_bytes()
        opened.add([Entry("bad", units(1, dim=32)[0], "0" * 64, {}, "../x.png", "PNG")])
        with pytest.raises(ImageMissingError, match="removed or changed"):
            opened.image(opened.stored(["bad"])["bad"].id)


def test_addresses_with_secrets_or_without_their_package_are_refused(tmp_path) -> None:
    for address in ("s3://key:secret@bucket/a", "https://x/a?sig=1", "simplecache::http://x/a"):
        with pytest.raises(InvalidParameterError) as refused:
            image_root_of(address)
        assert "secret" not in str(refused.value)
    assert image_root_of(f"file://{tmp_path}") == tmp_path
    away = ImageAddress("nowhere://bucket/a")  # it is opened at the first read
    with pytest.raises(EngineUnavailableError, match="install the package for its protocol"):
        away.read("x.png", 10)
    with pytest.raises(SourceError, match="There are no images at"):
        source_at(f"memory://{tmp_path.name}-empty")
