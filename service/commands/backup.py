"""`kinlens-serve backup` and `restore`: copy all data of a service to one folder, and back."""

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from kinlens.embedder.errors import InvalidParameterError, StateMissingError
from kinlens.indexer.types import MILVUS
from kinlens.indexer.types import Progress as OnProgress
from kinlens.service.backups import folder as backups
from kinlens.service.commands import options
from kinlens.service.settings import split_named

BACKUP_EXAMPLE = (
    "Example: kinlens-serve backup --out /mnt/backups/2026-01-31 --state /var/lib/kinlens "
    "--bundle bundles/shop"
)
RESTORE_EXAMPLE = (
    "Example: kinlens-serve restore /mnt/backups/2026-01-31 --state /var/lib/kinlens "
    "--bundle bundles/shop"
)


@options.refusals()
@options.with_shared
def backup(
    out: Annotated[Path, typer.Option(help="New folder for the backup.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    **given: Any,
) -> None:
    """Back up galleries, uploaded images, bundles, keys, feedback and jobs of a running service.

    Use the same options, or environment, as the service. Data that is not included is listed.
    """
    settings = options.read_settings(**given)
    with _progress(backups.expected_bytes(settings), "Copying") as advance:
        report = backups.back_up(settings, out, advance)
    _show(report, as_json, f"Backup {out}")


@options.refusals()
def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder of the backup.")],
    state: options.State = None,
    gallery: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIR, the folder for a gallery; repeatable."),
    ] = None,
    bundle: Annotated[Path | None, typer.Option(help="Folder for the model bundle.")] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace existing data in these folders.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only verify the whole backup; change no files.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Restore a backup after verifying all its files. Stop the service first."""
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    if check:
        with _progress(size, "Checking") as advance:
            report = backups.check(source, advance)
        _show(report, as_json, f"Backup {source} is complete")
        return
    settings = options.read_settings(state=state, gallery=gallery, bundle=bundle)
    if settings.state is None:
        raise StateMissingError("A restore needs a state folder. Set it with --state DIR.")
    galleries = {}
    for name, text in map(split_named, settings.galleries):
        if name is None:
            raise InvalidParameterError(f"gallery = {text!r} has no name. Write NAME={text}.")
        if not text.startswith(MILVUS):
            galleries[name] = Path(text)
    with _progress(2 * size, "Restoring") as advance:
        report = backups.restore(
            source,
            settings.state,
            galleries,
            settings.bundle,
            replace=replace,
            on_progress=advance,
        )
    _show(report, as_json, f"Restored {source}")
    bundles = [] if settings.bundle is None else [settings.bundle]
    _warn_of_owner(settings.state, [*galleries.values(), *bundles])


def _warn_of_owner(state: Path, others: Iterable[Path]) -> None:
    """A restore as root leaves files that a service of another user cannot read."""
    owner, caller = state.stat(), os.geteuid()
    if owner.st_uid != caller:
        user = f"{owner.st_uid}:{owner.st_gid}"
        fault = f"{state} belongs to another user than the restored files."
    elif caller == 0:
        user = "USER:GROUP"
        fault = "The restored files belong to root."
    else:
        return
    paths = shlex.join(map(str, [state, *others]))
    typer.echo(
        f"Warning: {fault} If the service runs as another user, run: chown -R {user} {paths}",
        err=True,
    )


@contextlib.contextmanager
def _progress(total: int, label: str) -> Iterator[OnProgress]:
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=total)
        yield lambda done: bar.advance(task, done)


def _show(report: backups.Backup, as_json: bool, title: str) -> None:
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
        return
    typer.echo(f"{title}: of {report.created_at}, {len(report.bundles)} bundles")
    for gallery in report.galleries:
        counts = f"{gallery.items:,} items, {gallery.pictures:,} uploaded images"
        typer.echo(f"  gallery {gallery.name}: {counts}")
    for text in report.damaged:
        typer.echo(f"  damaged before the backup: {text}")
    for text in report.not_contained:
        typer.echo(f"  not included: {text}")
