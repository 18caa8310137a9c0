"""`kinlens-index`, killed before or after it writes a shard; its first word chooses."""

import os
import signal
import sys
from typing import Any

from kinlens.commands.__main__ import app
from kinlens.indexer.ingest.shards import VectorShards

if __name__ == "__main__":
    step = sys.argv.pop(1)
    write = VectorShards.write

    def dying(self: VectorShards, *shard: Any) -> None:
        if step == "after":
            write(self, *shard)
        os.kill(os.getpid(), signal.SIGKILL)

    VectorShards.write = dying  # type: ignore[method-assign]
    app()
