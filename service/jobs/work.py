"""`kinlens-serve work`: do the jobs that a service elsewhere has taken, from the same folder."""

import time

from embedder.errors import StateMissingError
from service.galleries.locations import Locations
from service.galleries.migration import bring_over
from service.jobs.attempts import Attempts
from service.jobs.launch import Launcher
from service.jobs.store import JobStore
from service.jobs.tidy import tidy
from service.settings import Settings

_LOOK_S = 0.5


def run_worker(settings: Settings, once: bool = False) -> None:
    """Start jobs as they come, until the process is ended; with `once`, until none is left.

    Raises: StateMissingError; StateError if the folder cannot be used.
    """
    if settings.state is None:
        raise StateMissingError(
            "There is no folder to take jobs from. Name it with --state or KINLENS_STATE."
        )
    state = settings.state.absolute()
    store = JobStore(state / "service.sqlite")
    bring_over(state, [one.path for one in Locations(settings).list_galleries()])
    launcher = Launcher(state, settings, store)
    tidy(state, store)
    launcher.tick()
    attempts = Attempts()
    while not once or store.active():
        time.sleep(_LOOK_S)
        attempts.attempt("look", launcher.tick)
