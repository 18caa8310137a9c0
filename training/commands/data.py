"""kinlens-train data: render, download, split, doctor."""

from pathlib import Path
from typing import Annotated

import typer

from kinlens.embedder.programs.console import Printed, command
from kinlens.training.commands.options import AllowPartial
from kinlens.training.library import api

app = typer.Typer(
    help="Create, download and check data sets.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@command(app)
def render(
    out: Annotated[Path, typer.Argument(help="Folder to fill.")],
    products: Annotated[int, typer.Option(help="Number of products.")] = 90,
    views: Annotated[int, typer.Option(help="Images of each product.")] = 16,
    size_px: Annotated[int, typer.Option(help="Side of an image.")] = 160,
    seed: Annotated[int, typer.Option(help="A different seed gives different products.")] = 0,
) -> None:
    """Render a catalogue of products: a data set for demos and tests, without a download.

    Example: kinlens-train data render /tmp/shop --products 90
    """
    api.render(out, products=products, views=views, size_px=size_px, seed=seed)
    typer.echo(f"{products * views} images in {out}")


@command(app)
def download(
    name: Annotated[str, typer.Argument(help="cub, aircraft, sop; how to get cars196, in_shop.")],
    root: Annotated[Path, typer.Option(help="Folder to put the data set's folder into.")],
    url: Annotated[
        str | None, typer.Option(help="Another address of the same file, checked as usual.")
    ] = None,
    keep_archive: Annotated[bool, typer.Option(help="Keep the archive in the folder.")] = False,
) -> None:
    """Download, verify and unpack an official data set; an archive that exists is used.

    Example: kinlens-train data download cub --root data
    """
    from kinlens.training.data.download import BY_HAND, find_source

    if name in BY_HAND:
        typer.echo(BY_HAND[name].format(root=root))
        raise typer.Exit(1)
    folder = root / find_source(name).folder
    if folder.exists():
        typer.echo(f"{folder} exists already; nothing was downloaded.")
    api.download(name, root, url=url, keep_archive=keep_archive)
    typer.echo(f'data.kind = "{name}", data.root = "{folder}"')
    typer.echo(f"Check it: kinlens-train data doctor {folder}")


@command(app)
def split(
    path: Annotated[Path, typer.Argument(help="Folder of an official data set.")],
    out: Annotated[Path, typer.Option(help="Folder for the lists.")],
    kind: Annotated[
        str | None, typer.Option(help="cub, cars196, sop, in_shop, aircraft; default: detect.")
    ] = None,
    allow_partial: AllowPartial = False,
) -> None:
    """Write the official split as lists for `kinlens-index build --csv`: train, test, gallery.

    With a gallery, as in In-Shop, the test images are the queries. The last line prints the folder
    that the paths of the lists are relative to.

    Example: kinlens-train data split data/in-shop --out lists
    """
    lists = api.split(path, out, kind=kind, allow_partial=allow_partial)
    for name, images in lists.items():
        typer.echo(f"{name}: {len(images):,} images in {out / f'{name}.csv'}")
    typer.echo(f"images: {lists['test'].root}")


@command(app)
def doctor(
    path: Annotated[Path, typer.Argument(help="Folder of a data set.")],
    kind: Annotated[
        str | None,
        typer.Option(help="cub, cars196, sop, in_shop, aircraft, csv, folder; default: detect."),
    ] = None,
    file: Annotated[
        str | None, typer.Option(help="The CSV that lists its images, if not images.csv.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="Check headers only, not the pixels.")] = False,
    allow_partial: AllowPartial = False,
    feedback: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of `kinlens-serve feedback export` on these images. Repeatable."),
    ] = None,
    whole: Annotated[bool, typer.Option("--all", help="List all cases of each problem.")] = False,
) -> Printed:
    """Report all problems of a data set folder; exit code 1 if there are any to fix.

    Example: kinlens-train data doctor data/CUB_200_2011
    """
    report = api.doctor(
        path,
        kind=kind,
        file=file,
        quick=quick,
        allow_partial=allow_partial,
        feedback=feedback or (),
    )
    yield report.as_dict(), *report.lines(whole)
    if not report.healthy:
        raise typer.Exit(1)
