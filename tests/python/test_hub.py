"""Bundles on the Hugging Face Hub: pushed with a card, downloaded, checked; never asked for else.

Each call runs in a process of its own with the address of a stand-in, which the package reads when
it is imported.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.manifest import Baseline, Comparison, TextTower
from kinlens.indexer.gallery import Gallery
from kinlens.library.hub import model_card
from tests.support.hub_server import TOKEN, Hub, serve_hub
from tests.support.own_process import environment
from tests.tiny import encoded, photo

REPO = "shop/shoes"
LEFT = "ignore:Use 'content:DeprecationWarning"  # of huggingface_hub, by plain HTTP alone
Run = Callable[..., Any]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serve_hub() as hub:
        yield hub


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """Runs code that uses the stand-in; what it has put into `out`, as JSON."""

    def run(code: str, **variables: str) -> Any:
        known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": TOKEN}
        known |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        whole = f"import json, sys, kinlens\nout = []\n{code}\nprint(json.dumps(out))"
        done = subprocess.run(
            [sys.executable, "-W", "error", "-W", LEFT, "-c", whole],
            env=environment() | known | variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def put(hub: Hub, bundle: Bundle, name: str = REPO, **changed: bytes | None) -> None:
    """A repository with the files of a bundle, of which some are changed or missing."""
    files = {**files_of(bundle.path), **changed}
    hub.create(name, **{key: data for key, data in files.items() if data is not None})


ROUND = """
bundle = kinlens.load_bundle({path!r})
address = bundle.first(4).push_to_hub({repo!r})
same = kinlens.load_bundle(address)
out += [address, same.bundle_id == bundle.bundle_id == kinlens.load_bundle("hf://{repo}").bundle_id]
out.append(bool((same.embed(bundle.bundle.golden_inputs()) == bundle.embed(
    bundle.bundle.golden_inputs())).all()))
out.append(bundle.push_to_hub({repo!r}))
other = kinlens.load_bundle({other!r})
out.append(other.push_to_hub({repo!r}))
out.append(kinlens.load_bundle("hf://{repo}").bundle_id == other.bundle_id)
out.append(kinlens.load_bundle(address).bundle_id == bundle.bundle_id)
"""


def test_a_bundle_is_pushed_with_a_card_and_loaded_at_any_of_its_versions(
    hub: Hub, run: Run, tmp_path: Path, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    bundle, other = make_tiny_bundle(1), make_tiny_bundle(2)
    (bundle.path / "weights.safetensors").write_bytes(b"weights")
    (bundle.path / "notes.txt").write_text("mine")
    (bundle.path / "golden/notes").mkdir()
    paths = {"path": str(bundle.path), "other": str(other.path)}
    # Of files that come by Xet the stand-in has no content to download.
    code = ROUND.format(repo=REPO, **paths)
    address, same, equal, again, newer, is_newer, is_older = run(code, HF_HUB_DISABLE_XET="1")
    assert same
    assert equal
    assert is_newer
    assert is_older
    assert again == address, "nothing has changed, so there is no new commit"
    assert newer != address
    repository = hub.repositories[REPO]
    assert repository.private
    [_, first, last] = [files for _, files in repository.commits]
    shared = {"README.md", ".gitattributes"}
    assert first.keys() - shared == files_of(bundle.path).keys() - {"notes.txt"}
    assert last.keys() - shared == files_of(other.path).keys(), "files of the earlier one are gone"
    assert all(first[name] == data for name, data in files_of(bundle.path).items() if name in first)
    assert f"hf://{REPO}" in first["README.md"].decode()
    assert all(token != path.startswith("/large/") for _, path, token in hub.requests)
    kinds = {path.split("/")[1] for _, path, _ in hub.requests}
    assert kinds == {"api", "large", "shop"}, "no request reports use"
    assert not any("telemetry" in path for _, path, _ in hub.requests)


FAIL = """
for address in {addresses!r}:
    try:
        kinlens.load_bundle(address)
    except Exception as error:
        out.append([type(error).__name__, str(error)])
    else:
        out.append(["", ""])
"""


def test_what_is_no_bundle_is_refused_with_the_reason(
    hub: Hub, run: Run, tiny_bundle: Bundle, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    others = {"huge/other.onnx", "golden/deep/file.bin", "golden/more.pkl", "golden/*", "notes.txt"}
    put(hub, tiny_bundle, **dict.fromkeys(others, b"other"))
    hub.create("shop/else", **{"README.md": b"# Else", "model.onnx": b"x"})
    put(hub, tiny_bundle, "shop/damaged", **{"model.onnx": b"damaged"})
    put(hub, tiny_bundle, "shop/cut", **{"golden/vectors.npy": None})
    put(hub, tiny_bundle, "shop/odd", **{"manifest.json": b"{}"})
    put(hub, make_tiny_bundle(3), "shop/private")
    hub.repositories["shop/private"].private = True
    expected = {
        f"hf://{REPO}": ("", ""),
        "hf://shop/nothing": ("BundleNotFoundError", "does not exist"),
        f"hf://{REPO}@v9": ("BundleNotFoundError", "no such revision"),
        "hf://shop/else": ("BundleNotFoundError", "is no bundle: it has no manifest.json"),
        "hf://shop/damaged": ("BundleCorruptError", "model.onnx has sha256"),
        "hf://shop/cut": ("BundleCorruptError", "vectors.npy is missing"),
        "hf://shop/odd": ("BundleCorruptError", "not a bundle manifest"),
        "hf://shop": ("BundleError", "namespace/name"),
        "hf://": ("BundleError", "cannot be used"),
        "hf://datasets/shop/shoes": ("BundleError", "can hold a bundle"),
        f"hf://{REPO}/folder": ("BundleError", "can hold a bundle"),
    }
    found = run(FAIL.format(addresses=[*expected]))
    for (address, (kind, reason)), (found_kind, message) in zip(
        expected.items(), found, strict=True
    ):
        assert (found_kind, reason in message) == (kind, True), f"{address}: {message}"
        assert not kind or kind == "BundleCorruptError" or address in message
    asked = {path for _, path, _ in hub.requests}
    assert not {path for path in asked if path.endswith((*others, "/else/resolve/main/model.onnx"))}
    private = FAIL.format(addresses=["hf://shop/private"])
    [[kind, message]] = run(private, HF_TOKEN="hf_stranger")
    assert (kind, "your token must not see it" in message) == ("BundleNotFoundError", True)
    assert run(private) == [["", ""]]


PUSH = """
bundle = kinlens.load_bundle({path!r})
for options in {options!r}:
    try:
        out.append(["", bundle.push_to_hub(**options)])
    except Exception as error:
        out.append([type(error).__name__, str(error)])
"""


def test_a_push_shows_a_bundle_to_nobody_who_was_not_meant(
    hub: Hub, run: Run, tiny_bundle: Bundle
) -> None:
    own = {"extras/teacher.onnx": b"own", "notes.txt": b"own", "extras/golden/1.img": b"own"}
    before = hub.create("shop/public", **own, **{"text.onnx": b"earlier"}).commits[:]
    options = [
        {"repo": "shop/public"},
        {"repo": "shop/new", "token": "hf_stranger"},
        {"repo": "shop/a b"},
        {"repo": "shop/public", "private": False},
        {"repo": "shop/open", "private": False, "token": f"{TOKEN}\n"},
        {"repo": "shop/open", "private": False, "token": "hf_secret\nof mine"},
    ]
    found = run(PUSH.format(path=str(tiny_bundle.path), options=options))
    assert "everybody can read it" in found[0][1]
    assert [kind for kind, _ in found] == ["BundleError"] * 3 + ["", "", "BundleError"], found
    assert "secret" not in found[-1][1]
    assert "hf://shop/new cannot be used" in found[1][1]
    assert hub.repositories.keys() == {"shop/public", "shop/open"}
    assert hub.repositories["shop/public"].commits[: len(before)] == before
    assert len(hub.repositories["shop/public"].commits) == len(before) + 1
    pushed = hub.files("shop/public")
    assert own.items() <= pushed.items(), "files of the owner stay"
    assert "text.onnx" not in pushed
    assert not hub.repositories["shop/open"].private


def test_large_files_are_pushed_by_xet_unless_it_is_off(
    hub: Hub, run: Run, tiny_bundle: Bundle
) -> None:
    code = PUSH.format(path=str(tiny_bundle.path), options=[{"repo": REPO}])
    [[fault, address]] = run(code)
    assert not fault, address
    assert hub.xet
    assert not hub.large
    model = (tiny_bundle.path / "model.onnx").read_bytes()
    assert hub.files(REPO)["model.onnx"] == f"xet:{hashlib.sha256(model).hexdigest()}".encode()
    sent = {token for _, path, token in hub.requests if path.startswith("/v")}
    assert sent == {False}, "the store never gets the token of the user"
    assert run(code, HF_HUB_DISABLE_XET="1")[0][0] == ""
    assert hub.files(REPO)["model.onnx"] == model


def test_a_cached_bundle_needs_no_connection(hub: Hub, run: Run, tiny_bundle: Bundle) -> None:
    put(hub, tiny_bundle)
    code = FAIL.format(addresses=[f"hf://{REPO}", "hf://shop/other"])
    assert [kind for kind, _ in run(code)] == ["", "BundleNotFoundError"]
    asked = len(hub.requests)
    known, other = run(code, HF_HUB_OFFLINE="1")
    assert known == ["", ""]
    assert other[0] == "BundleNotFoundError"
    assert "HF_HUB_OFFLINE" in other[1]
    assert len(hub.requests) == asked
    known = FAIL.format(addresses=[f"hf://{REPO}"])
    assert run(known, HF_ENDPOINT="http://127.0.0.1:9") == [["", ""]], "the Hub is down"


def test_a_command_takes_the_address_as_its_bundle(
    hub: Hub, run: Run, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    put(hub, tiny_bundle)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/1.png").write_bytes(encoded(photo(1)))
    words = ["build", str(tmp_path / "photos"), "--bundle", f"hf://{REPO}"]
    code = f"""
from typer.testing import CliRunner
from kinlens.commands.__main__ import app
done = CliRunner().invoke(app, {[*words, "--out", str(tmp_path / "gallery")]!r})
out += [done.exit_code, done.output]
"""
    status, output = run(code)
    assert status == 0, output
    with closing(Gallery.open(tmp_path / "gallery")) as gallery:
        assert (gallery.bundle_id, gallery.size) == (tiny_bundle.bundle_id, 1)
        built_with = gallery.built_with()
        assert built_with is not None
        assert built_with.is_dir(), "a later sync finds the bundle in the cache"


def test_a_path_never_loads_the_package_of_the_hub(
    hub: Hub, run: Run, tiny_bundle: Bundle, tiny_gallery: Path
) -> None:
    code = f"""
bundle = kinlens.load_bundle({str(tiny_bundle.path)!r})
gallery = kinlens.open_gallery({str(tiny_gallery)!r}, bundle)
gallery.search(bundle.embed(bundle.bundle.golden_inputs()), 1)
out += [name for name in ("huggingface_hub", "httpx2", "hf_xet") if name in sys.modules]
for name in ("nothing", "hf", "./hf:/shop"):
    try:
        kinlens.load_bundle(name)
    except kinlens.library.bundles.BundleNotFoundError:
        continue
    out.append(name)
out += [name for name in ("huggingface_hub", "httpx2", "hf_xet") if name in sys.modules]
"""
    assert run(code) == []
    hidden = "sys.modules.update(huggingface_hub=None, httpx2=None)\n" + FAIL.format(
        addresses=["hf://shop/shoes"]
    )
    [[kind, message]] = run(hidden)
    assert (kind, "pip install 'kinlens[hub]'" in message) == ("ModuleNotFoundError", True)
    assert "package huggingface_hub" in message
    assert not hub.requests


def card_of(bundle: Bundle, **changes: Any) -> tuple[dict[str, Any], str]:
    """The metadata and the text of the card of a manifest."""
    card = model_card(bundle.manifest.model_copy(update=changes), REPO)
    _, metadata, text = card.split("---\n", 2)
    return yaml.safe_load(metadata), text


def test_a_card_has_figures_with_intervals_data_and_limits(tiny_bundle: Bundle) -> None:
    before = Baseline(model="the untrained trunk", queries=4092, recall={"R@1": 34.2})
    int8 = {"recall": {}, "recall_at_1_loss": 0.4, "recall_at_1_interval": (-0.1, 0.9)}
    int8 |= {"mixed_recall_at_1_loss": 0.1, "min_cosine": 0.99, "mean_cosine": 0.99}
    metadata, text = card_of(
        tiny_bundle,
        recall={"R@1": 66.9, "R@2": 77.0},
        baseline=before,
        modes={"openvino-bf16": Comparison(**int8)},
        job={"name": "cars196-half", "description": "Half of the classes."},
        data_sha256="f" * 64,
        licence="BSD-3-Clause",
        text=TextTower(kind="taught", context=8),
    )
    assert metadata["library_name"] == "kinlens"
    assert metadata["license"] == "bsd-3-clause"
    assert {"kinlens", "image-retrieval", "text-to-image-retrieval"} <= {*metadata["tags"]}
    [results] = metadata["model-index"][0]["results"]
    values = {one["name"]: one["value"] for one in results["metrics"]}
    assert values == {"R@1": 66.9, "R@2": 77.0}
    assert "| this model | 66.9 (65.5 to 68.3) |" in text
    assert "| the untrained trunk | 34.2 (" in text
    assert "on 4,092 test queries" in text
    assert "In openvino-bf16, R@1 is 0.40 points (-0.10 to 0.90) lower." in text
    assert "job `cars196-half`. Half of the classes." in text
    assert "f" * 64 in text
    assert "Licence: BSD-3-Clause." in text
    assert f'kinlens.load_bundle("hf://{REPO}")' in text
    assert "## What it is not for" in text


def test_a_card_of_a_bundle_without_figures_says_so(tiny_bundle: Bundle) -> None:
    metadata, text = card_of(tiny_bundle)
    assert "license" not in metadata
    assert "model-index" not in metadata
    assert "None were measured" in text
    assert "the bundle records none" in text
    assert "none is recorded; ask the owner" in text
    own, text = card_of(tiny_bundle, licence="For my shop, (C) 2026!", recall={"R@1": 50.0})
    assert (own["license"], own["license_name"]) == ("other", "for-my-shop-c-2026")
    assert "| this model | 50.0 |" in text, "without the number of queries there is no interval"
