"""kinlens-train teach-words: teach a bundle the words of a catalogue."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from kinlens.embedder.errors import ExportError
from kinlens.training.report.log import note


def teach_words(
    bundle: Annotated[Path, typer.Argument(help="Bundle that built the gallery.")],
    gallery: Annotated[Path, typer.Argument(help="Gallery whose attributes are the words.")],
    text_model: Annotated[
        Path, typer.Option("--text-model", help="Text encoder, an ONNX file such as MiniLM.")
    ],
    tokenizer: Annotated[Path, typer.Option(help="Its tokenizer.json.")],
    out: Annotated[Path, typer.Option(help="Bundle folder to write.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
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
    from kinlens.embedder.bundle import make_room
    from kinlens.library.bundles import load_bundle
    from kinlens.library.galleries import open_gallery
    from kinlens.training.words.teach import teach

    make_room(out)
    embedder = load_bundle(bundle)
    with contextlib.closing(open_gallery(gallery, embedder)) as store:
        if store.dim != embedder.dim:
            raise ExportError(
                f"The gallery {gallery} keeps {store.dim} of the {embedder.dim} numbers of each "
                "vector. Teach with one that was built without --dims; its words fit both."
            )
        items = (entry for batch in store.scan() for entry in batch)
        files = text_model, tokenizer
        names = attribute or ()
        taught = teach(embedder.bundle, items, *files, out, names, product, clicks, licence)
    if as_json:
        tower = taught.bundle.manifest.text
        assert tower is not None
        found = {kind: figures.model_dump() for kind, figures in tower.held_out.items()}
        typer.echo(json.dumps({"bundle_id": taught.bundle.manifest.bundle_id, "held_out": found}))
        return
    for line in taught.lines():
        typer.echo(line)
    note(f"Bundle {taught.bundle.manifest.bundle_id[:12]}: {out}")
    note(f'Next: kinlens-index search {gallery} --text "..." --bundle {out}')
