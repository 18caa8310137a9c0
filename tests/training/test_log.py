"""The console output of a run, also in a file, where it shows no bar."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from kinlens.training.report import log
from kinlens.training.report.log import ConsoleListener


def test_each_line_says_the_epoch_of_how_many_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    monkeypatch.setattr(log, "console", console)
    now = 1000.0
    listener = ConsoleListener(Progress(console=console), clock=lambda: now)
    row = {"loss": 9.438, "images_per_s": 44.0, "R@1": 72.04}
    listener.epoch_done({"epoch": 4.0, **row})  # of a run that is resumed
    for epoch, seconds in ((4, 700.0), (5, 100.0), (48, 4.0), (49, 1.0)):
        listener.epoch_started(epoch, 50, 10)
        now += seconds
        listener.epoch_done({"epoch": epoch + 1.0, **row})
    *lines, last = text.getvalue().splitlines()
    assert lines[0] == "epoch 4  loss 9.438  R@1 72.0  44 images/s"
    assert lines[1] == "epoch 5 of 50  loss 9.438  R@1 72.0  44 images/s  about 8 h 45 min left"
    assert lines[2].endswith("about 4 h 54 min left")
    assert lines[3].endswith("about 18 s left")
    assert last.endswith("images/s")
