"""Options that several commands share, and functions that interpret them."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import AskedEngine, AskedPrecision
from kinlens.embedder.session import Embedder, OnnxEmbedder
from kinlens.indexer.index.index_types import Device, IndexKind
from kinlens.indexer.index.plan import IndexChoice
from kinlens.indexer.types import VectorType
from kinlens.library.bundles import bundle_folder
from kinlens.library.images import BatchChoice, crop_of

Index = Literal["auto", IndexKind]


def _crop(text: str) -> object:
    """A part of an image. Raises: BadParameter for another text."""
    try:
        return crop_of(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


GalleryArgument = Annotated[Path, typer.Argument(metavar="GALLERY", help="Folder of the gallery.")]
StoreArgument = Annotated[
    str,
    typer.Argument(metavar="GALLERY", help="Folder of the gallery, or milvus://HOST:PORT/NAME."),
]
DeviceOption = Annotated[Device, typer.Option(help="Device that runs the model.")]
BatchOption = Annotated[int, typer.Option(min=1, max=1024, help="Images per batch.")]
ImageRootOption = Annotated[
    str | None,
    typer.Option(
        metavar="DIR", help="Folder or address of the images, if they were moved: s3://shop/photos."
    ),
]
CropOption = Annotated[
    Any,
    typer.Option(
        parser=_crop,
        metavar="auto|L,T,W,H",
        help="For a busy photo, auto: search with the whole image and with parts of it, the boxes "
        "of a detector if the bundle has one. Or one part: left,top,width,height as fractions of "
        "the image.",
    ),
]
WhereOption = Annotated[str | None, typer.Option(help="Filter: 'colour = \"red\" and price < 20'.")]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        "--memory-mb", min=0.001, help="Memory for the index in MiB; by default all available."
    ),
]
RecallOption = Annotated[
    float | None,
    typer.Option(
        "--target-recall",
        min=0.01,
        max=1.0,
        help="Recall@10 that the index must reach; by default 0.98.",
    ),
]
IndexDeviceOption = Annotated[
    Device | None,
    typer.Option("--index-device", help="Device that searches the index; by default cpu."),
]
VectorTypeOption = Annotated[
    VectorType,
    typer.Option(help="Number format of stored vectors; fp16 halves disk and cache use."),
]
NoCompactOption = Annotated[
    bool, typer.Option("--no-compact", help="Do not compact the index, even if it is due.")
]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to run a model."""

    device: DeviceOption = "cpu"
    allow_cpu_fallback: Annotated[
        bool, typer.Option("--allow-cpu-fallback", help="Use the CPU if CUDA does not work.")
    ] = False
    precision: Annotated[
        AskedPrecision,
        typer.Option(
            help="Numeric precision of the model; auto: the fastest that is accurate here."
        ),
    ] = "fp32"
    engine: Annotated[
        AskedEngine,
        typer.Option(help="Library that runs the model; auto: the faster one at export."),
    ] = "auto"

    def open(self, bundle: Path) -> Embedder:
        """Open the bundle with one thread per call, as the indexer runs one call per core. It may
        be at an address of the Hugging Face Hub.
        """
        settings = SessionSettings(
            self.device,
            1,
            self.allow_cpu_fallback,
            self.precision,
            engine=self.engine,
            callers=core_count(),
        )
        return OnnxEmbedder.open(bundle_folder(bundle), settings)


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """How many images are embedded at a time."""

    batch_size: BatchOption = 32
    workers: Annotated[int, typer.Option(min=0, max=256, help="Threads; 0: one per core.")] = 0

    @property
    def choice(self) -> BatchChoice:
        """The options as the library takes them."""
        return cast(BatchChoice, asdict(self))


@dataclass(frozen=True, slots=True)
class IndexOptions:
    """Which index to make."""

    index: Annotated[
        Index | None, typer.Option(help="Index type; auto picks one that fits the memory.")
    ] = None
    memory_mb: MemoryOption = None
    target_recall: RecallOption = None
    index_device: IndexDeviceOption = None

    @property
    def choice(self) -> IndexChoice:
        """The options as the library takes them."""
        return cast(IndexChoice, asdict(self))
