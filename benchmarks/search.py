"""POST /search end to end, compared with its ceiling and its peers, in one run.

    python benchmarks/search.py [--backbone mobilenet_v2] [--rounds 5] [--seconds 6]
    python benchmarks/search.py --device cuda --connections 1 64

The load comes from a separate process (benchmarks/load.py) on the same cores, with new files, or
with files whose answers are cached. Each round runs in turns:

    ceiling        the same files through decode, preprocess, onnxruntime and FAISS in a bare loop,
                   one thread per core; single images or batches, whichever is faster
    alone          the same loop with one image at a time; a model of one thread or of one per core
    ours           kinlens-serve, and two of them behind HAProxy with its file of deploy/
    ours fast      the same in the mode that `--precision auto` chooses
    cached         the same files again
    bare           a bare ASGI application on uvicorn that does the same work, one process per core
                   (peers/bare_asgi.py); and `bare fast`
    litserve       LitServe, the same ONNX file and preprocessing: with one worker and with one per
                   core (peers/litserve_search.py; needs the extra `bench`)
    litserve fast  the same in the fastest mode
    usual          FastAPI + torch eager + IndexFlatIP at 16 connections (peers/usual_script.py)

All but the fast ones run fp32 in onnxruntime. The output shows the choice of `auto`. Targets
compare the better of one and two. The table shows medians over the rounds, ratios as medians of
the pairs. The ceiling does not include the load, which shares the cores with the
service; its CPU time per request is printed, as is that of each service ("own"). Memory is that of
all processes of a service after the load, without file cache. Two networks at 224 px with 128
dimensions, hardly trained: ResNet50, usual in papers, and MobileNetV2, a tenth of its work, where
the cost of HTTP is most visible. On a GPU there are no peers. Images come from $KINLENS_SHARED if
available, else they are generated.
"""

import contextlib
import importlib.util
import itertools
import re
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from clustered import clustered_batches
from harness import (
    Server,
    free_port,
    heading,
    kinlens,
    made_gallery,
    options,
    row,
    sample_images,
    serving,
    shared_folder,
    started,
    tree_cpu_s,
    tree_mb,
    verdict,
)
from load import load

from kinlens.embedder.engines.models import SessionSettings, absence
from kinlens.embedder.machine import core_count
from kinlens.embedder.manifest import FP32, Mode
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery

PEERS = Path(__file__).parent / "peers"
HAPROXY = Path(__file__).parents[1] / "deploy/haproxy/haproxy.cfg"
IMAGES, K, DIM = 300, 20, 128
BATCH = {"cpu": 8, "cuda": 32}
OF_CEILING = {"resnet50": 0.95, "mobilenet_v2": 0.80}
TARGETS = (
    (1, "ours", "litserve", 1.0),
    (1, "ours fast", "litserve", 1.3),
    (1, "ours fast", "litserve fast", 1.0),
    (16, "ours", "usual", 2.0),
    (16, "ours fast", "ours", 1.5),
    (16, "ours", "bare", 0.93),
    (16, "ours fast", "bare fast", 0.88),
    (16, "ours", "litserve", 1.12),
    (16, "ours fast", "litserve", 1.6),
    (16, "ours fast", "litserve fast", 1.2),
)
"""Connections, two kinds of server, and the least ratio: of p50 at one connection, else of QPS."""

Figures = dict[str, float]
Results = dict[tuple[str, int], list[Figures]]
"""Figures by contestant and number of connections, in each round."""


def main() -> None:
    args = options(
        __doc__, backbone=["resnet50", "mobilenet_v2"], items=10_000, start_items=100_000,
        seconds=6.0, rounds=5, connections=[1, 16], device="cpu",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        images = sample_images(Path(name, "images"), IMAGES)
        for backbone in args.backbone:
            one_network(args, backbone, Path(name, backbone), images)


def one_network(args: Namespace, backbone: str, folder: Path, images: Path) -> None:
    """The whole comparison with one network."""
    cores = core_count()
    bundle = small_bundle(folder, backbone, args.device)
    made = gallery(folder / "gallery", bundle, args.items)
    vectors = folder / "vectors.npy"
    np.save(vectors, np.random.default_rng(0).standard_normal((args.items, DIM), "float32"))
    modes = {"": FP32, " fast": fastest(bundle, args.device)}
    print(f"fast: {modes[' fast']}")
    has_peers = args.device == "cpu"
    has_litserve = has_peers and importlib.util.find_spec("litserve") is not None
    with contextlib.ExitStack() as running:
        servers: dict[str, Server] = {}
        pids: dict[str, list[int]] = {}

        def start(who: str, service: contextlib.AbstractContextManager[Server]) -> None:
            servers[who] = running.enter_context(service)
            pids[who] = [servers[who].process.pid]

        if has_peers:
            start("usual", peer("usual_script.py", backbone, vectors, cores))
        for name, mode in modes.items():
            words = mode.precision, mode.engine
            flags = "--device", args.device, "--precision", mode.precision, "--engine", mode.engine
            first = f"ours{name} 1"
            start(first, serving(bundle, made, *flags))
            if shutil.which("haproxy"):
                second = running.enter_context(serving(bundle, made, *flags))
                file = folder / f"haproxy{mode.precision}.cfg"
                start(f"ours{name} 2", haproxy(file, [servers[first], second]))
                pids[f"ours{name} 2"] += [*pids[first], second.process.pid]
            if has_peers:
                start(f"bare{name}", peer("bare_asgi.py", bundle, vectors, cores, *words))
            for count in {1, cores} if has_litserve else ():
                litserve = peer("litserve_search.py", bundle, vectors, count, *words)
                start(f"litserve{name} {count}", litserve)
        urls = {who: server.url for who, server in servers.items()}
        results = contest(args, bundle, made, images, urls, pids)
        memory = {who: sum(map(tree_mb, pids[who])) for who in pids if "ours" in who}
    print(f"\n{backbone}: {args.items:,} items, {cores} cores, medians of {args.rounds} rounds")
    print_results(results, OF_CEILING.get(backbone, 0.75) if has_peers else 0.75)
    heading("memory of", "MB")
    for who, mb in memory.items():
        row(who, mb)
    made = gallery(folder / "start", bundle, args.start_items)
    seconds = statistics.median(seconds_to_ready(bundle, made) for _ in range(args.rounds))
    verdict(f"seconds from start to ready, {args.start_items:,} items", seconds, 1.5, at_most=True)


def contest(
    args: Namespace,
    bundle: Path,
    made: Path,
    images: Path,
    urls: dict[str, str],
    pids: dict[str, list[int]],
) -> Results:
    """All figures of all rounds."""
    results: Results = defaultdict(list)
    files = [path.read_bytes() for path in sorted(images.glob("*.jpg"))]
    one, every = (
        OnnxEmbedder.open(bundle, SessionSettings(device=args.device, threads=n))
        for n in (1, core_count())
    )
    seconds, sent = args.seconds, 0
    with contextlib.closing(Gallery.open(made)) as opened:
        for _ in range(args.rounds):
            loops = [
                bare_loop(one, opened, files, seconds / 2, core_count(), n)
                for n in (1, BATCH[args.device])
            ]
            results["ceiling", 0].append(max(loops, key=lambda found: found["qps"]))
            loops = [bare_loop(each, opened, files, seconds / 2, 1, 1) for each in (one, every)]
            results["alone", 0].append(min(loops, key=lambda found: found["p50_ms"]))
            load(urls["ours 1"], images, 4, 1.0, repeat=True)  # fill the cache
            for connections in args.connections:
                for who, url in urls.items():
                    if who != "usual" or connections == 16:
                        found = own(
                            pids[who], partial(load, url, images, connections, seconds, sent)
                        )
                        results[who, connections].append(found)
                        sent += int(found["sent"])
                again = partial(load, urls["ours 1"], images, connections, seconds / 2, repeat=True)
                found = own(pids["ours 1"], again)
                results["cached", connections].append(found)
    return results


def own(pids: list[int], load: Callable[[], Figures]) -> Figures:
    """The figures of a load, with the CPU time of these processes per request."""
    before_s = sum(map(tree_cpu_s, pids))
    found = load()
    return found | {
        "own_ms": 1e3 * (sum(map(tree_cpu_s, pids)) - before_s) / max(1.0, found["sent"])
    }


def peer(script: str, *words: object) -> contextlib.AbstractContextManager[Server]:
    """A peer in a separate process."""
    port = free_port()
    return started([sys.executable, PEERS / script, str(port), *map(str, words)], port)


def haproxy(file: Path, replicas: Sequence[Server]) -> contextlib.AbstractContextManager[Server]:
    """HAProxy with the shipped file before these services."""
    port, text = free_port(), HAPROXY.read_text()
    servers = "\n  ".join(
        f"server s{n} {replica.url.removeprefix('http://')} check"
        for n, replica in enumerate(replicas)
    )
    text = re.sub(r"server-template .*", servers, text).replace(":8080", f"127.0.0.1:{port}")
    file.write_text(text)
    return started(["haproxy", "-db", "-f", file], port)


def bare_loop(
    embedder: OnnxEmbedder,
    opened: Gallery,
    files: list[bytes],
    seconds: float,
    threads: int,
    size: int,
) -> Figures:
    """`threads` that each decode, embed and search `size` images at a time."""

    def loop(number: int) -> list[float]:
        latencies, at = [], number * 31
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            chosen = [files[(at + i) % len(files)] for i in range(size)]
            at += size
            inputs = np.stack([embedder.preprocess(data) for data in chosen])
            opened.nearest(embedder.embed(inputs), K)
            latencies += [time.perf_counter() - began] * size
        return latencies

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        found = sorted(itertools.chain.from_iterable(pool.map(loop, range(threads))))
    return {
        "qps": len(found) / (time.perf_counter() - began),
        "p50_ms": 1e3 * found[len(found) // 2],
    }


def small_bundle(folder: Path, backbone: str, device: str) -> Path:
    """A network at 224 px, 128 dimensions, hardly trained: that does not affect the speed.

    It begins with the ImageNet weights in $KINLENS_SHARED, if available: int8 and bf16 of random
    weights may not pass their gate.
    """
    shop = folder / "shop"
    weights = (shared_folder() or Path()) / "weights" / f"{backbone}-imagenet-fp16.pth"
    has_weights = weights.is_file()
    kinlens("train", "data", "render", shop, "--products", 8, "--views", 4, "--size-px", 96)
    changes = {
        "data.root": shop, "model.backbone": backbone, "model.dim": DIM,
        "model.weights": weights if has_weights else "none",
        "model.batch_norm": "folded" if has_weights else "train",
        "input.size_px": 224, "input.resize_px": 256, "input.test_px": 224, "optimizer.epochs": 1,
        "optimizer.batch_size": 8, "optimizer.min_steps": 1, "protocol.choose_by": "last",
    }  # fmt: skip
    flags = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    kinlens("train", "fit", "shop", "--out", folder / "run", *flags)
    precision = "--precision", "int8" if device == "cpu" else "fp16", "--skip-refused"
    kinlens("train", "export", folder / "run", "--out", folder / "bundle", *precision)
    return folder / "bundle"


def gallery(path: Path, bundle: Path, items: int) -> Path:
    """A gallery of clustered vectors for the bundle."""
    bundle_id = OnnxEmbedder.open(bundle).bundle_id
    batches = lambda: clustered_batches(items, DIM)
    return made_gallery(path, batches, items, DIM, bundle_id=bundle_id)


def print_results(results: Results, share: float) -> None:
    """The table and the verdict on each target."""

    def middle(who: str, at: int, field: str) -> float:
        return statistics.median(found[field] for found in results[who, at])

    def best(kind: str, at: int) -> list[Figures]:
        """The figures of the faster of one service or worker and several, in each round."""
        names = [who for who, n in results if n == at and who.rstrip("0123456789 ") == kind]
        return results[max(names, key=lambda who: middle(who, at, "qps")), at] if names else []

    top, alone = middle("ceiling", 0, "qps"), middle("alone", 0, "p50_ms")
    print(f"ceiling {top:.1f} images/s; alone {alone:.1f} ms per image")
    heading(
        "connections", "who", "QPS", "of ceiling", "p50 ms", "p99 ms", "load ms", "own ms", "errors"
    )
    for who, at in sorted(results, key=lambda key: (key[1], key[0])):
        if at:
            qps, *fields = (
                middle(who, at, f) for f in ("qps", "p50_ms", "p99_ms", "cpu_ms", "own_ms")
            )
            row(at, who, qps, qps / top, *fields, sum(f["errors"] for f in results[who, at]))
    errors = sum(f["errors"] for (who, _), each in results.items() if "ours" in who for f in each)
    verdict("requests without an answer", errors, 0, at_most=True)
    extra = middle("ours 1", 1, "p50_ms") - 1.1 * alone
    verdict("ms above 1.1 x the bare loop at 1", extra, 2, at_most=True)
    verdict("ms of a cached answer at 1", middle("cached", 1, "p50_ms"), 0.7, at_most=True)
    if ("bare", 1) in results:
        pairs = zip(results["ours 1", 1], results["bare", 1], strict=True)
        more = statistics.median(a["own_ms"] - b["own_ms"] for a, b in pairs)
        verdict("ms of CPU above the bare application at 1", more, 0.9, at_most=True)
    busiest = max(at for _, at in results)
    ours = best("ours", busiest)
    shares = (a["qps"] / b["qps"] for a, b in zip(ours, results["ceiling", 0], strict=True))
    verdict(f"of the ceiling at {busiest}", statistics.median(shares), share)
    spread = statistics.median(found["p99_ms"] / found["p50_ms"] for found in ours)
    verdict(f"p99 / p50 at {busiest}", spread, 3, at_most=True)
    for at, kind, other, target in TARGETS:
        pairs = zip(best(kind, at), best(other, at), strict=False)
        ratios = [b["p50_ms"] / a["p50_ms"] if at == 1 else a["qps"] / b["qps"] for a, b in pairs]
        if ratios:
            verdict(f"{kind} / {other} at {at}", statistics.median(ratios), target)
        else:
            print(f"skipped: {kind} / {other} at {at}")


def fastest(bundle: Path, device: str) -> Mode:
    """The choice of `auto`, or bf16 if that is fp32, as untrained weights may fail the gate."""
    settings = SessionSettings(device=device, precision="auto", engine="auto")  # type: ignore[arg-type]
    auto, bf16 = OnnxEmbedder.open(bundle, settings).mode, Mode("openvino", "bf16")
    return bf16 if device == "cpu" and auto == FP32 and absence(bf16) is None else auto


def seconds_to_ready(bundle: Path, made: Path) -> float:
    """From the start of the process to the first 200 of /ready."""
    began = time.perf_counter()
    with serving(bundle, made, "--log-level", "error", every_s=0.02):
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
