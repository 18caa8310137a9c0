"""A full demo as a user would run it: images, training, bundle, gallery, service, answers.

Uses only the public commands, and prints each one. Without arguments it renders a catalogue of
products and searches for products that the model was not trained on.

    make demo
    make demo IMAGES=/my/shop                 one sub-folder per product: trains on half of them
    make demo IMAGES=/my/photos               a flat folder: only a pretrained network
    make demo IMAGES=/my/photos BUNDLE=/my/bundle
    make demo IMAGES=/my/shop WEIGHTS=/my/mobilenet_v2.pth     without internet access
    make demo PORT=8001                       if another program uses port 8000
"""

import argparse
import contextlib
import json
import shlex
import shutil
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_steps import (
    DemoError,
    fetch,
    free_port,
    keep_open,
    kinlens,
    read_list,
    require_free,
    search,
    served,
    show,
    write_list,
)

from kinlens.embedder.errors import SourceError
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.values import AttributeValue

WORK = Path(".kinlens/demo")
MIN_RECALL = 0.6  # for the rendered products; guessing gives 0.04, a colour histogram 0.32
MAX_QUERIES = 400
MAX_DOUBT = 0.08  # between the mean probability of the best hits and the share of right ones
MIN_CLASSES = 4  # half of them are held out, and a search needs more than one


@dataclass(frozen=True)
class Query:
    """An image to send; `product` is the expected first answer, if known."""

    path: Path
    key: str | None = None
    product: str | None = None


def main() -> int:
    options = _options()
    started = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    port = free_port() if options.check else options.port
    try:
        require_free(port)  # check this before the training, which takes minutes
        if options.images is None:
            bundle, queries = rendered_products()
        else:
            bundle, queries = own_images(options.images, options.bundle, options.weights)
        arguments = ("--bundle", str(bundle), "--gallery", f"demo={WORK / 'gallery'}")
        if options.images is None:  # every query's product is in the gallery
            arguments += ("--no-match-prior", "0")
        with served(port, *arguments, "--state", str(WORK / "state")) as server:
            passed = ask(f"http://127.0.0.1:{port}", queries, options.images is None)
            if queries[0].product is not None:
                show(verdict())
            show(f"Total time: {time.monotonic() - started:.0f} s.")
            if queries[0].key is not None and queries[0].product is not None:
                settings = [f"data.root={options.images}"]
                settings += [f"model.weights={options.weights}"] if options.weights else []
                words = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
                show("Training the whole network gains more: ten minutes for up to 1,200 images.")
                print(f"  kinlens-train fit shop {words} --out runs/shop")
            if not options.check:
                keep_open(server, port)
    except DemoError as error:
        show(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        show("Stopped before completion.")
        return 130
    return 0 if passed else 1


def rendered_products() -> tuple[Path, list[Query]]:
    """Render, train, export; index half of the views of unseen products, query the other half."""
    run, bundle = WORK / "run", WORK / "bundle"
    train("demo", run, bundle)
    products = WORK / "products"
    unseen = read_list(run / "test.csv")
    gallery = [row for row in unseen if view_of(row) % 2 == 0]
    write_list(WORK / "gallery.csv", gallery)
    build(bundle, products, "--csv", str(WORK / "gallery.csv"))
    asked = [row for row in unseen if view_of(row) % 2 == 1]
    return bundle, [Query(products / row["path"], product=row["class"]) for row in asked]


def own_images(images: Path, bundle: Path | None, weights: str | None) -> tuple[Path, list[Query]]:
    """Train on the user's classes if there are enough; index everything."""
    classes = trainable(images)
    run = WORK / "run"
    unseen: list[dict[str, str]] = []
    if bundle is None and len(classes) >= MIN_CLASSES:
        bundle = WORK / "bundle"
        changes = ["--set", f"data.root={images}"]
        changes += ["--set", f"model.weights={weights}"] if weights else []
        train("adapt", run, bundle, *changes)
        unseen = read_list(run / "test.csv")
    elif bundle is None:
        found = f"only {len(classes)}" if classes else "no"
        show(
            f"{images} has {found} sub-folders with 2 images or more. A training needs "
            f"{MIN_CLASSES}, so a pretrained network is used as it is."
        )
        bundle = WORK / "bundle"
        export(bundle, "--backbone", "mobilenet_v2", *(["--weights", weights] if weights else []))
    build(bundle, images)
    if unseen:
        return bundle, [Query(images / r["path"], r["path"], r["class"]) for r in unseen]
    with contextlib.closing(Gallery.open(WORK / "gallery")) as gallery:  # no damaged files
        return bundle, [Query(images / item.key, item.key) for item in gallery.items()]


def trainable(images: Path) -> set[AttributeValue]:
    """The classes that are large enough to train on."""
    try:
        source = folder_source(images)
    except SourceError as error:
        raise DemoError(f"IMAGES={images}: {error}") from error
    sizes = Counter(r.attributes["class"] for r in source.records() if r.attributes)
    return {name for name, size in sizes.items() if size > 1}


def train(job: str, run: Path, bundle: Path, *changes: str) -> None:
    """Train a job in a new run folder and export it."""
    shutil.rmtree(run, ignore_errors=True)
    kinlens("train", "fit", job, "--out", str(run), *changes)
    export(bundle, str(run))


def export(bundle: Path, *source: str) -> None:
    """Export a bundle; the previous one is kept next to it until the next export."""
    made = bundle.with_name(f"{bundle.name}-new")
    shutil.rmtree(made, ignore_errors=True)
    kinlens("train", "export", *source, "--map", "--out", str(made))
    if bundle.exists():
        former = bundle.with_name(f"{bundle.name}-before")
        shutil.rmtree(former, ignore_errors=True)
        bundle.rename(former)
        show(f"The previous bundle is now {former}.")
    made.rename(bundle)
    show(f"The bundle of this demo is {bundle}.")


def build(bundle: Path, images: Path, *source: str) -> None:
    """Index images into a new gallery."""
    shutil.rmtree(WORK / "gallery", ignore_errors=True)
    kinlens(
        "index", "build", str(images), *source, "--bundle", str(bundle), "--out",
        str(WORK / "gallery"), "--name", "demo",
    )  # fmt: skip


def ask(url: str, queries: list[Query], rendered: bool) -> bool:
    """Send queries over HTTP, print recall@1 and one answer; False if too few were right."""
    step = max(len(queries) // MAX_QUERIES, 1)
    asked = queries[::step]
    show(f"{len(asked)} queries over HTTP ...")
    right, predicted = 0, []
    for query in asked:
        hits = search(url, query.path, k=6)["hits"]
        wanted = query.product or query.key
        found = (others(query, hits) if query.product else hits)[:1]
        is_right = [wanted in (hit["key"], hit["attributes"].get("class")) for hit in found]
        right += any(is_right)
        predicted += [
            (hit["probability"], good)
            for hit, good in zip(found, is_right, strict=True)
            if hit["probability"] is not None
        ]
    show_one(url, asked[len(asked) // 3])
    recall = right / len(asked)
    show(f"recall@1: {100 * recall:.1f} % ({what(asked[0])})")
    if rendered and not probabilities_hold(url, predicted):  # own images are in the gallery
        return False
    if rendered and recall < MIN_RECALL:
        show(f"That is below {100 * MIN_RECALL:.0f} %: something is broken.")
        return False
    return rendered or recall >= (0.95 if asked[0].product is None else 0.01)


def verdict() -> str:
    """Whether the training of this demo helped, from its result."""
    result = json.loads((WORK / "run" / "result.json").read_text(encoding="utf-8"))
    return f"Training result. {result['verdict']}"


def probabilities_hold(url: str, predicted: list[tuple[float, bool]]) -> bool:
    """Print predicted and true precision of the best hits; whether they are close enough."""
    about = fetch(urllib.request.Request(f"{url}/galleries/demo"))
    if not predicted:
        show(f"No probabilities: {about['no_calibration']}")
        return False
    likely = sum(probability for probability, _ in predicted) / len(predicted)
    true = sum(good for _, good in predicted) / len(predicted)
    known = about["calibration"]
    show(
        f"Probability of the best hit: predicted {likely:.3f}, true {true:.3f} (source: "
        f"{known['source']}, {known['products']} products with {known['views']:.1f} images each)"
    )
    if abs(likely - true) > MAX_DOUBT:
        print(f"  They differ by more than {MAX_DOUBT}.")
        return False
    return True


def what(query: Query) -> str:
    """The meaning of recall@1 for such queries, in words."""
    if query.product is None:
        return "each image finds itself"
    if query.key is None:
        return "new views of products that the model was never trained on"
    return (
        "images of products that the model was never trained on, searched among all images; R@1 "
        "above was searched among these products only"
    )


def others(query: Query, hits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hits that are not the query itself."""
    return [hit for hit in hits if hit["key"] != query.key]


def show_one(url: str, query: Query) -> None:
    """Search with one query and print its top 5."""
    answer = search(url, query.path, k=6)
    show(f"top 5 for {query.path}")
    for rank, hit in enumerate(others(query, answer["hits"])[:5], start=1):
        print(f"  {rank}. {hit['score']:.3f}  {hit['key']}")
    if answer["cached"]:
        print("  answered from the cache")
        return
    print("  " + "  ".join(f"{k} {v:.1f} ms" for k, v in answer["timings_ms"].items()))


def view_of(row: dict[str, str]) -> int:
    """The number of a rendered view, from its file name."""
    return int(Path(row["path"]).stem)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="a folder of your own images")
    parser.add_argument("--bundle", type=Path, help="a model bundle to use instead of training")
    parser.add_argument("--weights", help="ImageNet weights of mobilenet_v2, as a file")
    parser.add_argument("--port", type=int, default=8000, help="port of the service [8000]")
    parser.add_argument("--check", action="store_true", help="exit instead of serving the page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
