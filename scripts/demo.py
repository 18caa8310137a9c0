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
import json
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from kinlens.client import Client
from kinlens.embedder.errors import SourceError
from kinlens.errors import ClientError
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.models import HitModel
from kinlens.values import AttributeValue

BIN = Path(sys.executable).parent
READY_S = 180
MIN_RECALL = 0.6  # for the rendered products; guessing gives 0.04, a colour histogram 0.32
MAX_QUERIES = 400
MAX_DOUBT = 0.08  # between the mean probability of the best hits and the share of right ones
MIN_CLASSES = 4  # half of them are held out, and a search needs more than one
CLIENTS, SHOWN, PRODUCT_QUERIES = 4, 3, 1000
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
    except (DemoError, ClientError) as error:
        show(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        show("Stopped before completion.")
        return 130
    return 0 if is_good else 1


# A rendered catalogue, or the user's images


@dataclass(frozen=True)
class Query:
    """An image to send; `product` is the expected first answer, if known."""

    path: Path
    key: str | None = None
    product: str | None = None

    @property
    def meaning(self) -> str:
        """The meaning of recall@1 for such queries, in words."""
        if self.product is None:
            return "each image finds itself"
        if self.key is None:
            return "new views of products that the model was never trained on"
        return (
            "images of products that the model was never trained on, searched among all images; "
            "R@1 above was searched among these products only"
        )

    def best_of(self, client: Client) -> list[HitModel]:
        """The five best hits that are not the query itself, unless it should find itself."""
        own = self.key if self.product else None
        return [hit for hit in client.search(self.path, k=6).hits if hit.key != own][:5]


def catalogue(options: argparse.Namespace, work: Path) -> bool:
    """Train if possible, index and serve; whether enough searches were right."""
    is_rendered = options.images is None
    bundle, queries = rendered(work) if is_rendered else own_images(options, work)
    # The product of each rendered query is in the gallery.
    flags = ("--no-match-prior", "0") if is_rendered else ()
    with served(options, work, bundle, *flags) as client:
        is_good = asked(client, queries, is_rendered)
        if queries[0].product is not None:
            result = json.loads((work / "run/result.json").read_text(encoding="utf-8"))
            show(f"Training result. {result['verdict']}")
        if queries[0].product is not None and not is_rendered:
            settings = [f"data.root={options.images}"]
            settings += [f"model.weights={options.weights}"] if options.weights else []
            words = " ".join(f"--set {shlex.quote(setting)}" for setting in settings)
            show("Training the whole network gains more: ten minutes for up to 1,200 images.")
            print(f"  kinlens-train fit shop {words} --out runs/shop")
    return is_good


def rendered(work: Path) -> tuple[Path, list[Query]]:
    """Render, train, export; index half of the views of unseen products, query the other half."""
    bundle, products = trained(work, "demo"), work / "products"
    halves: tuple[list[Row], list[Row]] = ([], [])
    for row in read_list(work / "run/test.csv"):
        halves[int(Path(row["path"]).stem) % 2].append(row)
    shutil.rmtree(work / "gallery", ignore_errors=True)
    build(work, bundle, products, halves[0])
    return bundle, [Query(products / row["path"], product=row["class"]) for row in halves[1]]


def own_images(options: argparse.Namespace, work: Path) -> tuple[Path, list[Query]]:
    """Train on the user's classes if there are enough; index everything."""
    images, bundle = options.images, options.bundle
    classes = trainable(images)
    unseen: list[Row] = []
    if bundle is None and len(classes) >= MIN_CLASSES:
        weights = ("--set", f"model.weights={options.weights}") if options.weights else ()
        bundle = trained(work, "adapt", "--set", f"data.root={images}", *weights)
        unseen = read_list(work / "run/test.csv")
    elif bundle is None:
        found = f"only {len(classes)}" if classes else "no"
        show(
            f"{images} has {found} sub-folders with 2 images or more. A training needs "
            f"{MIN_CLASSES}, so a pretrained network is used as it is."
        )
        bundle = pretrained(work, options.weights)
    shutil.rmtree(work / "gallery", ignore_errors=True)
    build(work, bundle, images)
    if unseen:
        return bundle, [Query(images / r["path"], r["path"], r["class"]) for r in unseen]
    with contextlib.closing(Gallery.open(work / "gallery")) as gallery:  # no damaged files
        return bundle, [Query(images / item.key, item.key) for item in gallery.items()]


def trainable(images: Path) -> set[AttributeValue]:
    """The classes that are large enough to train on."""
    try:
        source = folder_source(images)
    except SourceError as error:
        raise DemoError(f"IMAGES={images}: {error}") from error
    sizes = Counter(r.attributes["class"] for r in source.records() if r.attributes)
    return {name for name, size in sizes.items() if size > 1}


def asked(client: Client, queries: list[Query], is_rendered: bool) -> bool:
    """Send queries, print recall@1 and one answer; False if too few were right."""
    some = queries[:: max(len(queries) // MAX_QUERIES, 1)]
    show(f"{len(some)} queries over HTTP ...")
    right, predicted = 0, []
    for query in some:
        for hit in query.best_of(client)[:1]:
            is_right = (query.product or query.key) in (hit.key, hit.attributes.get("class"))
            right += is_right
            if hit.probability is not None:
                predicted.append((hit.probability, is_right))
    example = some[len(some) // 3]
    show(f"top 5 for {example.path}")
    for rank, hit in enumerate(example.best_of(client), start=1):
        print(f"  {rank}. {hit.score:.3f}  {hit.key}")
    recall, probabilities_hold = right / len(some), True
    show(f"recall@1: {100 * recall:.1f} % ({some[0].meaning})")
    if is_rendered:  # own images are in the gallery, so their probabilities mean little
        probabilities_hold = judged(client, predicted)
    least = MIN_RECALL if is_rendered else 0.95 if some[0].product is None else 0.01
    if recall < least:
        show(f"That is below {100 * least:.0f} %: something is broken.")
    return recall >= least and probabilities_hold


def judged(client: Client, predicted: list[tuple[float, bool]]) -> bool:
    """Print predicted and true precision of the best hits; whether they are close enough."""
    about = client.gallery("demo")
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
    """How its lists are made, the k of recall@k, and published figures.

    `leave_one_out`: the queries are in the gallery, and are ignored in their own answers.
    """

    title: str
    lists: Callable[[Path, Path, bool], tuple[Path, list[Row], list[Row]]]
    recall_at: tuple[int, ...]
    published: Sequence[tuple[str, Sequence[float]]] = ()
    source: str = ""
    leave_one_out: bool = False


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
    return images, named([row | {"product": row["class"]} for row in gallery]), named(queries)


def grocery(root: Path, _work: Path, _partial: bool) -> tuple[Path, list[Row], list[Row]]:
    """The train split as gallery, the test split as queries, with the names of the classes."""
    lacking = [n for n in ("classes.csv", "train.txt", "test.txt") if not (root / n).is_file()]
    if lacking:
        raise DemoError(f"ROOT={root} is not the Grocery Store data set: it lacks {lacking[0]}.")
    names = {row["Class ID (int)"]: row for row in read_list(root / "classes.csv")}

    def rows(part: str) -> list[Row]:
        found = []
        with (root / f"{part}.txt").open(newline="", encoding="utf-8") as stream:
            for path, fine, _ in csv.reader(stream, skipinitialspace=True):
                known = names[fine.strip()]
                labels = {
                    "class": known["Class Name (str)"],
                    "kind": known["Coarse Class Name (str)"],
                    "shelf": Path(path).parts[1],
                }
                found.append({"key": path, "path": path, **labels})
        return found

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
        leave_one_out=True,
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
    most = options.queries or len(queries)
    with served(options, work, bundle) as client:
        measure = partial(recall_of, client, data, images, queries)
        rows = [*data.published, (f"this run ({bundle})", measure(most))]
        if "product" in gallery[0]:  # k counts products
            groups = measure(min(most, PRODUCT_QUERIES), group_by="product", group_size=2)
            rows.append(("this run, products", groups))
        show(f"{data.title}: recall in percent")
        width = max(len(name) for name, _ in rows)
        print(f"{'':{width}}" + "".join(f"{f'R@{k}':>9}" for k in data.recall_at))
        for name, values in rows:
            print(f"{name:{width}}" + "".join(f"{value:9.1f}" for value in values))
        if data.source:
            print(f"Published: {data.source}.")
        if options.allow_partial or most < len(queries):
            print("This run used a part of the data set, so its figures are not comparable.")
        show("Click an item on the page, or drop one of these query images on it:")
        for row in spread(queries, SHOWN):
            print((images / row["path"]).resolve())
    [(largest, _)] = Counter(row["class"] for row in gallery).most_common(1)
    chance = 100 * sum(row["class"] == largest for row in queries) / len(queries)
    is_above = rows[len(data.published)][1][0] > chance
    if not is_above:
        show(f"Recall is not above chance ({chance:.1f} %): something is broken.")
    return is_above


def recall_of(
    client: Client, data: DataSet, images: Path, queries: list[Row], most: int, **fields: Any
) -> list[float]:
    """Recall@k in percent: the share of queries with an image of their class among k hits."""
    some, k = spread(queries, most), max(data.recall_at) + data.leave_one_out
    show(f"{len(some):,} of {len(queries):,} queries over HTTP ...")

    def rank(row: Row) -> float:
        """The rank of the first right hit, from 1, ignoring the query itself."""
        answer = client.search(images / row["path"], k=k, **fields)
        # For the query's product its best other image counts, which may rank lower.
        groups = [[hit] for hit in answer.hits] if answer.groups is None else [
            group.hits for group in answer.groups
        ]  # fmt: skip
        others = ([hit for hit in hits if hit.key != row["key"]] for hits in groups)
        best = sorted((hits[0] for hits in others if hits), key=lambda hit: -hit.score)
        classes = [hit.attributes["class"] for hit in best]
        return classes.index(row["class"]) + 1 if row["class"] in classes else float("inf")

    with ThreadPoolExecutor(CLIENTS) as pool:
        ranks = []
        for number, found in enumerate(pool.map(rank, some), 1):
            ranks.append(found)
            if number % 1_000 == 0:
                print(f"{number:,} of {len(some):,}", flush=True)
    return [100 * sum(rank <= at for rank in ranks) / len(some) for at in data.recall_at]


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` rows, evenly spread."""
    return [rows[i * len(rows) // most] for i in range(most)] if most < len(rows) else rows


# The commands


def kinlens(command: str, *arguments: object) -> None:
    """Print and run one of the three commands."""
    words = [str(argument) for argument in arguments]
    print(f"\n$ kinlens-{command} {shlex.join(words)}", flush=True)
    code = subprocess.run([BIN / f"kinlens-{command}", *words], check=False).returncode
    if code:
        raise DemoError(f"kinlens-{command} exited with status {code}; its message is above.")


def trained(work: Path, job: str, *changes: str) -> Path:
    """The bundle of a new run of a job."""
    shutil.rmtree(work / "run", ignore_errors=True)
    kinlens("train", "fit", job, "--out", work / "run", *changes)
    return exported(work, work / "run")


def pretrained(work: Path, weights: str | None) -> Path:
    """A pretrained network, without further training, as a bundle."""
    chosen = ("--weights", weights) if weights else ()
    return exported(work, "--backbone", "mobilenet_v2", *chosen)


def exported(work: Path, *source: object) -> Path:
    """A new bundle; the previous one is kept next to it until the next export."""
    bundle, made, former = (work / f"bundle{end}" for end in ("", "-new", "-before"))
    shutil.rmtree(made, ignore_errors=True)
    kinlens("train", "export", *source, "--map", "--out", made)
    if bundle.exists():
        shutil.rmtree(former, ignore_errors=True)
        bundle.rename(former)
        show(f"The previous bundle is now {former}.")
    made.rename(bundle)
    show(f"The bundle of this demo is {bundle}.")
    return bundle


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
    kinlens("index", "build", *source, "--bundle", bundle, *place)


@contextlib.contextmanager
def served(options: argparse.Namespace, work: Path, bundle: Path, *flags: str) -> Iterator[Client]:
    """A client of the service, which stays open after the block until Ctrl-C, unless --check."""
    gallery = f"{work.name}={work / 'gallery'}"
    state = str(work / "state")
    words = ("--bundle", str(bundle), "--gallery", gallery, "--state", state, *flags)
    server, url = serve(options.port, *words), f"http://127.0.0.1:{options.port}"
    try:
        with Client(url) as client:
            yield client
        if not options.check:
            show(f"The page is open at {url}/ until you press Ctrl-C.")
            with contextlib.suppress(KeyboardInterrupt):
                server.wait()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(timeout=30)


def serve(port: int, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start the service and wait until it is ready."""
    require_free(port)
    arguments = (*arguments, "--port", str(port), "--log-level", "warning")
    print(f"\n$ kinlens-serve {shlex.join(arguments)}", flush=True)
    server = subprocess.Popen([BIN / "kinlens-serve", *arguments])
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise DemoError("kinlens-serve did not start; its message is above.")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=30).status_code == 200:
                return server
        time.sleep(0.2)
    server.kill()
    raise DemoError(f"kinlens-serve was not ready after {READY_S} s.")


def require_free(port: int) -> None:
    """Raises: DemoError if something listens on the port."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise DemoError(
                f"Port {port} is in use. Stop that program, or choose another port: PORT=8001 "
                "with make, --port 8001 without."
            )


def free_port() -> int:
    """A port that no process uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
