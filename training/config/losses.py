"""The `loss` table of a job."""

from typing import Literal

from training.config.section import Section


class ProxyAnchor(Section):
    """See training.losses.proxy_anchor."""

    name: Literal["proxy_anchor"] = "proxy_anchor"
    alpha: float = 32.0
    margin: float = 0.1
