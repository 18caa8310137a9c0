"""The promises of the README and of docs/index.md, with their proofs; the form of the README."""

import re

from tests.support.own_process import ROOT

README = (ROOT / "README.md").read_text("utf-8")
PROOFS = {
    "No mixed models": ("http/galleries/test_reload.py", "http/load/test_redis.py"),
    "Acknowledged writes survive `kill -9`": (
        "indexer/test_crash.py",
        "indexer/test_catalog.py",
        "http/galleries/test_live_writes.py",
        "test_power_loss.py",
    ),
    "Recall is measured": ("indexer/test_index.py",),
    "Zero-downtime model swaps": ("http/galleries/test_reload.py", "http/jobs/test_gate.py"),
    "Closed by default": ("promises/test_bar.py", "http/access/test_scopes.py"),
    "No silent change": ("training/test_export.py", "embedder/test_session.py"),
    "One bad image harms nobody": ("http/load/test_crowds.py", "units/test_decoding.py"),
    "First, do no harm": ("training/test_start.py",),
    "No test class chooses a model": ("training/test_trainer.py",),
    "One process or many, stopped or not": (
        "training/test_distributed.py",
        "training/test_trainer.py",
    ),
    "Readiness means it": ("http/observe/test_health.py",),
    "Redis may die": ("http/load/test_redis.py", "http/access/test_rates.py"),
}
RAW = "https://raw.githubusercontent.com/kinlens/kinlens/main/"


def test_every_promise_names_its_proof() -> None:
    index = (ROOT / "docs/index.md").read_text("utf-8")
    promises = README.partition("## What it promises")[2].partition("\n## ")[0]
    promises += index.partition("## More promises")[2].partition("\n## ")[0]
    assert {title.rstrip(".") for title in re.findall(r"^- \*\*(.+?)\*\*", promises, re.M)} == (
        PROOFS.keys()
    )
    for name in {name for names in PROOFS.values() for name in names}:
        assert (ROOT / "tests" / name).is_file(), name


def test_it_fits_on_a_screen_or_two() -> None:
    assert len(README.splitlines()) <= 90


def test_its_images_have_absolute_addresses_since_pypi_shows_it_too() -> None:
    images = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert images
    for image in images:
        assert image.startswith(RAW), image
        assert (ROOT / image.removeprefix(RAW)).is_file(), image
