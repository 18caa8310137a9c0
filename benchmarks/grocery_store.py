"""Class recall@1 on the Grocery Store Dataset, through HTTP.

Gallery: its train split. Queries: its test split. An answer is right if the best hit has the class
of the query; 81 classes of products, photographed in shops, none of which the model was trained on.

    python benchmarks/grocery_store.py BUNDLE
    BUNDLE defaults to runs/cars196-half-detreg-bundle
"""

import csv
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from running import run, service, shared_folder

CLIENTS = 4


def main() -> None:
    shared = shared_folder()
    bundle = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/cars196-half-detreg-bundle")
    if shared is None or not bundle.is_dir():
        print(f"skipped: needs {bundle} and the Grocery Store Dataset under $KINLENS_SHARED/data")
        return
    root = shared / "data" / "grocery-store"
    with tempfile.TemporaryDirectory() as folder:
        gallery = Path(folder) / "gallery"
        split = root / "train.txt"
        run("kinlens-index", "build", root, "--split", split, "--bundle", bundle, "--out", gallery)
        with service(bundle, gallery) as url:
            measure(url, root)


def measure(url: str, root: Path) -> None:
    queries = read_split(root / "test.txt")
    started = time.perf_counter()
    with httpx.Client(base_url=url, timeout=30) as client, ThreadPoolExecutor(CLIENTS) as pool:
        right = list(pool.map(lambda query: ask(client, root / query[0], query[1]), queries))
    seconds = time.perf_counter() - started
    largest = Counter(label for _, label in read_split(root / "train.txt")).most_common(1)[0]
    guess = sum(label == largest[0] for _, label in queries) / len(queries)
    print(f"\nqueries            {len(queries):,}")
    print(f"class R@1          {100 * sum(right) / len(right):.1f} %")
    print(f"largest class      {100 * guess:.1f} % (always answering it)")
    print(f"queries per second {len(queries) / seconds:.0f} with {CLIENTS} clients")


def read_split(path: Path) -> list[tuple[str, str]]:
    """(path, fine class) of each line."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [(row[0].strip(), row[1].strip()) for row in csv.reader(stream) if row]


def ask(client: httpx.Client, image: Path, label: str) -> bool:
    answer = client.post("/search", files={"image": image.read_bytes()}, data={"k": "1"})
    answer.raise_for_status()
    return bool(answer.json()["hits"][0]["attributes"]["class"] == label)


if __name__ == "__main__":
    main()
