"""`kinlens-serve feedback`: export the feedback of users for training, show it, or clear it."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.programs.console import command, refuse
from kinlens.service.commands import options
from kinlens.service.commands.keys import existing, note
from kinlens.service.galleries.feedback import ACTIONS, FeedbackStore, open_feedback

app = typer.Typer(no_args_is_help=True, help="Feedback of users on answers: export, show, clear.")

Named = Annotated[str | None, typer.Option(help="Name of a gallery.")]


@command(app, "kinlens-serve feedback export --out feedback --state /var/lib/kinlens")
def export(
    out: Annotated[Path, typer.Option(help="Folder for pairs.csv and the images.")],
    gallery: Named = None,
    state: options.State = None,
) -> None:
    """Export the feedback on a gallery as training pairs for kinlens-train fit.

    Feedback on images that were not stored is omitted.
    """
    with _store(state) as store:
        name = gallery or _only_gallery(store)
        sent = sum(store.counts(name).values())
        if not sent:
            known = ", ".join(store.galleries()) or "none"
            refuse(f"There is no feedback on gallery {name}. Galleries with some: {known}.")
        pairs = store.export(name, out)
    typer.echo(f"{out / 'pairs.csv'}: {len(pairs):,} pairs of {sent:,} feedbacks on gallery {name}")


@command(app, "kinlens-serve feedback show --state /var/lib/kinlens")
def show(state: options.State = None) -> None:
    """Show the counts of feedback on each gallery; pairs can be used for training.

    Exits with 1 if there is no feedback.
    """
    rows = []
    with _store(state) as store:
        for name in store.galleries():
            counts = store.counts(name)
            shown = [*(counts[action] for action in ACTIONS), len(store.pairs(name))]
            rows.append((name, *(f"{count:,}" for count in shown)))
    if not rows:
        refuse("There is no feedback yet.")
    options.print_table(("Gallery", *map(str.capitalize, ACTIONS), "Pairs"), rows)


@command(app, "kinlens-serve feedback clear --gallery shop --state /var/lib/kinlens")
def clear(gallery: Named = None, state: options.State = None) -> None:
    """Delete the feedback on a gallery, or on all galleries, with its images."""
    settings = options.read_settings(state=state)
    with contextlib.closing(open_feedback(settings)) as store:
        forgotten = store.clear(gallery)
    assert settings.state is not None
    note(settings.state, "feedback clear", gallery=gallery, affected=forgotten)
    typer.echo(f"Deleted {forgotten:,} feedbacks.")


def _store(state: object) -> contextlib.closing[FeedbackStore]:
    existing(state)
    return contextlib.closing(open_feedback(options.read_settings(state=state)))


def _only_gallery(store: FeedbackStore) -> str:
    names = store.galleries()
    if len(names) == 1:
        return names[0]
    raise InvalidParameterError(
        f"There is feedback on {len(names)} galleries ({', '.join(names) or 'none'}). Select one "
        "with --gallery."
    )
