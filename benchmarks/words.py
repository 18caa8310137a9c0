"""Words of a catalogue: what a text tower that was taught finds among photos, products and titles.

    KINLENS_SHARED=DIR python benchmarks/words.py --sources groceries

Each source has its own table, which is printed when it is done: cars take the longest.

Sources: groceries (81 products with their names and kinds), cars (196 models by make, type and
year), and drawn products, whose shape, colour and pattern are known. Images are embedded with
MobileNetV2 as it comes, or --bundle. Texts are read by MiniLM of $KINLENS_SHARED, and by a bag of
hashed words, which knows nothing but the words themselves.

Fifths of the photos, and of the products, are held out in turn, as by `kinlens-train teach-words`.
A cell has mAP (chance), the share of right first items, and how far mAP is from chance on the way
to 100, with the lower end of its interval. "values alone" is taught without words that texts share
and without pairs; "ten photos" searches with the mean of ten photos that were not held out.

Then photos of drawn products are searched together with a colour that they do not have.
"""

import json
import sys
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from harness import columns, grocery_photos, heading, kinlens, options, row, shared_folder, skip
from scipy.io import loadmat

from kinlens.embedder.manifest import TextTower
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.views.text import TextEncoder
from kinlens.rendered.catalogue import SCHEMES, describe, write_catalogue
from kinlens.training.config.job import load_job
from kinlens.training.data.load import load_split
from kinlens.training.words.catalogue import Catalogue, read_catalogue
from kinlens.training.words.graph import write_tower
from kinlens.training.words.heldout import average_precision, hold_out, random_precision
from kinlens.training.words.taught import fit_map, ridge

Rows = list[tuple[Path, dict[str, str]]]
"""Photos with their attributes."""

Encode = Callable[[Sequence[str]], Any]
"""Texts to features (T, H)."""

FITS: dict[str, Any] = {
    "ridge, values alone": ridge,
    "ridge": ridge,
    "contrastive, values alone": fit_map,
    "contrastive": fit_map,
}
KINDS = ("photos", "products", "titles")
VIEWS, BAG_NUMBERS, EXAMPLES, QUERIES = 4, 512, 10, 300
WEIGHTS = (0.0, 0.5, 1.0, 2.0, 4.0)
NAMES = (
    "teal", "burgundy", "yellow", "dark blue", "olive green", "red", "purple", "grey", "light blue",
    "beige", "pink", "white",
)  # fmt: skip
COLOURS = dict(zip(SCHEMES, NAMES, strict=True))


@dataclass(frozen=True)
class Photo:
    key: str
    vector: np.ndarray[Any, np.dtype[np.float32]]
    attributes: Mapping[str, str]


def main() -> None:
    args = options(
        __doc__, bundle=None, sources=["groceries", "cars", "drawn"], products=500, json=None
    )
    shared = shared_folder()
    if shared is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        embedder = OnnxEmbedder.open(args.bundle or _trunk(shared, folder / "bundle"))
        encoders = {"bag of words": bag_of_words}
        if (minilm := _minilm(shared, folder)) is not None:
            encoders["MiniLM"] = minilm
        for source in args.sources:
            rows = SOURCES[source](shared, folder, args.products)
            photos = _photos(embedder, rows)
            found[source] = contest(photos, encoders)
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
            print(f"\n{source}")
            heading("", "texts read by", *KINDS)
            for name, by_encoder in found[source].items():
                for encoder, figures in by_encoder.items():
                    row(name, encoder, *(_cell(figures.get(kind)) for kind in KINDS))
            if source == "drawn":
                print("\nphotos of drawn products with another colour, mAP")
                columns({name: mix(photos, encode) for name, encode in encoders.items()})


def _cell(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return ""
    return (
        f"{figures['map']:.1f} ({figures['chance']:.1f}), {figures['precision_at_1']:.0f}, "
        f"{figures['gain']:.1f} ({figures['gain_low']:.1f})"
    )


def contest(photos: Sequence[Photo], encoders: Mapping[str, Encode]) -> dict[str, dict[str, Any]]:
    """The figures of each method by the encoder of its texts."""
    catalogue = read_catalogue(photos)
    own = replace(
        catalogue,
        members=tuple(
            members if is_own else members[:0]
            for members, is_own in zip(catalogue.members, catalogue.written, strict=True)
        ),
    )
    found: dict[str, dict[str, Any]] = {}
    numbers = np.arange(len(catalogue.texts))
    for encoder, encode in encoders.items():
        features = encode(catalogue.texts)
        for name, fit in FITS.items():
            started = perf_counter()
            source = own if name.endswith("alone") else catalogue
            found.setdefault(name, {})[encoder] = _dumped(hold_out(source, features, fit))
            print(f"{encoder}, {name}: {perf_counter() - started:.1f} s", file=sys.stderr)
    found["ten photos"] = {"": _dumped(hold_out(catalogue, numbers, examples))}
    return found


def mix(photos: Sequence[Photo], encode: Encode) -> dict[str, float]:
    """mAP of photos of new products with a colour that they do not have, by the weight of the text.

    Half of the products are taught. Right answers have the shape of the photo and the colour of the
    text. "text alone" searches with the colour and the shape.
    """
    rng = np.random.default_rng(0)
    products = rng.permutation(sorted({photo.attributes["product"] for photo in photos})).tolist()
    taught = set(products[: len(products) // 2])
    catalogue = read_catalogue([p for p in photos if p.attributes["product"] in taught])
    others = [photo for photo in photos if photo.attributes["product"] not in taught]
    features = encode(catalogue.texts)
    learnt = fit_map(catalogue, features)
    mean = learnt(features[catalogue.written]).mean(axis=0)
    vectors = np.array([photo.vector for photo in others])
    shape = np.array([photo.attributes["shape"] for photo in others])
    colour = np.array([photo.attributes["colour"] for photo in others])
    colours = sorted(set(colour.tolist()))
    texts = dict(zip(colours, learnt(encode(colours)), strict=True))
    found: dict[str, list[float]] = {}
    for number in rng.permutation(len(others))[:QUERIES].tolist():
        wanted = str(rng.choice([each for each in colours if each != colour[number]]))
        right = (shape == shape[number]) & (colour == wanted)
        if not right.any():
            continue
        found.setdefault("chance", []).append(random_precision(int(right.sum()), len(right)))
        kept = np.arange(len(others)) != number
        queries = {
            f"weight {weight:g}": vectors[number] + weight * (texts[wanted] - mean)
            for weight in WEIGHTS
        }
        queries["text alone"] = learnt(encode([f"{wanted} {shape[number]}"]))[0]
        for name, query in queries.items():
            order = np.argsort(-(vectors[kept] @ query))
            found.setdefault(name, []).append(average_precision(right[kept][order]))
    return {name: 100 * float(np.mean(each)) for name, each in found.items()}


def _dumped(figures: Mapping[Any, Any]) -> dict[str, Any]:
    return {kind: each.model_dump() for kind, each in figures.items()}


def examples(catalogue: Catalogue, _: Any) -> Callable[[Any], Any]:
    """The mean of ten photos of each text, given the numbers of texts instead of features."""
    mean = catalogue.vectors.mean(axis=0)

    def queries(texts: Any) -> Any:
        found = []
        for text in texts:
            members = catalogue.members[text]
            chosen = np.random.default_rng(int(text)).permutation(members)[:EXAMPLES]
            found.append(catalogue.vectors[chosen].sum(axis=0) - len(chosen) * mean)
        return np.array(found)

    return queries


def _photos(embedder: OnnxEmbedder, rows: Rows) -> list[Photo]:
    vectors: list[Any] = []
    for start in range(0, len(rows), 32):
        vectors += [*embedder.embed_files([path for path, _ in rows[start : start + 32]])]
    return [
        Photo(str(number), vector, attributes)
        for number, (vector, (_, attributes)) in enumerate(zip(vectors, rows, strict=True))
    ]


def _trunk(shared: Path, out: Path) -> Path:
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    network = "--backbone", "mobilenet_v2", "--weights", weights
    kinlens("train", "export", *network, "--out", out)
    return out


def _minilm(shared: Path, folder: Path) -> Encode | None:
    files = shared / "weights/minilm-l6-v2-int8"
    if not files.is_dir():
        return None
    size = write_tower(files / "model.onnx", folder / "features.onnx")
    tower = TextTower(kind="taught", context=128)
    model = folder / "features.onnx", files / "tokenizer.json"
    return TextEncoder(*model, tower, size, "MiniLM").embed


def groceries(shared: Path, _folder: Path, _products: int) -> Rows:
    listed = (shared / "data/grocery-store/classes.csv").read_text().splitlines()[1:]
    kinds = {line.split(",")[0]: line.split(",")[2] for line in listed}
    return [(path, {"product": name, "kind": kinds[name]}) for path, name in grocery_photos(shared)]


def cars(shared: Path, _folder: Path, _products: int) -> Rows:
    root = shared / "data/cars196-half"
    split = load_split(load_job("cars196-half", [f"data.root={root}"]).data)
    annotations = loadmat(root / "cars_annos.mat", variable_names="class_names", squeeze_me=True)
    names = [str(name) for name in annotations["class_names"]]
    return [
        (root / path, {"product": names[int(part.class_names[number]) - 1]})
        for part in split.parts.values()
        for path, number in zip(part.paths, part.labels.tolist(), strict=True)
    ]


def drawn(_shared: Path, folder: Path, products: int) -> Rows:
    found: Rows = []
    for number, path in enumerate(write_catalogue(folder / "drawn", products, VIEWS)):
        item = describe(number // VIEWS)
        body = np.array(item.skin.body)
        distances = {name: np.abs(_rgb(codes[0]) - body).sum() for name, codes in SCHEMES.items()}
        colour = COLOURS[min(distances, key=distances.__getitem__)]
        title = f"{item.skin.word} {colour} {item.skin.pattern} {item.shape}"
        words = {"colour": colour, "pattern": item.skin.pattern, "shape": item.shape}
        found.append((path, {"product": title, **words}))
    return found


def _rgb(code: str) -> Any:
    return np.array([int(code[start : start + 2], 16) / 255 for start in (1, 3, 5)])


def bag_of_words(texts: Sequence[str]) -> Any:
    """Random vectors of the words of each text, added: (T, 512), unit norm."""

    def vector(word: str) -> Any:
        return np.random.default_rng(zlib.crc32(word.encode())).standard_normal(BAG_NUMBERS)

    found = np.array([sum(map(vector, text.split())) for text in texts], np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


SOURCES = {"groceries": groceries, "cars": cars, "drawn": drawn}

if __name__ == "__main__":
    main()
