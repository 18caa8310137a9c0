"""Galleries of the client: made, described, deleted; the calls of both kinds of client."""

from service.client_call import Call, address, model, nothing
from service.client_transport import AsyncSender, Sender
from service.schemas.galleries import Galleries, GalleryDetail, GalleryModel


class GalleryCalls(Sender):
    """Calls about galleries that wait for their answer."""

    def galleries(self) -> Galleries:
        """Every gallery; the first is the default of a search.

        Example: `[gallery.name for gallery in client.galleries().galleries]`
        """
        return self._send(_list())

    def gallery(self, name: str) -> GalleryDetail:
        """A gallery with its attributes, its index and its calibration.

        Example: `client.gallery("shop").attributes`
        """
        return self._send(_describe(name))

    def create_gallery(self, name: str, bundle_id: str | None = None) -> GalleryModel:
        """An empty gallery that can be written at once.

        Example: `client.create_gallery("summer").version`
        """
        return self._send(_create(name, bundle_id))

    def delete_gallery(self, name: str) -> None:
        """Delete a gallery that was created here, with its items and uploads.

        Example: `client.delete_gallery("summer")`
        """
        self._send(_delete(name))


class AsyncGalleryCalls(AsyncSender):
    """The same calls in an event loop."""

    async def galleries(self) -> Galleries:
        """Every gallery; the first is the default of a search.

        Example: `(await client.galleries()).galleries[0].size`
        """
        return await self._send(_list())

    async def gallery(self, name: str) -> GalleryDetail:
        """A gallery with its attributes, its index and its calibration.

        Example: `(await client.gallery("shop")).index.compaction_due`
        """
        return await self._send(_describe(name))

    async def create_gallery(self, name: str, bundle_id: str | None = None) -> GalleryModel:
        """An empty gallery that can be written at once.

        Example: `await client.create_gallery("summer")`
        """
        return await self._send(_create(name, bundle_id))

    async def delete_gallery(self, name: str) -> None:
        """Delete a gallery that was created here, with its items and uploads.

        Example: `await client.delete_gallery("summer")`
        """
        await self._send(_delete(name))


def _list() -> Call[Galleries]:
    return Call("GET", "/galleries", model(Galleries))


def _describe(name: str) -> Call[GalleryDetail]:
    return Call("GET", address("galleries", name), model(GalleryDetail))


def _create(name: str, bundle_id: str | None) -> Call[GalleryModel]:
    body = {"name": name, "bundle_id": bundle_id}
    return Call("POST", "/galleries", model(GalleryModel), json=body, idempotent=False)


def _delete(name: str) -> Call[None]:
    return Call("DELETE", address("galleries", name), nothing, idempotent=False)
