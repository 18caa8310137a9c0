"""The map of a bundle: what each position of an image adds to its embedding."""

import numpy as np
import pytest
import torch
from torch import nn

from kinlens.embedder.errors import ExportError
from kinlens.embedder.explain import overlaid, side_by_side
from kinlens.embedder.manifest import Preprocessing
from kinlens.rendered.catalogue import render_view
from kinlens.training.bundles.map import EmbeddingMap, check_map
from kinlens.training.config.settings import Model
from kinlens.training.models.embedding import EmbeddingNet, torch_embed
from kinlens.training.parts.fields import Flow, Options

RESNET = "timm:test_resnet.r160_in1k"
VIT = "timm:test_vit.r160_in1k"
SIDE = 64


class Duel(Options):
    activation: str
    flow: Flow
    input_norm: float = 5.0


DETERMINANTS = {
    name: Duel(activation=name, flow=Flow(layers=3, hidden=16)) for name in ("leaky_relu", "none")
}


def noise(count: int, side: int = SIDE) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


def network(model: Model, determinant: Options | None = None) -> EmbeddingNet:
    """With nothing at 0 in its head, so that no step of it can be forgotten."""
    torch.manual_seed(1)
    net = EmbeddingNet(model, determinant).eval()
    for part in (net.projection, net.flow or nn.Identity()):
        for parameter in part.parameters():
            nn.init.normal_(parameter, std=0.3)
    return net


@pytest.mark.parametrize("pooling", ["gap", "gmp", "gap+gmp", "gem"])
@pytest.mark.parametrize("head", ["trunk", "linear", *DETERMINANTS])
def test_the_parts_of_all_positions_sum_to_the_embedding(pooling: str, head: str) -> None:
    dim = None if head == "trunk" else 24
    model = Model(backbone=RESNET, weights="none", dim=dim, pooling=pooling)
    net = network(model, DETERMINANTS.get(head))
    maps, images = torch_embed(EmbeddingMap(net), noise(3)), noise(3)
    assert maps.shape == (3, net.dim, SIDE // 32, SIDE // 32)
    np.testing.assert_allclose(maps.sum((2, 3)), torch_embed(net, images), atol=1e-5)


def test_of_tokens_the_patches_are_positions_and_a_class_token_has_no_map() -> None:
    net = network(Model(backbone=VIT, weights="none", dim=None, pooling="gap"))
    maps = torch_embed(EmbeddingMap(net), noise(2, 160))
    assert maps.shape == (2, net.dim, 10, 10)
    np.testing.assert_allclose(maps.sum((2, 3)), torch_embed(net, noise(2, 160)), atol=1e-5)
    with pytest.raises(ExportError, match=r"class token .* without --map"):
        EmbeddingMap(network(Model(backbone=VIT, weights="none", dim=None, pooling="cls")))


def test_a_map_that_differs_from_torch_is_refused() -> None:
    maps = np.random.default_rng(0).standard_normal((4, 8, 3, 3)).astype(np.float32)
    sums, images = maps.sum((2, 3)), noise(4)
    assert check_map(lambda _: maps, lambda _: maps, images, sums).difference == 0
    for found, vectors in ((maps * 1.02, sums), (maps, sums + 2e-3)):
        with pytest.raises(ExportError, match="without --map"):
            check_map(lambda _: maps, lambda _, found=found: found, images, vectors)


def test_a_drawn_map_covers_what_the_model_saw_and_nothing_else() -> None:
    image = render_view(0, 0, size_px=200).convert("RGB").resize((300, 200))
    grid = np.zeros((4, 4), dtype=np.float32)
    grid[2:, 2:] = 0.1
    grid[0, 0] = -0.2
    shown = overlaid(image, grid, Preprocessing(resize_px=20, crop_px=16))
    changed = (np.asarray(shown) != np.asarray(image)).any(axis=2)
    rows, columns = changed.nonzero()
    assert shown.size == image.size
    assert (rows.max(), columns.max()) == (179, 229)  # of the central 160 x 160
    assert rows.min() >= 20 + 60
    assert columns.min() >= 70 + 60
    assert side_by_side((image, shown), side_px=100).size == (200, 100)
    large = np.asarray(side_by_side((image, shown), side_px=600))  # a small image is enlarged
    assert (large[300] < 255).all(axis=1).mean() > 0.9
