"""Learning rates as pure functions of the step."""

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def rate(schedule: Schedule, step: int, total_steps: int) -> float:
    """The factor of all learning rates at `step` of `total_steps`, in [0, 1].

    Linear and cosine fall from 1 at step 0 towards 0 at `total_steps`.
    """
    progress = min(step / max(total_steps, 1), 1.0)
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
