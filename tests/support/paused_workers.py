"""Ray workers that stop at a named point: before the shard after the first six is written.

Ray calls `runtime_env` in the driver and `pause` in each worker (RAY_RUNTIME_ENV_HOOK), so a test
that kills them finds work done and work left however fast they are.
"""

import signal
from typing import Any

PARTS = 6


def runtime_env(env: dict[str, Any] | None) -> dict[str, Any]:
    return {**(env or {}), "worker_process_setup_hook": "tests.support.paused_workers.pause"}


def pause() -> None:
    """Let each worker of this process write a shard only while there are fewer than six."""
    from kinlens.indexer.ingest import shards

    write = shards.VectorShards.write

    def paused(self: shards.VectorShards, *shard: Any) -> None:
        while self.manifest.shards - len(self.missing()) >= PARTS:
            signal.pause()  # until it is killed
        write(self, *shard)

    shards.VectorShards.write = paused  # type: ignore[method-assign]
