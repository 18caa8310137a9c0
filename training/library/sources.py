"""What a user gives to train on: the name or tables of a job, and a folder or list of images.

Neither torch, numpy nor pydantic is imported here: the programs load this for each typing error.
"""

import csv
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinlens.embedder.errors import CheckpointError, JobError
from kinlens.embedder.programs.progress import progress_bar
from kinlens.training.config.layers import names_of, read_layers, read_top
from kinlens.training.report.log import note

if TYPE_CHECKING:
    from kinlens.embedder.manifest import Preprocessing
    from kinlens.training.config.job import Job
    from kinlens.training.data.records import Split

Images = str | Path | Sequence[tuple[str | Path, str]] | Any
"""A folder, a CSV, pairs (path, class), or a pandas DataFrame with the columns of a CSV."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")

TRAIN_IT = "Set protocol.alpha=0.25, or train with `kinlens-train fit shop`."


def job_of(source: str | Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> "Job":
    """The job of a user, with absolute paths. Raises: JobError, also on dead settings."""
    read_layers(source)  # refuses a wrong name before the slow imports
    from kinlens.training.config.dead import changed, require_effect, written
    from kinlens.training.config.job import load_job, with_absolute_paths

    job = load_job(source, overrides)
    note_untrained(job, job.name, written(read_top(source)) | names_of(overrides))
    require_effect([job], changed(source, overrides, read_top(source)))
    return with_absolute_paths(job)


def note_untrained(job: "Job", name: str, given: Collection[str], cure: str = TRAIN_IT) -> None:
    """Name the settings among `given` that act on training steps, if nothing is trained."""
    from kinlens.training.config.dead import without_steps

    if names := without_steps(job, given):
        fact = f"since {name} trains nothing after its start"
        note(f"No effect: {', '.join(names)}, {fact}. {cure}")


def shop_of(images: Images) -> tuple[Path, str, str]:
    """The folder of images, a name for its job, and its CSV or "". Raises: JobError.

    The CSV is `images` itself, or an images.csv in it. A list or table is written to runs/.
    """
    if not isinstance(images, str | Path):
        root, table = _listed(images)
        return _named(root, table)
    path = Path(images).expanduser().resolve()
    if not path.exists():
        raise JobError(f"{images} does not exist. Give the folder with your images.")
    from kinlens.training.data.load import TABLE

    root = path.parent if path.is_file() else path
    table = path.name if path.is_file() else TABLE if (path / TABLE).is_file() else ""
    if not root.is_dir() or (table and not table.endswith(".csv")):
        raise JobError(f"{images} is no folder or CSV. Give the folder with your images.")
    return _named(root, table)


def _named(root: Path, table: str) -> tuple[Path, str, str]:
    if "$" in str(root):
        raise JobError(f"{root} has a $, which a job reads as a variable. Rename the folder.")
    try:
        str(root).encode()
    except UnicodeEncodeError as error:
        raise JobError(f"{str(root)!a} is not valid UTF-8. Rename it.") from error
    return root, _NOT_IN_NAMES.sub("-", root.name).strip("-._") or "shop", table


def _listed(images: Any) -> tuple[Path, str]:
    """The folder that all images of a list or table are in, and the CSV that lists them there.

    The CSV stays in runs/, since the run that is trained on it reads it again.
    """
    from kinlens.training.folder import replace_text

    names, rows, at = _rows(images)
    paths = [Path(row[at]).expanduser().absolute() for row in rows]
    root = os.path.commonpath([path.parent for path in paths])
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    for path, row in zip(paths, rows, strict=True):
        cells = ["" if cell is None or cell != cell else str(cell) for cell in row]  # NaN
        writer.writerow([*cells[:at], os.path.relpath(path, root), *cells[at + 1 :]])
    content = text.getvalue()
    digest = hashlib.sha256(f"{root}\n{content}".encode(errors="surrogateescape")).hexdigest()
    file = Path("runs", f"images-{digest[:12]}.csv").absolute()
    if not file.exists():
        replace_text(file, content)
    return Path(root), str(file)


def _rows(images: Any) -> tuple[list[str], list[Any], int]:
    """The columns and rows of a table or list, and which column has the paths. Raises: JobError."""
    if not hasattr(images, "columns") and not isinstance(images, Iterable):
        raise JobError(
            f"{images!r:.200} is no source of images. Give a folder, a list of (path, class), or a "
            "DataFrame with these columns."
        )
    if hasattr(images, "columns"):
        names = [str(column) for column in images.columns]
        rows: list[Any] = [*images.itertuples(index=False)]
    else:
        names, rows = ["path", "class"], [*images]
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != len(names):
            raise JobError(f"{row!r:.200} is not a pair (path, class). Give one for each image.")
    labels = [column for column in ("label", "class", "product") if column in names]
    if "path" not in names or not labels:
        raise JobError(
            f"The table has the columns {', '.join(names)}. It must have path and class."
        )
    if not rows:
        raise JobError("The list of images is empty. Give a pair (path, class) for each image.")
    at = names.index("path")
    for number, row in enumerate(rows, 1):
        if not isinstance(row[at], str | Path) or not row[at]:
            raise JobError(f"Row {number} has {row[at]!r:.200} in place of the path of an image.")
        label = row[names.index(labels[0])]
        if label is None or label != label or not str(label).strip():
            raise JobError(f"Row {number}, {row[at]}, has no {labels[0]}. Give it one, or drop it.")
    return names, rows, at


def shop_job(
    images: Images,
    settings: Mapping[str, Any],
    options: Mapping[str, str],
    overrides: Sequence[str] = (),
) -> "Job":
    """The job `adapt` on the images of a user, with absolute paths. Raises: JobError.

    `options` are the words by which the user gave `settings`.
    """
    root, name, table = shop_of(images)
    from kinlens.training.config.job import load_job, with_absolute_paths

    content = [f"{key}={json.dumps(value)}" for key, value in {"name": name, **settings}.items()]
    if table:
        file = json.dumps(table)
        content.append(f'data={{kind="csv", root="", file={file}, small_classes="drop"}}')
    job = with_absolute_paths(load_job("adapt", [*content, *overrides], options))
    return job.model_copy(update={"data": job.data.model_copy(update={"root": str(root)})})


def input_settings(spec: "Preprocessing") -> dict[str, Any]:
    """The settings of a job whose images are preprocessed as by a bundle."""
    return {
        "input.size_px": spec.crop_px,
        "input.test_px": spec.crop_px,
        "input.resize_px": spec.resize_px,
        "input.interpolation": spec.interpolation,
        "input.aspect": spec.aspect,
        "input.crop": "fixed" if spec.aspect == "squashed" else "area",
    }


def require_run(folder: Path) -> None:
    """Raises: CheckpointError, without the seconds that reading a run takes."""
    if not folder.exists():
        raise CheckpointError(
            f"There is no run: {folder} does not exist. Give the folder of a run."
        )


def with_settings(job: "Job", overrides: Sequence[str], allowed: tuple[str, ...]) -> "Job":
    """`job` with the overrides that a trained model allows, without feedback. Raises: JobError."""
    from kinlens.training.config.job import apply_override, parse_job

    content = job.as_dict()
    content["data"]["feedback"] = []
    for override in overrides:
        if not override.startswith(allowed):
            raise JobError(
                f"--set {override}: a trained model keeps its settings; here only "
                f"{' and '.join(allowed)}... can be changed."
            )
        apply_override(content, override)
    return parse_job(content)


def load_images(job: "Job", hold_out: bool = True, expected: str = "") -> "Split":
    """The images of a job, with a line for each remark. Raises: DatasetError.

    `expected` is the sha256 of the split of an existing run, otherwise that of the bundle that the
    job continues. If only the rule of version 0.1 gives this split, the classes are split by it.
    """
    from kinlens.embedder.bundle import Bundle
    from kinlens.training.config.settings import RenderedData
    from kinlens.training.data.feedback import sentences
    from kinlens.training.data.load import load_split, remarks
    from kinlens.training.data.records import with_protocol
    from kinlens.training.models.from_bundle import bundle_of

    if not expected and (bundle := bundle_of(job.model.weights)):
        expected = Bundle.open(bundle).manifest.split_sha256 or ""

    def loaded(by_name: bool, on_image: Callable[[], None] | None = None) -> "Split":
        split = load_split(job.data, on_image, by_name)
        return with_protocol(split, job.protocol) if hold_out else split

    if isinstance(job.data, RenderedData):
        total = job.data.products * job.data.views
        with progress_bar(total, "render products", "images") as advance:
            split = loaded(by_name=True, on_image=lambda: advance(1))
    else:
        split = loaded(by_name=True)
    if expected and split.sha256() != expected:
        older = loaded(by_name=False)
        split = older if older.sha256() == expected else split
    for remark in [*remarks(job.data, split), *sentences(split)]:
        note(remark)
    return split


def summary(split: "Split") -> str:
    return "; ".join(
        f"{name} {len(images):,} images of {images.classes:,} classes"
        for name, images in split.parts.items()
    )


def section(kind: type[Any], /, **values: Any) -> Any:
    """A table of a job from command line options. Raises: JobError."""
    from pydantic import ValidationError

    from kinlens.training.config.job import explain

    try:
        return kind(**values)
    except ValidationError as error:
        given = {name: f"--{name.replace('_', '-')} {value}" for name, value in values.items()}
        raise JobError(" ".join(explain(fault, given) for fault in error.errors())) from error
