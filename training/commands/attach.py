"""kinlens-train attach: a copy of a bundle with one more file, for the same galleries."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kinlens.embedder.errors import ExportError

if TYPE_CHECKING:
    from typing import Literal

Numbers = tuple[float, float, float]


def attach(
    bundle: Annotated[Path, typer.Argument(help="A model bundle.")],
    boxes: Annotated[
        Path, typer.Option(help="An ONNX file that finds objects: boxes, scores, classes.")
    ],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")],
    layout: Annotated[
        str,
        typer.Option(
            help="Of its outputs: auto, torchvision, centernet, tensorflow, yolo, yolo-objectness "
            "or yolo-nms."
        ),
    ] = "auto",
    size: Annotated[
        int | None, typer.Option(help="Side of its input, if the file leaves it open.")
    ] = None,
    scale: Annotated[
        int | None,
        typer.Option(
            help="The value of white, 1 or 255; default: 255 for centernet and tensorflow, else 1."
        ),
    ] = None,
    mean: Annotated[Numbers, typer.Option(help="Subtracted from red, green, blue.")] = (0, 0, 0),
    std: Annotated[Numbers, typer.Option(help="Divides red, green, blue.")] = (1, 1, 1),
    stretch: Annotated[
        bool, typer.Option("--stretch", help="Stretch images to its input; default: black bars.")
    ] = False,
    threshold: Annotated[float, typer.Option(help="Drop boxes with a lower score.")] = 0.1,
    labels: Annotated[
        Path | None,
        typer.Option(help="Names of its classes, one on each line; default: those in the file."),
    ] = None,
    licence: Annotated[
        str | None, typer.Option(help="Of the detector; default: that in the file.")
    ] = None,
) -> None:
    """Attach a detector to a bundle: searches with crops = auto then use its boxes.

    The copy serves the galleries of the bundle, without a rebuild.

    Examples: kinlens-train attach bundles/shop --boxes detector.onnx --out bundles/shop-boxes

    kinlens-train attach bundles/shop --boxes yolo.onnx --labels coco.txt --out bundles/shop-boxes
    """
    from kinlens.embedder.bundle import BOXES, Bundle, make_room
    from kinlens.embedder.bundle import attach as write
    from kinlens.training.bundles.boxes import Given, describe_detector, known_layout

    make_room(out)
    opened = Bundle.open(bundle)
    given = Given(
        layout=known_layout(layout),
        size_px=size,
        scale=_scale(scale),
        mean=mean,
        std=std,
        stretched=stretch,
        threshold=threshold,
        labels=None if labels is None else _lines(labels),
        licence=licence,
    )
    block, per_image = describe_detector(boxes, opened.golden_images(), given)
    made = write(opened, out, {BOXES: boxes}, boxes=block)
    typer.echo(
        f"bundle {made.bundle_id[:12]} with a detector in {out}: {block.layout}, "
        f"{block.width_px} x {block.height_px} px, {len(block.labels)} labels, {per_image:.1f} "
        "boxes on a golden image"
    )
    if not per_image:
        typer.echo(
            f"It found nothing on the golden images, which are drawn products. If it finds nothing "
            f"in photos either, check --scale (now {block.scale}), --mean and --std."
        )


def _scale(value: int | None) -> "Literal[1, 255] | None":
    if value is None:
        return None
    if value == 1:
        return 1
    if value == 255:
        return 255
    raise ExportError(f"--scale {value} is not 1 or 255.")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ExportError(f"The labels {file} cannot be read: {error}.") from error
