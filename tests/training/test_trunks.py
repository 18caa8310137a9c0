"""docs/trunks.md: every trunk that it names exports and matches its row."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch

from kinlens.training.config.settings import TIMM, Model
from kinlens.training.export.bundle import MAX_DIFFERENCE, write_onnx
from kinlens.training.models.backbones import BACKBONES, build_trunk, channels_of
from kinlens.training.models.embedding import EmbeddingNet, torch_embed

timm = pytest.importorskip("timm", reason="the extra kinlens[timm] is not installed")

PAGE = (Path(__file__).parents[2] / "docs" / "trunks.md").read_text(encoding="utf-8")
LONG = pytest.mark.skipif(
    not os.environ.get("KINLENS_LONG_TESTS"), reason="tracing takes a minute; make soak runs it"
)
SHORT = ("timm:mobilenetv4_conv_small.e2400_r224_in1k",)
SMALL_PX = 64


class Row(NamedTuple):
    name: str
    size_px: int
    width: int
    licence: str


def rows() -> list[Row]:
    found = re.findall(r"^\| `([^`]+)` \| (\d+) \| ([\d,]+) \| ([^|]+) \|", PAGE, re.MULTILINE)
    return [Row(n, int(s), int(w.replace(",", "")), licence) for n, s, w, licence in found]


ROWS = rows()


def test_the_page_has_its_table_and_names_no_trunk_besides() -> None:
    names = [row.name for row in ROWS]
    assert len(names) >= 8
    assert len(set(names)) == len(names)
    assert set(SHORT) <= set(names)
    assert set(re.findall(rf"{TIMM}[\w.]+\w", PAGE)) <= set(names)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_has_the_width_and_licence_that_the_package_states(row: Row) -> None:
    if row.name in BACKBONES:
        assert (row.width, row.licence) == (BACKBONES[row.name].channels, "none stated")
        return
    with torch.device("meta"):
        trunk = build_trunk(row.name, "none")
    settings = timm.get_pretrained_cfg(row.name.removeprefix(TIMM))
    assert row.width == channels_of(row.name, trunk)
    assert row.licence.lower() == settings.license.lower()


def marked(row: Row) -> object:
    return pytest.param(row, id=row.name, marks=() if row.name in SHORT else LONG)


@pytest.mark.parametrize("row", [marked(row) for row in ROWS])
def test_onnx_computes_what_torch_does_of_every_trunk(row: Row, tmp_path: Path) -> None:
    """The short one on few pixels, all others at the size of the page."""
    torch.manual_seed(0)
    net = EmbeddingNet(Model(backbone=row.name, weights="none", dim=None)).eval()
    side = SMALL_PX if row.name in SHORT else row.size_px
    write_onnx(net, side, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    rng = np.random.default_rng(0)
    for count in (1, 3):
        images = rng.integers(0, 256, (count, 3, side, side), dtype=np.uint8)
        (found,) = session.run(None, {"images": images})
        assert found.shape == (count, row.width)
        assert np.abs(found - torch_embed(net, images)).max() <= MAX_DIFFERENCE
