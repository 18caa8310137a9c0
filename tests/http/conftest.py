"""What the tests over HTTP share."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest


@pytest.fixture
def closes() -> Iterator[Callable[[Any], Any]]:
    """Closes what it is given after the test: `shop = closes(start_shop(...))`."""
    with ExitStack() as stack:

        def close_later(opened: Any) -> Any:
            stack.callback(opened.close)
            return opened

        yield close_later
