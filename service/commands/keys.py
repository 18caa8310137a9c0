"""`kinlens-serve keys`: create, list, rotate and revoke API keys; `kinlens-serve audit`."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from kinlens.embedder.errors import StateMissingError
from kinlens.embedder.programs.console import command, refuse
from kinlens.models import Change
from kinlens.service.access.audit import AuditLog
from kinlens.service.access.keys import (
    MAX_DAILY_UNITS,
    OVERLAP,
    SCOPES,
    Key,
    KeyStore,
    Limits,
    open_keys,
)
from kinlens.service.commands import options

app = typer.Typer(no_args_is_help=True, help="Create, list, rotate and revoke API keys.")
options.app.add_typer(app, name="keys")

_HOUR = timedelta(hours=1)
_MAX_SHOWN = 1_000_000

Name = Annotated[str, typer.Argument(help="Name of the key, shown in logs and lists.")]


@command(app, "kinlens-serve keys create shop --scope search --state /var/lib/kinlens")
def create(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option(
            help="search, write, admin or embed; write includes search, admin includes all. "
            "Repeatable."
        ),
    ],
    gallery: Annotated[
        list[str] | None,
        typer.Option(help="Bind the key to this gallery. Repeatable; default: all galleries."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option("--filter", help="Only items that match this filter, such as 'tenant = 7'."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Rate such as 600/minute; replaces KINLENS_RATE_LIMIT_PER_KEY."),
    ] = None,
    daily_units: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_DAILY_UNITS, help="Maximum units of work in a day."),
    ] = None,
    expires_days: Annotated[
        int | None,
        typer.Option(min=1, max=3650, help="Days until it expires; default: never."),
    ] = None,
    state: options.State = None,
) -> None:
    """Create a key and print it once; only its hash is stored."""
    scopes = [known for known in SCOPES if known in scope]
    for word in {*scope} - {*scopes}:
        refuse(f"scope = {word[:40]!r} is unknown; use search, write, admin or embed.")
    ends = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)
    galleries = tuple(gallery) if gallery else None
    limits = Limits(galleries=galleries, filter=only, rate=rate, daily_units=daily_units)
    with _changing("create", name, state) as store:
        text = store.create(name, scopes, ends, limits)
    typer.echo(f"Key {name}: store it now, it is not shown again.", err=True)
    typer.echo(text)


@command(app, "kinlens-serve keys list --state /var/lib/kinlens", name="list")
def list_keys(state: options.State = None) -> None:
    """List all keys with their scopes, bindings and limits, without their secrets.

    Exits with 1 if there are no keys.
    """
    now, folder = datetime.now(UTC), existing(state)
    keys = open_keys(folder).list()
    if not keys:
        refuse(f"There are no keys in {folder}. Create one with kinlens-serve keys create.")
    columns = ("Name", "Scopes", "State", "Made", "Ends", "Galleries", "Filter", "Limits")
    options.print_table(columns, [_row(key, now) for key in keys])


@command(app, "kinlens-serve keys revoke shop --state /var/lib/kinlens")
def revoke(name: Name, state: options.State = None) -> None:
    """Revoke a key; a running service refuses it within a second."""
    with _changing("revoke", name, state) as store:
        store.revoke(name)
    typer.echo(f"Key {name} is revoked.")


@command(app, "kinlens-serve keys rotate shop --state /var/lib/kinlens")
def rotate(
    name: Name,
    overlap_hours: Annotated[
        float, typer.Option(min=0, help="Hours that the previous secret stays valid.")
    ] = OVERLAP / _HOUR,
    state: options.State = None,
) -> None:
    """Give a key a new secret and print it once; the previous one stays valid for a while."""
    with _changing("rotate", name, state) as store:
        text = store.rotate(name, overlap_hours * _HOUR)
    typer.echo(
        f"Key {name}: store it now, it is not shown again. The previous secret stays valid for "
        f"{overlap_hours:g} hours.",
        err=True,
    )
    typer.echo(text)


@command(options.app, "kinlens-serve audit --state /var/lib/kinlens --json")
def audit(
    limit: Annotated[
        int, typer.Option(min=1, max=_MAX_SHOWN, help="Number of newest entries.")
    ] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
    state: options.State = None,
) -> None:
    """Show the audit log of changes, newest first. Exits with 1 if it is empty."""
    folder = existing(state)
    entries = AuditLog(folder).newest(limit)
    if not entries:
        refuse(f"The audit log of {folder} is empty: nothing was changed yet.")
    if as_json:
        for entry in entries:
            typer.echo(entry.model_dump_json(exclude_none=True))
        return
    columns = ("Time", "By", "From", "Action", "Gallery", "Target", "Count", "Status")
    rows = []
    for one in entries:
        time = one.time.isoformat(timespec="seconds")
        count = "-" if one.affected is None else f"{one.affected:,}"
        texts = (one.by, one.client, one.action, one.gallery, one.target, count, str(one.status))
        rows.append((time, *(text or "-" for text in texts)))
    options.print_table(columns, rows)


@contextlib.contextmanager
def _changing(command: str, name: str, state: object) -> Iterator[KeyStore]:
    folder = _folder(state)
    yield open_keys(folder)
    note(folder, f"keys {command}", target=name, affected=1)


def note(state: Path, action: str, **fields: Any) -> None:
    """Write a change by a command, which needs no key, to the audit log."""
    AuditLog(state).add(Change(action=action, by="command line", status=200, **fields))


def _folder(state: object) -> Path:
    return options.read_settings(state=state).require_state("The file of keys")


def existing(state: object) -> Path:
    """The state folder. Raises: StateMissingError if there is none."""
    folder = _folder(state)
    if not folder.is_dir():
        raise StateMissingError(f"{folder} is not a state folder: there is no such folder.")
    return folder


def _row(key: Key, now: datetime) -> tuple[str, ...]:
    limits, old = key.limits, key.old_valid_until(now)
    state = key.state(now) if old is None else f"{key.state(now)}, two secrets"
    units = [] if limits.daily_units is None else [f"{limits.daily_units:,} units/day"]
    rate = [] if limits.rate is None else [limits.rate or "no rate"]
    return (
        key.name,
        ",".join(key.scopes),
        state,
        _day(key.created_at),
        _day(key.revoked_at or key.expires_at),
        "all" if limits.galleries is None else ",".join(limits.galleries),
        limits.filter or "-",
        "; ".join([*rate, *units]) or "-",
    )


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else moment.date().isoformat()
