"""Load train and test images from the `data` table of a job, or from a folder.

Missing and damaged images are found before a training begins.
"""

import hashlib
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from kinlens.embedder.decoding.formats import SUFFIXES
from kinlens.embedder.errors import DatasetError, ImageError, TrainingError
from kinlens.embedder.machine import cache_folder
from kinlens.embedder.preprocess import decode
from kinlens.embedder.sources.names import composed, existing
from kinlens.embedder.sources.tables import PRODUCT, class_in, paths_in
from kinlens.embedder.sources.walk import Omitted, fault_lines, read_failed, walk_images
from kinlens.rendered.catalogue import write_catalogue
from kinlens.training.config.job import expand_path
from kinlens.training.config.settings import CsvData, Data, FolderData, OfficialData, RenderedData
from kinlens.training.data.datasets import OFFICIAL, data_sets_in, read_official
from kinlens.training.data.feedback import read_feedback
from kinlens.training.data.records import (
    FEWEST,
    LabelledImages,
    Record,
    Split,
    labelled,
    read_rows,
    write_table,
)
from kinlens.training.folder import replacing

TABLE = "images.csv"
_SHOWN = 5
_SMALLEST_PX = 32  # a JPEG is decoded whole, but at a reduced scale
_DIGEST = 16  # bytes
KINDS = (*OFFICIAL, "csv", "folder")

_WHY = (
    f"Each part needs {FEWEST} or more, since with one class every answer is right. Put "
    "the images of each class into a sub-folder of its own, 2 images or more, or skip the "
    "training: kinlens-train export --backbone mobilenet_v2."
)


def load_split(
    data: Data, on_image: Callable[[], None] | None = None, by_name: bool = True
) -> Split:
    """`on_image` is called for each rendered view, `by_name` is that of `split_by_class`.

    Raises: DatasetError, JobError.
    """
    split = _load(data, on_image, by_name)
    if not data.feedback:
        return split
    folders = [expand_path(folder, "data.feedback") for folder in data.feedback]
    classes = {
        path: part.class_names[label]
        for part in split.parts.values()
        for path, label in zip(part.paths, part.labels.tolist(), strict=True)
    }
    return replace(split, feedback=read_feedback(folders, classes))


def _load(data: Data, on_image: Callable[[], None] | None, by_name: bool) -> Split:
    root = expand_path(data.root, "data.root")
    if not root.is_absolute() and not root.exists():
        raise DatasetError(
            f"data.root = {data.root!r} is a relative path, as in runs of version 0.2, and "
            f"{Path.cwd()} has no such folder. Add --set data.root=/path/of/the/images."
        )
    dropped: tuple[str, ...] = ()
    omitted = Omitted()
    damaged: tuple[str, ...] = ()
    match data:
        case FolderData():
            listed = read_folder(root, omitted=omitted)
        case CsvData():
            listed = read_table(root, data.file, omitted=omitted)
        case RenderedData():
            write_catalogue(root, data.products, data.views, data.size_px, data.seed, on_image)
            records = read_folder(root)
        case OfficialData():
            return read_official(OFFICIAL[data.kind], root, data.allow_partial)
    if isinstance(data, FolderData | CsvData):
        records, dropped = without_small_classes(root, listed, data.small_classes)
        records, damaged = without_damaged(root, records, data.max_damaged)
        records, more = without_small_classes(root, records, "drop")
        dropped = tuple(sorted({*dropped, *more}))
    if any(record.part for record in records):
        split = split_by_column(root, records)
    else:
        split = split_by_class(root, records, data.train_fraction, data.split_seed, by_name)
    return replace(split, dropped_classes=dropped, omitted=omitted, damaged=damaged)


def remarks(data: Data, split: Split) -> list[str]:
    """What to know about a split before using it, one sentence each."""
    found = [*split.omitted.lines()]
    if faults := fault_lines(split.omitted.faults):
        found.append(
            f"{len(faults):,} file(s) or folder(s) cannot be used and are skipped: "
            f"{_first_of(faults, ' ')}"
        )
    if split.damaged:
        found.append(
            f"{len(split.damaged):,} image(s) are missing or damaged, and skipped: "
            f"{_first_of(split.damaged, ' ')}"
        )
    if isinstance(data, OfficialData) and data.allow_partial:
        name = OFFICIAL[data.kind].name
        found.append(f"{name}: allow_partial is set, the official counts are not checked")
    if split.dropped_classes:
        found.append(
            f"{len(split.dropped_classes):,} class(es) of one image are dropped: they have no "
            f"pair: {_first_of([*map(repr, split.dropped_classes)])}"
        )
    if split.without_gallery:
        found.append(
            f"{len(split.without_gallery)} class(es) of queries have no image in the gallery, for "
            f"example {split.without_gallery[0]!r}; these queries have no right answer"
        )
    return found


def read_folder(
    root: Path, setting: str = "data.root", omitted: Omitted | None = None
) -> list[Record]:
    """The images of a folder, without what `walk_images` omits, which goes to `omitted`.

    The class is the folder of the image, named by its path below root as in galleries: "mug", or
    "Women/Dress". An error names the `setting` or the option that gave the folder.

    Raises: DatasetError if the folder is missing or holds no images in sub-folders.
    """
    if not root.is_dir():
        raise DatasetError(f"The data set folder {root} does not exist. Check {setting}.")
    omitted = Omitted() if omitted is None else omitted
    try:
        images = [*walk_images(root, omitted, leave_root=True)]
    except OSError as error:
        raise DatasetError(read_failed(error)) from error
    records = [
        Record(path, folder)
        for path, name in images
        if (folder := name.rpartition("/")[0])  # an image in the root has no class
    ]
    if not records:
        faults = " ".join(fault_lines(omitted.faults)[:3])
        raise DatasetError(
            f"{root} has no images in sub-folders. Put the images of each class into a sub-folder "
            "of its own: shop/mug-17/front.jpg, or shop/mugs/mug-17/front.jpg."
            f"{faults and f' These cannot be used: {faults}'}"
        )
    return records


def read_table(
    root: Path,
    file: str,
    setting: str = "data.root and data.file",
    omitted: Omitted | None = None,
) -> list[Record]:
    """The images of a CSV; `setting` is named in errors. Raises: DatasetError."""
    records, faults = scan_table(root, file, setting, omitted)
    if faults:
        raise DatasetError(faults[0])
    return records


def scan_table(
    root: Path,
    file: str,
    setting: str = "data.root and data.file",
    omitted: Omitted | None = None,
) -> tuple[list[Record], list[str]]:
    """The images in usable rows of a CSV, which may be missing, and an error for each other row.

    The class is `label`, else `class`, else `product`, which is by default the `key`, as in a list
    for the indexer. There too, `path` may be a folder or several files.

    Raises: DatasetError if the file is missing, is not a text or lacks a column.
    """
    path = root / file
    records: dict[str, Record] = {}
    faults = []
    omitted = Omitted() if omitted is None else omitted
    for line, row in read_rows(path, "path", "label|class|product|key", cure=f"Check {setting}."):
        column = "label" if "label" in row else class_in(row)
        label = row.get(column, "")
        if column not in row or (column == PRODUCT and not label):
            column, label = PRODUCT, row.get("key", "")
        if not row["path"] or not label:
            faults.append(f"{path}, line {line}: path and {column} must not be empty.")
            continue
        try:
            images = _images_in(root, row["path"], omitted)
        except (ValueError, OSError) as error:
            reason = read_failed(error) if isinstance(error, OSError) else error
            faults.append(f"{path}, line {line}: {reason}")
            continue
        for image in images:
            place = os.path.normpath(image)
            if place in records:
                faults.append(f"{path}, line {line}: {image} is listed a second time.")
            else:
                part = row.get("split", "").strip()
                records[place] = Record(image, composed(label), part)
    return list(records.values()), faults


def _images_in(root: Path, cell: str, omitted: Omitted) -> list[str]:
    """The images in a cell `path`: those of each folder, and each file, which may be missing."""
    images = []
    for listed in paths_in(cell, root):
        path = existing(root, listed)
        if path.lower().endswith(SUFFIXES) or not os.path.isdir(root / path):  # noqa: PTH112 - URLs
            images.append(path)
        elif found := [*walk_images(root / path, omitted, leave_root=True)]:
            images += [os.path.normpath(f"{path}/{image.path}") for image in found]
        else:
            images.append(path)  # counts as an image that cannot be read
    return images


def without_small_classes(
    root: Path, records: Sequence[Record], policy: str
) -> tuple[list[Record], tuple[str, ...]]:
    """The other records, and the classes with one image. Raises: DatasetError under "refuse"."""
    sizes = Counter(record.label for record in records)
    small = tuple(sorted(label for label, size in sizes.items() if size < 2))
    if small and policy == "refuse":
        raise DatasetError(
            f"{len(small)} of the {len(sizes)} classes in {root} have only one image "
            f"({_first_of([*map(repr, small)])}); a class needs at least 2 to have a pair. Add "
            'images, remove these classes, or set data.small_classes = "drop".'
        )
    return [record for record in records if sizes[record.label] >= 2], small


def _first_of(items: Sequence[str], separator: str = ", ") -> str:
    more = len(items) - _SHOWN
    return separator.join([*items[:_SHOWN], *([f"and {more:,} more"] if more > 0 else [])])


def split_by_class(
    root: Path, records: Sequence[Record], train_fraction: float, seed: int, by_name: bool = True
) -> Split:
    """At least 2 classes train and 2 test, drawn by seed and name. Raises: DatasetError.

    A class that is added or removed moves at most one other to the other part, so that a growing
    shop keeps its test classes from training to training. Without `by_name` the split is that of
    version 0.1, where one new class changes it completely.
    """
    names = sorted({record.label for record in records})
    if len(names) < 2 * FEWEST:
        raise DatasetError(
            f"{root} has {len(names)} class(es) to train and test with; {2 * FEWEST} are needed, "
            f"{FEWEST} to train on and {FEWEST} others to test with. {_WHY}"
        )
    if by_name:
        names.sort(key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    else:
        names = [names[i] for i in np.random.default_rng(seed).permutation(len(names))]
    count = min(max(round(len(names) * train_fraction), FEWEST), len(names) - FEWEST)
    chosen = set(names[:count])
    return Split(
        train=labelled(root, [record for record in records if record.label in chosen]),
        test=labelled(root, [record for record in records if record.label not in chosen]),
    )


def split_by_column(root: Path, records: Sequence[Record]) -> Split:
    """Raises: DatasetError if a class is in both parts, or a part has a single class."""
    found = {record.part for record in records}
    if found != {"train", "test"}:
        raise DatasetError(
            f"The column split has {', '.join(map(repr, sorted(found)))}; it must have 'train' "
            "and 'test', both at least once."
        )
    train, test = (
        labelled(root, [record for record in records if record.part == part])
        for part in ("train", "test")
    )
    for part, images in (("train", train), ("test", test)):
        if images.classes < FEWEST:
            raise DatasetError(f"{root} has {images.classes} {part} class(es). {_WHY}")
    return Split(train, test)


def recognise(root: Path) -> str | None:
    """The kind of data set in `root`; None if it has no known layout.

    A folder with a list of an official layout is that kind even if other parts are missing, so that
    the error can name them.
    """
    for kind, official in OFFICIAL.items():
        if not official.lacks(root):
            return kind
    if (root / TABLE).is_file():
        return "csv"
    for kind, official in OFFICIAL.items():
        if any((root / name).is_file() for names in official.needs for name in names):
            return kind
    try:
        return "folder" if not data_sets_in(root) and read_folder(root) else None
    except DatasetError:
        return None


def write_lists(
    root: Path, out: Path, kind: str | None, allow_partial: bool
) -> dict[str, LabelledImages]:
    """Write the official split as train.csv, test.csv, gallery.csv. Raises: DatasetError."""
    if not root.exists():
        raise DatasetError(f"{root} does not exist. Give the folder that was unpacked.")
    official = OFFICIAL.get(kind or recognise(root) or "")
    if official is None:
        raise DatasetError(
            f"{root} is not an official data set. Give the folder that was unpacked, or name its "
            f"kind with --kind: {', '.join(OFFICIAL)}."
        )
    split = read_official(official, root, allow_partial)
    out.mkdir(parents=True, exist_ok=True)
    for name, images in split.parts.items():
        write_table(out / f"{name}.csv", images)
    return split.parts


def without_damaged(
    root: Path, records: Sequence[Record], max_damaged: float
) -> tuple[list[Record], tuple[str, ...]]:
    """The records with a readable image, and a line for each other one, with the reason.

    A readable image is not decoded again until its file changes.

    Raises: DatasetError if more than the share `max_damaged` is missing or damaged.
    """
    readable = _Readable(root)
    with warnings.catch_warnings(), ThreadPoolExecutor(os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow warns about harmless oddities of files
        reasons = [*pool.map(lambda record: readable.fault(root / record.path), records)]
    readable.save()
    damaged = tuple(
        f"{record.path}: {reason}"
        for record, reason in zip(records, reasons, strict=True)
        if reason
    )
    if len(damaged) > max_damaged * len(records):
        raise DatasetError(
            f"{len(damaged):,} of the {len(records):,} images in {root} are missing or damaged, "
            f"above the limit data.max_damaged = {max_damaged:g} of them: "
            f"{_first_of(damaged, ' ')} Restore or remove them, or raise the limit. "
            "`kinlens-train data doctor --all` lists all."
        )
    kept = [record for record, reason in zip(records, reasons, strict=True) if not reason]
    return kept, damaged


class _Readable:
    """The files of a data set that were readable, by path, size and modification time."""

    def __init__(self, root: Path) -> None:
        name = hashlib.sha256(os.fsencode(root)).hexdigest()[:32]
        self.path = cache_folder() / "readable" / name
        self.decoder = version("pillow")
        self.before: set[bytes] = set()
        self.now: set[bytes] = set()
        with suppress(OSError):
            data = self.path.read_bytes()
            self.before = {data[at : at + _DIGEST] for at in range(0, len(data), _DIGEST)}

    def fault(self, path: Path) -> str:
        """Why an image cannot be used; empty if it can."""
        try:
            status = path.stat()
            state = f"{self.decoder} {path!a} {status.st_size} {status.st_mtime_ns}"
            digest = hashlib.sha256(state.encode()).digest()[:_DIGEST]
            if digest not in self.before:
                decode(path.read_bytes(), min_side_px=_SMALLEST_PX)
        except FileNotFoundError:
            return "The file is missing."
        except IsADirectoryError:
            return "The folder has no images."
        except OSError as error:
            return f"The file cannot be read: {error.strerror}."
        except ImageError as error:
            return str(error)
        self.now.add(digest)
        return ""

    def save(self) -> None:
        """Add the readable files; without a cache folder they are decoded each time."""
        if not self.now <= self.before:
            with suppress(TrainingError), replacing(self.path) as file:
                file.write(b"".join(self.before | self.now))
