"""One market for tests that only search."""

from collections.abc import Iterator

import pytest

from tests.support.market import start_market
from tests.support.servers import Running


@pytest.fixture(scope="module")
def market(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    shop = start_market(tmp_path_factory.mktemp("market") / "state")
    yield shop.running
    shop.close()
