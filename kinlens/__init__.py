"""Visual search: a client for the service, and bundles and galleries without a service.

    import kinlens

    with kinlens.Client("http://127.0.0.1:8000") as client:
        for hit in client.search("photo.jpg", k=5).hits:
            print(hit.key, hit.score)

    bundle = kinlens.load_bundle("bundles/shop")
    gallery = kinlens.build("photos/", bundle, out="galleries/shop")
    hits = gallery.search("photo.jpg", k=5, filter="price < 60")
    kinlens.plot.map(gallery)

The client needs only the base install; bundles and galleries need `kinlens[cpu]` or `kinlens[gpu]`.
Each name is imported on first use, so `import kinlens` is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kinlens.environment import ENGINES, TRAINING, missing_package, refuse_telemetry

if TYPE_CHECKING:
    import kinlens.library.plots as plot
    from kinlens.calls import NewItem
    from kinlens.client import AsyncClient, Client
    from kinlens.library.bundles import load_bundle
    from kinlens.library.galleries import Gallery, build, compare, create_gallery, open_gallery
    from kinlens.library.models import adapt, attach, import_model, teach_words
    from kinlens.library.upkeep import compare_plans, import_gallery, plan, restore_gallery

# fmt: off
__all__ = [
    "AsyncClient", "Client", "Gallery", "NewItem", "__version__", "adapt", "attach", "build",
    "compare", "compare_plans", "create_gallery", "import_gallery", "import_model", "load_bundle",
    "open_gallery", "plan", "plot", "restore_gallery", "teach_words",
]
# fmt: on
__version__ = "0.2.0"

refuse_telemetry()

_CLIENT = {
    "AsyncClient": "kinlens.client",
    "Client": "kinlens.client",
    "NewItem": "kinlens.calls",
}
_LIBRARY = {
    "Gallery": ("kinlens.library.galleries", ENGINES),
    "build": ("kinlens.library.galleries", ENGINES),
    "create_gallery": ("kinlens.library.galleries", ENGINES),
    "load_bundle": ("kinlens.library.bundles", ENGINES),
    "open_gallery": ("kinlens.library.galleries", ENGINES),
    "compare": ("kinlens.library.galleries", ENGINES),
    "compare_plans": ("kinlens.library.upkeep", ENGINES),
    "import_gallery": ("kinlens.library.upkeep", ENGINES),
    "plan": ("kinlens.library.upkeep", ENGINES),
    "restore_gallery": ("kinlens.library.upkeep", ENGINES),
    "adapt": ("kinlens.library.models", TRAINING),
    "attach": ("kinlens.library.models", TRAINING),
    "import_model": ("kinlens.library.models", TRAINING),
    "teach_words": ("kinlens.library.models", TRAINING),
}
"""The module of a name, and the extras that bring what it imports; any one of them is enough."""
_SUBMODULES = {
    "client": "kinlens.client",
    "errors": "kinlens.errors",
    "models": "kinlens.models",
    "plot": "kinlens.library.plots",
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(_SUBMODULES[name])
    if name in _CLIENT:
        return getattr(import_module(_CLIENT[name]), name)
    if name not in _LIBRARY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extras = _LIBRARY[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as missing:
        return _absent(missing_package(f"kinlens.{name}", missing, *extras), missing.name)


def _absent(reason: str, package: str | None) -> Any:
    """A stand-in that raises when it is called, so that `dir` and `help` work without extras."""

    def absent(*_: object, **__: object) -> None:
        raise ModuleNotFoundError(reason, name=package)

    return absent


def __dir__() -> list[str]:
    return sorted(__all__)
