"""A flow by its name."""

from typing import Literal, get_args

from training.flows.nice import NICE
from training.flows.real_nvp import RealNVP

FlowKind = Literal["real_nvp", "nice"]


def build_flow(kind: FlowKind, dim: int, layers: int, hidden: int, clamp: float) -> RealNVP | NICE:
    """A flow of R^D that starts as the identity.

    Raises:
        ValueError: for another kind, or a shape that the flow refuses.
    """
    if kind not in get_args(FlowKind):
        raise ValueError(f"kind {kind!r} is not one of {', '.join(get_args(FlowKind))}")
    flow = RealNVP if kind == "real_nvp" else NICE
    return flow(dim, layers, hidden, clamp)
