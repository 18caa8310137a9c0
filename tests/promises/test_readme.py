"""The promises of the README, each with the modules that prove it."""

import re

from tests.support.own_process import ROOT

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
