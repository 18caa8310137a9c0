"""One service for the tests of a module, and a new gallery for each test."""

from collections.abc import Iterator
from itertools import count

import pytest

from kinlens.service.settings import Settings
from tests.embedder.bundles import CALIBRATION
from tests.support.servers import GatedEmbedder
from tests.support.shops import Shop, start_shop
from tests.tiny import encoded, photo

_NUMBERS = count()


@pytest.fixture(scope="session")
def data() -> list[bytes]:
    """Eight images."""
    return [encoded(photo(seed)) for seed in range(8)]


@pytest.fixture(scope="module")
def model() -> GatedEmbedder:
    """The model of the service."""
    return GatedEmbedder(calibration=CALIBRATION)


@pytest.fixture(scope="module")
def mall(tmp_path_factory: pytest.TempPathFactory, model: GatedEmbedder) -> Iterator[Shop]:
    """The service, with a gallery `shop` that nobody changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Settings, "max_items_per_request", 8)
        shop = start_shop(tmp_path_factory.mktemp("mall") / "state", model)
        yield shop
        shop.close()


@pytest.fixture
def shop(mall: Shop) -> Shop:
    """A new, empty gallery there."""
    return mall.create(f"shop-{next(_NUMBERS)}")
