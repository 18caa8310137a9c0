"""kinlens-index publish: snapshots of a gallery that other hosts follow."""

import contextlib
import re
import time
from pathlib import Path
from typing import Annotated

import typer

from embedder.errors import GalleryError, InvalidParameterError
from indexer.commands.console import err, errors_shown, print_report, progress
from indexer.commands.options import GalleryArgument, ImageRootOption, JsonOption
from indexer.exchange.publish import PublishReport
from indexer.exchange.publish import publish as publish_snapshot
from indexer.gallery import Gallery

app = typer.Typer()

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_UNITS_S = {"s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}


@app.command(
    epilog="Example: kinlens-index publish galleries/shop s3://shop/gallery --pictures --every 5s"
)
def publish(
    gallery: GalleryArgument,
    address: Annotated[
        str,
        typer.Argument(
            metavar="ADDRESS",
            help="A folder, or an address of fsspec such as s3://shop/gallery.",
        ),
    ],
    pictures: Annotated[
        bool, typer.Option("--pictures", help="Upload the images of the items as well.")
    ] = False,
    image_root: ImageRootOption = None,
    every: Annotated[
        str | None,
        typer.Option(help="Go on until Ctrl-C, and look for changes so often: 5s, 2m."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Publish a gallery as it is now, for any number of services that follow it.

    Only what changed since the last snapshot is uploaded, while searches and changes go on.
    Services follow with kinlens-serve --gallery NAME=ADDRESS.
    """
    with errors_shown():
        interval_s = None if every is None else _seconds(every)
        report = _publish(gallery, address, pictures, image_root)
        print_report(report, json, _text(report))
        with contextlib.suppress(KeyboardInterrupt):
            while interval_s is not None:
                time.sleep(interval_s)
                _publish_again(gallery, address, pictures, image_root, json)


def _publish(gallery: Path, address: str, pictures: bool, image_root: Path | None) -> PublishReport:
    with contextlib.closing(Gallery.open(gallery, load_index=False)) as opened:
        size = opened.size
    with progress(size, "Publishing") as advance:
        return publish_snapshot(
            gallery, address, pictures=pictures, image_root=image_root, on_progress=advance
        )


def _publish_again(
    gallery: Path, address: str, pictures: bool, image_root: Path | None, json: bool
) -> None:
    """Publish what has changed; a store that does not answer is asked again the next time."""
    try:
        report = publish_snapshot(gallery, address, pictures=pictures, image_root=image_root)
    except GalleryError as error:
        err.print(str(error), soft_wrap=True)
        return
    if report.uploaded_bytes:
        print_report(report, json, _text(report))


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _UNITS_S[found[2]] if found else 0.0
    if not 0.1 <= seconds <= 86_400:
        raise InvalidParameterError(
            f"every = {text!r:.40} is no time between 0.1 s and a day. Write such as 5s or 2m."
        )
    return seconds


def _text(report: PublishReport) -> str:
    text = (
        f"{report.address}: {report.items:,} items, {report.changed_items:,} changed, "
        f"{report.uploaded_bytes / 1e6:,.1f} MB uploaded in {report.elapsed_s:.1f} s"
    )
    if report.pictures or report.missing_pictures:
        text += f", {report.pictures:,} images"
    if report.missing_pictures:
        text += f"; {report.missing_pictures:,} items have no image that can be read"
    return f"{text}."
