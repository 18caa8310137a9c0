"""Every route of the service: the scope that it needs, and what a key with limits may ask there."""

import re
from dataclasses import dataclass
from typing import Any

from tests.support.seams import Route

FREE = None
_TABLE: dict[tuple[str | None, str], str] = {
    (FREE, "none"): """
        GET /           GET /admin      GET /ui/{path:path}
        GET /docs       GET /docs/{path:path}              GET /openapi.json
        GET /live       GET /startup
    """,
    (FREE, "items"): "GET /ready",
    ("search", "service"): "GET /metrics",
    ("search", "items"): """
        GET /access     POST /search    POST /search/batch              POST /feedback
        POST /boxes
        GET /galleries  GET /galleries/{name}           GET /galleries/{name}/items
        GET /galleries/{name}/items/{item_id}           GET /galleries/{name}/items/{item_id}/image
        GET /galleries/{name}/items/{item_id}/similar
        POST /galleries/{name}/items/{item_id}/explain
        GET /galleries/{name}/items/by-key/{key:path}
        GET /galleries/{name}/items/by-key/{key:path}/image
        GET /galleries/{name}/items/by-key/{key:path}/similar
        POST /galleries/{name}/items/by-key/{key:path}/explain
        POST /galleries/{name}/count
    """,
    ("embed", "items"): """
        POST /v1/embeddings             GET /galleries/{name}/items/{item_id}/vector
        GET /galleries/{name}/items/by-key/{key:path}/vector
    """,
    ("write", "items"): """
        PUT /galleries/{name}/items                     PATCH /galleries/{name}/items
        DELETE /galleries/{name}/items                  DELETE /galleries/{name}/items/{item_id}
        POST /galleries/{name}/items/delete             POST /galleries/{name}/items/restore
        PATCH /galleries/{name}/items/by-key/{key:path}
        DELETE /galleries/{name}/items/by-key/{key:path}
    """,
    ("write", "galleries"): """
        GET /galleries/{name}/golden    POST /galleries/{name}/golden
        GET /galleries/{name}/golden/runs               POST /galleries/{name}/golden/run
        DELETE /galleries/{name}/golden/{sha256}        GET /galleries/{name}/golden/{sha256}/image
        GET /galleries/{name}/golden/unlabelled
        GET /galleries/{name}/golden/unlabelled/{sha256}
        DELETE /galleries/{name}/golden/unlabelled/{sha256}
        PUT /galleries/{name}/golden/unlabelled/{sha256}
    """,
    ("admin", "galleries"): """
        POST /galleries                 DELETE /galleries/{name}
        POST /galleries/{name}/compact  POST /galleries/{name}/swap     POST /galleries/{name}/sync
        GET /galleries/{name}/feedback  GET /galleries/{name}/duplicates
        GET /jobs       GET /jobs/{job_id}              POST /jobs/{job_id}/cancel
        GET /jobs/options                               GET /jobs/{job_id}/log
    """,
    ("admin", "service"): """
        POST /galleries/{name}/rebuild  POST /jobs/train
        POST /jobs/{job_id}/swap        POST /jobs/{job_id}/resume
        GET /keys       POST /keys      DELETE /keys/{name}             POST /keys/{name}/rotate
        GET /audit
    """,
}


@dataclass(frozen=True)
class Right:
    """`extent`: a key with a filter is refused at `galleries`, every bound key at `service`."""

    scope: str | None
    extent: str


RIGHTS = {
    route: Right(*right)
    for right, text in _TABLE.items()
    for route in re.findall(r"[A-Z]+ /\S*", text)
}


def rights_of(app: Any) -> dict[str, Right]:
    """The same table as the app has it."""
    return {
        f"{method} {route.path}": Right(route.rule.scope, route.rule.extent)
        for route in app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
    }
