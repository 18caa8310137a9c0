"""Models whose images and texts were trained together: OpenCLIP and SigLIP 2, by `open_clip`.

Both towers are exported as they are, with their own pooling and projection. The package is the
extra `open-clip`; weights are a file, since nothing is downloaded.

Shapes: N images or texts, S pixels a side, T tokens, D numbers of a vector.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kinlens.embedder.bundle import Bundle, make_room
from kinlens.embedder.durable import staged
from kinlens.embedder.errors import ExportError
from kinlens.embedder.manifest import Preprocessing, TextTower
from kinlens.embedder.views.text import MAX_CHARACTERS, TextEncoder
from kinlens.environment import missing_package
from kinlens.training.bundles.bundle import export_network
from kinlens.training.bundles.graph import write_text_onnx
from kinlens.training.words.attach import attach_tower, golden_texts

PREFIX = "open_clip:"
"""The begin of the name of a backbone of open_clip."""

_VOCABULARY = 49_152 - 256 - 2  # merges that are used of the file of open_clip
_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_START, _END = "<start_of_text>", "<end_of_text>"


class ImageTower(nn.Module):
    """uint8 (N, 3, S, S) to unit vectors (N, D)."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", 255 * torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", 255 * torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.model.encode_image((images.float() - self.mean) / self.std)
        return F.normalize(features, dim=1)


class TextNet(nn.Module):
    """Token ids (N, T) to unit vectors (N, D)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(self.model.encode_text(ids), dim=1)


MIN_TEXTS = 20
"""Minimum number of texts whose mean is subtracted from others."""


def export_two_towers(
    backbone: str,
    weights: str,
    out: Path,
    tokenizer: Path | None = None,
    licence: str = "",
    texts: Path | None = None,
) -> Bundle:
    """Write the bundle of a model of open_clip, with both towers, to the new folder `out`.

    Args:
        backbone: such as `open_clip:ViT-B-16-SigLIP2`; `open_clip:ViT-L-14/openai` also names the
            pretrained version, whose image preprocessing is used.
        weights: a file of weights, or "none" for random ones.
        tokenizer: a `tokenizer.json`. Models with the tokenizer of CLIP need none.
        texts: a file with a text on each line, such as the titles of a catalogue. The mean of their
            vectors is what texts of the model have in common; it is subtracted from each text that
            is added to an image.

    Raises: ExportError, BundleError.
    """
    make_room(out)
    name, _, tag = backbone.removeprefix(PREFIX).partition("/")
    open_clip = _package()
    config = open_clip.get_model_config(name)
    if config is None:
        raise ExportError(
            f"--backbone {backbone}: open_clip has no model {name!r}. Its models are listed by: "
            "python -c 'import open_clip; print(*open_clip.list_models())'"
        )
    spec, mean, std = _preprocessing(open_clip, name, tag, config)
    text = config["text_cfg"]
    own = text.get("hf_tokenizer_name")
    if own and tokenizer is None:
        raise ExportError(
            f"--backbone {backbone} needs its tokenizer: pass --tokenizer tokenizer.json, the file "
            f"of {own}."
        )
    if text.get("hf_model_name"):
        raise ExportError(
            f"--backbone {backbone} has a text tower of transformers, {text['hf_model_name']}, "
            "which is not exported. Choose a model whose text tower is of open_clip."
        )
    given = None if texts is None else _texts_in(texts)
    model = _model(open_clip, name, weights)
    cleaning = (text.get("tokenizer_kwargs") or {}).get("clean", "lower")
    context = int(text.get("context_length", 77))
    with staged(out.parent) as folder:
        if tokenizer is None:
            tokenizer = folder / "tokenizer.json"
            write_clip_tokenizer(tokenizer)
        tower = TextTower(
            kind="native",
            context=context,
            padding="context",
            pad_id=int(text.get("pad_id", 0)),
            cleaning="canonical" if cleaning == "canonicalize" else "lower",
            licence=licence or "unspecified",
        )
        net = TextNet(model).eval()
        write_text_onnx(net, context, folder / "text.onnx")
        dim = int(config["embed_dim"])
        images = export_network(
            ImageTower(model, mean, std), dim, name, spec, folder / "images", tower.licence
        )
        encoder = TextEncoder(folder / "text.onnx", tokenizer, tower, dim, name)

        def by_torch(texts: list[str]) -> Any:
            ids, _ = encoder.tokens(texts)
            with torch.inference_mode():
                return net(torch.from_numpy(ids)).numpy()

        if given is not None:
            mean_text = encoder.embed(given).mean(axis=0)
            tower = tower.model_copy(update={"mean": tuple(mean_text.tolist())})
        known = golden_texts(encoder)
        return attach_tower(images, out, folder / "text.onnx", tokenizer, tower, by_torch, known)


def _texts_in(file: Path) -> list[str]:
    """The texts in a file, each once. Raises: ExportError."""
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ExportError(f"--texts {file} cannot be read: {reason}.") from error
    texts = list(dict.fromkeys(line.strip()[:MAX_CHARACTERS] for line in lines if line.strip()))
    if len(texts) < MIN_TEXTS:
        raise ExportError(
            f"--texts {file} has {len(texts)} texts; {MIN_TEXTS} are needed for a mean. Write one "
            "on each line, such as the titles of your catalogue."
        )
    return texts


def _package() -> Any:
    try:
        import open_clip
    except ModuleNotFoundError as missing:
        raise ExportError(missing_package("--text", missing, "open-clip")) from missing
    return open_clip


def _model(open_clip: Any, name: str, weights: str) -> Any:
    """The model with its weights, in float32. Raises: ExportError."""
    if weights == "imagenet":
        raise ExportError(
            "--text needs the weights of the model as a file: --weights FILE, such as "
            "open_clip_model.safetensors."
        )
    model = open_clip.create_model(name, pretrained_image=False, pretrained_text=False)
    if weights != "none":
        try:
            open_clip.load_checkpoint(model, weights)
        except Exception as error:
            # torch, safetensors and open_clip raise errors of many kinds for files of other models.
            raise ExportError(
                f"--weights {weights} are not those of {name}: {error}. Pass the file of this "
                "model, or the name of the model that it belongs to."
            ) from error
    return model.eval()


def _preprocessing(
    open_clip: Any, name: str, tag: str, config: dict[str, Any]
) -> tuple[Preprocessing, tuple[float, ...], tuple[float, ...]]:
    """How images are resized, and their mean and std, as for the pretrained versions of a model.

    Raises: ExportError if these versions differ and none is named.
    """
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag and tag not in tags:
        raise ExportError(f"open_clip:{name}/{tag}: there is no {tag!r}, only {', '.join(tags)}.")
    known = [open_clip.get_pretrained_cfg(name, each) for each in ([tag] if tag else tags)]
    facts = {
        (
            tuple(each.get("mean") or open_clip.OPENAI_DATASET_MEAN),
            tuple(each.get("std") or open_clip.OPENAI_DATASET_STD),
            each.get("interpolation") or "bicubic",
            each.get("resize_mode") or "shortest",
        )
        for each in known or [{}]
    }
    if len(facts) > 1:
        raise ExportError(
            f"The pretrained versions of open_clip:{name} read images differently. Name the one "
            f"that the weights are of, such as open_clip:{name}/{tags[0]}: {', '.join(tags)}."
        )
    [(mean, std, interpolation, mode)] = facts
    size = config["vision_cfg"].get("image_size", 224)
    if not isinstance(size, int) or mode not in ("shortest", "squash"):
        raise ExportError(
            f"open_clip:{name} reads images of {size} px by {mode!r}; only squares by 'shortest' "
            "or 'squash' can be exported. Choose another model."
        )
    aspect = "squashed" if mode == "squash" else "kept"
    spec = Preprocessing(resize_px=size, crop_px=size, interpolation=interpolation, aspect=aspect)
    return spec, mean, std


def write_clip_tokenizer(path: Path) -> None:
    """Write the tokenizer of CLIP, from the vocabulary in open_clip, as `tokenizer.json`."""
    from open_clip.tokenizer import bytes_to_unicode, default_bpe
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    lines = gzip.decompress(Path(default_bpe()).read_bytes()).decode().split("\n")
    merges = [(one, two) for one, two in (line.split() for line in lines[1 : _VOCABULARY + 1])]
    letters = list(bytes_to_unicode().values())
    words = [*letters, *(letter + "</w>" for letter in letters), *map("".join, merges)]
    vocabulary = {word: number for number, word in enumerate([*words, _START, _END])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{_START} $A {_END}",
        special_tokens=[(each, vocabulary[each]) for each in (_START, _END)],
    )
    content = json.loads(tokenizer.to_str())
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
