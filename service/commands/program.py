"""The commands of kinlens-serve: serve, check a setup, manage keys, jobs, audit and backups."""

from kinlens.embedder.machine import require_faiss
from kinlens.installs import missing_package

require_faiss("kinlens-serve")

try:
    from kinlens.service.commands import backup, check, feedback, serve
    from kinlens.service.commands.options import app
except ModuleNotFoundError as missing:
    raise SystemExit(missing_package("kinlens-serve", missing, "cpu", "gpu")) from None

_EXAMPLE = "Example: kinlens-serve --bundle bundles/shop --gallery shop=galleries/shop"

app.callback(invoke_without_command=True, epilog=_EXAMPLE)(serve.serve)
app.command()(check.check)
app.command()(serve.work)
app.command(epilog=backup.BACKUP_EXAMPLE)(backup.backup)
app.command(epilog=backup.RESTORE_EXAMPLE)(backup.restore)
app.add_typer(feedback.app, name="feedback")
