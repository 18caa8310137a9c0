"""A single search may use all cores; concurrent searches have one each."""

from concurrent.futures import ThreadPoolExecutor

from kinlens.embedder.types import Embeddings, Images
from tests.support.servers import GatedEmbedder
from tests.support.waiting import until


class Watched(GatedEmbedder):
    """Remembers for each call of the model whether it was alone."""

    def __init__(self) -> None:
        super().__init__(dim=32)
        self.alone: list[bool] = []

    def embed(self, images: Images) -> Embeddings:
        self.alone.append(False)
        return super().embed(images)

    def embed_single(self, images: Images) -> Embeddings:
        self.alone.append(True)
        return super().embed(images)


def test_only_a_search_that_is_alone_has_all_cores(start_service, photos) -> None:
    embedder = Watched()
    service = start_service(embedder=embedder, search_threads=2)
    embedder.alone.clear()
    embedder.gate.clear()
    with ThreadPoolExecutor(2) as clients:
        searches = [clients.submit(service.search, photos[0])]
        until(lambda: len(embedder.alone) == 1)
        searches.append(clients.submit(service.search, photos[1]))
        until(lambda: len(embedder.alone) == 2)
        embedder.gate.set()
        assert [search.result().status_code for search in searches] == [200, 200]
    assert service.search(photos[2]).status_code == 200
    assert embedder.alone == [True, False, True]
