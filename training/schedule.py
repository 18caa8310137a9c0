"""Learning rates as pure functions of the step."""

import math

from training.config.optimizer import Optimizer


def rate(settings: Optimizer, step: int, steps_per_epoch: int) -> float:
    """The factor of all learning rates at `step`, in [0, 1].

    Linear and cosine stay at 1 until the part `decay_start` of the steps, then fall towards 0 at
    the end of the run. "step" multiplies by `gamma` every `step_epochs` epochs, warm-up included,
    or at each epoch of a list.
    """
    if settings.schedule == "constant":
        return 1.0
    if settings.schedule == "step":
        epoch, at = step // steps_per_epoch, settings.step_epochs
        falls = epoch // at if isinstance(at, int) else sum(epoch >= mark for mark in at)
        return float(settings.gamma**falls)
    done = min(step / max(settings.epochs * steps_per_epoch, 1), 1.0)
    progress = max(done - settings.decay_start, 0.0) / (1.0 - settings.decay_start)
    if settings.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
