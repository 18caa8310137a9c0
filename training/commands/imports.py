"""kinlens-train import: an ONNX file that others made becomes a bundle."""

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import typer

from kinlens.embedder.errors import JobError
from kinlens.training.commands.jobs import input_settings, load_images, shop_job
from kinlens.training.commands.models import Precisions, describe, precisions_of
from kinlens.training.report.log import note, progress_bar

if TYPE_CHECKING:
    from kinlens.embedder.manifest import Preprocessing
    from kinlens.training.bundles.imported import FilePooling, Reading

_BORDER = 0.875
"""Part of the resized image that the crop keeps, as ImageNet models are tested."""


def import_onnx(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    size: Annotated[int, typer.Option(help="Side of the images that it takes, in pixels.")],
    mean: Annotated[str, typer.Option(help="What it subtracts: R,G,B or one number.")],
    std: Annotated[str, typer.Option(help="What it divides by: R,G,B or one number.")],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")],
    licence: Annotated[
        str | None, typer.Option(help="Licence of the model, for its manifest; required.")
    ] = None,
    scale: Annotated[
        float, typer.Option(help="The value of a white pixel before mean and std: 1 or 255.")
    ] = 1.0,
    pooling: Annotated[
        str | None,
        typer.Option(help="gap for maps (default), cls or mean for tokens, none for vectors."),
    ] = None,
    output: Annotated[
        str | None, typer.Option(help="The output, or a value inside, that is the embedding.")
    ] = None,
    resize: Annotated[
        int | None, typer.Option(help="Shorter side before the crop; default: size / 0.875.")
    ] = None,
    interpolation: Annotated[
        str, typer.Option(help="Filter of the resize: bilinear, bicubic or lanczos.")
    ] = "bilinear",
    squash: Annotated[
        bool, typer.Option("--squash", help="Resize to a square, whatever the shape of an image.")
    ] = False,
    images: Annotated[
        Path | None,
        typer.Option(
            help="Your images, as for adapt: for recall, calibration and other precisions."
        ),
    ] = None,
    precision: Precisions = None,
    name: Annotated[str | None, typer.Option(help="Its name; default: that of the file.")] = None,
) -> None:
    """Make a bundle of an ONNX file, after checking its vectors.

    The file may fix a batch of one image, have pixels as (N, H, W, 3), or keep its weights in
    other files. It is refused, with the reason, if its output is not one finite vector for each
    image, whatever the other images of a batch.

    With --images, half of the products test the model: as in `adapt`, which can then train on the
    other half.

    Examples:

    \b
    kinlens-train import encoder.onnx --size 224 --mean 0.485,0.456,0.406 \\
      --std 0.229,0.224,0.225 --licence apache-2.0 --out bundles/encoder

    \b
    kinlens-train import vit.onnx --size 224 --mean 0.5 --std 0.5 --pooling cls \\
      --resize 224 --interpolation bicubic --licence mit --out bundles/vit \\
      --images /my/shop --precision int8
    """
    if not (licence or "").strip():
        raise typer.BadParameter(
            "--licence is missing: the licence of the model decides who may use the bundle. Look "
            "it up where the file comes from, and pass for example --licence apache-2.0"
        )
    precisions = precisions_of(precision)
    if images is None and len(precisions) > 1:
        raise typer.BadParameter(
            "--precision compares with fp32 on images; pass a folder with one folder for each "
            "product as --images"
        )
    reading = _reading(size, mean, std, scale, output, pooling)
    spec = _preprocessing(size, resize, interpolation, squash)
    from kinlens.embedder.bundle import make_room
    from kinlens.embedder.durable import staged
    from kinlens.training.bundles.golden import golden_images, golden_inputs
    from kinlens.training.bundles.imported import import_graph

    make_room(out)
    named = name or re.sub(r"[^A-Za-z0-9._-]+", "-", model.stem).strip("-._") or "imported"
    with staged(out.parent) as folder, progress_bar() as bar:
        graph = folder / "imported.onnx"
        parity = import_graph(model, reading, golden_inputs(golden_images(spec), spec), graph)
        # Imported after the file is accepted, as torch takes seconds.
        from kinlens.training.bundles.bundle import Measured, export_imported

        data = None
        if images is not None:
            job = shop_job(images, {"model.backbone": "onnx", **input_settings(spec)}, {})
            split = load_images(job)
            task = bar.add_task("embed", total=len(split.test))
            data = Measured(split, job, precisions, partial(bar.advance, task), note)
        bundle = export_imported(graph, parity, named, str(licence), spec, out, data)
    describe(bundle)
    shop = images or "IMAGES"
    note(f"Next: kinlens-train adapt --bundle {out} --data {shop} --out BUNDLE")
    note(f"or: kinlens-index build {shop} --bundle {out} --out GALLERY")


def _reading(
    size: int, mean: str, std: str, scale: float, output: str | None, pooling: str | None
) -> "Reading":
    from kinlens.training.bundles.imported import FilePooling, Reading

    known: tuple[Any, ...] = get_args(FilePooling)
    if pooling is not None and pooling not in known:
        raise typer.BadParameter(f"--pooling {pooling} is not one of {', '.join(known)}")
    if scale not in (1, 255):
        raise typer.BadParameter(f"--scale {scale:g} must be 1 or 255")
    spread = _channels("--std", std)
    if min(spread) <= 0:
        raise typer.BadParameter(f"--std {std} must be above 0")
    kind = cast("FilePooling | None", pooling)
    return Reading(size, _channels("--mean", mean), spread, scale, output, kind)


def _channels(option: str, text: str) -> tuple[float, ...]:
    """Three numbers; one number is that of all channels."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3):
        raise typer.BadParameter(
            f"{option} {text} must be one number or three with commas, such as 0.485,0.456,0.406"
        )
    return tuple(numbers if len(numbers) == 3 else numbers * 3)


def _preprocessing(
    size: int, resize: int | None, interpolation: str, squash: bool
) -> "Preprocessing":
    from pydantic import ValidationError

    from kinlens.embedder.manifest import Preprocessing
    from kinlens.training.config.job import explain

    resized = (size if squash else round(size / _BORDER)) if resize is None else resize
    if resized < size:
        raise typer.BadParameter(f"--resize {resized} is smaller than --size {size}; raise it")
    given = {
        "crop_px": f"--size {size}",
        "resize_px": f"--resize {resized}",
        "interpolation": f"--interpolation {interpolation}",
    }
    values: dict[str, Any] = {"crop_px": size, "resize_px": resized, "interpolation": interpolation}
    try:
        return Preprocessing(aspect="squashed" if squash else "kept", **values)
    except ValidationError as error:
        raise JobError(" ".join(explain(fault, given) for fault in error.errors())) from error
