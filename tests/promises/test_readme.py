"""The promises of the README, each with the modules that prove it; its lines as one types them."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from embedder.bundle import Bundle
from indexer.gallery import Gallery
from tests.support.market import CALIBRATION, attributes_of, picture, start_market
from tests.support.own_process import ROOT
from tests.support.seams import KeyStore
from tests.tiny import encoded
from tests.tiny import picture as tiny_picture

README = (ROOT / "README.md").read_text("utf-8")
PROOFS = {
    "No mixed models": ("http/galleries/test_reload.py", "http/load/test_redis.py"),
    "No silent change": ("training/test_export.py", "embedder/test_session.py"),
    "Acknowledged is durable": (
        "indexer/test_crash.py",
        "http/galleries/test_live_writes.py",
        "test_power_loss.py",
    ),
    "Recall is measured, not hoped for": ("indexer/test_index.py",),
    "One bad image harms nobody": ("http/load/test_crowds.py", "units/test_decoding.py"),
    "Swaps are not noticed": ("http/galleries/test_reload.py", "http/jobs/test_gate.py"),
    "Closed until opened": ("promises/test_bar.py", "http/access/test_scopes.py"),
    "First, do no harm": ("training/test_start.py",),
    "No test class chooses a model": ("training/test_trainer.py",),
    "One process or many, stopped or not": (
        "training/test_distributed.py",
        "training/test_trainer.py",
    ),
    "Readiness means it": ("http/observe/test_health.py",),
    "Redis may die": ("http/load/test_redis_faults.py", "http/access/test_rates.py"),
}


def test_every_promise_names_its_proof() -> None:
    promises = README.partition("## What it promises")[2].partition("\n## ")[0]
    assert {title.rstrip(".") for title in re.findall(r"^- \*\*(.+?)\*\*", promises, re.M)} == (
        PROOFS.keys()
    )
    for name in {name for names in PROOFS.values() for name in names}:
        assert (ROOT / "tests" / name).is_file(), name


CURLS = re.findall(r"^    (curl (?:.*\\\n)*.*)$", README, re.MULTILINE)


def test_the_lines_with_curl_are_answered(tmp_path: Path) -> None:
    shop = start_market(tmp_path / "state", anonymous_scopes=("admin",), calibration=CALIBRATION)
    for number, name in enumerate(("photo", "new")):
        (tmp_path / f"{name}.jpg").write_bytes(picture(number))
    key = KeyStore(shop.state / "keys.json").create("shop", ["admin"])
    assert len(CURLS) == 3
    for line in CURLS:
        command = line.replace("http://127.0.0.1:8000", shop.running.url)
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, env=os.environ | {"KEY": key}, capture_output=True
        )
        answer = json.loads(done.stdout)
        if "PUT" in line:
            assert answer["added"] == 1
        else:
            assert answer["hits"], answer
    shop.close()


def test_the_python_of_the_page_about_galleries_runs(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first block; the second one needs a Milvus, and is what the tests of that do."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "bundle").symlink_to(tiny_bundle.path)
    with_prices(tiny_gallery, tmp_path / "shop" / "gallery")
    (tmp_path / "query.jpg").write_bytes(encoded(tiny_picture(1)))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "galleries.md").read_text("utf-8")
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "docs/galleries.md", "exec"), names)
    assert names["hits"]
    assert names["groups"]


def with_prices(source: Path, copy: Path) -> None:
    """A copy of a gallery whose items have the attributes of a shop."""
    with_items = Gallery.open(source)
    entries = [entry for part in with_items.scan() for entry in part]
    made = Gallery.create(copy, name="shop", bundle_id=with_items.bundle_id, dim=with_items.dim)
    made.add(entries)
    made.update({entry.key: attributes_of(n) for n, entry in enumerate(entries)})
    made.close()
    with_items.close()
