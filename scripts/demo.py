"""A full demo as a user would run it: images, training, bundle, gallery, service, answers.

Uses only the public commands, and prints each one. Without arguments it renders a catalogue of
products and searches for products that the model was not trained on.

    make demo
    make demo IMAGES=/my/shop                 one sub-folder per product: trains on half of them
    make demo IMAGES=/my/photos               a flat folder: only a pretrained network
    make demo IMAGES=/my/photos BUNDLE=/my/bundle
    make demo IMAGES=/my/shop WEIGHTS=/my/mobilenet_v2.pth     without internet access
    make demo PORT=8001                       if another program uses port 8000

Or a public product data set as a shop, with its recall next to the paper's:

    make demo-inshop ROOT=/data/in-shop            In-Shop: its gallery and its queries
    make demo-sop ROOT=/data/Stanford_Online_Products    SOP: its test images, leave one out
    make demo-grocery ROOT=/data/GroceryStoreDataset/dataset   gallery: train split, queries: test

There an ImageNet trunk is exported and used as it is, unless BUNDLE=/my/bundle has a trained one;
the jobs `in-shop-*` and `sop-*` of `kinlens-train fit` train the models of the table. QUERIES=N
uses N queries, spread evenly.
"""

import argparse
import contextlib
import csv
import shlex
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kinlens.client import Client
from kinlens.commands.console import SKIPPED
from kinlens.embedder.errors import SourceError
from kinlens.errors import ClientError
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.values import AttributeValue

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import BIN, free_port, kinlens, started

MIN_CLASSES = 4  # half of them are held out, and a search needs more than one
MIN_RECALL = 0.6  # for the rendered products; guessing gives 0.04, a colour histogram 0.32
CHECKED_EPOCHS = 11  # of 14: two seeds reach 77 and 79 %; eight epochs 54 to 75, too near the bound
MAX_QUERIES = 400
MAX_DOUBT = 0.08  # between the mean probability of the best hits and the share of right ones
CLIENTS, SHOWN = 4, 3
UNFINISHED = "unfinished.txt"  # in the folder of a demo, with its options, until it has answers
Row = dict[str, str]


class DemoError(Exception):
    """An error that the user can fix; the message is one line."""


def main() -> int:
    options = _options()
    work = Path(".kinlens") / (options.name or "demo")
    work.mkdir(parents=True, exist_ok=True)
    if options.check:
        options.port = free_port()
    try:
        require_free(options.port)  # check this before the training, which takes minutes
        is_good = (data_set if options.name else catalogue)(options, work)
    except subprocess.CalledProcessError as error:
        show(f"error: {error.cmd[0].name} exited with {error.returncode}; its message is above.")
        return 1
    except (DemoError, ClientError, OSError) as error:
        show(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        show("Stopped. The same command continues from here.")
        return 130
    return 0 if is_good else 1


# A rendered catalogue, or the user's images


def catalogue(options: argparse.Namespace, work: Path) -> bool:
    """Train if possible, index and serve; whether enough searches were right."""
    is_rendered = options.images is None
    images = work / "products" if is_rendered else options.images
    shutil.rmtree(work / "gallery", ignore_errors=True)
    begin(options, work)
    bundle, queries = rendered(options, work) if is_rendered else own_images(options, work)
    if is_rendered:
        meaning, least = "of new views of products that the model was never trained on", MIN_RECALL
    elif "class" in queries[0]:
        meaning, least = "of products that the model was never trained on, among all images", 0.01
    else:
        meaning, least = "find themselves: indexing and search work", 0.95
    # The product of each rendered query is in the gallery.
    flags = ("--no-match-prior", "0") if is_rendered else ()
    with served(options, work, bundle, *flags) as client:
        found = asked(client, images, spread(queries, MAX_QUERIES), k=2)
        show_example(client, images, queries[len(queries) // 3])
        recall = share_within(found, 1)
        if "class" in queries[0]:
            show(f"For {100 * recall:.1f} % {meaning}, the first answer is right.")
        else:
            show(
                f"{sum(answer.rank == 1 for answer in found):,} of {len(found):,} photos {meaning}."
            )
        (work / UNFINISHED).unlink(missing_ok=True)
        if recall < least:
            show(f"That is below {100 * least:.0f} %: something is broken.")
        if not is_rendered and "class" in queries[0]:
            suggest_network(options, work)
        # Own images are in the gallery, so their probabilities mean little.
        return recall >= least and (not is_rendered or judged(client, found))


def begin(options: argparse.Namespace, work: Path) -> None:
    """Keep what an interrupted demo of the same images left; put aside that of any other."""
    task = repr((options.images, options.bundle, options.weights, options.check))
    file = work / UNFINISHED
    if file.exists() and file.read_text(encoding="utf-8") == task:
        show("The previous demo was stopped; this one continues it.")
        return
    for name in ("run", "bundle"):
        emptied(work / name)
    file.write_text(task, encoding="utf-8")


def rendered(options: argparse.Namespace, work: Path) -> tuple[Path, list[Row]]:
    """Render, train, export; index half of the views of unseen products, query the other half."""
    run, bundle = work / "run", work / "bundle"
    if not (run / "result.json").exists():
        resume = ("--resume",) if (run / "checkpoint.pt").exists() else ()
        shorter = ("--set", f"optimizer.epochs={CHECKED_EPOCHS}") if options.check else ()
        kinlens("train", "fit", "demo", "--out", run, *shorter, *resume)
    if not bundle.exists():
        kinlens("train", "export", run, "--map", "--out", bundle)
    halves: tuple[list[Row], list[Row]] = ([], [])
    for row in read_list(run / "test.csv"):
        halves[int(Path(row["path"]).stem) % 2].append(row)
    build(work, bundle, work / "products", halves[0])
    return bundle, halves[1]


def own_images(options: argparse.Namespace, work: Path) -> tuple[Path, list[Row]]:
    """Train on half of the user's classes if there are enough; index everything."""
    images, bundle = options.images, options.bundle
    classes = trainable(images)
    unseen: list[Row] = []
    if bundle is None and len(classes) >= MIN_CLASSES:
        run, bundle = work / "run", work / "bundle"
        weights = ("--weights", options.weights) if options.weights else ()
        places = ("--data", images, "--run", run, "--out", bundle)
        if not bundle.exists():
            kinlens("train", "adapt", *places, "--map", *weights)
        unseen = read_list(run / "test.csv")
    elif bundle is None:
        found = f"only {len(classes)}" if classes else "no"
        show(
            f"{images} has {found} sub-folders with 2 images or more. A training needs "
            f"{MIN_CLASSES}, so a pretrained network is used as it is."
        )
        bundle = pretrained(work, options.weights)
    build(work, bundle, images)
    with contextlib.closing(Gallery.open(work / "gallery")) as gallery:  # no damaged files
        every = [{"key": item.key, "path": item.key} for item in gallery.items()]
    return bundle, [row | {"key": row["path"]} for row in unseen] or every


def show_example(client: Client, images: Path, row: Row) -> None:
    """Print the five best hits that are not the query itself, unless it should find itself."""
    path, own = images / row["path"], row.get("key") if "class" in row else None
    show(f"top 5 for {path}")
    hits = [hit for hit in client.search(path, k=6).hits if hit.key != own][:5]
    for rank, hit in enumerate(hits, start=1):
        print(f"  {rank}. {hit.score:.3f}  {hit.key}")


def suggest_network(options: argparse.Namespace, work: Path) -> None:
    """Print the command of the longer training, whose report has a table of both."""
    settings = [f"data.root={options.images}"]
    settings += [f"model.weights={options.weights}"] if options.weights else []
    words = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
    show("Training the whole network gains more: ten minutes for up to 1,200 images.")
    print(f"  kinlens-train fit shop {words} --out {work / 'network'}")


def trainable(images: Path) -> set[AttributeValue]:
    """The classes that are large enough to train on."""
    try:
        source = folder_source(images)
    except SourceError as error:
        raise DemoError(f"IMAGES={images}: {error}") from error
    sizes = Counter(r.attributes["class"] for r in source.records() if r.attributes)
    return {name for name, size in sizes.items() if size > 1}


def judged(client: Client, answers: "list[Answer]") -> bool:
    """Print predicted and true precision of the best hits; whether they are close enough."""
    about = client.gallery("demo")
    predicted = [(a.probability, a.rank == 1) for a in answers if a.probability is not None]
    if not predicted or about.calibration is None:
        show(f"No probabilities: {about.no_calibration}")
        return False
    likely, true = (sum(column) / len(predicted) for column in zip(*predicted, strict=True))
    show(
        f"Probability of the best hit: predicted {likely:.3f}, true {true:.3f} (source: "
        f"{about.calibration.source}, {about.calibration.products} products with "
        f"{about.calibration.views:.1f} images each)"
    )
    if abs(likely - true) > MAX_DOUBT:
        print(f"  They differ by more than {MAX_DOUBT}.")
    return abs(likely - true) <= MAX_DOUBT


# A public data set


@dataclass(frozen=True)
class DataSet:
    """How its lists are made, the k of recall@k, and published figures."""

    title: str
    lists: Callable[[Path, Path, bool], tuple[Path, list[Row], list[Row]]]
    recall_at: tuple[int, ...]
    published: Sequence[tuple[str, Sequence[float]]] = ()
    source: str = ""


def official(
    folders: tuple[str, ...], root: Path, work: Path, partial_: bool
) -> tuple[Path, list[Row], list[Row]]:
    """Lists of an official data set; `folders` are the attributes of a path's folders, in order."""

    def named(rows: list[Row]) -> list[Row]:
        parts = (zip(folders, Path(row["path"]).parts, strict=False) for row in rows)
        values = ({name: part.removesuffix("_final") for name, part in p if name} for p in parts)
        return [row | more for row, more in zip(rows, values, strict=True)]

    flag = ("--allow-partial",) if partial_ else ()
    kinlens("train", "data", "split", root, "--out", work / "lists", *flag)
    queries = read_list(work / "lists/test.csv")
    gallery_list = work / "lists/gallery.csv"
    gallery = read_list(gallery_list) if gallery_list.is_file() else queries
    images = next(p for p in (root / "Img", root) if (p / queries[0]["path"]).is_file())
    return images, named(gallery), named(queries)


def grocery(root: Path, _work: Path, _partial: bool) -> tuple[Path, list[Row], list[Row]]:
    """The train split as gallery, the test split as queries; the folders have the names."""

    def rows(part: str) -> list[Row]:
        lines = (root / f"{part}.txt").read_text(encoding="utf-8").splitlines()
        paths = [Path(line.split(",")[0]) for line in lines]
        return [
            {"key": str(p), "path": str(p), "class": p.parent.name, "shelf": p.parts[1]}
            for p in paths
        ]

    return root, rows("train"), rows("test")


DATA_SETS = {
    "in-shop": DataSet(
        "In-Shop Clothes Retrieval",
        partial(official, ("", "department", "category")),
        (1, 10, 20, 40),
        (
            ("MS 512", (89.7, 97.9, 98.5, 99.1)),
            ("Proxy-Anchor 512", (91.5, 98.1, 98.8, 99.1)),
            ("Determinant regularization 512", (91.5, 98.2, 98.7, 99.1)),
        ),
        "Determinant Regularization for Deep Metric Learning, table 3, whose last two columns are "
        "R@20 and R@40 in the papers that it cites",
    ),
    "sop": DataSet(
        "Stanford Online Products",
        partial(official, ("category",)),
        (1, 10, 100, 1000),
        (
            ("MS 512", (78.2, 90.5, 96.0, 98.7)),
            ("Proxy-Anchor 512", (79.1, 90.8, 96.2, 98.7)),
            ("Determinant regularization 512", (79.0, 90.7, 96.1, 98.7)),
        ),
        "Determinant Regularization for Deep Metric Learning, table 2",
    ),
    "grocery": DataSet("Grocery Store", grocery, (1, 5, 10)),
}


def data_set(options: argparse.Namespace, work: Path) -> bool:
    """Index and serve the data set, and print its recall; whether it is above chance."""
    data, root = DATA_SETS[options.name], options.root
    if root is None or not root.is_dir():
        raise DemoError(f"ROOT={root} is not a folder. Give the folder of {data.title}.")
    bundle = options.bundle or pretrained(work, options.weights)
    images, gallery, queries = data.lists(root, work, options.allow_partial)
    build(work, bundle, images, gallery)
    some = spread(queries, options.queries or len(queries))
    with served(options, work, bundle) as client:
        answers = asked(client, images, some, max(data.recall_at) + 1)
        recalls = [100 * share_within(answers, k) for k in data.recall_at]
        rows = [*data.published, (f"this run ({bundle})", recalls)]
        show(f"{data.title}: recall in percent")
        width = max(len(name) for name, _ in rows)
        print(f"{'':{width}}" + "".join(f"{f'R@{k}':>9}" for k in data.recall_at))
        for name, values in rows:
            print(f"{name:{width}}" + "".join(f"{value:9.1f}" for value in values))
        if data.source:
            print(f"Published: {data.source}.")
        if options.allow_partial or len(some) < len(queries):
            print("This run used a part of the data set, so its figures are not comparable.")
        show("Click an item on the page, or drop one of these query images on it:")
        for row in spread(queries, SHOWN):
            print((images / row["path"]).resolve())
    [(largest, _)] = Counter(row["class"] for row in gallery).most_common(1)
    chance = 100 * sum(row["class"] == largest for row in queries) / len(queries)
    if recalls[0] <= chance:
        show(f"Recall is not above chance ({chance:.1f} %): something is broken.")
    return recalls[0] > chance


# Queries


class Answer(NamedTuple):
    """The rank of the first right hit, from 1, and the probability of the best hit."""

    rank: float
    probability: float | None


def asked(client: Client, images: Path, queries: list[Row], k: int) -> list[Answer]:
    """Send queries over HTTP.

    A hit of the query's class is right, and the query itself is ignored; without a class, the query
    must find itself.
    """
    show(f"{len(queries):,} queries over HTTP ...")

    def ask(row: Row) -> Answer:
        hits = client.search(images / row["path"], k=k).hits
        if "class" in row:
            hits = [hit for hit in hits if hit.key != row.get("key")]
        right = [
            hit.attributes.get("class") == row["class"] if "class" in row else hit.key == row["key"]
            for hit in hits
        ]
        rank = right.index(True) + 1 if True in right else float("inf")
        return Answer(rank, hits[0].probability if hits else None)

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = []
        for number, answer in enumerate(pool.map(ask, queries), 1):
            answers.append(answer)
            if number % 1_000 == 0:
                print(f"{number:,} of {len(queries):,}", flush=True)
    return answers


def share_within(answers: list[Answer], k: int) -> float:
    """Recall@k: the share of queries with a right hit among the first k."""
    return sum(answer.rank <= k for answer in answers) / len(answers)


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` rows, evenly spread."""
    return [rows[i * len(rows) // most] for i in range(most)] if most < len(rows) else rows


# The commands


def pretrained(work: Path, weights: str | None) -> Path:
    """A pretrained network, without further training, as a bundle."""
    bundle = emptied(work / "bundle")
    chosen = ("--weights", weights) if weights else ()
    kinlens("train", "export", "--backbone", "mobilenet_v2", *chosen, "--map", "--out", bundle)
    return bundle


def emptied(path: Path) -> Path:
    """The path, without what the previous demo left there: that is now NAME-before."""
    before = path.with_name(f"{path.name}-before")
    if path.exists():
        shutil.rmtree(before, ignore_errors=True)
        path.rename(before)
    return path


def build(work: Path, bundle: Path, images: Path, listed: list[Row] | None = None) -> None:
    """Index all images or those of a list; an interrupted build of the same list is resumed."""
    source: tuple[object, ...] = (images,)
    if listed is not None:
        with (work / "gallery.csv").open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(listed[0]))
            writer.writeheader()
            writer.writerows(listed)
        source += "--csv", work / "gallery.csv"
    place = ("--out", work / "gallery", "--name", work.name)
    kinlens("index", "build", *source, "--bundle", bundle, *place, accepted=(0, SKIPPED))


@contextlib.contextmanager
def served(options: argparse.Namespace, work: Path, bundle: Path, *flags: str) -> Iterator[Client]:
    """A client of the service, which stays open after the block until Ctrl-C, unless --check."""
    require_free(options.port)
    words = ["--bundle", bundle, "--gallery", f"{work.name}={work / 'gallery'}", *flags]
    words += ["--state", work / "state", "--port", options.port, "--log-level", "warning"]
    command = [BIN / "kinlens-serve", *map(str, words)]
    print(f"\n$ kinlens-serve {shlex.join(command[1:])}", flush=True)
    with started(command, options.port, is_quiet=False) as server:
        with Client(server.url) as client:
            yield client
        if not options.check:
            show(f"The page is open at {server.url}/ until you press Ctrl-C.")
            with contextlib.suppress(KeyboardInterrupt):
                server.process.wait()


def require_free(port: int) -> None:
    """Raises: DemoError if something listens on the port."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise DemoError(
                f"Port {port} is in use. Stop that program, or choose another port: PORT=8001 "
                "with make, --port 8001 without."
            )


def read_list(path: Path) -> list[Row]:
    """Rows of a list."""
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def show(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=DATA_SETS, help="a public data set")
    parser.add_argument("--root", type=Path, help="folder of the data set")
    parser.add_argument("--images", type=Path, help="a folder of your own images")
    parser.add_argument("--bundle", type=Path, help="a model bundle to use instead of training")
    parser.add_argument("--weights", help="ImageNet weights of mobilenet_v2, as a file")
    parser.add_argument("--queries", type=int, help="number of queries of a data set [all]")
    parser.add_argument("--allow-partial", action="store_true", help="accept a partial data set")
    parser.add_argument("--port", type=int, default=8000, help="port of the service [8000]")
    parser.add_argument("--check", action="store_true", help="exit instead of serving the page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
