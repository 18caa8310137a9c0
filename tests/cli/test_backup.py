"""Backups of a whole service: every acknowledged write is restored, or nothing is changed."""

import errno
import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.durable import set_fault_hook
from kinlens.embedder.errors import BundleCorruptError, KinlensError
from kinlens.indexer.galleries import current_generation
from kinlens.indexer.gallery import Gallery
from kinlens.service.backups import folder as backups
from kinlens.service.commands.program import app
from kinlens.service.settings import Settings
from tests.support.detectors import with_detector
from tests.support.own_process import own_process
from tests.support.seams import Bundles, FeedbackStore, JobStore, KeyStore
from tests.support.servers import render
from tests.support.shops import sha256, start_shop
from tests.support.waiting import repeating
from tests.tiny import encoded


def call(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, f"{result.output}{result.exception!r}"
    assert isinstance(result.exception, SystemExit | None)
    return result


@pytest.fixture(scope="module")
def made(
    tiny_bundle: Bundle, tiny_gallery: Path, photos: list[bytes], tmp_path_factory: Any
) -> Path:
    """HOST/state and HOST/shelf of a service that has ended, and its backup; not to be changed."""
    host = Path(tmp_path_factory.mktemp("host"))
    shutil.copytree(tiny_gallery, host / "shelf")
    shutil.copytree(tiny_bundle.path, host / "model")
    shop = start_shop(host / "state", feedback="pictures", jobs="elsewhere")
    shop.put({f"{n}.png": photos[n] for n in range(3)})
    named = shop.search(photos[5]).json()["answer_id"]
    sent = {"answer_id": named, "item": "1.png", "action": "clicked"}
    files = {"image": photos[5]}
    shop.client.post("/feedback", data=sent, files=files).raise_for_status()
    golden = {"image": ("q.png", photos[6], "image/png")}
    label = {"label": json.dumps({"keys": ["2.png"]})}
    shop.client.post("/galleries/shop/golden", files=golden, data=label).raise_for_status()
    shop.close()
    KeyStore(host / "state" / "keys.json").create("till", ["admin"])
    JobStore(host / "state" / "service.sqlite").create("compact", "shop", {}, "anonymous")
    (host / "state" / "audit.jsonl").write_text('{"what": "a line of another part"}\n')
    save(host)
    return host


@pytest.fixture
def host(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "host"))


def save(host: Path, name: str = "saved") -> backups.Backup:
    settings = Settings(
        state=host / "state", galleries=(f"shelf={host / 'shelf'}",), bundle=host / "model"
    )
    return backups.back_up(settings, host / name, lambda _: None)


def put_back(saved: Path, to: Path) -> backups.Backup:
    return backups.restore(saved, to / "state", lambda _: None)


def content(host: Path) -> dict[str, Any]:
    """What a service on this host answers from, each part separately; None for one that is down."""
    state = host / "state"
    parts = ("keys", "jobs", "feedback", "model", "shop", "shelf")
    found: dict[str, Any] = dict.fromkeys(parts)
    shelf = host / "shelf" if (host / "shelf").is_dir() else state / "galleries" / "shelf"
    for name, path in {"shop": state / "galleries" / "shop", "shelf": shelf}.items():
        if current_generation(path) is not None:
            with closing(Gallery.open(path)) as gallery:
                found[name] = [(item.key, item.sha256) for item in gallery.items()]
                for key, digest in found[name] if name == "shop" else ():
                    file = path / "pictures" / digest[:2] / digest
                    assert sha256(file.read_bytes()) == digest, key
    if (state / "keys.json").is_file():
        found["keys"] = KeyStore(state / "keys.json").list()
    if (state / "service.sqlite").is_file() and (state / "service.sqlite").stat().st_size:
        found["jobs"] = [(job.id, job.kind) for job in JobStore(state / "service.sqlite").newest()]
    if (state / "feedback.sqlite").is_file() and (state / "feedback.sqlite").stat().st_size:
        with closing(FeedbackStore(state)) as store:
            found["feedback"] = [*store.pairs("shop")]
    for folder in (host / "model", *state.glob("bundles/*")):
        if folder.is_dir():
            found["model"] = Bundle.open(folder).bundle_id
    return found


def put(client: httpx.Client, number: int, acknowledged: dict[str, bytes]) -> None:
    data = encoded(render(number, 40))
    parts: list[Any] = [("image", ("x.png", data, "image/png")), ("key", (None, f"{number}"))]
    client.put("/galleries/shop/items", files=parts).raise_for_status()
    acknowledged[f"{number}"] = data


def answers(client: httpx.Client) -> dict[str, Any]:
    run = client.post("/galleries/shop/golden/run").raise_for_status().json()
    return {
        "feedback": client.get("/galleries/shop/feedback").raise_for_status().text,
        "queries": client.get("/galleries/shop/golden").raise_for_status().json()["queries"],
        "recall@1": run["recall_at_1"],
    }


def test_a_restore_on_an_empty_host_has_every_acknowledged_write(tiny_bundle, tmp_path) -> None:
    """The drill: puts go on during the backup; then the whole host is wiped."""
    old, new, saved = tmp_path / "old", tmp_path / "new", tmp_path / "saved"
    shutil.copytree(tiny_bundle.path, old / "model")
    key = call("keys", "create", "till", "--scope", "admin", "--state", old / "state").stdout
    headers = {"X-API-Key": key.strip()}
    common = {"anonymous_scopes": "", "feedback": "pictures"}
    acknowledged: dict[str, bytes] = {}
    began_at = time.time()

    with (
        own_process(tmp_path / "log", bundle=old / "model", state=old / "state", **common) as one,
        httpx.Client(base_url=one.url, headers=headers, timeout=30) as client,
    ):
        client.post("/galleries", json={"name": "shop"}).raise_for_status()
        for number in range(5):
            put(client, number, acknowledged)
        image = {"image": ("q.png", acknowledged["3"], "image/png")}
        label = {"label": json.dumps({"keys": ["3"]})}
        client.post("/galleries/shop/golden", files=image, data=label).raise_for_status()
        named = client.post("/search", files=image).json()["answer_id"]
        sent = {"answer_id": named, "item": "3", "action": "clicked"}
        client.post("/feedback", data=sent, files=image).raise_for_status()
        before = answers(client)

        options = ("--bundle", old / "model", "--state", old / "state")
        with repeating(lambda _: put(client, len(acknowledged), acknowledged)):
            known = dict(acknowledged)
            call("backup", "--out", saved, *options)
        assert "not an empty folder" in call("restore", saved, *options[2:], code=1).stderr
        call("backup", "--out", saved, *options, code=1)
        metrics = client.get("/metrics").text
        assert "kinlens_backup_failed 1.0" in metrics
        succeeded_at = re.findall(r"^kinlens_backup_last_success\w+ (.*)$", metrics, re.MULTILINE)
        assert began_at < float(succeeded_at[0]) < time.time()
        [free] = re.findall(r"^kinlens_disk_free_bytes\{.* (.*)$", metrics, re.MULTILINE)
        assert float(free) > 0
    assert len(acknowledged) > len(known)
    shutil.rmtree(old)
    (new / "state" / "lost+found").mkdir(parents=True)  # as in a new volume of ext4
    restored = call("restore", saved, "--state", new / "state").stdout
    [bundle] = re.findall(r"--bundle (\S+)", restored)
    with (
        own_process(tmp_path / "log", bundle=bundle, state=new / "state", **common) as two,
        httpx.Client(base_url=two.url, headers=headers, timeout=30) as client,
    ):
        assert httpx.post(f"{two.url}/search", files=image).status_code == 401
        assert answers(client) == before
        items = client.get("/galleries/shop/items", params={"limit": 100}).json()["items"]
        for item in items:
            shown = client.get(f"/galleries/shop/items/{item['id']}/image").raise_for_status()
            assert shown.content
        for key, data in known.items():
            files = {"image": ("q.png", data, "image/png")}
            assert client.post("/search", files=files).json()["hits"][0]["key"] == key


def test_all_parts_are_restored_and_unfinished_jobs_have_failed(made, tmp_path) -> None:
    report = put_back(made / "saved", tmp_path)
    assert content(tmp_path) == content(made)
    assert None not in content(tmp_path).values()
    [job] = JobStore(tmp_path / "state" / "service.sqlite").newest()
    assert (job.state, "Start it again" in str(job.error)) == ("failed", True)
    logs = [(host / "state" / "audit.jsonl").read_text() for host in (made, tmp_path)]
    assert logs[0] == logs[1]
    assert {gallery.name: gallery.items for gallery in report.galleries} == {"shop": 3, "shelf": 8}
    assert stat.S_IMODE((made / "saved").stat().st_mode) == 0o700
    assert any("images of gallery shelf" in text for text in report.not_contained)


def test_parts_stored_elsewhere_are_named_with_the_way_to_save_them(host) -> None:
    settings = Settings(
        state=host / "state",
        galleries=("far=milvus://127.0.0.1:1/far", "copy=file:///elsewhere/shop"),
        pictures=(f"far={host / 'shared'}",),
    )
    found = backups.back_up(settings, host / "other", lambda _: None).not_contained
    assert any("kinlens-index export milvus://127.0.0.1:1/far" in text for text in found)
    assert any(f"shared images far={host}" in text for text in found)
    assert any("copy, a copy of file:///elsewhere/shop" in text for text in found)


def test_all_bundles_with_one_id_are_restored_and_the_same_one_is_served(
    tiny_bundle, tmp_path
) -> None:
    """A detector replaces an older one, whatever the names of their folders."""
    state = tmp_path / "state"
    new = with_detector(tiny_bundle, tmp_path / "new")
    old = with_detector(tiny_bundle, tmp_path / "old", layout="yolo")
    os.utime(old.path / "manifest.json", (1, 1))
    shutil.copytree(new.path, state / "bundles" / "a")
    shutil.copytree(old.path, state / "bundles" / "b")
    damaged = Path(shutil.copytree(tiny_bundle.path, state / "bundles" / "c"))
    (damaged / "model.onnx").write_bytes(b"")
    for given in (tiny_bundle.path, None):
        settings = Settings(state=state, bundle=given)
        saved = backups.back_up(settings, tmp_path / f"saved {given is None}", lambda _: None)
        [note] = [text for text in saved.not_contained if str(damaged) in text]
        assert "the file is damaged" in note
        plain = [] if given is None else [tiny_bundle.manifest.bundle_id]
        ids = [*plain, new.manifest.bundle_id, old.manifest.bundle_id]
        assert [bundle.bundle_id for bundle in saved.bundles] == ids
        assert [one.bundle_id for one in saved.bundles if one.primary] == plain
        to = tmp_path / f"restored {given is None}"
        backups.restore(tmp_path / f"saved {given is None}", to, lambda _: None)
        opened = [Bundle.open(path).manifest.bundle_id for path in (to / "bundles").iterdir()]
        assert sorted(opened) == sorted(ids)
        for folder in (state, to):
            served = Bundles(Settings(state=folder)).bundle(tiny_bundle.bundle_id)
            assert served.manifest == new.manifest
    newest = state / "bundles" / "a"
    (newest / "boxes.onnx").write_bytes(b"")
    served = Bundles(Settings(state=state)).bundle(tiny_bundle.bundle_id)
    assert served.manifest == old.manifest, "a damaged one is passed over"
    named = Settings(state=state, bundle=newest)
    with pytest.raises(BundleCorruptError):
        Bundles(named).bundle(tiny_bundle.bundle_id)
    with pytest.raises(BundleCorruptError):
        backups.back_up(named, tmp_path / "never", lambda _: None)


@pytest.mark.parametrize(
    "pattern",
    [
        *("backup.json", "SHA256SUMS", "galleries/shop/pictures/*/*", "bundles/*/*.onnx"),
        *("galleries/shelf/versions/*/catalog.sqlite", "state/keys.json", "state/feedback.sqlite"),
    ],
)
def test_a_damaged_byte_is_named_and_nothing_is_changed(host, pattern: str) -> None:
    file = sorted((host / "saved").glob(pattern))[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    before = content(host)
    expected = "" if pattern == "SHA256SUMS" else file.name
    for arguments in (("--check",), ("--state", host / "new")):
        refusal = call("restore", host / "saved", *arguments, code=1).stderr
        assert expected in refusal
        assert "Use another backup" in refusal
    assert content(host) == before
    assert not (host / "new").exists()
    file.unlink()
    assert file.name in call("restore", host / "saved", "--check", code=1).stderr


def test_a_restore_overwrites_nothing(host, tmp_path) -> None:
    before = content(host)
    with pytest.raises(KinlensError, match="move the content of this one away"):
        put_back(host / "saved", host)
    assert content(host) == before
    with pytest.raises(KinlensError, match="already exists"):
        save(host)
    (tmp_path / "file").touch()
    assert (
        "not an empty"
        in call("restore", host / "saved", "--state", tmp_path / "file", code=1).stderr
    )
    away = ("--state", tmp_path / "other")
    assert "No backup at" in call("restore", tmp_path / "none", *away, code=1).stderr


@pytest.mark.parametrize("place", ["elsewhere", "in its folder", "nowhere"])
def test_a_restored_gallery_that_the_settings_hide_is_told(
    made, tmp_path, monkeypatch, place
) -> None:
    """By the restore, the check and the start; `shelf` was named, and `shop` was not."""
    state, old = tmp_path / "state", tmp_path / "old"
    if place == "elsewhere":
        shutil.copytree(made / "shelf", old)
    if place == "in its folder":
        old.symlink_to(state / "galleries" / "shelf")
    monkeypatch.setenv("KINLENS_GALLERIES", f"shelf={old}")
    printed = call("restore", made / "saved", "--state", state).stdout.splitlines()
    if place == "in its folder":
        assert "Warning" not in printed[-1]
        assert any("gallery shelf was in" in line for line in printed)
        return
    warning = printed[-1].removeprefix("Warning: ")
    assert warning.startswith(f"{old} is served as 'shelf'")
    assert f"{state / 'galleries' / 'shelf'} is not" in warning
    assert f"NAME={old}" in warning
    report = call("restore", made / "saved", "--state", tmp_path / "again", "--json")
    assert json.loads(report.stdout)["galleries"]
    assert "is served as 'shelf'" in report.stderr
    arguments = ("--bundle", made / "model", "--state", state)
    found = call("check", "--port", "0", *arguments, code=1)  # its shop has no model
    assert f"gallery shelf: {warning}" in found.stdout
    if place == "elsewhere":
        given = {"bundle": made / "model", "state": state, "galleries": f"shelf={old}"}
        with own_process(tmp_path / "log", **given) as service:
            assert httpx.get(f"{service.url}/galleries/shelf").json()["size"] == 8
        [event] = service.events("gallery is hidden")
        assert (event["gallery"], event["detail"]) == ("shelf", warning)
        assert f"Warning: {warning}" in service.output


def states(folder: Path, work: Callable[[Path], Any]) -> list[Path]:
    """Copies of `folder` as a kill at five fault points of the work would leave it, from the first
    to the last.
    """
    points: list[str] = []
    seen: list[Path] = []

    def copy(point: str) -> None:
        points.append(point)
        if len(points) - 1 in chosen:
            seen.append(folder.with_name(f"killed at {len(seen)}"))
            # By another process, since SQLite loses its locks where its own one closes the file.
            command = ["cp", "-a", "--reflink=auto", folder, seen[-1]]
            subprocess.run(command, check=True)

    trial = Path(shutil.copytree(folder, folder.with_name("trial")))
    try:
        set_fault_hook(points.append)
        work(trial)
        chosen = [place * (len(points) - 1) // 4 for place in range(5)]
        points.clear()
        set_fault_hook(copy)
        work(folder)
    finally:
        set_fault_hook(None)
    assert len(points) - 1 == chosen[-1]
    return seen


CURES = {
    errno.ENOSPC: "Free space on that disk",
    errno.EDQUOT: "raise its quota",
    errno.EROFS: "mount it for writing",
    errno.ENOENT: "Check that its disk is mounted",
}


@pytest.mark.parametrize("code", CURES)
@pytest.mark.parametrize("command", ["backup", "restore", "keys create"])
def test_a_disk_that_refuses_is_named_with_what_was_written(made, tmp_path, command, code) -> None:
    """At the first, the middle and the last point; with ENOENT, its folder has vanished."""
    served = ("--state", made / "state", "--bundle", made / "model")

    def run(place: Path, status: int | None = None) -> str:
        words = {
            "backup": ("backup", "--out", place / "new", *served),
            "restore": ("restore", made / "saved", "--state", place / "new"),
            "keys create": ("keys", "create", "k", "--scope", "search", "--state", place / "new"),
        }
        result = CliRunner().invoke(app, [str(word) for word in words[command]])
        assert status in (None, result.exit_code), result.output
        return result.stderr.splitlines()[-1] if result.exit_code else ""

    points: list[str] = []
    set_fault_hook(points.append)
    try:
        (tmp_path / "whole").mkdir()
        run(tmp_path / "whole", 0)
        own = [n for n, point in enumerate(points) if not point.startswith("audit")]
        for number in (own[0], own[len(own) // 2], own[-1]):
            place, left = tmp_path / f"{number}", number
            (place / "new").parent.mkdir()

            def refuse(_: str, place: Path = place) -> None:
                nonlocal left
                left -= 1
                if left < 0 and code != errno.ENOENT:
                    raise OSError(code, os.strerror(code))
                if left == -1:
                    shutil.rmtree(place)

            set_fault_hook(refuse)
            error = run(place, 1 if code != errno.ENOENT else None)
            if not error:
                continue  # it needed the folder no more
            assert error.startswith("error: ")
            assert str(place / "new") in error
            assert CURES[code] in error
            assert not re.search(r"Errno|\.kinlens-backup|stage-|Allow this user", error)
            entries = [one.name for one in (place / "new").glob("*") if one.name[0] != "."]
            if re.search("was not created|Nothing was restored|No key was created", error):
                assert entries == []
            else:
                assert re.search("It is complete|may have parts|was written, but", error)
                assert entries
    finally:
        set_fault_hook(None)


def test_a_killed_backup_leaves_nothing_that_looks_like_a_backup(host) -> None:
    *halves, whole = states(host, lambda host: save(host, "half"))
    assert any(list(left.glob(".kinlens-backup-*")) for left in halves)
    for left in halves:
        assert not (left / "half").exists()
        save(left, "next")
        assert not list(left.glob(".kinlens-backup-*"))
        backups.check(left / "next", lambda _: None)
    backups.check(whole / "half", lambda _: None)  # renamed, so that it is whole


def test_a_killed_restore_gives_no_access_until_it_is_whole(made, tmp_path) -> None:
    new = content(made)
    saved, to = made / "saved", tmp_path / "to"
    to.mkdir()
    for copy in states(to, lambda to: put_back(saved, to)):
        assert content(copy)["keys"] is None or content(copy) == new
        if not [entry for entry in (copy / "state").glob("*") if entry.name[0] != "."]:
            put_back(saved, copy)
            assert content(copy) == new
    assert content(to) == new
