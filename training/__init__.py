"""Training as a library: jobs, and the modules that they are made of.

    from kinlens.training import export, fit

    result = fit("shop", "/my/shop", out="runs/shop")
    print(result.figures["R@1"])
    export("runs/shop", "bundles/shop")

Losses, regularizers and flows are modules of torch. Shapes in their docstrings: B samples, D
dimensions, C classes. The names are imported on first use, as torch takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinlens.training.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        public = import_module(f"{__name__}.api")
        if name in public.__all__:
            return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
