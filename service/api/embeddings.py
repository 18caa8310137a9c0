"""Vectors that leave the service: those of items."""

from fastapi import APIRouter

from kinlens import models
from kinlens.embedder import errors
from kinlens.service.api.galleries import FAILURES, ITEM_PATHS, Generation, ItemRef, Service
from kinlens.service.http.openapi import problems
from kinlens.service.http.rules import Route, rule

router = APIRouter(route_class=Route)

for _path, _by, _item in ITEM_PATHS:

    @router.get(
        f"{_path}/vector",
        name="vector" if _by else "item_vector",  # part of the operation id
        responses=problems(*FAILURES, errors.ItemNotFoundError),
        summary=f"The vector of an item{_by}",
    )
    @rule("embed", "items")
    async def item_vector(
        runtime: Service, name: str, generation: Generation, ref: ItemRef = _item
    ) -> models.ItemVector:
        """The stored vector of an item; send it as a vector of a search or of another item."""
        async with runtime.registry.find(name) as served:
            served.check_generation(generation or ref.generation)
            gallery = served.gallery

            def read() -> models.ItemVector:
                item = gallery.item(ref.id)
                [entry] = gallery.entries([item.key])
                return models.ItemVector(
                    id=item.id,
                    key=item.key,
                    sha256=entry.sha256,
                    bundle_id=served.model.bundle_id,
                    vector=entry.vector.tolist(),
                )

            return await runtime.read("the vector", read, served=served)
