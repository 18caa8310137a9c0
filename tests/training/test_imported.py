"""ONNX files of others: as bundles, refused with a reason, and under a trained head."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn
from torch.nn import functional

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import CheckpointError, ExportError, JobError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Embeddings, Images
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.training.models.embedding import torch_embed
from tests.support.servers import create_app, run, settings_of
from tests.training.jobs import called

SIDE, CHANNELS = 32, 16
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
KERNEL = np.random.default_rng(0).standard_normal((CHANNELS, 3, 3, 3)).astype(np.float32) / 5
BIAS = np.linspace(-0.2, 0.2, CHANNELS, dtype=np.float32)
NORMALIZED = ("--mean", "0.5,0.4,0.3", "--std", "0.2,0.25,0.3")

Nodes = list[onnx.NodeProto]
Tail = tuple[Nodes, dict[str, Any]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def node(kind: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs.split(), [output], **attributes)


def vectors(name: str = "out") -> Nodes:
    """The mean of each channel of the map."""
    return [node("GlobalAveragePool", "map", "mean"), node("Flatten", "mean", name)]


def write_network(
    path: Path,
    tail: Nodes | None = None,
    constants: dict[str, Any] | None = None,
    *,
    shape: tuple[Any, ...] = ("n", 3, SIDE, SIDE),
    outputs: tuple[str, ...] = ("out",),
    opset: int = 18,
    kind: int = TensorProto.FLOAT,
    options: dict[str, Any] | None = None,
) -> Path:
    """A convolution with ReLU, then `tail`, from the value `map` (N, 16, 15, 15) to `outputs`."""
    start = "pixels"
    nodes: Nodes = []
    if kind != TensorProto.FLOAT:
        nodes += [node("Cast", start, "float", to=TensorProto.FLOAT)]
        start = "float"
    if shape[-1] == 3:
        nodes += [node("Transpose", start, "first", perm=[0, 3, 1, 2])]
        start = "first"
    nodes += [node("Conv", f"{start} kernel bias", "conv", strides=[2, 2])]
    nodes += [node("Relu", "conv", "map"), *(vectors() if tail is None else tail)]
    values = {"kernel": KERNEL, "bias": BIAS} | (constants or {})
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("pixels", kind, shape)],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in values.items()],
    )
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, path, **(options or {}))
    return path


def imported(model: Path, out: Path, *words: object) -> Bundle:
    given = words if "--mean" in words else (*NORMALIZED, *words)
    called(
        *("import", model, "--size", SIDE, "--resize", 36, "--licence", "mit"), *given, "--out", out
    )
    return Bundle.open(out)


def pixels(count: int = 3) -> Images:
    return np.random.default_rng(1).integers(0, 256, (count, 3, SIDE, SIDE), dtype=np.uint8)


def expected(images: Images, mean: Any = MEAN, std: Any = STD, peak: float = 1) -> Embeddings:
    """What the network with the tail `vectors` computes, in torch."""
    x = torch.from_numpy(images).float() / 255 * peak
    x = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    maps = functional.conv2d(x, torch.from_numpy(KERNEL), torch.from_numpy(BIAS), stride=2).relu()
    return functional.normalize(maps.mean((2, 3))).numpy()


TOKENS = [
    node("Reshape", "map rows", "flat"),
    node("Transpose", "flat", "out", perm=[0, 2, 1]),
]
CLASS_TOKEN = [
    *vectors("first"),
    node("Unsqueeze", "first axis", "token"),
    *TOKENS[:1],
    node("Transpose", "flat", "patches", perm=[0, 2, 1]),
    node("Concat", "token patches", "out", axis=1),
]
ROWS = {"rows": np.array([0, CHANNELS, -1])}


@pytest.mark.parametrize(
    ("network", "words"),
    [
        pytest.param({}, (), id="vectors"),
        pytest.param({"shape": (1, 3, SIDE, SIDE)}, (), id="a fixed batch"),
        pytest.param(
            {
                "shape": (1, 3, SIDE, SIDE),
                "tail": [
                    node("GlobalAveragePool", "map", "mean"),
                    node("Reshape", "mean s", "out"),
                ],
                "constants": {"s": np.array([1, -1])},
            },
            (),
            id="a fixed batch that a reshape repeats",
        ),
        pytest.param({"shape": (4, 3, SIDE, SIDE)}, (), id="a fixed batch of four"),
        pytest.param(
            {
                "shape": (1, 3, SIDE, SIDE),
                "tail": [
                    node("Reshape", "map heads", "apart", allowzero=1),
                    node("Reshape", "apart whole", "joined", allowzero=1),
                    node("Reshape", "joined rows", "flat", allowzero=1),
                    node("Transpose", "flat", "patches", perm=[0, 2, 1]),
                    node("Concat", "token patches", "tokens", axis=1),
                    node("Slice", "tokens one last one", "others"),
                    node("Identity", "others", "out"),
                ],
                "constants": {
                    "heads": np.array([2, CHANNELS // 2, 15, 15]),
                    "whole": np.array([1, CHANNELS, 15, 15]),
                    "rows": np.array([1, CHANNELS, 225]),
                    "token": np.ones((1, 1, CHANNELS), np.float32),
                    "one": np.array([1]),
                    "last": np.array([226]),
                },
            },
            ("--pooling", "mean"),
            id="a fixed batch with heads and a class token",
        ),
        pytest.param({"shape": ("n", SIDE, SIDE, 3)}, (), id="channels last"),
        pytest.param({"shape": (1, SIDE, SIDE, 3)}, (), id="channels last, fixed batch"),
        pytest.param({"shape": ("n", 3, "h", "w")}, (), id="free sides"),
        pytest.param({"opset": 9}, (), id="an old opset"),
        pytest.param({"opset": 21}, (), id="a new opset"),
        pytest.param(
            {"tail": [node("Identity", "map", "out")]}, (), id="maps, pooled without a word"
        ),
        pytest.param(
            {"tail": [node("Transpose", "map", "out", perm=[0, 2, 3, 1])]},
            ("--pooling", "gap"),
            id="maps with channels last",
        ),
        pytest.param({"tail": TOKENS, "constants": ROWS}, ("--pooling", "mean"), id="tokens"),
        pytest.param(
            {"tail": CLASS_TOKEN, "constants": ROWS | {"axis": np.array([1])}},
            ("--pooling", "cls"),
            id="a class token",
        ),
        pytest.param(
            {"tail": [*vectors("raw"), node("LpNormalization", "raw", "out", axis=1, p=2)]},
            (),
            id="unit vectors",
        ),
        pytest.param({"outputs": ("map", "out")}, ("--output", "out"), id="several outputs"),
        pytest.param(
            {"tail": [*vectors("inside"), node("Softmax", "inside", "out")]},
            ("--output", "inside"),
            id="a value inside",
        ),
        pytest.param(
            {},
            ("--scale", "255", "--mean", "127.5,102,76.5", "--std", "51,63.75,76.5"),
            id="0..255",
        ),
        pytest.param(
            {"options": {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}},
            (),
            id="external data",
        ),
    ],
)
def test_vectors_of_the_bundle_are_those_of_the_network(
    tmp_path: Path, network: dict[str, Any], words: tuple[str, ...]
) -> None:
    bundle = imported(write_network(tmp_path / "network.onnx", **network), tmp_path / "b", *words)
    assert (bundle.manifest.dim, bundle.manifest.backbone) == (CHANNELS, "onnx")
    assert (bundle.manifest.licence, bundle.manifest.name) == ("mit", "network")
    assert {path.name for path in bundle.path.iterdir()} == {
        "model.onnx",
        "golden",
        "manifest.json",
    }
    embedder = OnnxEmbedder.open(bundle)
    for count in (1, 2, 5, 17):
        images = pixels(count)
        assert np.abs(embedder.embed(images) - expected(images)).max() < 1e-5


@pytest.mark.parametrize("kind", [TensorProto.UINT8, TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_other_types_of_the_input(tmp_path: Path, kind: int) -> None:
    model = write_network(tmp_path / "network.onnx", kind=kind)
    words = ("--mean", "0", "--std", "1", "--scale", "255")
    found = OnnxEmbedder.open(imported(model, tmp_path / "b", *words)).embed(pixels())
    wanted = expected(pixels(), (0.0,) * 3, (1.0,) * 3, 255)
    assert np.abs(found - wanted).max() < 1e-5
    if kind == TensorProto.UINT8:
        refused(model, tmp_path / "c", "Pass --mean 0 --std 1 --scale 255")


def refused(model: Path, out: Path, message: str, *words: object) -> None:
    with pytest.raises(ExportError, match=message):
        imported(model, out, *words)
    assert not out.exists()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        pytest.param(
            {"tail": [*vectors("x"), node("Neg", "x", "y"), node("Sqrt", "y", "out")]},
            "not finite numbers",
            id="NaN",
        ),
        pytest.param(
            {"tail": [*vectors("x"), node("Softmax", "x", "out", axis=0)]},
            "the vector of an image depends on its batch",
            id="a softmax over the batch",
        ),
        pytest.param(
            {
                "tail": [
                    *vectors("x"),
                    node("ReduceMean", "x zero", "mean_", keepdims=1),
                    node("Sub", "x half", "y"),
                    node("Add", "y mean_", "out"),
                ],
                "constants": {"zero": np.array([0]), "half": np.float32(0.5)},
            },
            "the vector of an image depends on its batch",
            id="the mean of a batch",
        ),
        pytest.param(
            {
                "tail": [*vectors("x"), node("Mul", "x zero", "out")],
                "constants": {"zero": np.float32(0)},
            },
            "a vector of zeros",
            id="zeros",
        ),
        pytest.param(
            {
                "tail": [*vectors("x"), node("Mul", "x zero", "y"), node("Add", "y one", "out")],
                "constants": {"zero": np.float32(0), "one": np.float32(1)},
            },
            "the same vector for all images",
            id="a constant",
        ),
        pytest.param(
            {"tail": [*vectors("x"), node("ArgMax", "x", "out", axis=1)]},
            r"int64 of the shape \(1, 1\)",
            id="whole numbers",
        ),
        pytest.param(
            {"tail": [*vectors("x"), node("SequenceConstruct", "x", "out")]},
            "is a sequence or a map",
            id="a sequence",
        ),
        pytest.param(
            {
                "tail": [*vectors("x"), node("ReduceMean", "x one", "out", keepdims=0)],
                "constants": {"one": np.array([1])},
            },
            r"of the shape \(1,\) for 1 image",
            id="one number",
        ),
        pytest.param(
            {
                "tail": [
                    node("Reshape", "map flat", "row"),
                    node("Greater", "row half", "is_high"),
                    node("Compress", "row is_high", "high"),
                    node("Unsqueeze", "high zero", "out"),
                ],
                "constants": {
                    "flat": np.array([-1]),
                    "half": np.float32(0.5),
                    "zero": np.array([0]),
                },
            },
            "for one image and .* for another",
            id="another length for each image",
        ),
        pytest.param(
            {"tail": TOKENS, "constants": ROWS}, "Pass --pooling cls or mean", id="tokens"
        ),
        pytest.param({"outputs": ("map", "out")}, "has 2 outputs: map, out", id="two outputs"),
        pytest.param({"shape": ("n", 3, 48, 48)}, "Pass --size 48", id="another size"),
        pytest.param({"shape": ("n", 1, SIDE, SIDE)}, "RGB images have", id="grey"),
        pytest.param(
            {
                "shape": (1, 3, SIDE, SIDE),
                "tail": [
                    *vectors("x"),
                    node("Transpose", "x", "turned", perm=[1, 0]),
                    node("MatMul", "turned row", "wide"),
                    node("Reshape", "wide flat", "out"),
                ],
                "constants": {"row": np.ones((1, 4), np.float32), "flat": np.array([1, -1])},
            },
            "made for 1 image.* allow no other number",
            id="a product with one image",
        ),
    ],
)
def test_what_is_no_embedding_is_refused(
    tmp_path: Path, network: dict[str, Any], message: str
) -> None:
    refused(write_network(tmp_path / "network.onnx", **network), tmp_path / "b", message)


def test_broken_files_and_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = tmp_path / "b", write_network(tmp_path / "network.onnx")
    refused(tmp_path / "absent.onnx", out, "does not exist")
    (tmp_path / "text.onnx").write_text("no model")
    refused(tmp_path / "text.onnx", out, "is not an ONNX file")
    refused(model, out, "computes no value 'other'", "--output", "other")
    refused(model, out, "--pooling gap does not fit. Pass --pooling none", "--pooling", "gap")
    apart = {"save_as_external_data": True, "location": "w.bin", "size_threshold": 0}
    write_network(tmp_path / "apart.onnx", options=apart)
    (tmp_path / "w.bin").unlink()
    refused(tmp_path / "apart.onnx", out, "weights in w.bin, which is not next to it")
    words = ("import", model, "--size", 32, *NORMALIZED, "--out", out)
    assert "--licence is missing" in called(*words, code=2)
    assert "--precision compares" in called(*words, "--licence", "x", "--precision", "int8", code=2)
    for given in (
        ("--mean", "1,2"),
        ("--std", "0"),
        ("--scale", "2"),
        ("--pooling", "max"),
        ("--resize", "30"),
    ):
        assert given[0] in called(*words, "--licence", "x", *given, code=2)
    with pytest.raises(JobError, match="--interpolation cubic"):
        called(*words, "--licence", "x", "--interpolation", "cubic")
    monkeypatch.setattr("kinlens.training.bundles.onnx_graph.MAX_BYTES", 1_000)
    refused(model, out, "limits to 2 GiB")


FEW_BLOCKS = [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2], [6, 64, 1, 2]]


def exported_by_torch(path: Path, weights: Path | None = None, side: int = 96) -> nn.Module:
    """MobileNetV2 of torchvision as others export it: a few blocks with random weights and 1,000
    logits, or weights of a file and its features.
    """
    from torchvision.models import mobilenet_v2

    torch.manual_seed(0)
    network = mobilenet_v2(inverted_residual_setting=None if weights else FEW_BLOCKS).train()
    if weights is None:
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        with torch.no_grad():
            network(torch.randn(4, 3, 96, 96))
    else:
        from kinlens.training.models.backbones import read_weights

        state = read_weights(str(weights), "mobilenet_v2")
        network.load_state_dict({name: value.float() for name, value in state.items()})
        network.classifier = nn.Identity()
    for module in network.eval().modules():
        if hasattr(module, "inplace"):  # the exporter takes each of them apart, to the same file
            module.inplace = False
    sample = torch.zeros(2, 3, side, side)
    shapes = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(network, (sample,), path, dynamo=True, dynamic_shapes=shapes, verbose=False)
    return network


def of_torchvision(network: nn.Module) -> Callable[[Images], Embeddings]:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def embed(images: Images) -> Embeddings:
        x = torch.from_numpy(images).float() / 255
        with torch.no_grad():
            logits = network((x - mean.view(3, 1, 1)) / std.view(3, 1, 1))
        return functional.normalize(logits).numpy()

    return embed


TORCHVISION = ("--size", 96, "--mean", "0.485,0.456,0.406", "--std", "0.229,0.224,0.225")


def test_a_file_of_torchvision_is_indexed_searched_and_served(tmp_path: Path) -> None:
    network = exported_by_torch(tmp_path / "mobilenet.onnx")
    called("data", "render", tmp_path / "shop", "--products", 16, "--views", 4, "--size-px", 96)
    words = ("--licence", "bsd-3-clause", "--images", tmp_path / "shop", "--out", tmp_path / "b")
    model = tmp_path / "mobilenet.onnx"
    printed = called("import", model, *TORCHVISION, *words, "--verbose")
    assert "ONNX and the imported file differ by at most" in printed
    bundle = Bundle.open(tmp_path / "b")
    embedder = OnnxEmbedder.open(bundle)
    images = bundle.golden_inputs()
    assert np.abs(embedder.embed(images) - of_torchvision(network)(images)).max() < 1e-4
    assert np.abs(bundle.golden_vectors() - of_torchvision(network)(images)).max() < 1e-4
    held_out = bundle.manifest.held_out
    assert held_out is not None
    assert held_out.recall["R@1"] == bundle.manifest.recall["R@1"]
    assert held_out.split == "test"
    build_gallery(folder_source(tmp_path / "shop"), embedder, tmp_path / "gallery")
    photo = next((tmp_path / "shop").glob("*/*.*")).read_bytes()
    with closing(Gallery.open(tmp_path / "gallery")) as gallery:
        assert gallery.bundle_id == bundle.bundle_id
    with closing(
        run(
            create_app(settings_of(bundle=tmp_path / "b", galleries=f"shop={tmp_path / 'gallery'}"))
        )
    ) as service:
        answer = service.search(photo).json()
        assert answer["bundle_id"] == bundle.bundle_id
        assert answer["hits"][0]["score"] > 0.999


def shop(folder: Path, products: int) -> Path:
    called(
        *("data", "render", folder / "shop", "--products", products, "--views", 4),
        *("--size-px", 40),
    )
    return folder / "shop"


def test_adapt_puts_a_head_on_an_imported_network(tmp_path: Path) -> None:
    base = imported(write_network(tmp_path / "network.onnx"), tmp_path / "base")
    images, out = shop(tmp_path, 16), tmp_path / "adapted"
    words = ("adapt", "--bundle", base.path, "--data", images, "--run", tmp_path / "run")
    called(*words, "--out", out, "--set", "start.projection=within_class")
    bundle = Bundle.open(out)
    manifest = bundle.manifest
    assert (manifest.backbone, manifest.licence, manifest.dim) == ("onnx", "mit", CHANNELS)
    assert manifest.preprocessing == base.manifest.preprocessing
    assert manifest.baseline is not None
    from kinlens.training.checkpoint import load_chosen

    (base.path / "model.onnx").unlink()  # a run keeps the network
    _, net = load_chosen(tmp_path / "run").network()
    inputs = pixels(5)
    assert np.abs(OnnxEmbedder.open(bundle).embed(inputs) - torch_embed(net, inputs)).max() < 1e-5
    with torch.no_grad():
        through = net.embed(net.projection(torch.from_numpy(expected(inputs)))).numpy()
    assert np.abs(torch_embed(net, inputs) - through).max() < 1e-5
    assert np.abs(through - expected(inputs)).max() > 0.01


def test_adapt_leaves_an_imported_network_alone_where_no_head_is_proven(tmp_path: Path) -> None:
    base = imported(write_network(tmp_path / "network.onnx"), tmp_path / "base")
    words = ("adapt", "--bundle", base.path, "--data", shop(tmp_path, 6), "--out", tmp_path / "b")
    assert "with the model as it is" in called(*words, "--run", tmp_path / "run")
    adapted = Bundle.open(tmp_path / "b")
    assert np.array_equal(adapted.golden_vectors(), base.golden_vectors())
    assert adapted.model_path.read_bytes() == base.model_path.read_bytes()
    assert adapted.manifest.licence == "mit"
    assert "--bundle has a network" in called(*words, "--backbone", "resnet50", code=2)


def test_fit_trains_a_head_with_a_flow_on_an_imported_network(tmp_path: Path) -> None:
    base = imported(write_network(tmp_path / "network.onnx", opset=21), tmp_path / "base")
    job = {
        "name": "head",
        "data": {"kind": "folder", "root": str(shop(tmp_path, 8))},
        "recall_at": [1],
        "model": {"backbone": "onnx", "weights": str(base.path), "dim": 8, "hidden": 6},
        "input": {"size_px": SIDE, "resize_px": 36},
        "regularizers": {"determinant": {"flow": {"layers": 2, "hidden": 8}}},
        "optimizer": {"epochs": 1, "batch_size": 4},
        "runtime": {"workers": 0, "precision": "fp32", "device": "cpu"},
    }
    from kinlens.training import fit

    with pytest.raises(JobError, match="does not learn; set frozen_trunk = true"):
        fit(job, out=tmp_path / "run")
    job["model"]["frozen_trunk"] = True
    other = job | {"input": {"size_px": 24, "resize_px": 36}}
    with pytest.raises(JobError, match="takes images of 32 px"):
        fit(other, out=tmp_path / "other")
    fit(job, out=tmp_path / "run")
    called("export", tmp_path / "run", "--out", tmp_path / "b")
    assert Bundle.open(tmp_path / "b").manifest.dim == 8
    with pytest.raises(ExportError, match="no map of an imported network"):
        called("export", tmp_path / "run", "--map", "--out", tmp_path / "c")
    job["model"] |= {"weights": str(tmp_path / "b")}
    with pytest.raises(CheckpointError, match="Start from the imported bundle"):
        fit(job, out=tmp_path / "again")
    job["model"] |= {"weights": "none"}
    with pytest.raises(CheckpointError, match="folder of `kinlens-train import`"):
        fit(job, out=tmp_path / "again")


def test_int8_of_an_imported_network_passes_the_gate(tmp_path: Path) -> None:
    tail: Nodes = []
    for number in range(4):  # the first three convolutions of a network stay in float32
        before = f"map{number}" if number else "map"
        tail += [node("Conv", f"{before} more", f"conv{number}", pads=[1, 1, 1, 1])]
        tail += [node("Relu", f"conv{number}", f"map{number + 1}")]
    tail += [node("GlobalAveragePool", "map4", "mean"), node("Flatten", "mean", "out")]
    more = np.random.default_rng(2).standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32)
    model = write_network(tmp_path / "network.onnx", tail, {"more": more / 9})
    words = ("import", model, "--size", SIDE, *NORMALIZED, "--licence", "x")
    images = ("--images", shop(tmp_path, 34), "--precision", "int8")
    printed = called(*words, *images, "--out", tmp_path / "b", "--verbose")
    bundle = Bundle.open(tmp_path / "b")
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    if {"avx512_vnni", "avx_vnni"}.intersection(flags):  # without it int8 saturates, is refused
        assert bundle.precisions == ("fp32", "int8"), printed
        kinds = [x.op_type for x in onnx.load(bundle.model_file("int8")).graph.node]
        assert "QuantizeLinear" in kinds
    assert bundle.manifest.calibration is not None or "no calibration: " in printed


@pytest.mark.long
@pytest.mark.real_data
def test_a_file_of_pretrained_weights_is_adapted_like_the_trunk(
    shared_data: Path, tmp_path: Path
) -> None:
    """Features and gain are those of the same weights as a trunk of torch."""
    weights = shared_data / "weights" / "mobilenet_v2-imagenet-fp16.pth"
    exported_by_torch(tmp_path / "mobilenet.onnx", weights, side=224)
    grocery = shared_data / "data" / "grocery-store"
    lines = (grocery / "test.txt").read_text().splitlines()
    by_class: dict[str, list[str]] = {}
    for path, fine, _ in (line.split(", ") for line in lines):
        by_class.setdefault(fine, []).append(f"photos/{path},{fine}")
    chosen = [row for rows in [*by_class.values()][:40] for row in rows[:8]]
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "photos").symlink_to(grocery)
    (tmp_path / "shop" / "images.csv").write_text("\n".join(["path,label", *chosen]) + "\n")
    data = ("--data", tmp_path / "shop")
    words = ("import", tmp_path / "mobilenet.onnx", "--size", 224, *TORCHVISION[2:])
    images = ("--images", tmp_path / "shop", "--precision", "int8")
    called(*words, "--licence", "apache-2.0", *images, "--out", tmp_path / "base")
    base = Bundle.open(tmp_path / "base").manifest
    run = ("--run", tmp_path / "run")
    called("adapt", "--bundle", tmp_path / "base", *data, "--out", tmp_path / "of_file", *run)
    of_input = [f"input.{x}" for x in ("size_px=224", "test_px=224", "resize_px=256")]
    settings = [x for one in (*of_input, "model.pooling=gap") for x in ("--set", one)]
    run = ("--run", tmp_path / "other")
    called("adapt", "--weights", weights, *data, "--out", tmp_path / "of_trunk", *run, *settings)
    of_file, of_trunk = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("run", "other")
    )
    assert base.recall["R@1"] == pytest.approx(of_file["trunk"]["R@1"], abs=0.7)
    assert of_file["trunk"]["R@1"] == pytest.approx(of_trunk["trunk"]["R@1"], abs=1.5)
    assert of_file["figures"]["R@1"] >= of_file["trunk"]["R@1"] - 0.7
    assert of_file["choice"] == of_trunk["choice"]
    assert base.calibration is not None
    assert Bundle.open(tmp_path / "of_file").manifest.licence == "apache-2.0"
