"""Models: adapt one to your photos, import one of others, attach a detector, teach words.

Each function writes a bundle, and returns what `kinlens.load_bundle` returns for it. Its `report`
has what was measured, which a notebook shows. Errors name arguments as options of `kinlens-train`.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from kinlens.embedder.errors import ExportError, InvalidParameterError, JobError
from kinlens.embedder.programs.progress import progress_bar
from kinlens.environment import TRAINING, needs
from kinlens.training.config.layers import names_of
from kinlens.training.library.sources import (
    Images,
    input_settings,
    load_images,
    note_untrained,
    shop_job,
    shop_of,
    summary,
)
from kinlens.training.report.log import console_listener, note

if TYPE_CHECKING:
    from kinlens.embedder.bundle import Bundle
    from kinlens.embedder.manifest import OtherPrecision, Preprocessing
    from kinlens.library.bundles import LoadedBundle
    from kinlens.training.bundles.imported import FilePooling
    from kinlens.training.bundles.precisions import OnRefusal
    from kinlens.training.data.records import LabelledImages

_TRAIN_IT = "To train it, use `kinlens-train fit shop`."
_BORDER = 0.875
"""Part of the resized image that the crop keeps, as ImageNet models are tested."""
_PHOTOS = 60  # of the test, which a report searches

Channels = float | Sequence[float]
"""A number for each of red, green and blue, or one for all."""
Three = tuple[float, float, float]


@needs("kinlens.adapt", *TRAINING)
def adapt(
    images: Images,
    out: str | Path,
    *,
    bundle: str | Path | None = None,
    backbone: str = "mobilenet_v2",
    weights: str | Path = "imagenet",
    run: str | Path | None = None,
    settings: Sequence[str] = (),
    precisions: "Sequence[OtherPrecision]" = (),
    with_map: bool = False,
    verbose: bool = False,
) -> "LoadedBundle":
    """Adapt a pretrained model to your photos in about a minute, and write its bundle.

    Half of your products are learnt and the others test the result. If what is learnt is not proven
    to help other products, the bundle is the model as it is. Photos that cannot be read are skipped
    and named. The same call again resumes where it was stopped.

    Args:
        images: a folder with a folder for each product, a CSV with the columns path and class, a
            list of (path, class), or a pandas DataFrame with these columns.
        out: the new folder of the bundle.
        bundle: adapt this bundle, also one of `import_model`, with its network and sizes.
        backbone: the network, also "timm:NAME".
        weights: "imagenet", the path of a weight file, or of a bundle.
        run: the folder of the training; by default runs/adapt-NAME-DIGEST. It gets report.md.
        settings: changes to the job, such as "input.size_px=256".
        precisions: also "int8", "bf16" or "fp16".
        with_map: also a map that shows where images match, as large as the model.
        verbose: print all figures of the training.

    Returns:
        The model, as `kinlens.load_bundle(out)` returns it. `report.figures` has `photos`,
        `products`, `first_right` and `first_right_before` in percent, `gain`, and `run`.

    Raises:
        JobError: a folder that does not exist, a setting, or a run of other images.
        DatasetError: photos that cannot be learnt from, such as those of a single product.
        BundleError: `out` exists.

    Examples:
        >>> bundle = kinlens.adapt("photos/", out="bundles/shop")
        >>> print(bundle.report)
    """
    out = Path(out).expanduser()
    images = [*images] if isinstance(images, Iterator) else images
    changes, options = _start(backbone, str(weights), bundle)
    _, name, _ = shop_of(images)
    # Imported after the folder is found, as torch takes seconds.
    from kinlens.embedder.bundle import make_room
    from kinlens.training.bundles.bundle import export_checkpoint
    from kinlens.training.checkpoint import load_chosen
    from kinlens.training.runner import digest_of, run_or_resume, seen_in
    from kinlens.training.start import continues_model

    make_room(out)
    job = shop_job(images, changes, options, settings)
    note_untrained(job, "adapt", names_of(settings), _TRAIN_IT)
    if continues_model(job) and not job.protocol.trains:
        fact = "is trained already, and adapt does not change it"
        note(f"The model of {job.model.weights} {fact}. {_TRAIN_IT}")
    split = load_images(job)
    photos = sum(map(len, split.parts.values()))
    products = [part.classes for part in split.parts.values()]
    about = (
        f"{name}: {photos:,} photos of {sum(products):,} products; {products[0]:,} are learnt, the "
        "others test the result"
    )
    note(about)
    if verbose:
        note(summary(split))
    if copies := sum(part.copies() for part in split.parts.values()):
        note(
            f"{copies} image(s) are copies within their class. They find each other, so the "
            "figures are too high. `kinlens-train data doctor` lists them."
        )
    digest = digest_of(job, split)
    folder = Path("runs", f"adapt-{name}-{digest[:8]}") if run is None else Path(run).expanduser()
    with console_listener(verbose, brief=not verbose) as listener:
        result = run_or_resume(job, split, folder, digest, listener)
    written = export_checkpoint(
        load_chosen(folder),
        split,
        out,
        precisions=precisions,
        on_refusal=noting_refusals(precisions, verbose),
        with_map=with_map,
        seen=seen_in(folder),
    )
    after, before = (figures.get("R@1") for figures in (result.figures, result.trunk))
    figures: dict[str, Any] = {
        "photos": photos,
        "products": sum(products),
        "first_right": after,
        "first_right_before": before,
        "gain": not result.choice and result.verdict.startswith("Gain"),
        "run": folder,
    }
    lines = [about, _outcome(after, before, is_changed=not result.choice)]
    return _opened(written, lines, figures, split.test)


def _start(
    backbone: str, weights: str, bundle: str | Path | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a job from the options, and the options by setting. Raises: BundleError."""
    given = {"model.backbone": f"--backbone {backbone}", "model.weights": f"--weights {weights}"}
    if bundle is None:
        return {"model.backbone": backbone, "model.weights": weights}, given
    if (backbone, weights) != ("mobilenet_v2", "imagenet"):
        raise InvalidParameterError(
            f"--bundle has a network and its weights; omit {' and '.join(given.values())}"
        )
    from kinlens.embedder.bundle import Bundle

    manifest = Bundle.open(Path(bundle).expanduser()).manifest
    settings = {
        "model.backbone": manifest.backbone,
        "model.weights": str(bundle),
        "licence": manifest.licence,
        **input_settings(manifest.preprocessing),
    }
    return settings, dict.fromkeys(settings, f"--bundle {bundle}")


def noting_refusals(precisions: Sequence[str], verbose: bool = False) -> "OnRefusal":
    """Prints why a precision is omitted: one that was asked for, as bf16 is always tried."""

    def on_refusal(precision: str, reason: str) -> None:
        if verbose or precision in precisions:
            note(reason)

    return on_refusal


def _outcome(after: float | None, before: float | None, *, is_changed: bool) -> str:
    """How often the right product is found first, in the words of a shop."""
    if after is None or before is None:
        return "The result was not tested, as protocol.evaluate_test is never"
    changed = f"({before:.0f} before)"
    if not is_changed:
        changed = "with the model as it is: what was learnt is not proven to help other products"
    return (
        f"For {after:.0f} of 100 photos of products that were not learnt, the first result is "
        f"right {changed}"
    )


@needs("kinlens.import_model", *TRAINING)
def import_model(
    model: str | Path,
    out: str | Path,
    *,
    size: int,
    mean: Channels,
    std: Channels,
    licence: str,
    scale: float = 1.0,
    pooling: "FilePooling | None" = None,
    output: str | None = None,
    resize: int | None = None,
    interpolation: str = "bilinear",
    squash: bool = False,
    images: Images | None = None,
    precisions: "Sequence[OtherPrecision]" = (),
    name: str | None = None,
) -> "LoadedBundle":
    """Make a bundle of an ONNX file of others, after checking its vectors.

    The file may fix a batch of one image, have pixels as (N, H, W, 3), or keep its weights in
    other files. It is refused, with the reason, if its output is not one finite vector for each
    image, whatever the other images of a batch.

    Args:
        model: the ONNX file.
        out: the new folder of the bundle.
        size: side of the images that it takes, in pixels.
        mean, std: what it subtracts, and divides by: a number, or one for each of R, G and B.
        licence: of the model, for the manifest.
        scale: the value of a white pixel before mean and std, 1 or 255.
        pooling: "gap" for maps (default), "cls" or "mean" for tokens, "none" for vectors.
        output: the output, or a value inside, that is the embedding.
        resize: shorter side before the crop; by default size / 0.875.
        interpolation: of the resize: "bilinear", "bicubic" or "lanczos".
        squash: resize to a square, whatever the shape of an image.
        images: your images, as for `adapt`: half of the products test the model. For calibration
            and other precisions.
        precisions: also "int8", "bf16" or "fp16", which are compared on `images`.
        name: of the model; by default that of the file.

    Returns:
        The model, as `kinlens.load_bundle(out)` returns it.

    Raises:
        ExportError: the file is no embedding, for the reason in the message.
        InvalidParameterError, JobError, DatasetError, BundleError.

    Examples:
        >>> kinlens.import_model("vit.onnx", "bundles/vit", size=224, mean=0.5, std=0.5,
        ...                      pooling="cls", licence="mit", images="photos/")
    """
    model, out = Path(model).expanduser(), Path(out).expanduser()
    if not licence.strip():
        raise InvalidParameterError(
            "--licence is missing: the licence of the model decides who may use the bundle. Look "
            "it up where the file comes from, and pass for example --licence apache-2.0"
        )
    if images is None and precisions:
        raise InvalidParameterError(
            "--precision compares with fp32 on images; pass a folder with one folder for each "
            "product as --images"
        )
    from kinlens.embedder.bundle import make_room
    from kinlens.embedder.durable import staged
    from kinlens.training.bundles.golden import golden_images, golden_inputs
    from kinlens.training.bundles.imported import FilePooling, Reading, import_graph

    known: tuple[str, ...] = get_args(FilePooling)
    if pooling is not None and pooling not in known:
        raise InvalidParameterError(f"--pooling {pooling} is not one of {', '.join(known)}")
    if scale not in (1, 255):
        raise InvalidParameterError(f"--scale {scale:g} must be 1 or 255")
    spread = _channels("--std", std)
    if min(spread) <= 0:
        raise InvalidParameterError(f"--std {std} must be above 0")
    reading = Reading(size, _channels("--mean", mean), spread, scale, output, pooling)
    spec = _preprocessing(size, resize, interpolation, squash)
    make_room(out)
    named = name or re.sub(r"[^A-Za-z0-9._-]+", "-", model.stem).strip("-._") or "imported"
    with staged(out.parent) as folder, contextlib.ExitStack() as bar:
        graph = folder / "imported.onnx"
        parity = import_graph(model, reading, golden_inputs(golden_images(spec), spec), graph)
        # Imported after the file is accepted, as torch takes seconds.
        from kinlens.training.bundles.bundle import Measured, export_imported

        data, tested = None, None
        if images is not None:
            job = shop_job(images, {"model.backbone": "onnx", **input_settings(spec)}, {})
            split = load_images(job)
            tested = split.test
            advance = bar.enter_context(progress_bar(len(tested), "embed", "images"))
            data = Measured(split, job, precisions, advance, noting_refusals(precisions))
        written = export_imported(graph, parity, named, licence, spec, out, data)
    manifest = written.manifest
    lines = [f"{named}: a model of {manifest.dim} numbers for each photo, licence {licence}"]
    figures: dict[str, Any] = {"first_right": manifest.recall.get("R@1")}
    if tested is not None:
        first, photos = figures["first_right"], f"{len(tested):,} photos"
        lines.append(
            f"For {first:.0f} of 100 photos, the first result is right ({photos} of "
            f"{tested.classes:,} products)"
        )
        if others := written.precisions[1:]:
            lines.append(f"It also runs in {' and '.join(others)}, which is faster")
        if manifest.calibration is None:
            lines.append("It does not say how sure it is: too few photos tested it")
    return _opened(written, lines, figures, tested)


def _channels(option: str, given: Channels) -> tuple[float, ...]:
    """Three numbers; one number is that of all channels."""
    numbers = [float(given)] if isinstance(given, int | float) else [float(x) for x in given]
    if len(numbers) not in (1, 3):
        shown = ",".join(f"{number:g}" for number in numbers)
        raise InvalidParameterError(
            f"{option} {shown} must be one number or three with commas, such as 0.485,0.456,0.406"
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
        raise InvalidParameterError(f"--resize {resized} is smaller than --size {size}; raise it")
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


@needs("kinlens.attach", *TRAINING)
def attach(
    bundle: str | Path,
    out: str | Path,
    *,
    boxes: str | Path,
    layout: str = "auto",
    size: int | None = None,
    scale: int | None = None,
    mean: Three = (0, 0, 0),
    std: Three = (1, 1, 1),
    stretch: bool = False,
    threshold: float = 0.1,
    labels: Sequence[str] | str | Path | None = None,
    licence: str | None = None,
) -> "LoadedBundle":
    """Attach a detector to a bundle: searches with crops = auto then use its boxes.

    The copy serves the galleries of the bundle, without a rebuild.

    Args:
        bundle: the bundle that is copied.
        out: the new folder of the copy.
        boxes: an ONNX file that finds objects: boxes, scores, classes.
        layout: of its outputs; "auto" recognises it.
        size: side of its input, if the file leaves it open.
        scale: the value of white, 1 or 255; by default 255 for "centernet" and "tensorflow".
        mean, std: subtracted from red, green and blue, and divided by.
        stretch: stretch images to its input; by default they get black bars.
        threshold: drop boxes with a lower score.
        labels: names of its classes, or a file with one on each line; by default those in the file.
        licence: of the detector; by default that in the file.

    Returns:
        The model, as `kinlens.load_bundle(out)` returns it.

    Raises:
        ExportError: the file is no detector, for the reason in the message.
        BundleError: the bundle is missing or damaged, or `out` exists.
    """
    from kinlens.embedder.bundle import BOXES, Bundle, make_room
    from kinlens.embedder.bundle import attach as write
    from kinlens.training.bundles.boxes import Given, describe_detector, known_layout

    out = Path(out).expanduser()
    make_room(out)
    opened = Bundle.open(Path(bundle).expanduser())
    if scale not in (None, 1, 255):
        raise ExportError(f"--scale {scale} is not 1 or 255.")
    given = Given(
        layout=known_layout(layout),
        size_px=size,
        scale=cast("Literal[1, 255] | None", scale),
        mean=mean,
        std=std,
        stretched=stretch,
        threshold=threshold,
        labels=_labels(labels),
        licence=licence,
    )
    block, per_image = describe_detector(Path(boxes).expanduser(), opened.golden_images(), given)
    made = write(opened, out, {BOXES: Path(boxes).expanduser()}, boxes=block)
    lines = [
        f"bundle {made.bundle_id[:12]} with a detector in {out}: {block.layout}, "
        f"{block.width_px} x {block.height_px} px, {len(block.labels)} labels, {per_image:.1f} "
        "boxes on a golden image"
    ]
    if not per_image:
        lines.append(
            "It found nothing on the golden images, which are drawn products. If it finds nothing "
            f"in photos either, check --scale (now {block.scale}), --mean and --std."
        )
    return _opened(made, lines, {"boxes_per_image": per_image})


def _labels(given: Sequence[str] | str | Path | None) -> list[str] | None:
    if given is None or not isinstance(given, str | Path):
        return None if given is None else [*given]
    try:
        return Path(given).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ExportError(f"The labels {given} cannot be read: {error}.") from error


@needs("kinlens.teach_words", *TRAINING)
def teach_words(
    bundle: str | Path,
    gallery: str | Path,
    out: str | Path,
    *,
    text_model: str | Path,
    tokenizer: str | Path,
    attributes: Sequence[str] = (),
    product: str = "",
    clicks: str | Path | None = None,
    licence: str = "unspecified",
) -> "LoadedBundle":
    """Let a gallery be searched with words: its titles, classes and attributes are taught.

    A map from a small text encoder into the space of the images is fitted to the vectors of the
    gallery. Fifths of its photos and products are held out in turn, and the report states what
    words find among them. The gallery can be searched with the new bundle as it is. It needs
    `kinlens[cpu,training,text]`.

    Args:
        bundle: the one that built the gallery.
        gallery: the folder of the gallery whose attributes are the words.
        out: the new folder of the bundle.
        text_model: a text encoder, an ONNX file such as MiniLM.
        tokenizer: its tokenizer.json.
        attributes: the attributes with words; by default all texts.
        product: the attribute that images of a product share; by default product, else class.
        clicks: a CSV (text,item) of text queries, and the key that was clicked after each.
        licence: of the text encoder.

    Returns:
        The model, as `kinlens.load_bundle(out)` returns it; `embed_texts` is new.

    Raises:
        ExportError: new products are not found better than by chance, or a file is no encoder.
        DatasetError, BundleError, GalleryError.
    """
    from kinlens.embedder.bundle import make_room
    from kinlens.library.bundles import load_bundle
    from kinlens.library.galleries import open_gallery
    from kinlens.training.words.teach import teach

    out = Path(out).expanduser()
    make_room(out)
    embedder = load_bundle(bundle)
    with open_gallery(gallery, embedder) as opened:
        store = opened.store
        if store.dim != embedder.dim:
            raise ExportError(
                f"The gallery {gallery} keeps {store.dim} of the {embedder.dim} numbers of each "
                "vector. Teach with one that was built without --dims; its words fit both."
            )
        items = (entry for batch in store.scan() for entry in batch)
        clicked = None if clicks is None else Path(clicks).expanduser()
        files = Path(text_model).expanduser(), Path(tokenizer).expanduser()
        taught = teach(embedder.bundle, items, *files, out, attributes, product, clicked, licence)
    tower = taught.bundle.manifest.text
    assert tower is not None
    found = {kind: figures.model_dump() for kind, figures in tower.held_out.items()}
    return _opened(taught.bundle, taught.lines(), {"held_out": found})


def _opened(
    written: "Bundle",
    lines: list[str],
    figures: dict[str, Any],
    tested: "LabelledImages | None" = None,
) -> "LoadedBundle":
    """The model of a bundle that was just written, with its report."""
    from kinlens.library.bundles import ModelReport, load_bundle

    model = load_bundle(written.path)
    photos: dict[Path, str] = {}
    if tested is not None:
        some = tested.some(_PHOTOS)
        names = [some.class_names[label] for label in some.labels.tolist()]
        photos = {some.root / path: name for path, name in zip(some.paths, names, strict=True)}
    model.report = ModelReport(lines, figures, model, photos)
    return model
