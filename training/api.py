"""Training from Python: `fit`, `evaluate` and `export`. Their public names are in kinlens.training.

The commands of `kinlens-train` do the same, and each continues what the other has begun.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.manifest import Precision
from kinlens.training.commands.jobs import job_of, load_images, shop_of
from kinlens.training.commands.models import export_run, figures_of
from kinlens.training.config.job import Job, load_job, with_absolute_paths
from kinlens.training.config.layers import read_layers
from kinlens.training.data.samplers import BatchSampler
from kinlens.training.folder import Result
from kinlens.training.losses.base import MetricLoss, ProxyLoss
from kinlens.training.losses.matryoshka import matryoshka
from kinlens.training.losses.miners import (
    Triplets,
    batch_hard,
    distance_weighted,
    hard_pairs,
    semi_hard,
)
from kinlens.training.losses.pairs import (
    BinomialDevianceLoss,
    ContrastiveLoss,
    LiftedStructureLoss,
    MultiSimilarityLoss,
    NPairLoss,
)
from kinlens.training.losses.proxy_anchor import (
    BatchProxySeparationLoss,
    ProxyAnchorLoss,
    ProxySeparationLoss,
)
from kinlens.training.losses.softmax import ArcFaceLoss, ProxyNCALoss, SoftTripleLoss
from kinlens.training.losses.triplet import MarginLoss, TripletLoss
from kinlens.training.parts.own import forget_files, register
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.determinant import DeterminantRegularizer
from kinlens.training.regularizers.flows import NICE, ConditionalGlow, RealNVP
from kinlens.training.regularizers.graph_consistency import GraphConsistencyRegularizer
from kinlens.training.regularizers.koleo import KoLeoRegularizer
from kinlens.training.regularizers.non_isotropy import NonIsotropyRegularizer
from kinlens.training.regularizers.skewed_mean import SkewedMeanRegularizer
from kinlens.training.report.log import (
    Callback,
    Callbacks,
    MlflowCallback,
    WandbCallback,
)
from kinlens.training.runner import require_fresh_or_resumable, run_job

# fmt: off
__all__ = [
    "NICE", "ArcFaceLoss", "BatchProxySeparationLoss", "BatchSampler", "BinomialDevianceLoss",
    "Callback", "ConditionalGlow", "ContrastiveLoss", "DeterminantRegularizer",
    "GraphConsistencyRegularizer", "Job", "KoLeoRegularizer", "LiftedStructureLoss", "MarginLoss",
    "MetricLoss", "MlflowCallback", "MultiSimilarityLoss", "NPairLoss", "NonIsotropyRegularizer",
    "ProxyAnchorLoss", "ProxyLoss", "ProxyNCALoss", "ProxySeparationLoss", "RealNVP",
    "Regularizer", "Result", "SkewedMeanRegularizer", "SoftTripleLoss", "TripletLoss",
    "Triplets", "WandbCallback", "batch_hard", "distance_weighted", "evaluate", "export", "fit",
    "hard_pairs", "load_job", "matryoshka", "semi_hard",
]
# fmt: on

Source = str | Path | Mapping[str, Any] | Job


def fit(
    job: Source,
    images: str | Path | None = None,
    *,
    out: str | Path | None = None,
    loss: type[nn.Module] | nn.Module | None = None,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
) -> Result:
    """Train a job and test its model.

    Args:
        job: the name of a shipped job, a TOML file, or its tables as a dict.
        images: a folder with a folder for each class, or a CSV with the columns path and label;
            None: the images of the job.
        out: the run folder; by default runs/NAME. It has the same files as one of the command.
        loss: your own loss, in place of the job's: a module from embeddings (B, D) and labels (B,)
            to a scalar, as a class or made by you. A class gets `classes` and `dim` if its
            constructor has them. Embeddings have unit length unless its `normalized` is False.
        callbacks: called during the training, see `Callback`.
        resume: continue the run in `out`.

    Returns:
        The figures on test classes, `result.figures["R@1"]` in percent, and all else that
        `result.json` has.

    Raises:
        JobError: settings that do not fit each other, or a folder that has a run already.
        DatasetError: images that cannot be trained on.
        TrainingError: a loss that is not finite, or a folder that cannot be written.
        EvaluationError: all embeddings are equal.
    """
    forget_files()
    of_images: dict[str, Any] = {}
    if images is not None:
        root, _, table = shop_of(Path(images))
        of_images = {"kind": "folder", "root": str(root)}
        if table:
            of_images |= {"kind": "csv", "file": table}
        if not isinstance(job, Job) and "data" not in read_layers(job)[0]:
            job = {**(job if isinstance(job, Mapping) else {"base": str(job)}), "data": of_images}
    wanted = job if isinstance(job, Job) else job_of(job)
    content = wanted.as_dict()
    if of_images:
        kept = content["data"].keys() & {"train_fraction", "split_seed"}
        content["data"] = {name: content["data"][name] for name in kept} | of_images
    if loss is not None:
        content["loss"] = {"name": register(loss)}
    wanted = with_absolute_paths(load_job(content))
    folder = Path("runs", wanted.name) if out is None else Path(out)
    require_fresh_or_resumable(folder, resume)
    split = load_images(wanted)
    listener = Callbacks(callbacks)
    listener.started(wanted)
    result = run_job(wanted, split, folder, listener)
    listener.finished(result)
    return result


def evaluate(
    source: str | Path, images: str | Path | None = None, *, full: bool = False
) -> dict[str, float]:
    """R@K and MAP@R in percent of a run or bundle.

    Args:
        source: a run folder or a bundle.
        images: other images than the test classes of its job, each of which is searched for among
            the others.
        full: also NMI, F1 and structure measures, which take minutes.

    Raises:
        EvaluationError: all embeddings are equal.
        CheckpointError, BundleError, DatasetError: what is read is missing or damaged.
    """
    forget_files()
    data = None if images is None else Path(images)
    return figures_of(Path(source), data=data, full=full)[0]


def export(
    run: str | Path,
    out: str | Path,
    *,
    precisions: Sequence[Precision] = (),
    keep_weights: bool = False,
) -> Bundle:
    """Write the bundle of a run to the new folder `out`.

    Args:
        precisions: also "int8", "bf16" or "fp16".
        keep_weights: also write `weights.safetensors`, so that a job can continue the training of
            any network.

    Raises:
        ExportError: the model differs from the trained network, or loses too much.
        EvaluationError: all embeddings are equal.
        BundleError: `out` exists.
    """
    forget_files()
    return export_run(
        Path(run), Path(out), precisions=("fp32", *precisions), keep_weights=keep_weights
    )
