"""What `kinlens-train` does, from Python. The public names are in kinlens.training.

Each command calls the function of its name, so that each continues what the other has begun.
"""

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Union

from kinlens.embedder.errors import JobError
from kinlens.embedder.programs.progress import console, progress_bar
from kinlens.environment import TRAINING, needs
from kinlens.training.config.layers import JOBS, read_layers
from kinlens.training.library.measure import Figures, evaluate, export
from kinlens.training.library.sources import Images, job_of, load_images, section, shop_of, summary
from kinlens.training.report.log import Callback, Callbacks, console_listener, note

if TYPE_CHECKING:
    from torch import nn

    from kinlens.training.config.job import Job
    from kinlens.training.data.doctor import Report
    from kinlens.training.data.records import LabelledImages
    from kinlens.training.folder import Result
    from kinlens.training.studies.tournament import GridRun
    from kinlens.training.studies.validation import Trial

__all__ = [
    "Figures",
    "compare",
    "crossval",
    "doctor",
    "download",
    "evaluate",
    "export",
    "fit",
    "new",
    "render",
    "search",
    "split",
    "tournament",
]

Source = Union[str, Path, Mapping[str, Any], "Job"]


@needs("kinlens.training.fit", *TRAINING)
def fit(
    job: Source,
    images: Images | None = None,
    *,
    out: str | Path | None = None,
    loss: "type[nn.Module] | nn.Module | None" = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    verbose: bool = False,
) -> "Result":
    """Train a job and test its model, with a bar of the progress.

    Args:
        job: the name of a shipped job, a TOML file, or its tables as a dict.
        images: a folder with a folder for each class, a CSV with the columns path and class, a list
            of (path, class), or a DataFrame with these columns; None: the images of the job.
        out: the run folder; by default runs/NAME. It has the same files as one of the command.
        loss: your own loss, in place of the job's: a module from embeddings (B, D) and labels (B,)
            to a scalar, as a class or made by you. A class gets `classes` and `dim` if its
            constructor has them. Embeddings have unit length unless its `normalized` is False.
        callbacks: called during the training, see `Callback`.
        resume: continue the run in `out`.
        verbose: also print the remarks of the report.

    Returns:
        The figures on test classes, `result.figures["R@1"]` in percent, and all else that
        `result.json` has.

    Raises:
        JobError: settings that do not fit each other, or a folder that has a run already.
        DatasetError: images that cannot be trained on.
        TrainingError: a loss that is not finite, or a folder that cannot be written.
        EvaluationError: all embeddings are equal.
    """
    # Imported here, as torch takes seconds.
    from kinlens.training.checkpoint import FILE, load_checkpoint
    from kinlens.training.config.job import Job, load_job, with_absolute_paths
    from kinlens.training.distributed import is_main, main_first, process_group
    from kinlens.training.parts.own import forget_files, register
    from kinlens.training.runner import require_fresh_or_resumable, run_job

    forget_files()
    of_images: dict[str, Any] = {}
    if images is not None:
        root, _, table = shop_of(images)
        of_images = {"kind": "folder", "root": str(root)}
        if table:
            of_images |= {"kind": "csv", "file": table}
        if not isinstance(job, Job) and "data" not in read_layers(job)[0]:
            job = {**(job if isinstance(job, Mapping) else {"base": str(job)}), "data": of_images}
    wanted = job if isinstance(job, Job) else job_of(job)
    content = wanted.as_dict()
    if of_images:
        kept = content["data"].keys() & {"train_fraction", "split_seed"}
        content["data"] = {name: content["data"][name] for name in kept} | of_images
    if loss is not None:
        content["loss"] = {"name": register(loss)}
    wanted = with_absolute_paths(load_job(content))
    folder = Path("runs", wanted.name) if out is None else Path(out)
    require_fresh_or_resumable(folder, resume)
    with process_group(wanted.runtime.device):
        console.quiet = not is_main()
        with main_first():
            begun = load_checkpoint(folder).split_sha256 if (folder / FILE).exists() else ""
            split = load_images(wanted, expected=begun)
        note(f"{wanted.name}: {summary(split)}")
        with console_listener(verbose) as listener:
            followers = Callbacks([listener, *callbacks])
            followers.started(wanted)
            try:
                result = run_job(wanted, split, folder, followers)
            except BaseException:
                followers.stopped()
                raise
            followers.finished(result)
        return result


@needs("kinlens.training.new", *TRAINING)
def new(images: Images, out: str | Path = "job.toml", *, weights: str = "imagenet") -> "Job":
    """Write a commented job for your own images, with the recommended recipe, and return it.

    Args:
        images: as for `fit`.
        out: the file to write.
        weights: "imagenet", the path of a weight file, or of a bundle to continue.

    Raises:
        JobError: `out` exists.
        DatasetError: images that cannot be trained on.
    """
    out = Path(out)
    if out.exists():
        raise JobError(f"{out} exists already. Delete it, or give another --out.")
    root, name, table = shop_of(images)
    from kinlens.training.config.job import load_job
    from kinlens.training.data.samplers import BatchSampler
    from kinlens.training.folder import replace_text

    weights = str(Path(weights).resolve()) if Path(weights).exists() else weights
    text = (JOBS / "shop.toml").read_text(encoding="utf-8")
    for key, value in {"name": name, "root": str(root), "weights": weights}.items():
        # A function, as a replacement string would interpret the backslashes of a path.
        line = re.compile(rf'^({key} = )"[^"]*"', flags=re.MULTILINE)
        shown = json.dumps(value, ensure_ascii=False)
        text = line.sub(partial(_with_value, shown), text, count=1)
    if table:
        text = text.replace('kind = "folder"', f'kind = "csv"\nfile = {json.dumps(table)}', 1)
    replace_text(out, text)
    try:
        job = load_job(out)
        split = load_images(job)
        steps = len(BatchSampler(job, split.train.labels, 0, 1))
    except BaseException:
        out.unlink()
        raise
    epochs = job.optimizer.enough_epochs(steps).epochs
    note(f"{summary(split)}; {epochs} epochs of {steps} steps")
    return job


def _with_value(value: str, found: re.Match[str]) -> str:
    return found[1] + value


@needs("kinlens.training.crossval", *TRAINING)
def crossval(
    job: str | Path,
    *,
    folds: int = 10,
    out: str | Path | None = None,
    seed: int = 0,
    settings: Sequence[str] = (),
) -> dict[str, dict[str, float]]:
    """Cross validate a job over its train classes; finished folds are not trained again.

    Args:
        job: the name of a shipped job, or a TOML file.
        out: the folder; by default runs/NAME-crossval. It gets report.md.
        settings: changes to the job, such as "optimizer.epochs=8".

    Returns:
        "mean" and "std" over the folds, by the name of the figure.
    """
    read_layers(job)  # refuses a wrong name before the slow imports
    from kinlens.training.config.job import load_job, with_absolute_paths
    from kinlens.training.studies.validation import cross_validate, scores

    wanted = with_absolute_paths(load_job(job, settings))
    folder = Path("runs", f"{wanted.name}-crossval") if out is None else Path(out)
    split = load_images(wanted, hold_out=False)
    with console_listener() as listener:
        found = cross_validate(wanted, split, folder, listener, folds, seed)
    note(f"Report: {folder / 'report.md'}")
    return scores(found)


@needs("kinlens.training.search", *TRAINING)
def search(
    job: str,
    space: str | Path,
    *,
    trials: int = 50,
    out: str | Path | None = None,
    validation: float = 0.1,
    epochs: int | None = None,
    sampler: Literal["tpe", "grid"] = "tpe",
    seed: int = 0,
    settings: Sequence[str] = (),
) -> "Trial":
    """Search for the settings with the best R@1 on validation classes, without test classes.

    Args:
        job: the name of a shipped job, or a TOML file.
        space: a TOML file with a range or values for each setting.
        trials: in all, finished ones included.
        out: the folder; by default runs/NAME-search. It gets best.toml and report.md.
        validation: the fraction of the train classes to validate on.
        epochs: of a trial; None: those of the job.
        sampler: "tpe" learns from earlier trials, "grid" tries every combination of steps.
        settings: changes to the job, such as "optimizer.epochs=8".

    Returns:
        The best trial, with its `values` and `score`.
    """
    from kinlens.training.config.job import load_job, with_absolute_paths
    from kinlens.training.studies import validation as study

    wanted = with_absolute_paths(load_job(study.job_for(job, Path(space)), settings))
    plan = study.Plan(study.load_space(Path(space)), trials, validation, seed, epochs, sampler)
    folder = Path("runs", f"{wanted.name}-search") if out is None else Path(out)
    split = load_images(wanted, hold_out=False)
    with console_listener() as listener:
        best = study.search(wanted, split, plan, folder, listener)
    note(f"Test it once: kinlens-train fit {folder / 'best.toml'}")
    return best


@needs("kinlens.training.tournament", *TRAINING)
def tournament(
    grid: str | Path,
    *,
    out: str | Path | None = None,
    plan: bool = False,
    choose_by_test: bool = False,
    settings: Sequence[str] = (),
) -> "list[GridRun]":
    """Train every combination of a grid and rank them; finished runs are not trained again.

    Args:
        grid: a TOML file with a base job and the lists to combine.
        out: the folder; by default runs/GRID. It gets runs.csv and report.md.
        plan: train nothing.
        choose_by_test: accept jobs whose test classes choose the epoch.
        settings: changes to the base job, such as "optimizer.epochs=8".

    Returns:
        The runs, each with its `result`, or the `reason` of its failure.
    """
    from kinlens.training.studies.tournament import load_grid, play, read_runs

    runs = load_grid(Path(grid), settings)
    for run in runs:
        run.job.protocol.require_flag(choose_by_test)
    folder = Path("runs", Path(grid).stem) if out is None else Path(out)
    if plan:
        return read_runs(runs, folder)
    found = play(runs, folder, note)
    note(f"Report: {folder / 'report.md'}")
    return found


@needs("kinlens.training.compare", *TRAINING)
def compare(
    study: str | Path,
    runs: Sequence[str | Path] = (),
    *,
    against: Sequence[str] = (),
    by: str = "",
    page: str | Path | None = None,
) -> str:
    """Compare methods over seeds: store the figures of runs, and return their table as Markdown.

    Args:
        study: the JSON file of the study, which is created if it is missing.
        runs: finished run folders to add, or JSON files of peers.
        against: methods that others are compared with, seed by seed; "METHOD=OTHER" for a single
            method. They are stored in the study.
        by: the setting that names the method, such as "loss.name"; by default the folder does.
        page: a file whose block `<!-- NAME OF THE STUDY -->` gets the table.
    """
    from dataclasses import asdict

    from kinlens.training.folder import replace_json
    from kinlens.training.studies import tables

    study = Path(study)
    known = tables.read_study(study)
    others = {method: other for method, _, other in (text.rpartition("=") for text in against)}
    if runs or others:
        records = tables.records_of([Path(run) for run in runs], by)
        known = known.merged(records, others)
        replace_json(study, asdict(known))
    if not known.records:
        raise JobError(f"{study} has no runs. Pass finished run folders to add.")
    lines = tables.methods(known)
    if page is not None:
        tables.replace_block(Path(page), study.stem, lines)
    return "\n".join(lines)


@needs("kinlens.training.render", *TRAINING)
def render(
    out: str | Path, *, products: int = 90, views: int = 16, size_px: int = 160, seed: int = 0
) -> None:
    """Draw a catalogue of products into a folder: a data set for demos and tests.

    Args:
        out: the folder to fill.
        views: images of each product.
        size_px: side of an image.
        seed: another seed gives other products.

    Raises: JobError for a number out of range.
    """
    from kinlens.rendered.catalogue import write_catalogue
    from kinlens.training.config.settings import RenderedData

    numbers = {"products": products, "views": views, "size_px": size_px, "seed": seed}
    section(RenderedData, kind="rendered", root=str(out), **numbers)
    with progress_bar(products * views, "render products", "images") as advance:
        write_catalogue(Path(out), products, views, size_px, seed, lambda: advance(1))


@needs("kinlens.training.doctor", *TRAINING)
def doctor(
    path: str | Path,
    *,
    kind: str | None = None,
    file: str | None = None,
    quick: bool = False,
    allow_partial: bool = False,
    feedback: Sequence[str | Path] = (),
) -> "Report":
    """All problems of a data set folder; `report.lines()` names them, with a cure for each.

    Args:
        kind: its layout; None: recognised.
        file: the CSV that lists its images, if it is not images.csv.
        quick: check headers only, not the pixels.
        allow_partial: accept a subset of an official data set.
        feedback: folders that `kinlens-serve feedback export` wrote.
    """
    from kinlens.training.data.doctor import examine

    with contextlib.ExitStack() as bar:

        def watch(total: int) -> Callable[[], None]:
            advance = bar.enter_context(progress_bar(total, "look at images", "images"))
            return lambda: advance(1)

        folders = [Path(folder) for folder in feedback]
        return examine(Path(path), kind, file, quick, allow_partial, watch, folders)


@needs("kinlens.training.download", *TRAINING)
def download(
    name: str, root: str | Path, *, url: str | None = None, keep_archive: bool = False
) -> Path:
    """Download, verify and unpack an official data set, unless it exists; return its folder.

    Args:
        name: "cub", "aircraft" or "sop".
        root: the folder that gets the folder of the data set; an archive in it is used.
        url: another address of the same file, which is checked as usual.
        keep_archive: keep the archive in `root`.
    """
    from kinlens.training.data.download import find_source, obtain

    source = find_source(name)
    if not (Path(root) / source.folder).exists():
        note(f"{source.name} is distributed {source.licence}.")
    return obtain(source, Path(root), url, keep_archive, note)


@needs("kinlens.training.split", *TRAINING)
def split(
    path: str | Path, out: str | Path, *, kind: str | None = None, allow_partial: bool = False
) -> "dict[str, LabelledImages]":
    """Write the official split of a data set as lists for galleries: train, test, gallery.

    Args:
        path: the folder that was unpacked.
        out: the folder for the lists, such as test.csv.
        kind: its layout; None: recognised.
        allow_partial: accept a subset of an official data set.

    Returns:
        The images of each list, whose paths are relative to their `root`.
    """
    from kinlens.training.data.load import write_lists

    return write_lists(Path(path), Path(out), kind, allow_partial)
