"""kinlens-train adapt, import, attach and teach-words: the commands of a shop."""

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kinlens.embedder.programs.console import Printed
from kinlens.embedder.sources.tables import PRODUCT
from kinlens.library import models as library
from kinlens.training.commands.models import print_facts
from kinlens.training.commands.options import (
    NONE,
    Data,
    Out,
    Overrides,
    Precisions,
    Verbose,
    WithMap,
    stoppable,
    usage_errors,
)
from kinlens.training.library.sources import shop_of
from kinlens.training.report.log import note

Numbers = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class AdaptOptions:
    """What `adapt` learns from, and what else it writes."""

    backbone: Annotated[
        str, typer.Option(help="Network, also timm:NAME; its weights do not change.")
    ] = "mobilenet_v2"
    weights: Annotated[
        str, typer.Option(help='"imagenet", the path of a weight file, or of a bundle.')
    ] = "imagenet"
    bundle: Annotated[
        Path | None,
        typer.Option(help="Adapt this bundle, also one of `import`: with its network and sizes."),
    ] = None
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder with the report; default runs/adapt-NAME-DIGEST."),
    ] = None
    settings: Overrides = NONE
    precisions: Precisions = NONE
    with_map: WithMap = False


def adapt(
    data: Data,
    out: Out,
    options: AdaptOptions,
    verbose: Verbose = False,
) -> None:
    """Adapt a pretrained model to your images in about a minute, and export the bundle.

    Half of your products are learnt and the others test the result. If what is learnt is not proven
    to help other products, the bundle is the model as it is. Products with one photo are
    omitted. Run the same command again to resume. With --verbose it prints all figures.

    Examples:

    kinlens-train adapt --data /my/shop --out bundles/shop

    kinlens-train adapt --bundle bundles/imported --data /my/shop --out bundles/shop

    \b
    kinlens-train adapt --data /my/shop --out bundles/siglip \\
      --backbone timm:vit_base_patch32_siglip_256.v2_webli \\
      --set input.size_px=256 --set input.resize_px=288 --set input.test_px=256
    """
    with stoppable("Run the same command again to resume."), usage_errors():
        made = library.adapt(data, out, verbose=verbose, **asdict(options))
    if verbose:
        print_facts(made.bundle)
    _, outcome = made.report.lines()
    note(outcome)
    note(f"Report: {made.report.figures['run'] / 'report.md'}")
    note(f"Bundle {made.bundle_id[:12]}: {out}")
    note(f"Next: {_build(data, out)}")


def _build(data: Path, out: Path) -> str:
    from kinlens.training.data.records import read_rows

    root, name, table = shop_of(data)
    words = ["kinlens-index", "build", str(data if data.is_dir() else data.parent)]
    # Another list names no items, while a folder names the product of each image.
    if table and {"key", PRODUCT} & next(read_rows(root / table, cure=""))[1].keys():
        words += ["--csv", str(root / table)]
    return shlex.join([*words, "--bundle", str(out), "--out", f"galleries/{name}"])


def _channels(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"{text} must be one number or three with commas, such as 0.485,0.456,0.406"
        ) from error


@dataclass(frozen=True, slots=True)
class FileOptions:
    """What an ONNX file takes and returns."""

    size: Annotated[int, typer.Option(help="Side of the images that it takes, in pixels.")]
    mean: Annotated[
        Any,
        typer.Option(
            parser=_channels, metavar="<str>", help="What it subtracts: R,G,B or one number."
        ),
    ]
    std: Annotated[
        Any,
        typer.Option(
            parser=_channels, metavar="<str>", help="What it divides by: R,G,B or one number."
        ),
    ]
    licence: Annotated[
        str, typer.Option(help="Licence of the model, for its manifest; required.")
    ] = ""
    scale: Annotated[
        float, typer.Option(help="The value of a white pixel before mean and std: 1 or 255.")
    ] = 1.0
    pooling: Annotated[
        str | None,
        typer.Option(help="gap for maps (default), cls or mean for tokens, none for vectors."),
    ] = None
    output: Annotated[
        str | None, typer.Option(help="The output, or a value inside, that is the embedding.")
    ] = None
    resize: Annotated[
        int | None, typer.Option(help="Shorter side before the crop; default: size / 0.875.")
    ] = None
    interpolation: Annotated[
        str, typer.Option(help="Filter of the resize: bilinear, bicubic or lanczos.")
    ] = "bilinear"
    squash: Annotated[
        bool, typer.Option("--squash", help="Resize to a square, whatever the shape of an image.")
    ] = False
    images: Annotated[
        Path | None,
        typer.Option(
            help="Your images, as for adapt: for recall, calibration and other precisions."
        ),
    ] = None
    precisions: Precisions = NONE
    name: Annotated[str | None, typer.Option(help="Its name; default: that of the file.")] = None


def import_onnx(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    out: Out,
    options: FileOptions,
    verbose: Verbose = False,
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
    with usage_errors():
        made = library.import_model(model, out, **asdict(options))
    if verbose:
        print_facts(made.bundle)
    else:
        typer.echo(made.report)
        note(f"Bundle {made.bundle_id[:12]}: {out}")
    shop = options.images or "IMAGES"
    note(f"Next: kinlens-train adapt --bundle {out} --data {shop} --out BUNDLE")
    note(f"or: kinlens-index build {shop} --bundle {out} --out GALLERY")


@dataclass(frozen=True, slots=True)
class DetectorOptions:
    """A detector, its input and its outputs."""

    boxes: Annotated[
        Path, typer.Option(help="An ONNX file that finds objects: boxes, scores, classes.")
    ]
    layout: Annotated[
        str,
        typer.Option(
            help="Of its outputs: auto, torchvision, centernet, tensorflow, yolo, yolo-objectness "
            "or yolo-nms."
        ),
    ] = "auto"
    size: Annotated[
        int | None, typer.Option(help="Side of its input, if the file leaves it open.")
    ] = None
    scale: Annotated[
        int | None,
        typer.Option(
            help="The value of white, 1 or 255; default: 255 for centernet and tensorflow, else 1."
        ),
    ] = None
    mean: Annotated[Numbers, typer.Option(help="Subtracted from red, green, blue.")] = (0, 0, 0)
    std: Annotated[Numbers, typer.Option(help="Divides red, green, blue.")] = (1, 1, 1)
    stretch: Annotated[
        bool, typer.Option("--stretch", help="Stretch images to its input; default: black bars.")
    ] = False
    threshold: Annotated[float, typer.Option(help="Drop boxes with a lower score.")] = 0.1
    labels: Annotated[
        Path | None,
        typer.Option(help="Names of its classes, one on each line; default: those in the file."),
    ] = None
    licence: Annotated[
        str | None, typer.Option(help="Of the detector; default: that in the file.")
    ] = None


def attach(
    bundle: Annotated[Path, typer.Argument(help="A model bundle.")],
    out: Out,
    options: DetectorOptions,
) -> None:
    """Attach a detector to a bundle: searches with crops = auto then use its boxes.

    The copy serves the galleries of the bundle, without a rebuild.

    Examples: kinlens-train attach bundles/shop --boxes detector.onnx --out bundles/shop-boxes

    kinlens-train attach bundles/shop --boxes yolo.onnx --labels coco.txt --out bundles/shop-boxes
    """
    made = library.attach(bundle, out, **asdict(options))
    typer.echo(made.report)


def teach_words(
    bundle: Annotated[Path, typer.Argument(help="Bundle that built the gallery.")],
    gallery: Annotated[Path, typer.Argument(help="Gallery whose attributes are the words.")],
    text_model: Annotated[
        Path, typer.Option("--text-model", help="Text encoder, an ONNX file such as MiniLM.")
    ],
    tokenizer: Annotated[Path, typer.Option(help="Its tokenizer.json.")],
    out: Out,
    attribute: Annotated[
        list[str] | None,
        typer.Option(help="Attribute with words; repeat. By default all texts.", metavar="NAME"),
    ] = None,
    product: Annotated[
        str,
        typer.Option(
            help="Attribute that images of a product share; default: product, else class.",
            metavar="NAME",
        ),
    ] = "",
    clicks: Annotated[
        Path | None,
        typer.Option(help="CSV (text,item): text queries, and the key clicked after each."),
    ] = None,
    licence: Annotated[
        str, typer.Option(help="Licence of the text encoder.", metavar="NAME")
    ] = "unspecified",
) -> Printed:
    """Let a gallery be searched with words: its titles, classes and attributes are taught.

    A map from a small text encoder into the space of the images is fitted to the vectors of the
    gallery. Fifths of its photos and products are held out in turn, and the report states what
    words find among them. It is refused if new products are not found better than by chance. The
    gallery can be searched with the new bundle as it is. Needs `kinlens[cpu,training,text]`.

    Examples:

    \b
    kinlens-train teach-words bundles/shop galleries/shop --text-model minilm/model.onnx \\
      --tokenizer minilm/tokenizer.json --out bundles/shop-words

    kinlens-index search galleries/shop --text "green mug" --bundle bundles/shop-words
    """
    made = library.teach_words(
        bundle,
        gallery,
        out,
        text_model=text_model,
        tokenizer=tokenizer,
        attributes=attribute or (),
        product=product,
        clicks=clicks,
        licence=licence,
    )
    # The bundle's own id: its vectors, by which galleries know it, have not changed.
    bundle_id, held_out = made.bundle.manifest.bundle_id, made.report.figures["held_out"]
    yield {"bundle_id": bundle_id, "held_out": held_out}, *made.report.lines()
    note(f"Bundle {bundle_id[:12]}: {out}")
    note(f'Next: kinlens-index search {gallery} --text "..." --bundle {out}')
