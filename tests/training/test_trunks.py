"""Trunks of timm, and docs/models.md: every trunk that it names exports and matches its row."""

import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.training.bundles.bundle import MAX_DIFFERENCE, export_backbone, write_onnx
from kinlens.training.config.settings import TIMM, Input, Model
from kinlens.training.models.backbones import (
    BACKBONES,
    build_trunk,
    channels_of,
    normalization_of,
)
from kinlens.training.models.embedding import EmbeddingNet, torch_embed
from kinlens.training.state import synchronize_batch_norm
from tests.training.jobs import images

timm = pytest.importorskip("timm", reason="the extra kinlens[timm] is not installed")
save_file = pytest.importorskip("safetensors.torch").save_file

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


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


@pytest.mark.long
@pytest.mark.parametrize("name", dict.fromkeys((*BACKBONES, *(row.name for row in ROWS))))
def test_every_trunk_exports_to_what_torch_computes(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    side = next((row.size_px for row in ROWS if row.name == name), 224)
    spec, model = Input(size_px=side, resize_px=side), Model(backbone=name, weights="none")
    bundle = export_backbone("plain", model, spec, tmp_path / "bundle")
    assert bundle.manifest.parity is not None
    assert bundle.manifest.parity.max_abs_difference <= MAX_DIFFERENCE


VIT = "timm:test_vit.r160_in1k"
RESNET = "timm:test_resnet.r160_in1k"


def net_of(backbone: str, **settings: object) -> EmbeddingNet:
    torch.manual_seed(0)
    return EmbeddingNet(Model(backbone=backbone, weights="none", **{"dim": 8, **settings}))


@pytest.mark.parametrize(
    ("backbone", "pooling", "side"),
    [
        (VIT, "cls", 64),
        (RESNET, "gem", 96),
        ("timm:test_convnext", "gmp", 64),
        ("timm:test_mambaout", "gap", 96),
    ],
)
def test_any_network_of_timm_embeds_and_learns(backbone: str, pooling: str, side: int) -> None:
    net = net_of(backbone, pooling=pooling)
    vectors = net(images(side=side))
    assert vectors.shape == (2, 8)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    vectors[:, 0].sum().backward()
    missing = [n for n, p in net.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


def test_the_trunk_normalises_as_its_weights_were_trained() -> None:
    trunk = build_trunk("timm:vit_tiny_patch16_224.augreg_in21k", "none")
    expected = (images() / 255 - 0.5) / 0.5
    torch.testing.assert_close(normalization_of("timm:x", trunk)(images()), expected)


def test_only_tokens_of_patches_are_pooled_and_cls_takes_the_class_token() -> None:
    net = net_of("timm:test_vit3", pooling="gap", dim=None).eval()
    tokens = net.trunk(net.normalize(images()))
    assert tokens.shape[1] == 16 + 1  # 4 x 4 patches and a register
    torch.testing.assert_close(net.features(images()), tokens[:, 1:].mean(dim=1))
    net = net_of(VIT, pooling="cls", dim=None).eval()
    tokens = net.trunk(net.normalize(images()))
    torch.testing.assert_close(net.features(images()), tokens[:, 0])


def test_what_a_network_cannot_do_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r'pooling = "cls" needs a class token'):
        net_of("timm:test_vit3", pooling="cls")
    net = net_of(VIT)
    net.check_sizes(64, 96)
    with pytest.raises(JobError, match=r"images of 100 px \(.*16.*accepts 160"):
        net.check_sizes(64, 100)
    model, spec = Model(backbone=VIT, weights="none", dim=None), Input(size_px=100, resize_px=100)
    with pytest.raises(JobError, match="images of 100 px"):  # before the export to ONNX
        export_backbone("vit", model, spec, tmp_path / "bundle")
    with pytest.raises(JobError, match=r"images of 96 px.*accepts 160"):
        net_of("timm:test_vit_relpos", pooling="gap").check_sizes(96)
    with pytest.raises(JobError, match=r'class token alone. Set model.pooling = "cls"'):
        net_of("timm:pit_ti_224").check_sizes(224)
    with pytest.raises(JobError, match="does not return one map or one list of tokens"):
        net_of("timm:efficientvim_m1").check_sizes(224)
    with pytest.raises(JobError, match="cannot be built without its own pooling"):
        build_trunk("timm:crossvit_tiny_240", "none")
    with pytest.raises(JobError, match=r'"folded" needs a convolution before each batch norm'):
        net_of("timm:test_coatnet", batch_norm="folded")


@pytest.mark.parametrize("backbone", ["timm:test_efficientnet", "mobilenet_v2"])
def test_synchronised_batch_norm_keeps_the_activations(backbone: str) -> None:
    net = net_of(backbone, batch_norm="train").eval()
    expected = net(images(side=96)).detach()
    net.trunk = synchronize_batch_norm(net.trunk)
    assert any(isinstance(layer, nn.SyncBatchNorm) for layer in net.modules())
    torch.testing.assert_close(net(images(side=96)).detach(), expected)


def test_without_timm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(JobError, match=r"pip install 'kinlens\[timm\]'"):
        build_trunk(VIT, "none")


@pytest.mark.parametrize(("name", "kind"), [("test_vit", "pth"), ("test_resnet", "safetensors")])
def test_a_state_dict_of_timm_loads(name: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = timm.create_model(name, pretrained=False)
    path = tmp_path / f"w.{kind}"
    save = torch.save if kind == "pth" else save_file
    save(network.state_dict(), path)
    trunk = build_trunk(f"timm:{name}", str(path)).eval()
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        network.reset_classifier(0, "")
        torch.testing.assert_close(trunk(x), network.eval()(x))
    if kind == "safetensors":
        path.write_bytes(b"no weights")
        with pytest.raises(CheckpointError, match="not a weight file of PyTorch"):
            build_trunk(f"timm:{name}", str(path))


def test_a_norm_behind_the_pooling_keeps_its_weights(tmp_path: Path) -> None:
    network = timm.create_model("test_vit2", pretrained=False)
    nn.init.normal_(network.fc_norm.weight)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    trunk = build_trunk("timm:test_vit2", str(tmp_path / "w.pth")).eval()
    x = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        tokens = network.eval().forward_features(x)
        torch.testing.assert_close(trunk(x), network.fc_norm(tokens))


@pytest.mark.long
def test_onnx_computes_what_torch_computes_of_a_transformer(tmp_path: Path) -> None:
    net = net_of(VIT, pooling="gap+gmp").eval()
    write_onnx(net, 96, tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for count in (1, 3):
        batch = images(count, 96).numpy()
        (found,) = session.run(None, {"images": batch})
        np.testing.assert_allclose(found, torch_embed(net, batch), atol=1e-4)
