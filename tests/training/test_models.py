import os
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torchvision.models as tv
from pydantic import ValidationError
from torch import nn

import kinlens.training.models.backbones as backbones
from kinlens.embedder.errors import CheckpointError
from kinlens.training.config.settings import BACKBONE_NAMES, Determinant, Flow, Model
from kinlens.training.models.backbones import BACKBONES, Normalize, build_trunk, fold_batch_norm
from kinlens.training.models.embedding import EmbeddingNet, Pool

LONG = pytest.mark.skipif(
    not os.environ.get("KINLENS_LONG_TESTS"), reason="a large backbone; make soak runs it"
)
LARGE = [pytest.param(name, marks=LONG) for name in ("resnet50", "googlenet")]
SMALL_FIRST = ["mobilenet_v2", *LARGE, pytest.param("bn_inception", marks=LONG)]


def images(count: int = 2, side: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def test_a_job_may_name_every_backbone() -> None:
    assert set(BACKBONE_NAMES) == set(BACKBONES)


@pytest.mark.parametrize("name", ["resnet_50", "timm:"])
def test_an_unknown_backbone_names_the_known(name: str) -> None:
    with pytest.raises(ValidationError, match=r"mobilenet_v2\|resnet50.*timm:"):
        Model(backbone=name)


def test_a_map_has_no_class_token() -> None:
    with pytest.raises(ValidationError, match="needs a class token, which resnet50 does not have"):
        Model(backbone="resnet50", pooling="cls")


@pytest.mark.parametrize("name", SMALL_FIRST)
def test_every_backbone_gives_unit_vectors_and_learns(name: str) -> None:
    net = EmbeddingNet(Model(backbone=name, weights="none", dim=16))
    vectors = net(images())
    assert vectors.shape == (2, 16)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(2))
    vectors.sum().backward()
    convolutions = [m for m in net.trunk.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.grad is not None for m in convolutions)


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet50", "googlenet"])
def test_a_trunk_computes_what_torchvision_computes(name: str, tmp_path: Path) -> None:
    network = BACKBONES[name].build().eval()
    seen = {}
    pool = network.get_submodule("avgpool") if name != "mobilenet_v2" else network.classifier
    pool.register_forward_pre_hook(lambda _, inputs: seen.setdefault("input", inputs[0]))
    torch.save({k: v.half() for k, v in network.state_dict().items()}, tmp_path / "w.pth")
    network.load_state_dict({k: v.half().float() if v.is_floating_point() else v
                             for k, v in network.state_dict().items()})  # fmt: skip
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        network(x)
        maps = build_trunk(name, str(tmp_path / "w.pth")).eval()(x)
    assert maps.shape[1] == BACKBONES[name].channels
    expected = maps.mean(dim=(2, 3)) if name == "mobilenet_v2" else maps
    torch.testing.assert_close(seen["input"], expected)


def test_googlenet_weights_with_auxiliary_classifiers_load(tmp_path: Path) -> None:
    network = tv.googlenet(weights=None, aux_logits=True, init_weights=False)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    build_trunk("googlenet", str(tmp_path / "w.pth"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    state = BACKBONES["mobilenet_v2"].build().state_dict()
    state.pop("classifier.1.bias")
    torch.save(state, tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=r"do not fit the network.*classifier.1.bias"):
        build_trunk("mobilenet_v2", str(tmp_path / "w.pth"))


@pytest.mark.parametrize("content", [b"", b"no weights", None])
def test_files_without_weights_are_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "w.pth"
    with pytest.raises(CheckpointError, match=r"w.pth does not exist"):
        build_trunk("mobilenet_v2", str(path))
    if content is None:
        torch.save([1, 2, 3], path)
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match="state dict"):
        build_trunk("mobilenet_v2", str(path))


def test_imagenet_weights_without_a_network_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise URLError("offline")

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", offline)
    with pytest.raises(
        CheckpointError, match=r"could not be downloaded.*--set model.weights=/path"
    ):
        backbones.build_trunk("mobilenet_v2", "imagenet")


def test_frozen_batch_norm_neither_moves_nor_learns() -> None:
    net = EmbeddingNet(Model(weights="none", dim=4, batch_norm="frozen")).train()
    norms = [m for m in net.trunk.modules() if isinstance(m, nn.BatchNorm2d)]
    assert norms
    assert not any(m.training for m in norms)
    assert not any(p.requires_grad for m in norms for p in m.parameters())
    before = norms[0].running_mean.clone()
    net(images())
    assert torch.equal(norms[0].running_mean, before)


def test_a_resting_trunk_is_not_woken_by_the_mode_of_training() -> None:
    """Its batch norms learn scale and shift under "statistics", but not while it is warmed up."""
    net = EmbeddingNet(Model(weights="none", dim=4, batch_norm="statistics")).train()
    norms = [m for m in net.trunk.modules() if isinstance(m, nn.BatchNorm2d)]
    assert all(p.requires_grad for m in norms for p in m.parameters())
    net.trunk.requires_grad_(False)
    net.eval().train()
    assert not any(p.requires_grad for p in net.trunk.parameters())
    assert not any(m.training for m in norms)


# timm's batch norms hold activations, which stay.
@pytest.mark.parametrize(
    "name",
    ["mobilenet_v2", "bn_inception", *LARGE, "timm:test_resnet", "timm:test_efficientnet"],
)
def test_folding_batch_norm_changes_nothing_but_the_layers(name: str) -> None:
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="the extra kinlens[timm] is not installed")
    torch.manual_seed(0)
    trunk = build_trunk(name, "none").double()  # float32 rounds otherwise on every processor
    for module in trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.8, 1.2)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor, std=0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = trunk.eval()(x)
    fold_batch_norm(trunk)
    atol = 1e-9 * float(expected.detach().abs().max())
    torch.testing.assert_close(trunk.train()(x), expected, rtol=0, atol=atol)
    kinds = [type(module) for module in trunk.modules()]
    assert nn.BatchNorm2d not in kinds
    convolutions = [m for m in trunk.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.requires_grad for m in convolutions)
    if name in BACKBONES:  # those of timm have convolutions without batch norm besides
        assert not any(m.bias.requires_grad for m in convolutions)


def gem(maps: torch.Tensor, exponent: float) -> torch.Tensor:
    pool = Pool("gem")
    with torch.no_grad():
        pool.exponent.fill_(exponent)
    return pool(maps)


def test_gem_runs_from_the_mean_to_the_maximum() -> None:
    maps = 100 * torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(gem(maps, 1.0), maps.mean(dim=(2, 3)))
    torch.testing.assert_close(gem(maps, 5000.0), maps.amax(dim=(2, 3)), rtol=1e-3, atol=0)
    ladder = torch.stack([gem(maps, p) for p in (0.5, 1.0, 3.0, 10.0, 100.0)])
    assert (ladder.diff(dim=0) > 0).all()


@pytest.mark.parametrize("exponent", [-2.0, 0.0, 1e4])
def test_gem_is_finite_at_any_exponent_and_on_an_empty_map(exponent: float) -> None:
    maps = torch.stack([torch.zeros(3, 2, 2), 1e4 * torch.rand(3, 2, 2)]).requires_grad_()
    pooled = gem(maps, exponent)
    pooled.sum().backward()
    assert pooled.isfinite().all()
    assert maps.grad.isfinite().all()


def test_gem_has_the_gradient_of_its_formula() -> None:
    maps = (torch.rand(2, 3, 2, 2, dtype=torch.float32) + 0.1).requires_grad_()
    pool = Pool("gem")
    found = torch.autograd.grad(pool(maps)[:, 0].sum(), [maps, pool.exponent])
    naive = maps.pow(pool.exponent).mean(dim=(2, 3)).pow(1 / pool.exponent)
    expected = torch.autograd.grad(naive[:, 0].sum(), [maps, pool.exponent])
    torch.testing.assert_close(found, expected)


def test_gem_is_float32_under_autocast() -> None:
    maps = torch.rand(2, 3, 2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(Pool("gem")(maps), Pool("gem")(maps.float()))
        assert Pool("gem")(maps.bfloat16()).dtype == torch.float32


def test_maps_and_tokens_without_their_prefix_are_pooled_by_the_formulas() -> None:
    tokens = torch.rand(2, 6, 3)
    maps = tokens[:, 2:].transpose(1, 2).reshape(2, 3, 2, 2)
    average, maximum = maps.mean(dim=(2, 3)), maps.amax(dim=(2, 3))
    cube = maps.pow(3).mean(dim=(2, 3)).pow(1 / 3)
    expected = {"gap": average, "gmp": maximum, "gap+gmp": average + maximum, "gem": cube}
    for kind, pooled in expected.items():
        torch.testing.assert_close(Pool(kind)(maps), pooled)
        torch.testing.assert_close(Pool(kind, prefix=2)(tokens), pooled)
    assert torch.equal(Pool("cls", prefix=2)(tokens), tokens[:, 0])


def test_normalisation_is_mean_and_std_on_0_to_1_or_on_turned_and_scaled_channels() -> None:
    pixels = images(1, 8)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(Normalize(mean, std)(pixels), expected)
    expected = pixels.flip(1).float() - torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    found = Normalize((1.0, 2.0, 3.0), (1.0, 1.0, 1.0), bgr=True, peak=255.0)(pixels)
    torch.testing.assert_close(found, expected)


def test_what_enters_the_flow_has_the_norm_of_the_job() -> None:
    settings = Determinant(flow=Flow(layers=2, hidden=4), input_norm=7.0)
    net = EmbeddingNet(Model(weights="none", dim=6), settings)
    torch.testing.assert_close(net.features(images()).norm(dim=1), torch.full((2,), 7.0))
