"""kinlens-index: build galleries, check them, show what is in them."""

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from embedder.errors import KinlensError
from embedder.session import Embedder, OnnxEmbedder, SessionSettings
from indexer.build import BuildReport, BuildSettings, build_gallery, estimated_index_mb
from indexer.embed import EmbedSettings
from indexer.images import Source, csv_source, folder_source, split_source
from indexer.layout import SHORT, GalleryFolder
from indexer.stats import gallery_stats
from indexer.verify import sampled_ids, verify_gallery
from indexer.version import read_manifest

Device = Literal["cpu", "cuda"]

_SHOWN = 10
_SPEED_PERIOD_S = 600.0  # a batch may take minutes, and an estimate needs several of them
_TABLES = ("formats", "attributes")

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Build image galleries, check them, show what is in them.",
)
_out = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
_err = Console(stderr=True, markup=False, highlight=False, emoji=False)

GalleryArgument = Annotated[Path, typer.Argument(metavar="GALLERY", help="Folder of the gallery.")]
DeviceOption = Annotated[Device, typer.Option(help="Where the model runs.")]
FallbackOption = Annotated[
    bool, typer.Option("--allow-cpu-fallback", help="Use the CPU where CUDA does not work.")
]


@app.command(
    epilog="Example: kinlens-index build shop/images --bundle shop/bundle --out shop/gallery"
)
def build(
    bundle: Annotated[Path, typer.Option(help="Model bundle that embeds the images.")],
    out: Annotated[Path, typer.Option(help="Folder of the gallery; a new version replaces it.")],
    images: Annotated[
        Path | None,
        typer.Argument(metavar="IMAGES", help="Folder of images; paths in a list start from it."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name in addresses; that of the folder.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="CSV list: columns key, path and any attributes.")
    ] = None,
    split: Annotated[
        Path | None, typer.Option(help="Data set list: lines of relative/path.jpg, class, ...")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="IMAGES under another name.")] = None,
    device: DeviceOption = "cpu",
    allow_cpu_fallback: FallbackOption = False,
    batch_size: Annotated[int, typer.Option(min=1, max=1024, help="Images per batch.")] = 32,
    workers: Annotated[int, typer.Option(min=0, max=256, help="Threads; 0: one a core.")] = 0,
) -> None:
    """Build a gallery from a folder, a CSV list or a data set split.

    A build that was stopped continues with the same command. Unreadable images are left out and
    listed in report.json.
    """
    settings = BuildSettings(name, EmbedSettings(batch_size, workers))
    with _errors_shown():
        source = _source(images, root, csv, split)
        embedder = open_embedder(bundle, device, allow_cpu_fallback)
        count = len(source.records)
        _out.print(
            f"Found {count:,} images in the {source.description}. Dimension {embedder.dim}, "
            f"index about {estimated_index_mb(count, embedder.dim):,.1f} MB, "
            f"model on {embedder.provider}."
        )
        with _progress(count, "Embedding") as progress:
            report = build_gallery(source, embedder, out, settings, progress)
        _print_report(report, out)


@app.command(epilog="Example: kinlens-index verify shop/gallery --bundle shop/bundle --sample 500")
def verify(
    gallery: GalleryArgument,
    bundle: Annotated[
        Path | None, typer.Option(help="Embed the images again with this bundle and compare.")
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(min=1, help="Items to check; all up to 10,000, of larger galleries 1,000."),
    ] = None,
    image_root: Annotated[
        Path | None, typer.Option(help="Folder of the images, if they were moved.")
    ] = None,
    device: DeviceOption = "cpu",
    allow_cpu_fallback: FallbackOption = False,
) -> None:
    """Check every hash, and that items find themselves.

    Without --bundle the stored vectors search for themselves, so vectors that stand under the wrong
    items go unnoticed.
    """
    with _errors_shown():
        embedder = open_embedder(bundle, device, allow_cpu_fallback) if bundle else None
        size = read_manifest(GalleryFolder(gallery).current()).size
        with _progress(len(sampled_ids(size, sample)), "Searching") as progress:
            report = verify_gallery(gallery, embedder, sample, image_root, progress)
    for problem in report.problems[:_SHOWN]:
        _out.print(f"{problem.key}: {problem.reason}")
    _out.print(
        f"Gallery {report.name}, version {report.version[:SHORT]}: hashes fit, "
        f"{report.checked - len(report.problems):,} of {report.checked:,} checked items "
        f"({report.size:,} in all) find themselves."
    )
    if report.problems:
        raise typer.Exit(1)


@app.command(epilog="Example: kinlens-index stats shop/gallery --json")
def stats(
    gallery: GalleryArgument,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in a gallery."""
    with _errors_shown():
        facts = gallery_stats(gallery)
    if json:
        _out.print(facts.model_dump_json(indent=2))
        return
    for name, value in facts.model_dump().items():
        shown = ", ".join(f"{k} {v:,}" for k, v in value.items()) if name in _TABLES else value
        _out.print(f"{name.replace('_', ' '):16} {shown}")


def open_embedder(bundle: Path, device: Device, allow_cpu_fallback: bool) -> Embedder:
    """The bundle in an engine that leaves the cores to the indexer's threads."""
    return OnnxEmbedder.open(
        bundle, SessionSettings(device, threads=1, allow_cpu_fallback=allow_cpu_fallback)
    )


def _source(images: Path | None, root: Path | None, csv: Path | None, split: Path | None) -> Source:
    if csv and split:
        raise typer.BadParameter("Give --csv or --split, not both.")
    if images and root:
        raise typer.BadParameter("Give IMAGES or --root, not both: they mean the same.")
    folder = images or root
    if csv:
        return csv_source(csv, folder)
    if split:
        return split_source(split, folder)
    if folder is None:
        raise typer.BadParameter("Give the folder IMAGES, or a list with --csv or --split.")
    return folder_source(folder)


def _print_report(report: BuildReport, out: Path) -> None:
    _out.print(
        f"Gallery {out}, version {report.version[:SHORT]}: {report.indexed:,} items "
        f"({report.embedded:,} embedded, {report.reused:,} from an earlier run, "
        f"{report.duplicates:,} copies) in {report.elapsed_s:.1f} s, "
        f"{report.images_per_s:.1f} images/s."
    )
    if not report.failures:
        return
    _out.print(f"Left out {len(report.failures):,} of {report.found:,} images:")
    for failure in report.failures[:_SHOWN]:
        _out.print(f"  {failure.key}: {failure.reason}")
    if len(report.failures) > _SHOWN:
        folder = out / "versions" / report.version[:SHORT]
        _out.print(f"  ... and {len(report.failures) - _SHOWN:,} more in {folder / 'report.json'}")


@contextlib.contextmanager
def _errors_shown() -> Iterator[None]:
    try:
        yield
    except KinlensError as error:
        _err.print(f"Error: {' '.join(str(error).split())}", soft_wrap=True)
        raise typer.Exit(1) from error
    except MemoryError as error:
        _err.print("Error: Not enough memory. Build with a lower --batch-size or --workers.")
        raise typer.Exit(1) from error
    except KeyboardInterrupt as interrupt:
        _err.print("Stopped. Finished work is kept: run the same command again to continue.")
        raise typer.Exit(1) from interrupt


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed_s = task.finished_time or task.elapsed or math.inf
        return Text(f"{task.speed or task.completed / elapsed_s:.1f} images/s")


@contextlib.contextmanager
def _progress(total: int, label: str) -> Iterator["_Advance"]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,}"),
        _Speed(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=_err, speed_estimate_period=_SPEED_PERIOD_S) as progress:
        yield _Advance(progress, label, total)


class _Advance:
    def __init__(self, progress: Progress, label: str, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task(label, total=total)

    def __call__(self, count: int) -> None:
        self._progress.advance(self._task, count)


if __name__ == "__main__":
    app()
