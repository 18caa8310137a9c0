"""Galleries of one bundle in different precisions, served together."""

import contextlib

from kinlens.service.app import create_app
from kinlens.service.settings import Settings
from tests.embedder.bundles import write_full_bundle
from tests.support.servers import DEFAULTS, run
from tests.support.shops import Shop, make_gallery
from tests.tiny import encoded, photo


def test_a_gallery_records_each_precision_added_to_it(tiny_bundle, tmp_path) -> None:
    bundle, state = write_full_bundle(tiny_bundle, tmp_path), tmp_path / "state"
    facts = {"bundle_id": bundle.bundle_id, "dim": bundle.manifest.dim}
    make_gallery(state / "galleries" / "shop", "", count=0, **facts)
    given = {"state": state, "precision": "int8", "anonymous_scopes": ("admin",)}
    app = create_app(Settings(**DEFAULTS | {"bundle": bundle.path} | given))
    with contextlib.closing(run(app)) as running:
        shop = Shop(running, state)
        own = shop.create("own")
        found = []
        for gallery in (shop, own):
            found.append(running.client.get(gallery.url).json()["precision"])
            gallery.put({"a": encoded(photo(1))})
            found.append(running.client.get(gallery.url).json()["precision"])
    assert found == ["fp32", "fp32+int8", "int8", "int8"]
