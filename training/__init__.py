"""Training as a library: jobs, and the modules that they are made of.

    from kinlens.training import export, fit

    result = fit("shop", "/my/shop", out="runs/shop")
    print(result.figures["R@1"])
    export("runs/shop", "bundles/shop")

Losses, regularizers and flows are modules of torch. Shapes in their docstrings: B samples, D
dimensions, C classes. The names are imported on first use, as torch takes seconds to import.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kinlens.environment import TRAINING, needs

if TYPE_CHECKING:
    from kinlens.training.library.api import *  # noqa: F403
    from kinlens.training.library.public import *  # noqa: F403

_MODULES = ("library.api", "library.public")


def __getattr__(name: str) -> Any:
    # A module of this package is imported by Python itself.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is None:
        for module in _MODULES:
            with needs(f"{__name__}.{name}", *TRAINING):
                public = import_module(f"{__name__}.{module}")
            if name in public.__all__:
                return getattr(public, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
