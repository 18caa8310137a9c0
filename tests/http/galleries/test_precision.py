"""Galleries of one bundle in different precisions, served together."""

import contextlib
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.engines.models import SessionSettings
from kinlens.embedder.errors import BundleMismatchError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.service.app import create_app
from kinlens.service.runtime import build_runtime
from kinlens.service.settings import Settings
from tests.embedder.bundles import write_full_bundle
from tests.support.servers import DEFAULTS, run
from tests.support.shops import Shop, make_gallery
from tests.tiny import encoded, photo


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    return write_full_bundle(tiny_bundle, tmp_path)


def made(folder: Path, bundle: Bundle, precision: str) -> str:
    """An empty gallery, as `NAME=PATH`."""
    facts = {"bundle_id": bundle.bundle_id, "dim": bundle.manifest.dim, "precision": precision}
    Gallery.create(folder / precision, name=precision, **facts).close()
    return f"{precision}={folder / precision}"


def settings(bundle: Bundle, *galleries: str, **more: object) -> Settings:
    return Settings(**DEFAULTS | {"bundle": bundle.path, "galleries": galleries} | more)


def test_auto_considers_the_precisions_of_all_galleries(bundle, tmp_path, monkeypatch) -> None:
    asked: list[SessionSettings] = []
    real = OnnxEmbedder.open

    def opened(path: Path, session: SessionSettings, *rest: object) -> OnnxEmbedder:
        asked.append(session)
        return real(path, SessionSettings(), *rest)

    monkeypatch.setattr(OnnxEmbedder, "open", opened)
    galleries = [made(tmp_path, bundle, one) for one in ("fp32", "int8")]
    build_runtime(settings(bundle, *galleries, precision="auto"))
    assert [one.precision for one in asked] == ["auto"]
    assert asked[0].galleries == {"fp32", "int8"}


def test_a_precision_that_was_never_compared_is_refused(bundle, tmp_path) -> None:
    other = made(tmp_path, bundle, "bf16")
    build_runtime(settings(bundle, made(tmp_path, bundle, "int8"), precision="int8"))
    with pytest.raises(BundleMismatchError, match=r"'bf16' was built in bf16, .* in int8.*fp32"):
        build_runtime(settings(bundle, other, precision="int8"))
    build_runtime(settings(bundle, other, precision="fp32"))


def test_a_gallery_records_each_precision_added_to_it(bundle, tmp_path) -> None:
    state = tmp_path / "state"
    facts = {"bundle_id": bundle.bundle_id, "dim": bundle.manifest.dim}
    make_gallery(state / "galleries" / "shop", "", count=0, **facts)
    given = settings(bundle, state=state, precision="int8", anonymous_scopes=("admin",))
    with contextlib.closing(run(create_app(given))) as running:
        shop = Shop(running, state)
        own = shop.create("own")
        found = []
        for gallery in (shop, own):
            found.append(running.client.get(gallery.url).json()["precision"])
            gallery.put({"a": encoded(photo(1))})
            found.append(running.client.get(gallery.url).json()["precision"])
    assert found == ["fp32", "fp32+int8", "int8", "int8"]
