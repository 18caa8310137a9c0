"""The whole road, as a user would walk it: images, training, bundle, gallery, service, answers.

Runs only the commands that anyone can type, and prints each. Without arguments it draws a catalogue
of products and searches among products that the model has never seen.

    make demo
    make demo IMAGES=/my/shop                 one sub-folder per product: trains on half of them
    make demo IMAGES=/my/photos               a flat folder: a pretrained network alone
    make demo IMAGES=/my/photos BUNDLE=/my/bundle
    make demo IMAGES=/my/shop WEIGHTS=/my/mobilenet_v2.pth     without a network
    make demo PORT=8001                       where another program has port 8000
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
    show,
    search,
    served,
    write_list,
)

from kinlens.embedder.errors import SourceError
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.values import AttributeValue

WORK = Path(".kinlens/demo")
MIN_RECALL = 0.6  # of the rendered products; guessing gives 0.04, a colour histogram 0.32
MAX_QUERIES = 400
MAX_DOUBT = 0.08  # between what the best hits say, on average, and how many are right
MIN_CLASSES = 4  # half of them are held out, and a search needs more than one


@dataclass(frozen=True)
class Query:
    """An image to send; `product` is what the first answer should be, if that is known."""

    path: Path
    key: str | None = None
    product: str | None = None


def main() -> int:
    options = _options()
    started = time.monotonic()
    WORK.mkdir(parents=True, exist_ok=True)
    port = free_port() if options.check else options.port
    try:
        require_free(port)  # before the minutes that a training takes
        if options.images is None:
            bundle, queries = rendered_products()
        else:
            bundle, queries = own_images(options.images, options.bundle, options.weights)
        places = ("--bundle", str(bundle), "--gallery", f"demo={WORK / 'gallery'}")
        if options.images is None:  # every query's product is in the gallery
            places += ("--no-match-prior", "0")
        with served(port, *places, "--state", str(WORK / "state")) as server:
            passed = ask(f"http://127.0.0.1:{port}", queries, options.images is None)
            if queries[0].product is not None:
                show(verdict())
            show(f"The whole road took {time.monotonic() - started:.0f} s.")
            if queries[0].key is not None and queries[0].product is not None:
                settings = [f"data.root={options.images}"]
                settings += [f"model.weights={options.weights}"] if options.weights else []
                words = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
                show("The whole network gains more, in ten minutes up to 1,200 photographs:")
                print(f"  kinlens-train fit shop {words} --out runs/shop")
            if not options.check:
                keep_open(server, port)
    except DemoError as error:
        show(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        show("Stopped before the end.")
        return 130
    return 0 if passed else 1


def rendered_products() -> tuple[Path, list[Query]]:
    """Draw, train, export; index half of the views of unseen products, ask with the other half."""
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
    """Train on the user's classes if there are any; index everything."""
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
            f"{MIN_CLASSES}, so a pretrained network is used without one."
        )
        bundle = WORK / "bundle"
        export(bundle, "--backbone", "mobilenet_v2", *(["--weights", weights] if weights else []))
    build(bundle, images)
    if unseen:
        return bundle, [Query(images / r["path"], r["path"], r["class"]) for r in unseen]
    with contextlib.closing(Gallery.open(WORK / "gallery")) as gallery:  # it lacks damaged files
        return bundle, [Query(images / item.key, item.key) for item in gallery.items()]


def trainable(images: Path) -> set[AttributeValue]:
    """The classes that can be trained on."""
    try:
        source = folder_source(images)
    except SourceError as error:
        raise DemoError(f"IMAGES={images}: {error}") from error
    sizes = Counter(r.attributes["class"] for r in source.records() if r.attributes)
    return {name for name, size in sizes.items() if size > 1}


def train(job: str, run: Path, bundle: Path, *changes: str) -> None:
    """Fit a job into a fresh run folder and export it."""
    shutil.rmtree(run, ignore_errors=True)
    kinlens("train", "fit", job, "--out", str(run), *changes)
    export(bundle, str(run))


def export(bundle: Path, *source: str) -> None:
    """Export a bundle; the one of the demo before is then kept beside it until the next."""
    made = bundle.with_name(f"{bundle.name}-new")
    shutil.rmtree(made, ignore_errors=True)
    kinlens("train", "export", *source, "--map", "--out", str(made))
    if bundle.exists():
        former = bundle.with_name(f"{bundle.name}-before")
        shutil.rmtree(former, ignore_errors=True)
        bundle.rename(former)
        show(f"The bundle of the demo before is now {former}.")
    made.rename(bundle)
    show(f"The bundle of this demo is {bundle}.")


def build(bundle: Path, images: Path, *source: str) -> None:
    """Index images into a fresh gallery."""
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
    right, said = 0, []
    for query in asked:
        hits = search(url, query.path, k=6)["hits"]
        wanted = query.product or query.key
        found = (others(query, hits) if query.product else hits)[:1]
        is_right = [wanted in (hit["key"], hit["attributes"].get("class")) for hit in found]
        right += any(is_right)
        said += [
            (hit["probability"], good)
            for hit, good in zip(found, is_right, strict=True)
            if hit["probability"] is not None
        ]
    show_one(url, asked[len(asked) // 3])
    recall = right / len(asked)
    show(f"recall@1: {100 * recall:.1f} % ({what(asked[0])})")
    if rendered and not probabilities_hold(url, said):  # own images are in the gallery themselves
        return False
    if rendered and recall < MIN_RECALL:
        show(f"That is below {100 * MIN_RECALL:.0f} %: something is broken.")
        return False
    return rendered or recall >= (0.95 if asked[0].product is None else 0.01)


def verdict() -> str:
    """Whether the training of this demo helped."""
    result = json.loads((WORK / "run" / "result.json").read_text(encoding="utf-8"))
    return f"The training. {result['verdict']}"


def probabilities_hold(url: str, said: list[tuple[float, bool]]) -> bool:
    """Print what the best hits said and what was true; whether both are near enough."""
    about = fetch(urllib.request.Request(f"{url}/galleries/demo"))
    if not said:
        show(f"No probabilities: {about['no_calibration']}")
        return False
    likely = sum(probability for probability, _ in said) / len(said)
    true = sum(good for _, good in said) / len(said)
    known = about["calibration"]
    show(
        f"Probability of the best hit: said {likely:.3f}, true {true:.3f} (source: "
        f"{known['source']}, {known['products']} products with {known['views']:.1f} images each)"
    )
    if abs(likely - true) > MAX_DOUBT:
        print(f"  They differ by more than {MAX_DOUBT}.")
        return False
    return True


def what(query: Query) -> str:
    """What recall@1 means for such queries, in words."""
    if query.product is None:
        return "each image finds itself"
    if query.key is None:
        return "new views of products that the model was never trained on"
    return (
        "photographs of products that the model was never trained on, searched among all "
        "photographs; R@1 above was searched among these products alone"
    )


def others(query: Query, hits: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The hits that are not the query itself."""
    return [hit for hit in hits if hit["key"] != query.key]


def show_one(url: str, query: Query) -> None:
    """Print the top 5 of one query."""
    answer = search(url, query.path, k=6)
    show(f"top 5 for {query.path}")
    for rank, hit in enumerate(others(query, answer["hits"])[:5], start=1):
        print(f"  {rank}. {hit['score']:.3f}  {hit['key']}")
    if answer["cached"]:
        print("  answered from the cache")
        return
    print("  " + "  ".join(f"{k} {v:.1f} ms" for k, v in answer["timings_ms"].items()))


def view_of(row: dict[str, str]) -> int:
    """The number of a rendered view: its file name."""
    return int(Path(row["path"]).stem)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=Path, help="a folder of your own images")
    parser.add_argument("--bundle", type=Path, help="a model bundle to use instead of training")
    parser.add_argument("--weights", help="ImageNet weights of mobilenet_v2, as a file")
    parser.add_argument("--port", type=int, default=8000, help="port of the service [8000]")
    parser.add_argument("--check", action="store_true", help="end with exit code 0 or 1")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
