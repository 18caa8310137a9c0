"""Parts of `kinlens-index`, each in a process of its own, all killed before or after they write a
shard: `python -m tests.support.dying_part STEP PARTS WORDS...`, where STEP is the one or the other.

They are forks, since only the first one then takes the time to import everything.
"""

import os
import signal
import sys
from typing import Any

from kinlens.commands.__main__ import app
from kinlens.indexer.ingest.shards import VectorShards


def run(step: str, words: list[str]) -> None:
    write = VectorShards.write

    def dying(self: VectorShards, *shard: Any) -> None:
        if step == "after":
            write(self, *shard)
        os.kill(os.getpid(), signal.SIGKILL)

    VectorShards.write = dying  # type: ignore[method-assign]
    app(words)


if __name__ == "__main__":
    step, parts, *words = sys.argv[1:]
    processes = []
    for part in parts.split():
        if not (process := os.fork()):
            run(step, [*words, "--part", part])
        processes.append(process)
    ends = {os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes}
    sys.exit(ends != {-signal.SIGKILL})
