"""Train a model in a subprocess, export its bundle, and rebuild the gallery with it."""

import contextlib
import csv
import hashlib
import json
import re
import shutil
import subprocess
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kinlens.embedder.bundle import BOXES, MAP, Bundle, attach
from kinlens.embedder.decoding.formats import FORMATS
from kinlens.embedder.engines.choice import FASTER
from kinlens.embedder.errors import GalleryError, ImageError, SourceError, StateError
from kinlens.embedder.sources.tables import class_in
from kinlens.indexer.gallery import Gallery
from kinlens.quality.gate import class_name
from kinlens.service.galleries.feedback import FeedbackStore
from kinlens.service.jobs.params import Plan, TrainParams, data_kind
from kinlens.service.jobs.rebuild import Context, replace_model
from kinlens.service.jobs.store import TOTAL
from kinlens.values import Scalar, single

_LAST_LINES = 3  # of a command's output, quoted in the error
_PREPARED, _TRAINED, _EXPORTED = 0.05, 0.6, 0.65  # parts of the whole job
_SHOWN = 100
_LIST = "images.csv"
_MIN_CLASSES = 4  # with 2 images: half of them are held out, and a search needs more than one
_FORMATS = {*FORMATS} - {"GIF"}
_RESULTS = (
    "figures",
    "validation",
    "trunk",
    "best_epoch",
    "seconds_per_epoch",
    "verdict",
    "choice",
)


def train_gallery(context: Context) -> None:
    """Do the work of a training job: train, export, rebuild the gallery, compare, decide, swap.

    Raises: StateError if a command fails; SourceError for too few classes; what `replace_model`
        raises.
    """
    params, folders, command = context.params, context.folders, context.plan.command
    assert isinstance(params, TrainParams)
    run, bundle = folders.run, folders.run / "bundle"
    run.mkdir(parents=True, exist_ok=True)
    try:
        _fit(context, params)
    finally:
        folders.drop_images()
    epochs = _epochs_in(run)
    result = _json(run / "result.json")
    figures = {name: result[name] for name in _RESULTS if name in result}
    context.report(training={**figures, "epochs": epochs}, swapped=False)
    context.at("export the bundle", _TRAINED)
    shutil.rmtree(bundle, ignore_errors=True)
    _run([*command, "export", str(run), "--out", str(bundle), *_options(context.plan)])
    made = _with_detector(context.plan.old_bundle, bundle)
    replace_model(context, made, params.gate, _EXPORTED)
    for folder in (bundle, made):
        shutil.rmtree(folder, ignore_errors=True)  # the service has a copy
    shutil.rmtree(folders.feedback, ignore_errors=True)
    for checkpoint in run.glob("*.pt"):
        checkpoint.unlink()
    folders.drop_images()


def _options(plan: Plan) -> list[str]:
    """The options of an export with the map and precision that the service needs or may choose."""
    has_map = plan.old_bundle is not None and (plan.old_bundle / MAP).is_file()
    with_map = ["--map"] if has_map else []
    if plan.session.precision == "auto":
        return [*with_map, "--precision", FASTER[plan.session.device], "--skip-refused"]
    if plan.session.precision == "fp32":
        return with_map
    return [*with_map, "--precision", plan.session.precision]


def _with_detector(old: Path | None, bundle: Path) -> Path:
    """The bundle in `bundle`, or a copy with the detector that the old bundle has."""
    opened = None if old is None else Bundle.open(old)
    if opened is None or opened.manifest.boxes is None:
        return bundle
    out = bundle.with_name("bundle-with-boxes")
    shutil.rmtree(out, ignore_errors=True)
    attach(Bundle.open(bundle), out, {BOXES: opened.path / BOXES}, boxes=opened.manifest.boxes)
    return out


def _fit(context: Context, params: TrainParams) -> None:
    folders, run = context.folders, context.folders.run
    if not folders.can_resume:  # a resumed training keeps its data
        _prepare(context, params)
    settings = [_data_of(context, params)]
    if params.feedback:
        settings.append(f"data.feedback={json.dumps(str(folders.feedback))}")
    changes = dict(params.overrides)
    if context.plan.weights is not None:
        changes["model.weights"] = str(context.plan.weights)
    settings += [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    words = [word for setting in settings for word in ("--set", setting)]
    if folders.can_resume:
        words.append("--resume")
    reported = -1

    def report_epoch() -> None:
        nonlocal reported
        epoch, total = _epochs_in(run)
        if total and epoch > reported:
            reported = epoch
            part = _PREPARED + (_TRAINED - _PREPARED) * epoch / total
            store, step = context.store, f"train: {epoch} of {total} epochs"
            # Not logged: the log already contains the epochs, from the trainer.
            store.progress(context.job.id, step, int(TOTAL * part))

    context.at("train", _PREPARED)
    _run([*context.plan.command, "fit", params.job, "--out", str(run), *words], report_epoch)


def _run(words: Sequence[str], on_line: Callable[[], None] = lambda: None) -> None:
    """Run a command and write its output to the log of the job; call `on_line` after each line.

    Raises: OSError if it cannot be started; StateError, with its last lines, if it fails.
    """
    print(f"$ {' '.join(words)}", flush=True)  # noqa: T201
    last: deque[str] = deque(maxlen=_LAST_LINES)
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if text := line.rstrip():
                last.append(text[-500:])
            print(text, flush=True)  # noqa: T201
            on_line()
    if process.returncode:
        raise StateError(
            f"{Path(words[0]).name} {words[1]} exited with status {process.returncode}: "
            f"{' '.join(last)[-1500:] or 'it printed nothing'}"
        )


def _prepare(context: Context, params: TrainParams) -> None:
    """Copy the images of the gallery, unless a data set is named, and the requested feedback."""
    names = None  # a named data set has the keys of the items as names
    if context.plan.data_root is None:
        names = _write_images(context, params.class_attribute, context.folders.data)
    if params.feedback:
        with contextlib.closing(FeedbackStore(context.folders.state)) as store:
            pairs = store.export(context.job.gallery, context.folders.feedback, names)
        context.report(feedback=Counter(pair.action for pair in pairs))


def _data_of(context: Context, params: TrainParams) -> str:
    """The setting for the training data: the named data set, or the copied images."""
    root = context.plan.data_root
    if root is not None and data_kind(params.job) != "rendered":
        return f"data.root={json.dumps(str(root))}"
    root = root or context.folders.data
    # Replace the whole table: jobs of another kind have other fields in it.
    is_listed = (root / _LIST).is_file()
    kind = f'kind = "csv", file = "{_LIST}"' if is_listed else 'kind = "folder"'
    return f'data={{{kind}, root = {json.dumps(str(root))}, small_classes = "drop"}}'


def _write_images(context: Context, chosen: str | None, root: Path) -> dict[str, str]:
    """Copy the image of each item of the gallery to `root`, with a list of their classes under the
    names that they have in the gallery; the copied paths by key.

    Raises: SourceError if fewer than four classes have two images; OSError.
    """
    shutil.rmtree(root, ignore_errors=True)
    paths: dict[str, str] = {}
    rows = [("path", "class")]
    sizes: Counter[str] = Counter()
    skipped = 0
    read_image = context.read_image()
    with contextlib.closing(Gallery.open(context.plan.gallery, load_index=False)) as gallery:
        class_attribute = chosen or class_in(gallery.schema())
        copied = context.progress("copy images", 0.0, _PREPARED, gallery.size)
        for item in gallery.items():
            copied(1)
            value = single(item.attributes.get(class_attribute))
            try:
                if value is None or value == "" or item.format not in _FORMATS:
                    raise SourceError(f"no {class_attribute}, or no format for training")
                data = read_image(item)
            except (ImageError, GalleryError, OSError) as error:
                skipped += 1
                if skipped <= _SHOWN:
                    context.log(f"skipped: {item.key}: {error}"[:500])
                continue
            folder = root / _folder_name(value)
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"{item.id:09d}.{item.format.lower()}"
            file.write_bytes(data)
            paths[item.key] = f"{folder.name}/{file.name}"
            rows.append((paths[item.key], class_name(value)))
            sizes[folder.name] += 1
        name = gallery.name
    if skipped:
        context.log(f"skipped: {skipped:,} images in total")
    enough = sum(size > 1 for size in sizes.values())
    if enough < _MIN_CLASSES:
        raise SourceError(
            f"Gallery {name} has {enough} values of the attribute {class_attribute!r} with 2 "
            f"images or more; a training needs {_MIN_CLASSES}. Add that attribute to the items, or "
            "choose another one with class_attribute."
        )
    with (root / _LIST).open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, quoting=csv.QUOTE_ALL)  # a reader strips spaces without quotes
        writer.writerows(rows)
    return paths


def _folder_name(value: Scalar) -> str:
    """A name that depends on the value alone, so each training splits the classes alike."""
    word = re.sub(r"[^A-Za-z0-9]+", "-", str(value))[:40].strip("-") or "class"
    return f"{word}-{hashlib.sha256(repr(value).encode()).hexdigest()[:12]}"


def _epochs_in(run: Path) -> tuple[int, int]:
    """Finished and total epochs of a folder; the total is 0 until it is known."""
    total = _json(run / "job.json").get("optimizer", {}).get("epochs", 0)
    done = 0
    with contextlib.suppress(OSError), (run / "log.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            with contextlib.suppress(ValueError):  # the last line may be incomplete
                record = json.loads(line)
                done = int(record["epoch"]) if record.get("kind") == "epoch" else done
    return done, total


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
