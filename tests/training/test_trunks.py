"""docs/trunks.md: every trunk that it names exports and matches its row."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kinlens.training.config.settings import TIMM, Input, Model
from kinlens.training.export.bundle import MAX_DIFFERENCE, export_backbone
from kinlens.training.models.backbones import BACKBONES, build_trunk, channels_of

timm = pytest.importorskip("timm", reason="the extra kinlens[timm] is not installed")

PAGE = (Path(__file__).parents[2] / "docs" / "trunks.md").read_text(encoding="utf-8")
LONG = pytest.mark.skipif(
    not os.environ.get("KINLENS_LONG_TESTS"), reason="tracing takes a minute; make soak runs it"
)


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


@LONG
@pytest.mark.parametrize("name", dict.fromkeys((*BACKBONES, *(row.name for row in ROWS))))
def test_every_trunk_exports_to_what_torch_computes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    side = next((row.size_px for row in ROWS if row.name == name), 224)
    spec, model = Input(size_px=side, resize_px=side), Model(backbone=name, weights="none")
    bundle = export_backbone("plain", model, spec, tmp_path / "bundle")
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity.max_abs_difference <= MAX_DIFFERENCE
