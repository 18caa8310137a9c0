import csv
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from kinlens.embedder.errors import CheckpointError
from kinlens.training.models.backbones import build_trunk, normalization_of
from kinlens.training.models.bn_inception import BNInception

FACTS = Path(__file__).parent / "bn_inception_state_dict.tsv"


def published_shapes() -> dict[str, tuple[int, ...]]:
    with FACTS.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return {
        row["name"]: () if row["shape"] == "scalar" else tuple(map(int, row["shape"].split("x")))
        for row in rows
    }


def published_file(folder: Path, counts: bool = True) -> Path:
    """Random weights as in the published file: batch norms with a leading axis of 1."""
    state = {}
    for name, shape in published_shapes().items():
        if shape == ():
            if counts:
                state[name] = torch.tensor(0)
            continue
        norm = name.rsplit(".", 1)[0].endswith("_bn")
        state[name] = torch.rand((1, *shape) if norm else shape) * 0.1 + 0.5 * norm
    torch.save(state, folder / "w.pth")
    return folder / "w.pth"


def randomise(network: nn.Module) -> None:
    torch.manual_seed(0)
    for name, tensor in network.state_dict().items():
        if name.endswith(("bias", "running_mean")):
            nn.init.normal_(tensor, std=0.2)
        elif "_bn" in name and tensor.ndim:
            nn.init.uniform_(tensor, 0.5, 2.0)


@pytest.mark.parametrize("counts", [True, False], ids=["with counters", "as torch 0.3 wrote"])
def test_the_published_layout_loads_strictly(tmp_path: Path, counts: bool) -> None:
    path = published_file(tmp_path, counts)
    trunk = build_trunk("bn_inception", str(path))
    state = torch.load(path, weights_only=True)
    loaded = {name.removeprefix("0."): tensor for name, tensor in trunk.state_dict().items()}
    for name, tensor in loaded.items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, state[name].reshape(tensor.shape)), name
    del state["inception_4a_1x1.bias"]
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"do not fit.*inception_4a_1x1.bias"):
        build_trunk("bn_inception", str(path))


def test_its_input_is_bgr_in_0_to_255_less_the_mean() -> None:
    trunk = build_trunk("bn_inception", "none")
    red = torch.tensor([255, 10, 0], dtype=torch.uint8).view(1, 3, 1, 1)
    expected = torch.tensor([0.0 - 104, 10.0 - 117, 255.0 - 128]).view(1, 3, 1, 1)
    torch.testing.assert_close(normalization_of("bn_inception", trunk)(red), expected)


def chain(network: BNInception, x: torch.Tensor, *names: str) -> torch.Tensor:
    for name in names:
        x = torch.relu(network.get_submodule(f"{name}_bn")(network.get_submodule(name)(x)))
    return x


def by_hand(network: BNInception, x: torch.Tensor) -> torch.Tensor:
    """The figure of the paper, branch by branch, for sides that halve evenly."""
    halved = partial(F.max_pool2d, kernel_size=3, stride=2, ceil_mode=True)
    x = halved(chain(network, x, "conv1_7x7_s2"))
    x = halved(chain(network, x, "conv2_3x3_reduce", "conv2_3x3"))
    for block in ("3a", "3b", "3c", "4a", "4b", "4c", "4d", "4e", "5a", "5b"):
        at = f"inception_{block}_"
        triple = chain(network, x, f"{at}3x3_reduce", f"{at}3x3")
        names = ("double_3x3_reduce", "double_3x3_1", "double_3x3_2")
        double = chain(network, x, *(at + name for name in names))
        if block in ("3c", "4e"):
            x = torch.cat([triple, double, halved(x)], 1)
            continue
        pooled = F.max_pool2d(x, 3, 1, 1) if block == "5b" else F.avg_pool2d(x, 3, 1, 1)
        single = chain(network, x, f"{at}1x1")
        x = torch.cat([single, triple, double, chain(network, pooled, f"{at}pool_proj")], 1)
    return x


def test_the_network_is_the_figure_of_the_paper() -> None:
    network = BNInception().eval()
    randomise(network)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        maps = network(x)
        torch.testing.assert_close(maps, by_hand(network, x))
    assert maps.min() == 0
