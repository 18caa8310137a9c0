"""Whether anybody still waits for a call that runs in a thread, which nobody can end from outside.

The call asks between pieces of its work, and so gives its thread and memory back soon.
"""

import threading

from embedder.errors import DeadlineExceededError


class Waiting:
    """Over once whoever waited has left: after the time limit, or when the client has gone."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def end(self) -> None:
        """Nobody waits any more."""
        self._over.set()

    def check(self) -> None:
        """Raises: DeadlineExceededError once nobody waits."""
        if self._over.is_set():
            raise DeadlineExceededError(
                "Nobody waits for this search any more; the rest of it was left out."
            )
