"""A retriever for LangChain: finds the items of a gallery for words or an image.

It needs `kinlens[langchain]`, and sends requests to the service of its client alone.
"""

from pathlib import Path
from typing import Any

from pydantic import Field

from kinlens.environment import needs

with needs("kinlens.langchain", "langchain"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever

from kinlens.agents import FoundItem, found_items, read_image
from kinlens.client import Client


class KinlensRetriever(BaseRetriever):
    """Finds the items of a gallery that are most similar to a query.

    A query is words, if the bundle of the gallery reads words; or an image: a data URL
    (`data:image/jpeg;base64,...`), or `file:` with a path below `images`.

    A document has the key of its item as `id`. Its `page_content` is the key and the attributes;
    its `metadata` has `key`, `attributes`, `link` (the address in the shop), `score`, `probability`
    and `gallery`. It raises the errors of the client.

    Attributes:
        client: it can be shared by several retrievers.
        gallery: its name; None for the default of the service.
        k: the number of documents.
        images: the folder of the images that a query may name; None refuses paths.
        search_kwargs: further options of `Client.search`, such as `filter` or `min_score`.

    Examples:
        >>> from kinlens.langchain import KinlensRetriever
        >>> retriever = KinlensRetriever(client=client, gallery="shop", k=1, images="photos")
        >>> [document.id for document in retriever.invoke("file:shoe.jpg")]
        ['shoes/1']
    """

    client: Client
    gallery: str | None = None
    k: int = 5
    images: Path | None = None
    search_kwargs: dict[str, Any] = Field(default_factory=dict)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
    ) -> list[Document]:
        is_image = query.startswith(("data:", "file:"))
        views: dict[str, Any] = {"texts": None if is_image else [query]}
        images = [read_image(query, self.images)] if is_image else []
        options = {"gallery": self.gallery, "k": self.k, **self.search_kwargs, **views}
        answer = self.client.search(images, **options)
        groups = [hit for group in answer.groups or [] for hit in group.hits]
        items = found_items(self.client, answer.gallery, answer.hits or groups)
        return [_document(item, answer.gallery) for item in items]


def _document(item: FoundItem, gallery: str) -> Document:
    lines = [item.key, *(f"{name}: {_plain(value)}" for name, value in item.attributes.items())]
    metadata = {**item.model_dump(), "gallery": gallery}
    return Document("\n".join(lines), id=item.key, metadata=metadata)


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
