"""`kinlens-serve keys`: make API keys, list them, end them."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from embedder.errors import StateMissingError
from service.access.keys import SCOPES, KeyStore, open_keys
from service.commands import options

app = typer.Typer(no_args_is_help=True, help="Make API keys, list them, end them.")

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
    text = _store(state).create(name, scopes, ends)
    typer.echo(f"Key {name}: keep it now, it is not shown again.", err=True)
    typer.echo(text)


@app.command("list")
@options.refusals()
def list_keys(state: options.State = None) -> None:
    """Show every key, without its secret."""
    table = Table("Name", "Scopes", "State", "Made", "Ends", box=None, pad_edge=False)
    now = datetime.now(UTC)
    for key in _store(state).list():
        made, ends = _day(key.created_at), _day(key.revoked_at or key.expires_at)
        table.add_row(key.name, ",".join(key.scopes), key.state(now), made, ends)
    Console().print(table)


@app.command()
@options.refusals()
def revoke(name: Name, state: options.State = None) -> None:
    """End a key; a running service refuses it within a second."""
    _store(state).revoke(name)
    typer.echo(f"Key {name} is revoked.")


def _store(state: object) -> KeyStore:
    store = open_keys(options.read_settings(state=state).state)
    if store is None:
        raise StateMissingError("Keys need a folder. Name it with --state DIR or KINLENS_STATE.")
    return store


def _day(moment: datetime | None) -> str:
    return "-" if moment is None else moment.date().isoformat()
