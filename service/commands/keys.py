"""`kinlens-serve keys`: make API keys, list them, end them."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from embedder.errors import InvalidParameterError, KinlensError
from service.access.keys import SCOPES, KeyStore, Scope, open_keys
from service.commands import options

app = typer.Typer(no_args_is_help=True, help="Make API keys, list them, end them.")

_LONGEST_DAYS = 3650
Name = Annotated[str, typer.Argument(help="What the key is for; shown in logs and lists.")]
Scopes = Annotated[
    list[str],
    typer.Option(help="search, write or admin; admin may do all, write may search. Repeatable."),
]
ExpiresDays = Annotated[
    int | None,
    typer.Option(min=1, max=_LONGEST_DAYS, help="Days until it ends by itself; default: never."),
]


@app.command()
def create(
    name: Name,
    scope: Scopes,
    expires_days: ExpiresDays = None,
    state: options.State = None,
) -> None:
    """Make a key and print it, this once: only its hash is kept."""
    store = _store(state)
    ends = None if expires_days is None else datetime.now(UTC) + timedelta(days=expires_days)
    try:
        text = store.create(name, [_scope(word) for word in scope], ends)
    except KinlensError as error:
        options.refuse(str(error))
    typer.echo(f"Key {name}: keep it now, it is not shown again.", err=True)
    typer.echo(text)


@app.command("list")
def list_keys(state: options.State = None) -> None:
    """Show every key, without its secret."""
    store = _store(state)
    table = Table("Name", "Scopes", "State", "Made", "Ends", box=None, pad_edge=False)
    try:
        keys = store.list()
    except KinlensError as error:
        options.refuse(str(error))
    now = datetime.now(UTC)
    for key in keys:
        made, ends = _day(key.created_at), _day(key.revoked_at or key.expires_at)
        table.add_row(key.name, ",".join(key.scopes), key.state(now), made, ends)
    Console().print(table)


@app.command()
def revoke(name: Name, state: options.State = None) -> None:
    """End a key; a running service refuses it within a second."""
    try:
        _store(state).revoke(name)
    except KinlensError as error:
        options.refuse(str(error))
    typer.echo(f"Key {name} is revoked.")


def _store(state: object) -> KeyStore:
    try:
        store = open_keys(options.settings_or_refuse(state=state).state)
    except KinlensError as error:
        options.refuse(str(error))
    if store is None:
        options.refuse("Keys need a folder. Name it with --state DIR or KINLENS_STATE.")
    return store


def _scope(word: str) -> Scope:
    for scope in SCOPES:
        if word == scope:
            return scope
    raise InvalidParameterError(f"scope = {word[:40]!r} is unknown; write search, write or admin.")


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else moment.date().isoformat()
