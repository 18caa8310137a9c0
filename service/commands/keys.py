"""`kinlens-serve keys`: make API keys, list them, rotate them, end them; `kinlens-serve audit`."""

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kinlens.embedder.errors import StateMissingError
from kinlens.service.access.audit import AuditLog, Change
from kinlens.service.access.keys import (
    KEYS_FILE,
    MAX_DAILY_UNITS,
    OVERLAP,
    SCOPES,
    Key,
    KeyStore,
    Limits,
)
from kinlens.service.commands import options

app = typer.Typer(no_args_is_help=True, help="Make API keys, list them, rotate them, end them.")

BY_COMMAND = "command line"
"""Who changed something, in the audit log, where no key was needed for it."""

_HOUR = timedelta(hours=1)
_MAX_SHOWN = 1_000_000

Name = Annotated[str, typer.Argument(help="What the key is for; shown in logs and lists.")]


@app.command()
@options.refusals()
def create(
    name: Name,
    scope: Annotated[
        list[str],
        typer.Option(
            help="search, write or admin; admin may do all, write may search. Repeatable."
        ),
    ],
    gallery: Annotated[
        list[str] | None,
        typer.Option(help="Bind the key to this gallery. Repeatable; default: all galleries."),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(
            "--filter", help="Of these galleries only items that fit, such as 'tenant = 7'."
        ),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Such as 600/minute, in place of KINLENS_RATE_LIMIT_PER_KEY."),
    ] = None,
    daily_units: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_DAILY_UNITS, help="Units of work that fit into a day."),
    ] = None,
    expires_days: Annotated[
        int | None,
        typer.Option(min=1, max=3650, help="Days until it ends by itself; default: never."),
    ] = None,
    state: options.State = None,
) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    scopes = [known for known in SCOPES if known in scope]
    for word in {*scope} - {*scopes}:
        options.refuse(f"scope = {word[:40]!r} is unknown; write search, write or admin.")
    ends = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)
    galleries = tuple(gallery) if gallery else None
    try:
        limits = Limits(galleries=galleries, filter=only, rate=rate, daily_units=daily_units)
    except ValidationError as error:
        options.refuse(options.faults(error))
    with _changing("create", name, state) as store:
        text = store.create(name, scopes, ends, limits)
    typer.echo(f"Key {name}: keep it now, it is not shown again.", err=True)
    typer.echo(text)


@app.command("list")
@options.refusals()
def list_keys(state: options.State = None) -> None:
    """Show every key, without its secret: what it may do, what it is bound to, its limits."""
    now = datetime.now(UTC)
    columns = ("Name", "Scopes", "State", "Made", "Ends", "Galleries", "Filter", "Limits")
    table = Table(*columns, box=None, pad_edge=False)
    for key in _store(_folder(state)).list():
        table.add_row(*map(Text, _row(key, now)))
    Console().print(table)


@app.command()
@options.refusals()
def revoke(name: Name, state: options.State = None) -> None:
    """End a key; a running service refuses it within a second."""
    with _changing("revoke", name, state) as store:
        store.revoke(name)
    typer.echo(f"Key {name} is revoked.")


@app.command()
@options.refusals()
def rotate(
    name: Name,
    overlap_hours: Annotated[
        float, typer.Option(min=0, help="How long the last secret stays valid.")
    ] = OVERLAP / _HOUR,
    state: options.State = None,
) -> None:
    """Give a key a new secret and print it, this once; the last one stays valid for a while."""
    with _changing("rotate", name, state) as store:
        text = store.rotate(name, overlap_hours * _HOUR)
    typer.echo(
        f"Key {name}: keep it now, it is not shown again. The last secret is valid for "
        f"{overlap_hours:g} more hours.",
        err=True,
    )
    typer.echo(text)


@options.refusals()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=_MAX_SHOWN, help="Newest entries.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object in each line.")] = False,
    state: options.State = None,
) -> None:
    """Who changed what, newest first."""
    entries = AuditLog(_folder(state)).newest(limit)
    if as_json:
        for entry in entries:
            typer.echo(entry.model_dump_json(exclude_none=True))
        return
    columns = ("Time", "By", "From", "Action", "Gallery", "Target", "Count", "Status")
    table = Table(*columns, box=None, pad_edge=False)
    for one in entries:
        time = one.time.isoformat(timespec="seconds")
        count = "-" if one.affected is None else f"{one.affected:,}"
        texts = (one.by, one.client, one.action, one.gallery, one.target, count, str(one.status))
        table.add_row(time, *(Text(text or "-") for text in texts))
    Console().print(table)


def noted(state: Path, change: Change) -> None:
    """Write what a command has changed into the audit log of the folder `state`."""
    AuditLog(state).add(change)


@contextlib.contextmanager
def _changing(command: str, name: str, state: object) -> Iterator[KeyStore]:
    folder = _folder(state)
    yield _store(folder)
    noted(folder, Change(f"keys {command}", BY_COMMAND, 200, target=name, affected=1))


def _folder(state: object) -> Path:
    folder = options.read_settings(state=state).state
    if folder is None:
        raise StateMissingError("Keys need a folder. Name it with --state DIR or KINLENS_STATE.")
    return folder


def _store(folder: Path) -> KeyStore:
    store = KeyStore(folder / KEYS_FILE)
    store.list()  # an error that names the folder, before anything is made there
    return store


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
