"""Effect of each regularizer, on heads of a frozen trunk and on whole networks.

    KINLENS_SHARED=DIR python benchmarks/regularizers.py --json docs/results/regularizers/cars.json

MobileNetV2 with the recipe of the job `cars196-half`: classes 1-98 train, 99-196 test. A condition
trains heads on cached features at 176 px, with one change of "20 epochs", or the whole network. A
row differs from its baseline only in the regularizer. Records in the JSON file are not repeated.

    --conditions "network, 5 epochs"  each regularizer with its paper's losses, at a chosen share
    --folds --seeds 2                 the search that chose these shares, on folds of train classes
    --regularizers "determinant 0.1, leaky ReLU"  another reading of a regularizer

Earlier records have more figures. A difference is paired by seed. A bold one is not zero by
Student's 95 % interval, corrected for all comparisons of the table (Bonferroni).
docs/results/hypotheses.csv and regularizers.md have hypotheses and outcomes.
"""

import tempfile
import tomllib
from argparse import Namespace
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from harness import grocery_photos, heading, keep, options, records, row, shared_folder, skip
from numpy.typing import NDArray
from scipy import stats

from kinlens.embedder.errors import KinlensError
from kinlens.training import evaluate, fit, load_job
from kinlens.training.data.load import load_split

SETTINGS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
OF_HEADS: list[str] = SETTINGS["heads"]["regularizers"]
Figures = dict[str, Any]
Seeds = dict[str, Figures]
_ON_PROXIES, _WITH_PROXIES = ("skewed mean", "non-isotropy"), ("proxy_anchor", "softmax")


class Condition(NamedTuple):
    """What is trained, and on what; `images` of each class, all if 0; `factor` of each share.

    `size_px` is the side of the views of a whole network; 0 trains a head.
    """

    epochs: int = 20
    classes: float = 1.0
    images: int = 0
    wrong_labels: float = 0.0
    dim: int = 512
    factor: int = 1
    size_px: int = 0


CONDITIONS = {name: Condition(**given) for name, given in SETTINGS["conditions"].items()}
BASE = "20 epochs"

FIGURES = ("R@1", "MAP@R", "1 image", "AUROC", "calibration error", "groceries", "int8", "bf16")
FOLDS = 3


class Cell(NamedTuple):
    """One training; `fold` is None on the test classes."""

    seed: int
    loss: str
    condition: str
    regularizer: str = "none"
    fold: int | None = None

    @property
    def name(self) -> str:
        fold = () if self.fold is None else (f"fold {self.fold}",)
        return "|".join([self.loss, self.condition, self.regularizer, str(self.seed), *fold])


def main() -> None:
    args = options(
        __doc__,
        seeds=10,
        losses=["proxy_anchor", "triplet"],
        conditions=list(CONDITIONS)[:9],
        regularizers=["chosen"],
        folds=False,
        classes=98,
        json=None,
    )
    if (shared := shared_folder()) is None:
        skip("needs the images and weights of $KINLENS_SHARED")
    found: dict[str, Figures] = records(args.json)
    for cell in (cell for cell in cells_of(args) if cell.name not in found):
        try:
            found[cell.name] = run(cell, shared, args.classes)
        except KinlensError as error:  # the others still run
            print(f"{cell.name}: {error}", flush=True)
            continue
        print(f"{cell.name:70} R@1 {found[cell.name]['R@1']:.1f}", flush=True)
        keep(found, args.json)
    report(found)


def cells_of(args: Namespace) -> Iterator[Cell]:
    """Every training that the command asks for, a seed at a time."""
    for seed, condition, loss in product(range(args.seeds), args.conditions, args.losses):
        names: tuple[str, ...] = tuple(args.regularizers)
        if names == ("chosen",):
            names = SETTINGS["chosen"][loss] if CONDITIONS[condition].size_px else OF_HEADS
        if args.folds:
            for base in (name.rsplit(" ", 1)[0] for name in names):
                for share in SETTINGS["shares"][base]:
                    yield Cell(seed, loss, condition, f"{base} {share:g}", seed % FOLDS)
            continue
        if CONDITIONS[condition].factor == 1:
            yield Cell(seed, loss, condition)
        for name in names:
            lacks_proxies = name.startswith(_ON_PROXIES) and loss not in _WITH_PROXIES
            with_flow = condition in SETTINGS["heads"]["with_determinant"]
            if not lacks_proxies and (with_flow or name != OF_HEADS[0]):
                yield Cell(seed, loss, condition, name)


def run(cell: Cell, shared: Path, classes: int) -> dict[str, float]:
    """Figures on the test classes and groceries, or on a fold of the train classes."""
    job, condition = job_of(cell, shared), CONDITIONS[cell.condition]
    split = load_split(load_job(job).data)
    train, test = (
        pd.DataFrame({"path": part.paths, "label": part.labels, "split": name})
        for name, part in (("train", split.train), ("test", split.test))
    )
    train, test = train[train.label < classes], test[test.label < classes]
    test = test.assign(label=test.label + 1000)  # names of their own
    if cell.fold is not None:
        fold = np.random.default_rng(0).permutation(train.label.nunique()) % FOLDS == cell.fold
        test = train[fold[train.label]].assign(split="test")
        train = train[~fold[train.label]]
    train = some(train, condition, np.random.default_rng(cell.seed))
    if not condition.size_px:  # a batch draws a class at most twice
        largest = 2 * job["sampling"]["per_class"] * train.label.nunique()
        job["optimizer"]["batch_size"] = min(job["optimizer"]["batch_size"], largest)
    with tempfile.TemporaryDirectory() as name:
        table, folder = Path(name) / "images.csv", Path(name) / "run"
        pd.concat([train, test]).to_csv(table, index=False)
        job["data"] = {"kind": "csv", "root": str(split.train.root), "file": str(table)}
        figures = fit(job, out=folder).figures
        found = {figure: figures[figure] for figure in FIGURES[:2]}
        if cell.fold is None:
            rows = pd.DataFrame(grocery_photos(shared), columns=["path", "label"])
            rows.to_csv(table, index=False)
            found["groceries"] = evaluate(folder, table)["R@1"]
    return {figure: round(value, 3) for figure, value in found.items()}


def job_of(cell: Cell, shared: Path) -> dict[str, Any]:
    """The job of a training, as tables."""
    condition, data = CONDITIONS[cell.condition], shared / "data/cars196-half"
    weights = shared / "weights/mobilenet_v2-imagenet-fp16.pth"
    changes = SETTINGS["changes"][str(condition.size_px)]
    content = load_job(
        "cars196-half", [f"data.root={data}", f"model.weights={weights}", *changes]
    ).as_dict()
    content["seed"], content["optimizer"]["epochs"] = cell.seed, condition.epochs
    content["model"]["dim"] = condition.dim
    settings = SETTINGS["losses"][cell.loss]
    for table in ("sampling", "start", "optimizer"):
        content[table] |= settings.get(table, {})
    content["loss"] = settings["loss"]
    if cell.regularizer != "none":
        name, _, variant = cell.regularizer.partition(", ")
        base, share = name.rsplit(" ", 1)
        table = base.replace(" ", "_").replace("-", "_")
        more = SETTINGS["variants"][variant] if variant else {}
        content["optimizer"] |= more.get("optimizer", {})
        settings = SETTINGS["regularizers"][base] | more.get(table, {})
        content["regularizers"] = {table: settings | {"share": float(share) * condition.factor}}
    return content


def some(train: pd.DataFrame, condition: Condition, rng: np.random.Generator) -> pd.DataFrame:
    """The condition's share of the classes, its number of images of each, its wrong labels."""
    names = train.label.unique()
    kept = np.sort(rng.choice(names, round(condition.classes * len(names)), replace=False))
    train = train[train.label.isin(kept)].sample(frac=1, random_state=rng)
    if condition.images:
        train = train.groupby("label").head(condition.images)
    is_wrong = rng.random(len(train)) < condition.wrong_labels
    moved = np.searchsorted(kept, train.label) + rng.integers(1, len(kept), len(train))
    return train.assign(label=np.where(is_wrong, kept[moved % len(kept)], train.label))


def report(found: dict[str, Figures]) -> None:
    """A row for each loss and condition, and one with paired differences for each regularizer."""
    runs: dict[tuple[str, str], dict[str, Seeds]] = {}
    for key, figures in sorted(found.items()):
        loss, condition, regularizer, seed, *fold = key.split("|")
        where = f"{condition}, folds" if fold else condition
        runs.setdefault((loss, where), {}).setdefault(regularizer, {})[seed] = figures
    # More of a share is compared with the runs of the first condition.
    bases = {c: BASE if c in CONDITIONS and CONDITIONS[c].factor > 1 else c for _, c in runs}
    cells = {
        (loss, condition, name, figure): difference(
            seeds, runs.get((loss, bases[condition]), {}).get("none", {}), figure
        )
        for (loss, condition), names in runs.items()
        for (name, seeds), figure in product(names.items(), FIGURES)
        if name != "none"
    }
    comparisons = sum(len(values) > 1 for values in cells.values())
    heading("loss", "condition", "regularizer", "seeds", *FIGURES)
    for (loss, condition), names in runs.items():
        for name, seeds in sorted(names.items(), key=lambda item: item[0] != "none"):
            if name == "none" or condition.endswith("folds"):
                every = [[r[f] for r in seeds.values() if f in r] for f in FIGURES]
                shown = [f"{np.mean(values):.1f}" if values else "" for values in every]
            else:
                values = [cells[loss, condition, name, figure] for figure in FIGURES]
                with_interval = CONDITIONS[condition].size_px > 0  # few seeds
                shown = [marked(each, comparisons, with_interval) for each in values]
            row(loss, condition, name, len(seeds), *shown)
    print(f"\nbold: significant among {comparisons} comparisons")


def difference(seeds: Seeds, base: Seeds, figure: str) -> NDArray[np.float64]:
    """By seed that both have."""
    both = [(seeds[s], base[s]) for s in sorted(seeds.keys() & base.keys())]
    return np.array([a[figure] - b[figure] for a, b in both if figure in a and figure in b])


def marked(differences: NDArray[np.float64], comparisons: int, with_interval: bool) -> str:
    """The mean, perhaps with its interval, which is not corrected; bold if above or below 0."""
    count = len(differences)
    if not count:
        return ""
    mean = differences.mean()
    text = f"{mean:+.1f}" if abs(mean) >= 1 else f"{mean:+.2f}"
    if count == 1:
        return text
    spread, digits = stats.sem(differences), 1 if abs(mean) >= 1 else 2
    if abs(mean) > stats.t.ppf(1 - 0.025 / comparisons, count - 1) * spread:
        text = f"**{text}**"
    half = stats.t.ppf(0.975, count - 1) * spread
    return f"{text} ± {half:.{digits}f}" if with_interval and count > 2 else text


if __name__ == "__main__":
    main()
