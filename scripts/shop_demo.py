"""A public product data set as a shop: gallery, page, sample queries, recall next to the paper's.

    make demo-inshop ROOT=/data/in-shop            In-Shop: its gallery and its queries
    make demo-sop ROOT=/data/Stanford_Online_Products    SOP: its test images, leave one out
    make demo-grocery ROOT=/data/GroceryStoreDataset/dataset   gallery: train split, queries: test

By default an ImageNet trunk is exported and used as it is (WEIGHTS=/my/mobilenet_v2.pth if it
cannot be downloaded). BUNDLE=/my/bundle uses a trained one; the jobs `in-shop-*` and `sop-*` of
`kinlens-train fit` train the models of the table. QUERIES=N uses N queries, spread evenly.
"""

import argparse
import csv
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_steps import (
    DemoError,
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

CLIENTS = 4
SHOWN = 3
PRODUCT_QUERIES = 1000
Row = dict[str, str]
Published = Sequence[tuple[str, Sequence[float]]]
Recall = dict[int, float]


@dataclass(frozen=True)
class Demo:
    """A data set: how its lists are made, the k of recall@k, and published figures.

    `leave_one_out`: the queries are in the gallery, and are ignored in their own answers.
    """

    title: str
    lists: Callable[[Path, Path, bool], tuple[Path, list[Row], list[Row]]]
    recall_at: tuple[int, ...]
    published: Published = ()
    source: str = ""
    leave_one_out: bool = False


def official(folders: tuple[str, ...]) -> Callable[..., tuple[Path, list[Row], list[Row]]]:
    """Lists of an official data set; `folders` are the attributes of a path's folders, in order."""

    def lists(root: Path, work: Path, partial: bool) -> tuple[Path, list[Row], list[Row]]:
        flag = ("--allow-partial",) if partial else ()
        kinlens("train", "data", "split", str(root), "--out", str(work / "lists"), *flag)
        queries = read_list(work / "lists" / "test.csv")
        gallery_list = work / "lists" / "gallery.csv"
        gallery = read_list(gallery_list) if gallery_list.is_file() else queries
        images = next(p for p in (root / "Img", root) if (p / queries[0]["path"]).is_file())
        products = [row | {"product": row["class"]} for row in named(gallery, folders)]
        return images, products, named(queries, folders)

    return lists


def grocery(root: Path, _work: Path, _partial: bool) -> tuple[Path, list[Row], list[Row]]:
    """The train split as gallery, the test split as queries, with the names of the classes."""
    lacking = [n for n in ("classes.csv", "train.txt", "test.txt") if not (root / n).is_file()]
    if lacking:
        raise DemoError(f"ROOT={root} is not the Grocery Store data set: it lacks {lacking[0]}.")
    with (root / "classes.csv").open(newline="", encoding="utf-8") as stream:
        names = {row["Class ID (int)"]: row for row in csv.DictReader(stream)}

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


DEMOS = {
    "in-shop": Demo(
        "In-Shop Clothes Retrieval",
        official(("", "department", "category")),
        (1, 10, 20, 40),
        (
            ("MS 512", (89.7, 97.9, 98.5, 99.1)),
            ("Proxy-Anchor 512", (91.5, 98.1, 98.8, 99.1)),
            ("Determinant regularization 512", (91.5, 98.2, 98.7, 99.1)),
        ),
        "Determinant Regularization for Deep Metric Learning, table 3, whose last two columns are "
        "R@20 and R@40 in the papers that it cites",
    ),
    "sop": Demo(
        "Stanford Online Products",
        official(("category",)),
        (1, 10, 100, 1000),
        (
            ("MS 512", (78.2, 90.5, 96.0, 98.7)),
            ("Proxy-Anchor 512", (79.1, 90.8, 96.2, 98.7)),
            ("Determinant regularization 512", (79.0, 90.7, 96.1, 98.7)),
        ),
        "Determinant Regularization for Deep Metric Learning, table 2",
        leave_one_out=True,
    ),
    "grocery": Demo("Grocery Store", grocery, (1, 5, 10)),
}


def main() -> int:
    options = _options()
    demo, work = DEMOS[options.name], Path(".kinlens") / options.name
    started = time.monotonic()
    try:
        root = Path(options.root)
        if not options.root or not root.is_dir():
            raise DemoError(
                f"ROOT={options.root} is not a folder. Give the folder of {demo.title}."
            )
        work.mkdir(parents=True, exist_ok=True)
        port = free_port() if options.check else options.port
        require_free(port)
        bundle = options.bundle or trunk(work, options.weights)
        images, gallery, queries = demo.lists(root, work, options.allow_partial)
        build(work, bundle, images, gallery)
        arguments = ("--bundle", str(bundle), "--gallery", f"{work.name}={work / 'gallery'}")
        with served(port, *arguments, "--state", str(work / "state")) as server:
            url = f"http://127.0.0.1:{port}"
            recall = ask(url, demo, images, queries, options.queries)
            by_product: Recall = {}
            if "product" in gallery[0]:
                most = min(options.queries or PRODUCT_QUERIES, PRODUCT_QUERIES)
                fields = {"group_by": "product", "group_size": 2}
                by_product = ask(url, demo, images, queries, most, **fields)
            is_part = options.allow_partial or (options.queries or len(queries)) < len(queries)
            print_table(demo, recall, by_product, bundle, is_part)
            guess = chance(gallery, queries)
            show(f"Total time: {time.monotonic() - started:.0f} s.")
            offer(images, queries)
            if not options.check:
                keep_open(server, port)
    except DemoError as error:
        show(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        show("Stopped before completion.")
        return 130
    if recall[demo.recall_at[0]] <= guess:
        show(f"Recall is not above chance ({100 * guess:.1f} %): something is broken.")
        return 1
    return 0


def trunk(work: Path, weights: str | None) -> Path:
    """A pretrained network, without further training, as a bundle."""
    bundle = work / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    chosen = ("--weights", weights) if weights else ()
    kinlens("train", "export", "--backbone", "mobilenet_v2", "--out", str(bundle), *chosen)
    return bundle


def named(rows: list[Row], folders: tuple[str, ...]) -> list[Row]:
    """Rows with an attribute for each named folder of their path."""
    return [
        row
        | {
            name: part.removesuffix("_final")
            for name, part in zip(folders, Path(row["path"]).parts, strict=False)
            if name
        }
        for row in rows
    ]


def build(work: Path, bundle: Path, images: Path, gallery: list[Row]) -> None:
    """Index the gallery; an interrupted build of the same list is resumed."""
    write_list(work / "gallery.csv", gallery)
    kinlens(
        "index", "build", str(images), "--csv", str(work / "gallery.csv"), "--bundle", str(bundle),
        "--out", str(work / "gallery"), "--name", work.name,
    )  # fmt: skip


def offer(images: Path, queries: list[Row]) -> None:
    """Print a few queries, spread evenly, to drop on the page."""
    show("Click an item on the page, or drop one of these query images on it:")
    for row in spread(queries, SHOWN):
        print((images / row["path"]).resolve())


def ask(
    url: str, demo: Demo, images: Path, queries: list[Row], most: int | None, **fields: object
) -> Recall:
    """Recall@k over HTTP: the share of queries with an image of their class among k hits.

    If `fields` group the answer by product, k counts products.
    """
    asked = spread(queries, most or len(queries))
    k = max(demo.recall_at) + demo.leave_one_out
    show(f"{len(asked):,} of {len(queries):,} queries over HTTP ...")
    first_right = []
    with ThreadPoolExecutor(CLIENTS) as pool:
        ranks = pool.map(
            lambda row: rank(search(url, images / row["path"], k, **fields), row), asked
        )
        for number, found in enumerate(ranks, start=1):
            first_right.append(found)
            if number % 1000 == 0:
                print(f"  {number:,}", flush=True)
    return {
        at: sum(found is not None and found <= at for found in first_right) / len(asked)
        for at in demo.recall_at
    }


def rank(answer: dict[str, Any], row: Row) -> int | None:
    """The rank of the first right hit, from 1, ignoring the query itself.

    For the query's product its best other image counts, which may rank lower.
    """
    hits = answer["hits"]
    if answer["groups"] is not None:
        left = ([h for h in g["hits"] if h["key"] != row["key"]] for g in answer["groups"])
        hits = sorted((each[0] for each in left if each), key=lambda hit: -hit["score"])
    others = [hit for hit in hits if hit["key"] != row["key"]]
    classes = [hit["attributes"]["class"] for hit in others]
    return classes.index(row["class"]) + 1 if row["class"] in classes else None


def print_table(
    demo: Demo, recall: Recall, by_product: Recall, bundle: Path, is_part: bool
) -> None:
    """Recall next to published figures, and recall of products, where k counts products."""
    show(f"{demo.title}: recall in percent")
    rows = [*demo.published, (f"this run ({bundle})", [100 * v for v in recall.values()])]
    if by_product:
        rows.append(("this run, products", [100 * v for v in by_product.values()]))
    width = max(len(name) for name, _ in rows)
    print(f"{'':{width}}" + "".join(f"{f'R@{k}':>9}" for k in recall))
    for name, values in rows:
        print(f"{name:{width}}" + "".join(f"{value:9.1f}" for value in values))
    if demo.source:
        print(f"Published: {demo.source}.")
    if is_part:
        print("This run used a part of the data set, so its figures are not comparable.")


def chance(gallery: list[Row], queries: list[Row]) -> float:
    """The accuracy of always answering with the most frequent class."""
    [(largest, _)] = Counter(row["class"] for row in gallery).most_common(1)
    return sum(row["class"] == largest for row in queries) / len(queries)


def spread(rows: list[Row], most: int) -> list[Row]:
    """At most `most` rows, evenly spread."""
    return [rows[i * len(rows) // most] for i in range(most)] if most < len(rows) else rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=DEMOS)
    parser.add_argument("--root", required=True, help="folder of the data set")
    parser.add_argument("--bundle", type=Path, help="a trained model bundle")
    parser.add_argument("--weights", help="ImageNet weights of mobilenet_v2, as a file")
    parser.add_argument("--queries", type=int, help="number of queries [all]")
    parser.add_argument("--allow-partial", action="store_true", help="accept a partial data set")
    parser.add_argument("--port", type=int, default=8000, help="port of the service [8000]")
    parser.add_argument("--check", action="store_true", help="exit instead of serving the page")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
