"""The one place where trouble with a job, or with the disk, is caught: the caller goes on."""

from collections.abc import Callable

import structlog


class Attempts:
    """Calls work that must not end whoever calls it; each new trouble is logged once."""

    def __init__(self) -> None:
        self._troubles: dict[str, str] = {}

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Call `work`, whatever it raises; `what` names it in the log."""
        try:
            work()
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
            if self._troubles.get(what) != trouble:
                structlog.get_logger().error(
                    "jobs cannot be looked after", what=what, detail=trouble, exc_info=error
                )
            self._troubles[what] = trouble
        else:
            self._troubles.pop(what, None)
