"""A text encoder and a tokenizer small enough for every test: a bag of words."""

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.manifest import TextTower
from kinlens.embedder.views.text import TextEncoder
from kinlens.training.words.attach import attach_tower, golden_texts
from kinlens.training.words.graph import write_tower
from kinlens.training.words.taught import WordMap

COLOURS = ("red", "green", "blue", "white", "black", "yellow")
SHAPES = ("mug", "lamp", "shoe", "ball")
OTHERS = ("with", "laces", "and", "a", "glass", "bottle", "zig", "zag")
VOCABULARY = ("[PAD]", "[UNK]", *COLOURS, *SHAPES, *OTHERS)
WIDTH = 24
CONTEXT = 8


def write_tokenizer(path: Path) -> Path:
    """A tokenizer whose tokens are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    numbers = {word: number for number, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def write_encoder(path: Path, types: bool = True, kind: int = TensorProto.INT64) -> Path:
    """int64 (N, T) to a random vector for each token, float32 (N, T, 24)."""
    rng = np.random.default_rng(5)
    table = rng.standard_normal((len(VOCABULARY), WIDTH)).astype(np.float32)
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if types else [])]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["states"])]
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info(name, kind, ["n", "t"]) for name in names],
        [helper.make_tensor_value_info("states", TensorProto.FLOAT, ["n", "t", WIDTH])],
        [numpy_helper.from_array(table, "table")],
    )
    opset = [helper.make_opsetid("", 12)]  # as old as those of encoders in use
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=7), path)
    return path


def with_tower(bundle: Bundle, folder: Path, out: Path, **changes: object) -> Bundle:
    """A copy of `bundle` with a text tower whose map of words is random; files lie in `folder`."""
    tokenizer = write_tokenizer(folder / "words.json")
    encoder = write_encoder(folder / "encoder.onnx")
    rng = np.random.default_rng(1)
    dim = bundle.manifest.dim
    weight = rng.standard_normal((WIDTH, dim)).astype(np.float32)
    taught = WordMap(weight, rng.standard_normal(dim).astype(np.float32))
    write_tower(encoder, folder / "features.onnx")
    write_tower(encoder, folder / "text.onnx", taught)
    tower = TextTower(kind="taught", context=CONTEXT, licence="MIT").model_copy(update=changes)
    reader = TextEncoder(folder / "features.onnx", tokenizer, tower, WIDTH, "encoder")
    files = folder / "text.onnx", tokenizer
    return attach_tower(
        bundle, out, *files, tower, lambda texts: taught(reader.embed(texts)), golden_texts(reader)
    )
