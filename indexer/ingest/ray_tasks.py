"""Runs the parts of `embed` as tasks of a Ray cluster, which retries those whose machine dies."""

import contextlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import EngineUnavailableError, KinlensError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.exchange.objects import REMOTE
from kinlens.indexer.ingest.embed import EmbedSettings
from kinlens.indexer.ingest.parts import Part, embed_part
from kinlens.indexer.ingest.shards import VectorShards

_PARTS_PER_SLOT = 64  # so that fast machines get more of them, and progress is seen


def embed_on_ray(
    shards: VectorShards, bundle: Path, session: SessionSettings, address: str, batch_size: int
) -> Iterator[int]:
    """Embed the missing shards on the cluster at `address`, a part per task and CPU or GPU.

    The bundle travels with the tasks. Yields the number of images of each part that has ended.

    Raises: EngineUnavailableError without Ray, cluster or GPU, or if a task fails; KinlensError.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError as error:
        raise EngineUnavailableError(
            "--ray needs Ray, which is not installed. Install it with `pip install 'kinlens[ray]'`."
        ) from error
    kind = "GPU" if session.device == "cuda" else "CPU"
    files = {str(f.relative_to(bundle)): f.read_bytes() for f in bundle.rglob("*") if f.is_file()}
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.chdir("/"):
            ray.init(address=address, log_to_driver=False, logging_level="error")
        has = ray.cluster_resources()
        slots = int(has.get(kind, 0))
        if not slots:
            raise EngineUnavailableError(f"The Ray cluster has no {kind}. Change --device.")
        # Reads of a remote source wait for the network.
        workers = max(1, int(has["CPU"]) // slots) + (REMOTE in shards.manifest.source_root)
        parts = min(_PARTS_PER_SLOT * slots, shards.manifest.shards)
        task = ray.remote(**{f"num_{kind.lower()}s": 1})(_embed)
        given = (ray.put(files), shards.address, session, EmbedSettings(batch_size, workers))
        waiting = [task.remote(Part(number, parts), *given) for number in range(1, parts + 1)]
        while waiting:
            ended, waiting = ray.wait(waiting)
            yield ray.get(ended[0])
    except (KinlensError, GeneratorExit):
        raise
    except Exception as error:  # many types: raised by a task, by the connection or by Ray
        cause = getattr(error, "cause", None) or error
        if isinstance(cause, KinlensError):
            raise cause from None
        text = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
        raise EngineUnavailableError(
            f"The Ray cluster at {address} failed: {text} Stored shards are kept. Check the "
            "address, the version of Ray on both sides and the token (RAY_AUTH_MODE=token), then "
            "run the same command again, or omit --ray."
        ) from error
    finally:
        ray.shutdown()


def _embed(
    part: Part, files: dict[str, bytes], out: str, session: SessionSettings, settings: EmbedSettings
) -> int:
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        embedder = OnnxEmbedder.open(Path(folder), session)
    return sum(embed_part(VectorShards(out), part, embedder, settings))
