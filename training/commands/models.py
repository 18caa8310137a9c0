"""kinlens-train evaluate and export: measure a model, and write its bundle."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kinlens.embedder.programs.console import Printed, print_lines
from kinlens.training.commands.options import (
    NONE,
    Overrides,
    Precisions,
    WithMap,
)
from kinlens.training.library import api
from kinlens.training.library.sources import section

if TYPE_CHECKING:
    from kinlens.embedder.bundle import Bundle

KeepWeights = Annotated[
    bool,
    typer.Option(
        "--keep-weights", help="Also weights.safetensors, to continue the training of any network."
    ),
]

_OPEN_CLIP = "open_clip:"


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run folder or a model bundle.")],
    overrides: Overrides = NONE,
    data: Annotated[
        Path | None,
        typer.Option(help="Other images: a folder of class folders, or a CSV (path,class)."),
    ] = None,
    full: Annotated[bool, typer.Option(help="Also NMI, F1 and structure measures.")] = False,
    precision: Annotated[
        str, typer.Option(help="For a bundle: fp32, bf16, int8, fp16, or auto to choose.")
    ] = "fp32",
    engine: Annotated[
        str, typer.Option(help="For a bundle: onnxruntime, openvino, or auto to choose.")
    ] = "auto",
    plot: Annotated[
        Path | None,
        typer.Option(help="Also draw the embeddings in the plane (t-SNE): a .png, .svg or .pdf."),
    ] = None,
) -> Printed:
    """Recall@K and MAP@R of a run or bundle, on the test images of its job or on other images.

    With --data each image is searched for among the other images; a bundle then needs no job.

    Examples: kinlens-train evaluate bundles/cars --set data.root=/data/cars196 --full

    kinlens-train evaluate bundles/trunk --data /my/shop

    kinlens-train evaluate bundles/shop --precision bf16
    """
    figures = api.evaluate(
        source,
        data,
        full=full,
        precision=precision,
        engine=engine,
        plot=plot,
        settings=overrides,
    )
    yield {**figures}, *figures.lines()


def export(
    run: Annotated[Path | None, typer.Argument(help="Run folder.")] = None,
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")] = Path("bundle"),
    overrides: Overrides = NONE,
    precisions: Precisions = NONE,
    skip_refused: Annotated[
        bool,
        typer.Option(
            "--skip-refused", help="Skip a precision that fails its gate, and print the reason."
        ),
    ] = False,
    trunk: Annotated[
        bool,
        typer.Option("--trunk", help="For a run: export the untrained trunk that it began with."),
    ] = False,
    backbone: Annotated[
        str | None, typer.Option(help="Export this pretrained trunk, without a run.")
    ] = None,
    weights: Annotated[str, typer.Option(help="With --backbone: imagenet or a path.")] = "imagenet",
    size_px: Annotated[int, typer.Option(help="With --backbone: side of the input.")] = 224,
    resize_px: Annotated[
        int, typer.Option(help="With --backbone: shorter side before the crop.")
    ] = 256,
    with_map: WithMap = False,
    keep_weights: KeepWeights = False,
    with_text: Annotated[
        bool,
        typer.Option("--text", help="With --backbone open_clip:NAME: also its text tower."),
    ] = False,
    tokenizer: Annotated[
        Path | None, typer.Option(help="With --text: a tokenizer.json, as SigLIP 2 needs.")
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            help="With --text: a text on each line, such as titles, whose mean is subtracted from "
            "words that are added to images."
        ),
    ] = None,
    licence: Annotated[
        str, typer.Option(help="With --text: licence of the weights.", metavar="NAME")
    ] = "unspecified",
) -> None:
    """Write the model bundle of a run; fails unless ONNX and torch agree.

    With --text it writes both towers of a model that was trained on images with texts, as OpenCLIP
    and SigLIP 2 were. Its galleries can be searched with words. It needs `kinlens[open-clip]` and
    the weights as a file.

    Examples: kinlens-train export runs/cars --out bundles/cars --precision int8

    \b
    kinlens-train export --backbone open_clip:ViT-B-16-SigLIP2 --text --out bundles/siglip2 \\
      --weights open_clip_model.safetensors --tokenizer tokenizer.json --licence Apache-2.0
    """
    if with_text or (backbone or "").startswith(_OPEN_CLIP):
        if not (with_text and backbone and backbone.startswith(_OPEN_CLIP)) or run is not None:
            raise typer.BadParameter(f"--text and --backbone {_OPEN_CLIP}NAME need each other")
        from kinlens.training.words.native import export_two_towers

        print_facts(export_two_towers(backbone, weights, out, tokenizer, licence, texts))
        return
    if trunk and run is None:
        raise typer.BadParameter("--trunk needs a run; give its folder")
    if (run is None) == (backbone is None):
        raise typer.BadParameter("give either a run folder or --backbone NAME")
    if backbone is not None:
        from kinlens.training.bundles.bundle import export_backbone
        from kinlens.training.config.settings import Input, Model

        if precisions:
            raise typer.BadParameter(
                "--precision compares with fp32 on images, which --backbone lacks; give a run"
            )
        model = section(Model, backbone=backbone, weights=weights)
        spec = section(Input, size_px=size_px, resize_px=resize_px)
        print_facts(export_backbone(backbone, model, spec, out, with_map))
    if run is not None:
        bundle = api.export(
            run,
            out,
            precisions=precisions,
            keep_weights=keep_weights,
            trunk=trunk,
            with_map=with_map,
            skip_refused=skip_refused,
            settings=overrides,
        )
        print_facts(bundle)


def print_facts(bundle: "Bundle") -> None:
    from kinlens.training.library.measure import facts

    print_lines(*facts(bundle))
