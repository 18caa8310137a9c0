"""From labelled images to batches of tensors: random views to train, served views to evaluate.

A view is a random crop of an image, scaled to a square of S x S and perhaps mirrored.
"""

import io
import math
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from kinlens.embedder.errors import DatasetError, ImageError, JobError, TrainingError
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import Preprocessing
from kinlens.embedder.preprocess import (
    PixelBox,
    cropped_size,
    decode,
    preprocess,
    read_header,
    resize_box,
    to_chw,
)
from kinlens.training.config.settings import Input, Runtime
from kinlens.training.data.records import LabelledImages
from kinlens.training.device import on_gpu
from kinlens.training.parts.own import own_part

Item = tuple[Tensor, Tensor]
Index = tuple[int, int, int]
"""(epoch, image, view): `view` is 0 at the first use of an image in an epoch, then 1, 2, ..."""

_ATTEMPTS = 10
_LOG_RATIO = math.log(4 / 3)
_ON_CPU, _ON_GPU = 2, 16  # maximum number of workers under "auto"
_SPARE = 2  # a whole image is decoded at `size_px` times this, at least
_BEST_QUALITY = 95
_ENHANCERS = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)


class ImageFiles(Dataset[Item]):
    def __init__(self, images: LabelledImages) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def item(self, number: int, pixels_of: Callable[[bytes], NDArray[np.uint8]]) -> Item:
        """Pixels (3, S, S) and label of an image. Raises: DatasetError naming the file."""
        path = self.images.root / self.images.paths[number]
        try:
            pixels = pixels_of(path.read_bytes())
        except OSError as error:
            raise DatasetError(f"The image {path} cannot be read: {error.strerror}.") from error
        except ImageError as error:
            raise DatasetError(
                f"{path}: {error} `kinlens-train data doctor {shlex.quote(str(self.images.root))}` "
                "lists all such files (with --file if their list is not images.csv). Replace them "
                "and continue the training with --resume, or remove them and start a new one."
            ) from error
        return torch.from_numpy(pixels), torch.tensor(self.images.labels[number])


class TrainingImages(ImageFiles):
    """Random views, indexed by (epoch, image, view); pixels depend on the index and the seed only.

    An image that an epoch uses twice has two views. Items are uint8 (3, S, S) and the label.
    """

    def __init__(self, images: LabelledImages, spec: Input, seed: int) -> None:
        super().__init__(images)
        self.spec = spec
        self.seed = seed

    def __getitem__(self, index: Index) -> Item:
        epoch, number, view = index
        rng = np.random.default_rng((self.seed, epoch, number, *([view] if view else [])))
        return self.item(number, lambda data: to_chw(random_view(data, self.spec, rng)))


class EvaluationImages(ImageFiles):
    """Images as the service preprocesses them: uint8 (3, S, S) and the label."""

    def __init__(self, images: LabelledImages, spec: Preprocessing) -> None:
        super().__init__(images)
        self.spec = spec

    def __getitem__(self, number: int) -> Item:
        return self.item(number, lambda data: preprocess(data, self.spec))


def random_view(data: bytes, spec: Input, rng: np.random.Generator) -> Image.Image:
    """A view of an encoded image, `spec.size_px` wide and high. Raises: the errors of `decode`."""
    image, box = random_part(data, spec, rng)
    view = resize_box(image, box, spec.size_px, spec.interpolation)
    if spec.flip and rng.random() < 0.5:
        view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    view = photographed(view, spec, rng)
    if spec.augment is not None:
        view = own_part(spec.augment)(view, rng)
        if view.mode != "RGB" or view.size != (spec.size_px, spec.size_px):
            raise JobError(
                f"{spec.augment} gave a view of {view.width} x {view.height} in {view.mode}; it "
                f"must keep {spec.size_px} x {spec.size_px} in RGB."
            )
    return view


def random_part(data: bytes, spec: Input, rng: np.random.Generator) -> tuple[Image.Image, PixelBox]:
    """An image, decoded only as finely as a random box in it needs, and that box in its pixels.

    The box is drawn from the full size in the header of a JPEG, which is then decoded at a reduced
    scale at which the box still has `size_px` pixels. Raises: the errors of `decode`.
    """
    header = read_header(data)
    if header.format != "JPEG":
        image = decode(data)
        return image, _box_of(image.size, spec, rng)
    width, height = header.width, header.height
    left, top, right, bottom = _box_of((width, height), spec, rng)
    part = min(right - left, bottom - top) / min(width, height)
    image = decode(data, min_side_px=math.ceil(spec.size_px * max(_SPARE, 1 / part)))
    x, y = image.width / width, image.height / height
    return image, (left * x, top * y, right * x, bottom * y)


def _box_of(size: tuple[int, int], spec: Input, rng: np.random.Generator) -> PixelBox:
    if spec.crop == "area":
        return random_box(size, spec.min_crop_area, rng)
    width, height = cropped_size(size, spec.size_px / spec.resize_px, spec.aspect)
    left, top = rng.uniform(0, size[0] - width), rng.uniform(0, size[1] - height)
    return left, top, left + width, top + height


def random_box(size: tuple[int, int], min_area: float, rng: np.random.Generator) -> PixelBox:
    """A box of at least `min_area`, 3:4 to 4:3; after ten attempts the central square."""
    width, height = size
    for _ in range(_ATTEMPTS):
        area = width * height * rng.uniform(min_area, 1.0)
        ratio = math.exp(rng.uniform(-_LOG_RATIO, _LOG_RATIO))
        w, h = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if w <= width and h <= height:
            left, top = rng.uniform(0, width - w), rng.uniform(0, height - h)
            return left, top, left + w, top + h
    side = min(size)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def build_loader(
    dataset: Dataset[Item],
    batches: Sampler[list[Index]] | int,
    runtime: Runtime,
    device: torch.device,
    seed: int,
    processes: int = 1,
) -> DataLoader[Item]:
    """Batches of images, uint8 (B, 3, S, S), and their labels (B,), read in parallel.

    `batches` is the order of a training, whose workers stay from epoch to epoch, or a batch size.
    For a GPU the batches are in pinned memory, so that copies do not block. The loader has a
    generator of its own: otherwise each pass would draw from the global one, which losses also use.
    `processes` train together on this machine and share its cores.
    """
    workers = worker_count(runtime, device, processes)
    order = None if isinstance(batches, int) else batches
    return DataLoader(
        dataset,
        batches if isinstance(batches, int) else 1,
        batch_sampler=order,
        num_workers=workers,
        prefetch_factor=2 if workers else None,
        persistent_workers=order is not None and workers > 0,
        pin_memory=device.type == "cuda",
        generator=torch.Generator().manual_seed(seed),
    )


def at_once(runtime: Runtime) -> int:
    """Number of images that a network embeds together.

    A process reads them all before the network begins, so on a CPU more would let it wait longer.
    """
    return 64 if on_gpu(runtime) else 16


def worker_count(runtime: Runtime, device: torch.device, processes: int) -> int:
    """Number of processes that read images for one that computes; 0 reads in the same process.

    "auto" is 2 for a CPU, where computing takes longer than reading; for a GPU it is the share of
    the available cores, less one for the process itself, at most 16.
    """
    if runtime.workers != "auto":
        return runtime.workers
    if device.type != "cuda":
        return _ON_CPU
    return max(min(core_count() // processes - 1, _ON_GPU), 1)


def batches(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader. Raises: DatasetError; TrainingError if a worker dies."""
    try:
        yield from loader
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).strip().splitlines()[-1]  # after the traceback of a worker, if any
        raise TrainingError(
            f"A process that reads images died ({reason}). If it was a bus "
            "error, give the container more shared memory (--shm-size=2g); set runtime.workers "
            "lower, or to 0 to read without other processes."
        ) from error
    except DatasetError as error:
        # A worker process sends its whole traceback as the message, which ends with the error.
        _, _, message = str(error).rpartition("kinlens.embedder.errors.DatasetError: ")
        raise DatasetError(message.strip()) from error


def photographed(view: Image.Image, spec: Input, rng: np.random.Generator) -> Image.Image:
    """A view, RGB of S x S, with the changes of `spec`; without any it is the same object.

    The random numbers come from `rng` alone, and only those of changes that are on.
    """
    if spec.colour:
        for number in rng.permutation(len(_ENHANCERS)):
            factor = rng.uniform(1 - spec.colour, 1 + spec.colour)
            view = _ENHANCERS[number](view).enhance(factor)
    if spec.blur_px:
        view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0, spec.blur_px)))
    if spec.jpeg_quality is not None:
        file = io.BytesIO()
        quality = int(rng.integers(spec.jpeg_quality, _BEST_QUALITY, endpoint=True))
        view.save(file, "JPEG", quality=quality)
        view = Image.open(file).convert("RGB")
    if spec.erase and rng.random() < 0.5:
        view = _covered(view, spec.erase, rng)
    return view


def _covered(view: Image.Image, most: float, rng: np.random.Generator) -> Image.Image:
    """The view with a rectangle of one colour, of at most this part of its area."""
    area = rng.uniform(0.02, most) if most > 0.02 else most
    ratio = np.exp(rng.uniform(-0.7, 0.7))  # 1:2 to 2:1
    width = min(round(view.width * np.sqrt(area * ratio)), view.width)
    height = min(round(view.height * np.sqrt(area / ratio)), view.height)
    left, top = rng.integers(0, [view.width - width + 1, view.height - height + 1]).tolist()
    covered = view.copy()
    covered.paste(tuple(rng.integers(0, 256, 3).tolist()), (left, top, left + width, top + height))
    return covered
