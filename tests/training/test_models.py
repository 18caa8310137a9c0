from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

import kinlens.training.models.backbones as backbones
from kinlens.embedder.errors import CheckpointError
from kinlens.training.bundles.graph import folded
from kinlens.training.config.settings import Model
from kinlens.training.models.backbones import BACKBONES, build_trunk, fold_batch_norm
from kinlens.training.models.embedding import EmbeddingNet, Pool
from tests.training.jobs import images

LARGE = [pytest.param(name, marks=pytest.mark.long) for name in ("resnet50", "googlenet")]


def test_what_no_backbone_has_is_refused() -> None:
    for name in ("resnet_50", "timm:"):
        with pytest.raises(ValidationError, match=r"mobilenet_v2, resnet50.*timm:"):
            Model(backbone=name)
    with pytest.raises(ValidationError, match="needs a class token, which resnet50 does not have"):
        Model(backbone="resnet50", pooling="cls")


@pytest.mark.parametrize("name", ["mobilenet_v2", "resnet50", "googlenet"])
def test_a_trunk_computes_what_torchvision_computes(name: str, tmp_path: Path) -> None:
    network = BACKBONES[name].build().eval()
    seen = {}
    pool = network.get_submodule("avgpool") if name != "mobilenet_v2" else network.classifier
    pool.register_forward_pre_hook(lambda _, inputs: seen.setdefault("input", inputs[0]))
    torch.save(network.state_dict(), tmp_path / "w.pth")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        network(x)
        maps = build_trunk(name, str(tmp_path / "w.pth")).eval()(x)
    assert maps.shape[1] == BACKBONES[name].channels
    expected = maps.mean(dim=(2, 3)) if name == "mobilenet_v2" else maps
    torch.testing.assert_close(seen["input"], expected)


def test_googlenet_weights_with_auxiliary_classifiers_load(tmp_path: Path) -> None:
    from torchvision.models import googlenet  # here, since its import takes seconds

    network = googlenet(weights=None, aux_logits=True, init_weights=False)
    torch.save(network.state_dict(), tmp_path / "w.pth")
    build_trunk("googlenet", str(tmp_path / "w.pth"))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    with pytest.raises(CheckpointError, match=r"w.pth does not exist"):
        build_trunk("mobilenet_v2", str(path))
    state = BACKBONES["mobilenet_v2"].build().state_dict()
    state.pop("classifier.1.bias")
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"do not fit the network.*classifier.1.bias"):
        build_trunk("mobilenet_v2", str(path))
    torch.save([1, 2, 3], path)
    listed = path.read_bytes()
    for content in (b"", b"no weights", listed):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="not a weight file of PyTorch"):
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
    assert not any(p.requires_grad for m in norms for p in m.parameters())
    before = norms[0].running_mean.clone()
    net(images())
    assert torch.equal(norms[0].running_mean, before)


@pytest.mark.parametrize(
    "name", ["mobilenet_v2", "bn_inception", *LARGE, "timm:test_resnet", "timm:test_efficientnet"]
)
def test_folding_batch_norm_changes_nothing_but_the_layers(name: str) -> None:
    if name.startswith("timm:"):
        pytest.importorskip("timm", reason="the extra kinlens[timm] is not installed")
    torch.manual_seed(0)
    trunk = build_trunk(name, "none").double()  # float32 rounds otherwise on every processor
    for module in trunk.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                nn.init.uniform_(tensor, 0.8, 1.2)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = trunk.eval()(x)
    fold_batch_norm(trunk)
    atol = 1e-9 * float(expected.detach().abs().max())
    torch.testing.assert_close(trunk.train()(x), expected, rtol=0, atol=atol)
    # timm's batch norms hold activations, which stay.
    assert nn.BatchNorm2d not in [type(module) for module in trunk.modules()]
    convolutions = [m for m in trunk.modules() if isinstance(m, nn.Conv2d)]
    assert all(m.weight.requires_grad for m in convolutions)
    if name in BACKBONES:  # those of timm have convolutions without batch norm besides
        assert not any(m.bias.requires_grad for m in convolutions)


class NormFirst(nn.Sequential):
    """A trunk whose batch norm follows no convolution."""

    channels = 8

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3))


class NormByHand(nn.Module):
    """A trunk that reads its batch norm and does not call it."""

    channels = 8

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, images: Tensor) -> Tensor:
        bn = self.bn
        assert bn.running_mean is not None
        y = self.conv(images)
        return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias)


class Uncopied(NormByHand):
    """A trunk that cannot be copied."""

    def __deepcopy__(self, _: object) -> "Uncopied":
        raise TypeError("cannot pickle a lock")


@pytest.mark.parametrize("trunk", [NormFirst, NormByHand, Uncopied])
def test_an_export_takes_a_network_that_cannot_be_folded_as_it_is(trunk: type[nn.Module]) -> None:
    name = f"tests.training.test_models:{trunk.__name__}"
    net = EmbeddingNet(Model(backbone=name, weights="none", dim=8), trunk=trunk()).eval()
    before = net(images(2, 64))
    assert folded(net, 64) is net
    assert torch.equal(net(images(2, 64)), before)


def test_an_export_folds_a_copy_of_a_network() -> None:
    net = EmbeddingNet(Model(weights="none", dim=8)).eval()
    copied, noise = folded(net, 64), images(2, 64)
    kinds = [[type(module) for module in one.trunk.modules()] for one in (net, copied)]
    assert [nn.BatchNorm2d in of for of in kinds] == [True, False]
    torch.testing.assert_close(copied(noise), net(noise), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exponent", [-2.0, 0.0, 1.0, 3.0, 1e4])
def test_gem_is_its_formula_from_the_mean_to_the_maximum(exponent: float) -> None:
    pool, maps = Pool("gem"), (torch.rand(2, 3, 2, 2) + 0.1).requires_grad_()
    with torch.no_grad():
        pool.exponent.fill_(exponent)
    pooled = pool(maps)
    found = torch.autograd.grad(pooled[:, 0].sum(), [maps, pool.exponent])
    assert all(gradient.isfinite().all() for gradient in found)
    if exponent == 1e4:
        torch.testing.assert_close(pooled, maps.amax(dim=(2, 3)), rtol=1e-3, atol=0)
    elif exponent >= 1:
        naive = maps.pow(pool.exponent).mean(dim=(2, 3)).pow(1 / pool.exponent)
        torch.testing.assert_close(pooled, naive)
        expected = torch.autograd.grad(naive[:, 0].sum(), [maps, pool.exponent])
        torch.testing.assert_close(found, expected)
    empty = torch.zeros(1, 3, 2, 2, requires_grad=True)
    pool(empty).sum().backward()
    assert empty.grad.isfinite().all()


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
