"""The program kinlens-serve with the commands that need no part of the service.

`kinlens.service.commands.program` adds the others.
"""

from kinlens.installs import missing_package

try:
    import typer

    from kinlens.embedder.programs.console import Commands
    from kinlens.service.commands import keys, settings
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens-serve", missing, "cpu", "gpu")) from None

app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command(epilog=settings.EXAMPLE)(settings.settings)
app.command()(keys.audit)
app.add_typer(keys.app, name="keys")
