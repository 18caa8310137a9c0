"""Learning rates as pure functions of the step."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def rate(schedule: Schedule, step: int, total_steps: int, decay_start: float = 0.0) -> float:
    """The factor of all learning rates at `step` of `total_steps`, in [0, 1].

    Linear and cosine stay at 1 until the part `decay_start` of the steps, then fall towards 0 at
    `total_steps`.
    """
    done = min(step / max(total_steps, 1), 1.0)
    progress = max(done - decay_start, 0.0) / (1.0 - decay_start)
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
