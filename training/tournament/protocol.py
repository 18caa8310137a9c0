"""What a reader must know before believing a table: how models were chosen and tested."""

from collections.abc import Sequence
from pathlib import Path

from training.tournament.ledger import Finished

_CHOSEN_BY = {
    "last": "the model of a run is that of its last epoch; nothing was chosen by test recall",
    "validation": "the epoch of a run is that with the best R@1 on validation classes; "
    "nothing was chosen by test recall",
    "test": "CHOSEN BY TEST: the epoch of a run is that with the best R@1 on the test classes, so "
    "these figures are too high",
}


def protocol_lines(finished: Sequence[Finished]) -> tuple[str, ...]:
    """Who chose, which classes, which seeds, how many epochs; one line each."""
    if not finished:
        return ()
    jobs = [one.combination.job for one in finished]
    chosen = dict.fromkeys(one.result.chosen_by for one in finished)
    lines = [_CHOSEN_BY[who] for who in chosen]
    if len(chosen) > 1:
        lines.append(
            "MIXED: not all runs were chosen in the same way, so ranks compare unlike runs"
        )
    held = dict.fromkeys(job.protocol.validation_fraction for job in jobs)
    lines += [
        f"{part:.0%} of the train classes were held out for validation" for part in held if part
    ]
    seeds = ", ".join(map(str, sorted({job.seed for job in jobs})))
    epochs = ", ".join(map(str, sorted({job.optimizer.epochs for job in jobs})))
    sizes = ", ".join(map(str, sorted({job.optimizer.batch_size for job in jobs})))
    data = ", ".join(sorted({f"{job.data.kind} ({Path(job.data.root).name})" for job in jobs}))
    lines += [
        f"data: {data}",
        f"seeds {seeds}; epochs {epochs}; batch {sizes}",
        "figures are means over seeds ± sample standard deviation; R@K in percent",
    ]
    return tuple(lines)
