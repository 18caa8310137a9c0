"""`kinlens-serve backup` and `restore`: copy all data of a service to one folder, and back."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kinlens.embedder.errors import KinlensError
from kinlens.embedder.programs.console import JsonOption, command, print_report
from kinlens.embedder.programs.progress import progress_bar
from kinlens.service.backups import folder as backups
from kinlens.service.commands import options
from kinlens.service.galleries.locations import Locations


@command(
    options.app,
    "kinlens-serve backup --out /mnt/backups/2026-01-31 --state /var/lib/kinlens "
    "--bundle bundles/shop",
)
@options.with_shared
def backup(
    out: Annotated[Path, typer.Option(help="New folder for the backup.")],
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Back up galleries, uploaded images, bundles, keys, feedback and jobs of a running service.

    Use the same options, or environment, as the service. Data that is not included is listed.
    """
    settings = options.read_settings(**given)
    with progress_bar(None, "Copying", "bytes", shown=True) as advance:
        report = backups.back_up(settings, out, advance)
    print_report(report, as_json, f"Backup {out}: {report}")


@command(
    options.app,
    "kinlens-serve restore /mnt/backups/2026-01-31 --state /var/lib/kinlens-restored",
)
def restore(
    source: Annotated[Path, typer.Argument(metavar="BACKUP", help="Folder of the backup.")],
    state: options.State = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only verify the whole backup; write no files.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Restore a whole backup to a new or empty state folder, after verifying all its files."""
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    if check:
        with progress_bar(size, "Checking", "bytes", shown=True) as advance:
            report = backups.check(source, advance)
        print_report(report, as_json, f"Backup {source} is complete: {report}")
        return
    folder = options.read_settings(state=state).require_state("A restore")
    with progress_bar(2 * size, "Restoring", "bytes", shown=True) as advance:
        report = backups.restore(source, folder, advance)
    print_report(report, as_json, f"Restored {source}: {report}")
    hidden = _hidden(folder)
    if not as_json:
        primary = [one.bundle_id for one in report.bundles if one.primary]
        bundle = f" --bundle {folder}/bundles/{primary[0]}" if primary else ""
        typer.echo(f"Serve it: kinlens-serve --state {folder}{bundle}")
        for gallery in report.galleries:
            if not gallery.managed and gallery.name not in hidden:
                typer.echo(
                    f"  gallery {gallery.name} was in {gallery.path}, and is served without "
                    f"--gallery from {folder}/galleries/{gallery.name} now; you may move it back"
                )
    for warning in hidden.values():
        typer.echo(f"Warning: {warning}", err=as_json)


def _hidden(state: Path) -> dict[str, str]:
    """A warning for each gallery of `state` that a service with this environment would not serve,
    by name; or the one reason, by "", for which it would not start.
    """
    try:
        return Locations(options.read_settings(state=state)).hidden()
    except (KinlensError, OSError) as error:
        return {"": str(error)}
