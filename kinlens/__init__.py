"""Visual search: a client for the service, and bundles and galleries without a service.

    import kinlens

    with kinlens.Client("http://127.0.0.1:8000") as client:
        for hit in client.search("photo.jpg", k=5).hits:
            print(hit.key, hit.score)

    bundle = kinlens.load_bundle("bundles/shop")
    gallery = kinlens.open_gallery("galleries/shop", bundle)
    [hits] = gallery.search(bundle.embed_files(["photo.jpg"]), k=5)

The client needs only the base install; bundles and galleries need `kinlens[cpu]` or `kinlens[gpu]`.
Each name is imported on first use, so `import kinlens` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kinlens.environment import refuse_telemetry

if TYPE_CHECKING:
    from kinlens.client import AsyncClient, Client
    from kinlens.local import load_bundle, open_gallery

__all__ = ["AsyncClient", "Client", "__version__", "load_bundle", "open_gallery"]

__version__ = "0.2.0"

refuse_telemetry()

_MODULES = {
    "AsyncClient": "kinlens.client",
    "Client": "kinlens.client",
    "load_bundle": "kinlens.local",
    "open_gallery": "kinlens.local",
}
_SUBMODULES = ("client", "errors", "models")


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"kinlens.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
