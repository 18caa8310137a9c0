"""Options that several commands share, and what is made of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from embedder.manifest import AskedPrecision
from embedder.session import Embedder, OnnxEmbedder, SessionSettings
from indexer.index.kinds import Device, IndexKind
from indexer.index.plan import IndexSettings

Index = Literal["auto", IndexKind]

GalleryArgument = Annotated[Path, typer.Argument(metavar="GALLERY", help="Folder of the gallery.")]
StoreArgument = Annotated[
    str,
    typer.Argument(metavar="GALLERY", help="Folder of the gallery, or milvus://HOST:PORT/NAME."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DeviceOption = Annotated[Device, typer.Option(help="Where model and index run.")]
FallbackOption = Annotated[
    bool, typer.Option("--allow-cpu-fallback", help="Use the CPU where CUDA does not work.")
]
PrecisionOption = Annotated[
    AskedPrecision, typer.Option(help="Model of the bundle; auto: the fastest that holds here.")
]
BatchOption = Annotated[int, typer.Option(min=1, max=1024, help="Images per batch.")]
WorkersOption = Annotated[int, typer.Option(min=0, max=256, help="Threads; 0: one a core.")]
ImageRootOption = Annotated[
    Path | None, typer.Option(help="Folder of the images, if they were moved.")
]
WhereOption = Annotated[str | None, typer.Option(help="Filter: 'colour = \"red\" and price < 20'.")]
IndexOption = Annotated[
    Index | None, typer.Option(help="Kind of index; auto picks one that fits the memory.")
]
MemoryOption = Annotated[
    float | None,
    typer.Option("--memory-mb", min=0.001, help="Memory for the index; what the machine has."),
]
RecallOption = Annotated[
    float | None,
    typer.Option(
        "--target-recall", min=0.01, max=1.0, help="Recall@10 that the index must reach [0.98]."
    ),
]
IndexDeviceOption = Annotated[Device | None, typer.Option(help="Where the index runs [cpu].")]
NoCompactOption = Annotated[
    bool, typer.Option("--no-compact", help="Leave the index as it is, even if it is due.")
]

TARGET_RECALL = IndexSettings().target_recall


def open_embedder(
    bundle: Path, device: Device, allow_cpu_fallback: bool, precision: AskedPrecision
) -> Embedder:
    """The bundle in an engine that leaves the cores to the indexer's threads."""
    return OnnxEmbedder.open(bundle, SessionSettings(device, 1, allow_cpu_fallback, precision))


def index_device(device: Device, embedder: Embedder, allow_cpu_fallback: bool) -> Device:
    """Where the index runs: beside the model, wherever that had to go."""
    is_on_cpu = embedder.provider == "CPUExecutionProvider"
    return "cpu" if allow_cpu_fallback and is_on_cpu else device
