"""Check and time training and embedding on a GPU.

    make install-gpu                               # on a machine with an NVIDIA GPU
    .venv-gpu/bin/python scripts/gpu_check.py      # --out gpu.json writes the figures
    .venv/bin/python scripts/gpu_check.py --device cpu --quick    # checks the script itself

Checks:

- a training step of each loss and regularizer matches the CPU and never waits for the device;
- a run on rendered products trains, resumes and can be exported;
- evaluation matches the CPU;
- the exported bundle on CUDA matches the CPU's vectors, also for odd batch sizes.

Timings: steps, and embedding by batch size. The service has its own (`benchmarks/search.py --device
cuda`), and so have galleries: `pytest -k "real or wheel" tests/indexer/test_gpu.py` (install pytest
and pytest-timeout) and benchmarks/gallery_gpu.py.

Exit code 1 if any check fails; each failure is one line.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.manifest import Precision
from kinlens.embedder.session import OnnxEmbedder
from kinlens.embedder.types import Images
from kinlens.training.bundles.bundle import export_checkpoint
from kinlens.training.checkpoint import load_chosen
from kinlens.training.config.job import Job, parse_job
from kinlens.training.data.load import load_split
from kinlens.training.device import tuned
from kinlens.training.evaluation.evaluate import evaluate_embeddings
from kinlens.training.report.log import Callback
from kinlens.training.runner import run_job
from kinlens.training.state import Run, create_run
from kinlens.training.terms import LOSSES
from kinlens.training.trainer import train_step

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import timed_ms

ROUNDS = 20
STEPS = 6  # fewer than 10 with the warm-up: step 10 measures shares, which waits
REGULARIZERS: dict[str, dict[str, Any]] = {
    "determinant": {"lambda1": 1.0, "lambda2": 1.0},
    "skewed_mean": {},
    "non_isotropy": {},
    "graph_consistency": {},
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tiny timm network, few losses")
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("error: torch sees no GPU. Check the driver, or pass --device cpu.")
        return 1
    device = torch.device(options.device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    checks: dict[str, Callable[[], dict[str, float]]] = {}
    for loss in list(LOSSES)[:2] if options.quick else LOSSES:
        checks[f"step {loss}"] = partial(step, options, {"name": loss}, {})
    for regularizer, settings in list(REGULARIZERS.items())[: 1 if options.quick else None]:
        terms = {"name": "proxy_anchor"}, {regularizer: settings}
        checks[f"step proxy_anchor + {regularizer}"] = partial(step, options, *terms)
    checks["evaluation"] = partial(evaluation, device, options.quick)
    with tempfile.TemporaryDirectory() as folder:
        checks["run, resume, export"] = partial(whole_run, options, Path(folder))
        checks["bundle"] = partial(bundle, Path(folder) / "bundle", options)
        figures, failed = results_of(checks)
    if options.out is not None:
        page = {"device": name, "torch": torch.__version__, "checks": figures, "failed": failed}
        options.out.write_text(json.dumps(page, indent=2) + "\n")
    print(f"{len(figures)} checks passed, {len(failed)} failed")
    return 1 if failed else 0


def results_of(
    checks: Mapping[str, Callable[[], dict[str, float]]],
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """The figures of each check, with a line for each, and the names of those that failed."""
    figures, failed = {}, []
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:  # any error fails this check, not the others
            failed.append(name)
            print(f"FAILED  {name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            continue
        figures[name] = found
        shown = "  ".join(f"{key} {value:,.4g}" for key, value in found.items())
        print(f"ok      {name:32} {shown}", flush=True)
    return figures, failed


def step_job(
    options: argparse.Namespace, loss: dict[str, Any], regularizers: dict[str, Any]
) -> Job:
    """A network with random weights; batches of each class twice."""
    side, batch = (32, 12) if options.quick else (224, 90)
    return parse_job({
        "name": "step",
        "data": {"kind": "folder", "root": "unused"},
        "model": model(options),
        "input": {"size_px": side, "resize_px": side},
        "loss": loss,
        "regularizers": regularizers,
        "sampling": {"kind": "paired", "per_class": 1},
        "optimizer": {"batch_size": batch, "lr_trunk": 1e-5, "average": 0.99},
        "runtime": {"device": options.device, "precision": "fp32"},
    })  # fmt: skip


def model(options: argparse.Namespace) -> dict[str, Any]:
    backbone = "timm:test_resnet" if options.quick else "mobilenet_v2"
    return {"backbone": backbone, "weights": "none", "batch_norm": "train", "dim": 64}


def step(
    options: argparse.Namespace, loss: dict[str, Any], regularizers: dict[str, Any]
) -> dict[str, float]:
    """Compare the first loss with the CPU; then time steps, where a wait for the device fails."""
    job = step_job(options, loss, regularizers)
    side, count = job.input.size_px, job.optimizer.batch_size
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8)
    labels = torch.arange(count) % (count // 2)
    here, losses = _fresh(job), []
    cpu = parse_job(job.as_dict() | {"runtime": {"device": "cpu", "precision": "fp32"}})
    for run in (here, _fresh(cpu)):
        parts = _step(run, images.to(run.device), labels.to(run.device))
        losses.append(float(parts["total"]))
    if abs(losses[0] - losses[1]) > 0.02 * max(1.0, abs(losses[1])):
        raise AssertionError(f"the loss is {losses[0]:.5g}, but {losses[1]:.5g} on the CPU")
    images, labels = images.to(here.device), labels.to(here.device)
    rounds = 2 if options.quick else STEPS
    with tuned(here.device):
        for _ in range(2):
            _step(here, images, labels)
        with no_waiting(here.device):
            started = time.perf_counter()
            for _ in range(rounds):
                parts = _step(here, images, labels)
            queued = time.perf_counter() - started
        _wait(here.device)
        seconds = time.perf_counter() - started
    if not all(tensor.isfinite().all() for tensor in (*parts.values(), *here.net.parameters())):
        raise AssertionError("a term, the gradient or a weight is not finite after some steps")
    return {"ms per step": 1000 * seconds / rounds, "ms to queue it": 1000 * queued / rounds}


def _fresh(job: Job) -> Run:
    torch.manual_seed(0)
    run = create_run(job, job.optimizer.batch_size // 2)
    run.net.train()
    return run


def _step(run: Run, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    return train_step(run, run.begin_epoch(trunk_frozen=False), images, labels, 1000)


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """A block in which an operation that waits for the GPU raises an error."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def evaluation(device: torch.device, quick: bool) -> dict[str, float]:
    """Figures of random vectors on the device; they must equal the CPU's."""
    count = 500 if quick else 20_000
    labels = np.arange(count) % (count // 10)
    centres = torch.randn(count // 10, 128)
    vectors = F.normalize(centres[labels] + 1.5 * torch.randn(count, 128))
    expected = evaluate_embeddings(vectors, labels, full=False)
    found = evaluate_embeddings(vectors.to(device), labels, full=False)
    for name, value in expected.items():
        if abs(found[name] - value) > 0.02:
            raise AssertionError(f"{name} is {found[name]}, on the CPU {value}")
    return {"R@1": found["R@1"]}


def whole_run(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Two epochs on rendered products, the second one resumed, and the export of the bundle."""
    side = 48 if options.quick else 224
    job = parse_job({
        "name": "drawn",
        "data": {
            "kind": "rendered", "root": str(folder / "products"),
            "products": 12 if options.quick else 40, "views": 4, "size_px": side,
        },
        "model": model(options),
        "input": {"size_px": side, "resize_px": side},
        "regularizers": {"determinant": {"share": 0.1}},
        "optimizer": {"epochs": 2, "batch_size": 16, "average": 0.9},
        "runtime": {"device": options.device},
    })  # fmt: skip
    split = load_split(job.data)

    class Stopping(Callback):
        def epoch_done(self, row: dict[str, float]) -> None:
            raise KeyboardInterrupt(row)

    try:
        run_job(job, split, folder / "run", Stopping())
    except KeyboardInterrupt:
        result = run_job(job, split, folder / "run", Callback())
    faster: list[Precision] = ["fp16"] if options.device == "cuda" else []
    refused = lambda _, reason: print(f"note: {reason}")
    checkpoint = load_chosen(folder / "run")
    export_checkpoint(checkpoint, split, folder / "bundle", None, faster, refused)
    return {"R@1": result.figures["R@1"], "seconds per epoch": result.seconds_per_epoch}


def bundle(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Vectors and throughput of the bundle on the device, compared with the CPU."""
    cpu = OnnxEmbedder.open(path)
    there = OnnxEmbedder.open(path, SessionSettings(device=options.device))
    known = cpu.bundle.golden_inputs()
    found: dict[str, float] = {}
    for size in (1, 3, 8, 33, 64):
        batch = np.resize(known, (size, *known.shape[1:]))
        cosine = float((cpu.embed(batch) * there.embed(batch)).sum(axis=1).min())
        if cosine < 0.999:
            raise AssertionError(f"{there.provider}: a cosine of {cosine:.6f} to the CPU's vectors")
        fast, slow = (_rate(one, batch, options.quick) for one in (there, cpu))
        found[f"images/s of {size}"] = fast
        found[f"times the CPU at {size}"] = fast / slow
    return found


def _rate(embedder: OnnxEmbedder, batch: Images, quick: bool) -> float:
    """Images per second."""
    times = [timed_ms(partial(embedder.embed, batch)) for _ in range(3 if quick else ROUNDS)]
    return len(batch) / statistics.median(times) * 1e3


if __name__ == "__main__":
    sys.exit(main())
