"""Downloads from local servers, well behaved and not."""

import hashlib
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from embedder.errors import DatasetError
from tests.training.servers import FtpFile, Site, ftp_site, http_site
from training.commands.data import app
from training.data import fetch as fetching
from training.data.download import find_source, instructions, obtain
from training.data.fetch import Patience, fetch
from training.data.sources import BY_HAND, SOURCES, Source
from training.data.unpack import unpack

QUICK = Patience(attempts=3, wait_s=0.001, timeout_s=5)
CONTENT = np.random.default_rng(0).bytes(700_000)


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def tgz(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return buffer.getvalue()


BIRDS = {"birds/images/1.jpg": CONTENT[:200_000], "birds/list.txt": b"1", "attributes.txt": b"a"}


@pytest.fixture
def site() -> Iterator[Site]:
    with http_site(Site(CONTENT)) as running:
        yield running


def source_of(content: bytes, *urls: str) -> Source:
    return Source("Birds", urls, md5(content), "birds.tgz", "birds", 10**6, "to all")


def get(url: str, target: Path, expected: bytes = CONTENT, **more: object) -> list[tuple]:
    seen: list[tuple] = []
    fetch(url, target, md5(expected), lambda *step: seen.append(step), QUICK, **more)
    assert target.read_bytes() == expected
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    return seen


def put_part(target: Path, site: Site, size: int, content: bytes = CONTENT) -> None:
    """Leave what an interrupted download of `site` leaves: its first `size` bytes."""
    site.drops.append(size)
    impatient = Patience(attempts=1)
    with pytest.raises(DatasetError, match=f"ended after {size:,} of {len(content):,} bytes"):
        fetch(site.url, target, "", lambda *_: None, impatient)
    assert not target.exists()
    site.asked.clear()


def test_a_file_is_fetched_and_its_progress_told(site: Site, tmp_path: Path) -> None:
    seen = get(site.url, tmp_path / "x")
    assert seen[0] == (0, len(CONTENT))
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert sorted(seen) == seen
    assert site.asked == [""]


def test_a_dropped_connection_is_gone_on_with(site: Site, tmp_path: Path) -> None:
    site.drops = [300_000, 100_000]
    get(site.url, tmp_path / "x")
    assert site.asked == ["", "bytes=300000-", "bytes=400000-"]


def test_a_second_call_goes_on_where_the_first_stopped(site: Site, tmp_path: Path) -> None:
    put_part(tmp_path / "x", site, 500_000)
    seen = get(site.url, tmp_path / "x")
    assert site.asked == ["bytes=500000-"]
    assert seen[0] == (500_000, len(CONTENT))


def test_a_server_without_ranges_sends_it_all_again(site: Site, tmp_path: Path) -> None:
    site.ranges = False
    put_part(tmp_path / "x", site, 500_000)
    assert get(site.url, tmp_path / "x")[0] == (0, len(CONTENT))


def test_a_file_that_changed_meanwhile_is_fetched_anew(site: Site, tmp_path: Path) -> None:
    put_part(tmp_path / "x", site, 500_000)
    site.content, site.etag = CONTENT[::-1], '"two"'
    get(site.url, tmp_path / "x", CONTENT[::-1])
    assert site.asked == ["bytes=500000-", ""]


def test_a_file_of_another_size_is_fetched_anew(site: Site, tmp_path: Path) -> None:
    for longer in (CONTENT + b"more", CONTENT[:100_000]):
        site.content, site.etag = CONTENT, ""
        put_part(tmp_path / "x", site, 500_000)
        site.content = longer
        get(site.url, tmp_path / "x", longer)
        assert site.asked == ["bytes=500000-", ""]
        (tmp_path / "x").unlink()


def test_a_part_without_its_note_is_not_trusted(site: Site, tmp_path: Path) -> None:
    put_part(tmp_path / "x", site, 500_000)
    (tmp_path / "x.part.json").write_text("[]")
    get(site.url, tmp_path / "x")
    assert site.asked == [""]


def test_a_complete_part_needs_no_more_than_its_check(site: Site, tmp_path: Path) -> None:
    put_part(tmp_path / "x", site, 500_000)
    with (tmp_path / "x.part").open("ab") as stream:
        stream.write(CONTENT[500_000:])
    get(site.url, tmp_path / "x")
    assert site.asked == [f"bytes={len(CONTENT)}-"]


def test_another_address_goes_on_with_a_part_of_the_same_size(site: Site, tmp_path: Path) -> None:
    put_part(tmp_path / "x", site, 500_000)
    with http_site(Site(CONTENT, etag='"mirror"')) as mirror:
        get(mirror.url, tmp_path / "x")
        assert mirror.asked == ["bytes=500000-"]


def test_a_file_of_unknown_size_is_fetched(tmp_path: Path) -> None:
    with http_site(Site(CONTENT, sized=False)) as site:
        assert get(site.url, tmp_path / "x")[-1] == (len(CONTENT), None)


def test_a_busy_server_is_asked_again(site: Site, tmp_path: Path) -> None:
    site.statuses = [503, 429]
    retries: list[tuple[int, int]] = []
    patience = replace(QUICK, on_retry=lambda *attempt: retries.append(attempt))
    fetch(site.url, tmp_path / "x", md5(CONTENT), lambda *_: None, patience)
    assert retries == [(2, 3), (3, 3)]


def test_attempts_that_gain_nothing_end(site: Site, tmp_path: Path) -> None:
    site.statuses = [503] * 9
    with pytest.raises(DatasetError, match=r"answers 503 .*run the command again"):
        get(site.url, tmp_path / "x")
    assert len(site.asked) == QUICK.attempts


def test_attempts_that_gain_something_do_not_count(site: Site, tmp_path: Path) -> None:
    site.drops = [100_000] * 6
    get(site.url, tmp_path / "x")
    assert len(site.asked) == 7 > QUICK.attempts


def test_an_address_that_does_not_exist_is_not_asked_twice(site: Site, tmp_path: Path) -> None:
    site.statuses = [404]
    with pytest.raises(DatasetError, match=r"file.tgz: the server answers 404 .*--url"):
        get(site.url, tmp_path / "x")
    assert len(site.asked) == 1


def test_a_server_that_is_not_there_is_named(site: Site, tmp_path: Path) -> None:
    with http_site(Site(b"")) as gone:
        pass
    with pytest.raises(DatasetError, match=r"127.0.0.1:\d+/file.tgz cannot be read.*Check the net"):
        get(gone.url, tmp_path / "x")


def test_only_network_addresses_are_read(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"file:///etc/hosts is not an address.*http, https or"):
        get("file:///etc/hosts", tmp_path / "x")


def test_a_wrong_checksum_deletes_the_file(site: Site, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"700,000 bytes with MD5 .*; expected is .*deleted"):
        get(site.url, tmp_path / "x", b"another")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_told_before_the_download(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr(fetching.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DatasetError, match=r"0.00 GB free; 0.00 GB are needed .*another --root"):
        get(site.url, tmp_path / "x", spare=1.1)
    assert (tmp_path / "x.part").stat().st_size == 0
    get(site.url, tmp_path / "x", spare=0.1)


def test_a_folder_that_cannot_be_written_is_named(site: Site, tmp_path: Path) -> None:
    (tmp_path / "x.part").mkdir()
    with pytest.raises(DatasetError, match=r"x.part cannot be written.*another --root"):
        get(site.url, tmp_path / "x")


@pytest.mark.parametrize("rest", [True, False])
def test_ftp_goes_on_where_the_server_can(tmp_path: Path, rest: bool) -> None:
    with ftp_site(FtpFile(CONTENT, rest=rest, drops=[300_000])) as file:
        get(file.url, tmp_path / "x")
        assert file.starts == ([0, 300_000] if rest else [0, 0])


def test_a_missing_ftp_file_is_named(tmp_path: Path) -> None:
    with (
        ftp_site(FtpFile(CONTENT)) as file,
        pytest.raises(DatasetError, match=r"file.zipx: the server answers 550 .*--url"),
    ):
        get(file.url + "x", tmp_path / "x")


@pytest.mark.parametrize("pack", [tgz, zipped])
def test_a_data_set_appears_complete(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    steps: list[tuple] = []
    with http_site(Site(pack(BIRDS))) as site:
        source = source_of(site.content, site.url)
        folder = obtain(source, tmp_path / "new", lambda *step: steps.append(step))
    assert folder == tmp_path / "new" / "birds"
    assert (folder / "images" / "1.jpg").read_bytes() == BIRDS["birds/images/1.jpg"]
    assert [path.name for path in folder.parent.iterdir()] == ["birds"]
    size = len(site.content)
    assert ("download", size, size) in steps
    assert steps[-1] == ("unpack", size, size)


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "birds").mkdir()
    source = source_of(b"", "http://127.0.0.1:1/x")
    assert obtain(source, tmp_path, lambda *_: None) == tmp_path / "birds"


def test_an_archive_that_lies_there_is_used_if_it_is_the_right_one(tmp_path: Path) -> None:
    content = tgz(BIRDS)
    source = source_of(content, "http://127.0.0.1:1/x")
    (tmp_path / "birds.tgz").write_bytes(content[:-1])
    with pytest.raises(DatasetError, match=r"birds.tgz has MD5 .*; that of Birds is .*Delete it"):
        obtain(source, tmp_path, lambda *_: None)
    (tmp_path / "birds.tgz").write_bytes(content)
    obtain(source, tmp_path, lambda *_: None, keep_archive=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["birds", "birds.tgz"]


def test_the_next_address_is_tried_and_all_faults_told(tmp_path: Path) -> None:
    with http_site(Site(tgz(BIRDS))) as site, http_site(Site(b"", statuses=[404] * 9)) as gone:
        source = source_of(site.content, gone.url, site.url)
        obtain(source, tmp_path, lambda *_: None, patience=QUICK)
        bad = replace(source, urls=(gone.url, gone.url + "2"), folder="other")
        with pytest.raises(DatasetError, match=r"tgz: the server answers 404 .*\n.*tgz2: the"):
            obtain(bad, tmp_path, lambda *_: None, patience=QUICK)


def test_an_archive_of_something_else_leaves_nothing_behind(tmp_path: Path) -> None:
    content = tgz({"planes/1.jpg": b"1"})
    (tmp_path / "birds.tgz").write_bytes(content)
    with pytest.raises(DatasetError, match="does not hold the folder birds"):
        obtain(source_of(content), tmp_path, lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == ["birds.tgz"]


def test_left_overs_of_a_broken_unpacking_are_replaced(tmp_path: Path) -> None:
    content = tgz(BIRDS)
    (tmp_path / "birds.tgz").write_bytes(content)
    (tmp_path / ".birds.unpacking" / "birds").mkdir(parents=True)
    (tmp_path / ".birds.unpacking" / "birds" / "old.jpg").write_bytes(b"old")
    folder = obtain(source_of(content), tmp_path, lambda *_: None)
    assert sorted(path.name for path in folder.iterdir()) == ["images", "list.txt"]


def refuse(tmp_path: Path, content: bytes, message: str, most_bytes: int = 10**6) -> None:
    (tmp_path / "archive").write_bytes(content)
    (tmp_path / "into").mkdir()
    with pytest.raises(DatasetError, match=message):
        unpack(tmp_path / "archive", tmp_path / "into", most_bytes, lambda *_: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "into"]


@pytest.mark.parametrize("name", ["../out.txt", "a/../../out.txt"])
def test_a_tar_cannot_write_outside_its_folder(tmp_path: Path, name: str) -> None:
    refuse(tmp_path, tgz({name: b"x"}), "outside the destination.*no archive of a data set")


def test_an_absolute_name_in_a_tar_stays_inside(tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    (tmp_path / "archive").write_bytes(tgz({str(target): b"x"}))
    (tmp_path / "into").mkdir()
    unpack(tmp_path / "archive", tmp_path / "into", 10**6, lambda *_: None)
    assert not target.exists()


def test_a_tar_cannot_link_outside_its_folder(tmp_path: Path) -> None:
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            info = tarfile.TarInfo("link")
            info.type, info.linkname = kind, "../../etc"
            tar.addfile(info)
        folder = tmp_path / kind.decode()
        folder.mkdir()
        refuse(folder, buffer.getvalue(), "no archive of a data set")


@pytest.mark.parametrize(
    "name", ["../out.txt", "a/../../out.txt", "/out.txt", "C:/out.txt", "..\\out.txt"]
)
def test_a_zip_cannot_write_outside_its_folder(tmp_path: Path, name: str) -> None:
    refuse(tmp_path, zipped({"good.txt": b"x", name: b"x"}), "leads out of the folder")
    assert not list((tmp_path / "into").iterdir())


def test_a_zip_cannot_hold_a_link(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        info = zipfile.ZipInfo("link")
        info.external_attr = (stat.S_IFLNK | 0o777) << 16
        file.writestr(info, "/etc")
    refuse(tmp_path, buffer.getvalue(), "'link' is a link or a device")


@pytest.mark.parametrize("pack", [tgz, zipped])
def test_an_archive_that_grows_without_end_is_stopped(
    tmp_path: Path, pack: Callable[..., bytes]
) -> None:
    refuse(tmp_path, pack({"zeros": bytes(100_001)}), "limits are 100,000 and", 100_000)
    assert not (tmp_path / "into" / "zeros").exists()


@pytest.mark.parametrize("pack", [tgz, zipped])
def test_a_damaged_archive_is_named(tmp_path: Path, pack: Callable[..., bytes]) -> None:
    content = bytearray(pack({"a.jpg": CONTENT[:5000], "b.jpg": CONTENT[:5000]}))
    content[2000:2100] = bytes(100)
    refuse(tmp_path, bytes(content), "archive is damaged .*download again")


def test_something_else_is_no_archive(tmp_path: Path) -> None:
    refuse(tmp_path, b"<html>Please log in</html>", "archive is damaged")


def test_every_official_data_set_can_be_fetched_or_is_explained() -> None:
    assert {*SOURCES, *BY_HAND} == {"cub", "cars196", "sop", "in_shop", "aircraft"}
    for source in SOURCES.values():
        assert source.urls
        assert len(source.md5) == 32
    with pytest.raises(DatasetError, match=r"'cubs' is known. Give one of cub, .*in_shop"):
        find_source("cubs")
    assert "agreement" in instructions("in_shop", Path("/d"))
    assert "/d/cars196/cars_annos.mat" in instructions("cars196", Path("/d"))


def test_the_command_fetches_and_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with http_site(Site(tgz(BIRDS))) as site:
        known = {"birds": source_of(site.content, "http://127.0.0.1:1/x")}
        monkeypatch.setattr("training.data.download.SOURCES", known)
        arguments = ["download", "birds", "--root", str(tmp_path), "--url", site.url]
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == again.exit_code == 0
    assert f"kinlens-train data doctor {tmp_path / 'birds'}" in done.stdout
    assert "is there already" in again.stdout
    assert len(site.asked) == 1


def test_the_command_tells_how_to_get_what_cannot_be_fetched(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["download", "in_shop", "--root", str(tmp_path / "d")])
    assert done.exit_code == 1
    assert f"{tmp_path / 'd'}/in_shop/Eval/list_eval_partition.txt" in done.stdout
    assert not (tmp_path / "d").exists()
