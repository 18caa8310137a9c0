"""python -m service.jobs STATE ID: the process of one job. `kinlens-serve` starts it."""

import sys
from pathlib import Path

from service.jobs.run import run_job

_WORDS = 3

if __name__ == "__main__":
    if len(sys.argv) != _WORDS:
        sys.exit(__doc__)
    sys.exit(run_job(Path(sys.argv[1]), sys.argv[2]))
