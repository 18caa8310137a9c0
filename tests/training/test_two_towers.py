"""Models whose images and texts were trained together: both towers stay those of the model.

No weights are at hand, so the towers are small and random: this proves the arithmetic.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import ExportError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.views.text import TextEncoder
from kinlens.training.words.native import export_two_towers

open_clip = pytest.importorskip("open_clip", reason="needs kinlens[open-clip]")

TEXT = {"context_length": 16, "width": 32, "heads": 4, "layers": 2}
CLIP = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 8, "patch_size": 16},
    "text_cfg": TEXT | {"vocab_size": 49_408},
}
SIGLIP2 = {
    "embed_dim": 64,
    "custom_text": True,
    "init_logit_bias": -10,
    "vision_cfg": {
        "image_size": 160,
        "timm_model_name": "test_vit",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": TEXT
    | {
        "vocab_size": 64,
        "hf_tokenizer_name": "timm/ViT-B-16-SigLIP2",
        "tokenizer_kwargs": {"clean": "canonicalize"},
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
        "act_kwargs": {"approximate": "tanh"},
    },
}
TITLES = [f"red mug {number}" for number in range(25)]
TEXTS = ["mug", "A red mug, with white dots!", " ".join(["green bottle"] * 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("towers")


def made(folder: Path, name: str, config: dict[str, Any], **more: Any) -> tuple[Any, Bundle]:
    """A random model of this architecture, and the bundle that was exported from its weights."""
    (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / f"{name}.json")
    torch.manual_seed(3)
    model = open_clip.create_model(name).eval()
    for parameter in model.parameters():  # nothing is 0, so no step can be forgotten
        torch.nn.init.normal_(parameter, std=0.1)
    torch.save(model.state_dict(), folder / f"{name}.pt")
    out = folder / f"{name}-bundle"
    weights = str(folder / f"{name}.pt")
    return model, export_two_towers(f"open_clip:{name}", weights, out, licence="MIT", **more)


@pytest.fixture(scope="module")
def clip(folder: Path) -> tuple[Any, Bundle]:
    """Its bundle has the mean of titles, of which one comes twice."""
    (folder / "titles.txt").write_text("\n".join(["", *TITLES, TITLES[0]]))
    return made(folder, "tiny-clip", CLIP, texts=folder / "titles.txt")


@pytest.fixture(scope="module")
def siglip(folder: Path) -> tuple[Any, Bundle]:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["<pad>", "<eos>", "<unk>", "mug", "a", "red", "with", "white", "dots", "green"]
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", 1)]
    )
    tokenizer.save(str(folder / "words.json"))
    return made(folder, "tiny-SigLIP2", SIGLIP2, tokenizer=folder / "words.json")


@pytest.mark.parametrize("towers", ["clip", "siglip"])
def test_both_towers_are_those_of_the_model(towers: str, request: pytest.FixtureRequest) -> None:
    model, bundle = request.getfixturevalue(towers)
    tower, encoder = bundle.manifest.text, TextEncoder.open(bundle)
    assert (tower.kind, tower.context, tower.padding) == ("native", 16, "context")
    assert bundle.manifest.licence == tower.licence == "MIT"
    ids, _ = encoder.tokens(TEXTS)
    with torch.inference_mode():
        wanted = F.normalize(model.encode_text(torch.from_numpy(ids)), dim=1).numpy()
    np.testing.assert_allclose(encoder.embed(TEXTS), wanted, atol=1e-5)
    alone = np.concatenate([encoder.embed([text]) for text in TEXTS])
    np.testing.assert_allclose(alone, wanted, atol=1e-5)
    assert len({tuple(row) for row in np.round(wanted, 4).tolist()}) == 3

    pixels = bundle.golden_inputs()
    scaled = (torch.from_numpy(pixels).float() / 255 - _row(open_clip.OPENAI_DATASET_MEAN)) / _row(
        open_clip.OPENAI_DATASET_STD
    )
    with torch.inference_mode():
        wanted = F.normalize(model.encode_image(scaled), dim=1).numpy()
    np.testing.assert_allclose(OnnxEmbedder.open(bundle).embed(pixels), wanted, atol=1e-5)


def _row(values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values).view(1, 3, 1, 1)


def test_the_tokens_of_clip_are_those_of_open_clip(clip: tuple[Any, Bundle]) -> None:
    encoder = TextEncoder.open(clip[1])
    texts = [*TEXTS, "it's a Café's 24-inch naïve T-shirt (new) 日本 🙂", "don't   stop\tnow", "_"]
    ids, _ = encoder.tokens(texts)
    wanted = open_clip.SimpleTokenizer(context_length=16)(texts)
    np.testing.assert_array_equal(ids, wanted.numpy())


def test_the_mean_of_given_texts_is_subtracted_from_words(clip: tuple[Any, Bundle]) -> None:
    encoder = TextEncoder.open(clip[1])
    mean = encoder.embed(TITLES).mean(axis=0)
    np.testing.assert_allclose(clip[1].manifest.text.mean, mean, atol=1e-6)
    image, words = encoder.embed(["green"]), encoder.embed(["red mug 3"])
    moved = image + 0.5 * (words - mean)
    joined = encoder.joined(image, words, [0.5])
    np.testing.assert_allclose(joined, moved / np.linalg.norm(moved), atol=1e-6)


def test_too_few_texts_are_refused_before_the_export(tmp_path: Path) -> None:
    file = tmp_path / "titles.txt"
    file.write_text("\n".join(TITLES[:19]))
    with pytest.raises(ExportError, match="has 19 texts; 20 are needed"):
        export_two_towers("open_clip:ViT-B-32", "nowhere.pt", tmp_path / "out", texts=file)
    assert not (tmp_path / "out").exists()


def test_punctuation_is_dropped_where_the_model_was_trained_so(siglip: tuple[Any, Bundle]) -> None:
    encoder = TextEncoder.open(siglip[1])
    plain, marked = encoder.tokens(["red mug", "RED, mug!"])[0]
    np.testing.assert_array_equal(plain, marked)
    assert plain.tolist()[:4] == [5, 3, 1, 0]  # words, end, padding


@pytest.mark.parametrize(
    ("backbone", "weights", "reason"),
    [
        ("open_clip:nothing", "none", "has no model 'nothing'"),
        ("open_clip:ViT-B-32", "imagenet", "--weights FILE"),
        ("open_clip:ViT-B-16-SigLIP2", "none", "--tokenizer tokenizer.json"),
        ("open_clip:ViT-L-14", "none", "read images differently.*openai"),
        ("open_clip:ViT-B-32/mine", "none", "there is no 'mine', only"),
    ],
)
def test_what_is_missing_is_named(backbone: str, weights: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=reason):
        export_two_towers(backbone, weights, tmp_path / "out")
    assert not (tmp_path / "out").exists()
