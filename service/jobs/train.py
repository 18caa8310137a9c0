"""Train a model in a process of its own, export its bundle, give the gallery that model."""

import json
import shutil
from pathlib import Path
from typing import Any

from embedder.session import FASTER, PROVIDERS
from indexer.gallery import Gallery
from service.jobs.class_folders import write_classes
from service.jobs.command import run_command
from service.jobs.context import Context
from service.jobs.epochs import epochs_of, followed, result_of
from service.jobs.params import TrainParams
from service.jobs.plan import Plan, data_kind
from service.jobs.replace import replace_model
from service.jobs.unseen import Unseen, seen_by, unseen_in

_PREPARED, _TRAINED, _EXPORTED = 0.05, 0.6, 0.65  # parts of the whole job
_SHOWN = 100


def train_gallery(context: Context) -> None:
    """The work of a training: fit, export, rebuild beside, compare, decide, swap.

    Raises: StateError if a command fails; SourceError for too few classes; as `replace_model`.
    """
    params, run = context.params, context.folders.run
    assert isinstance(params, TrainParams)
    _fit(context, params)
    epoch, total, _ = epochs_of(run)
    context.tell(training={**result_of(run), "epochs": [epoch, total]}, swapped=False)
    context.steps.set("export the bundle", _TRAINED)
    bundle = run / "bundle"
    shutil.rmtree(bundle, ignore_errors=True)
    more = _precisions(context.plan)
    run_command([*context.plan.command, "export", str(run), "--out", str(bundle), *more])
    seen = seen_by(run, context.plan.data_root or run / "data")
    shutil.rmtree(run / "data", ignore_errors=True)

    def choose(gallery: Gallery) -> Unseen:
        return unseen_in(gallery, params.class_attribute, seen)

    replace_model(context, bundle, params.gate, _EXPORTED, choose)
    shutil.rmtree(bundle, ignore_errors=True)  # the service has a copy
    for checkpoint in run.glob("*.pt"):
        checkpoint.unlink()


def _precisions(plan: Plan) -> list[str]:
    """The options of an export that has what the service asks for, or may choose by itself."""
    if plan.precision == "auto":
        return ["--precision", FASTER[PROVIDERS[plan.device]], "--skip-refused"]
    return [] if plan.precision == "fp32" else ["--precision", plan.precision]


def _fit(context: Context, params: TrainParams) -> None:
    run = context.folders.run
    run.mkdir(parents=True, exist_ok=True)
    changes = dict(params.overrides)
    if context.plan.weights is not None:
        changes["model.weights"] = str(context.plan.weights)
    overrides = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    settings = [_data(context, params), *overrides]
    words = [word for setting in settings for word in ("--set", setting)]
    is_resumed = (run / "checkpoint.pt").is_file()
    words += ["--resume"] if is_resumed else []

    def tell(epoch: int, total: int, figures: dict[str, Any]) -> None:
        part = _PREPARED + (_TRAINED - _PREPARED) * epoch / total
        loss = f", loss {figures['loss']:.3f}" if "loss" in figures else ""
        context.steps.set(f"train: {epoch} of {total} epochs{loss}", part)

    context.steps.set("train", _PREPARED)
    with followed(run, tell):
        run_command([*context.plan.command, "fit", params.job, "--out", str(run), *words])


def _data(context: Context, params: TrainParams) -> str:
    """The setting that says what to train on."""
    root = context.plan.data_root
    if root is None:
        root = context.folders.run / "data"
        _write_pictures(context, params, root)
    elif data_kind(params.job) != "rendered":
        return f"data.root={json.dumps(str(root))}"
    # A job of another kind has other names in this table, so all of it is replaced.
    return f'data={{kind = "folder", root = {json.dumps(str(root))}, small_classes = "drop"}}'


def _write_pictures(context: Context, params: TrainParams, root: Path) -> None:
    gallery = Gallery.open(context.plan.gallery, verify_hashes=False)
    try:
        more = context.steps.enter("copy pictures", 0.0, _PREPARED, gallery.size)
        read = context.read_image(gallery)
        left_out = write_classes(gallery, params.class_attribute, read, root, more)
        for line in left_out[:_SHOWN]:
            print(f"left out: {line}"[:500], flush=True)  # noqa: T201 (into the log of the job)
        if left_out[_SHOWN:]:
            print(f"left out: {len(left_out):,} pictures in all", flush=True)  # noqa: T201
    finally:
        gallery.close()
