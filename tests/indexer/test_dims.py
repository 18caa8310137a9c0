"""Galleries of the first numbers of each vector."""

from contextlib import closing

import numpy as np

from kinlens.embedder.fake import FakeEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.rebuild import CatchUp, rebuild
from tests.indexer.conftest import failure, printed
from tests.indexer.oracle import contents
from tests.tiny import encoded, photo


def cut(vectors: np.ndarray, n: int) -> np.ndarray:
    return vectors[:, :n] / np.linalg.norm(vectors[:, :n], axis=1, keepdims=True)


def vectors_of(path) -> np.ndarray:
    with closing(Gallery.open(path)) as gallery:
        return np.stack([entry.vector for entry in gallery.entries(sorted(contents(gallery)))])


def test_a_short_gallery_equals_cut_vectors_and_is_searched_and_changed_as_a_whole_one(
    run, shop, out, tmp_path
) -> None:
    whole = tmp_path / "whole"
    run("build", shop, "--bundle", "b", "--out", whole)
    result = run("build", shop, "--bundle", "b", "--out", out, "--dims", "8")
    assert "Dimension 8," in result.stdout
    np.testing.assert_allclose(vectors_of(out), cut(vectors_of(whole), 8), atol=1e-5)

    (shop / "hat" / "new.png").write_bytes(encoded(photo(99)))
    assert "1 added" in run("add", out, shop / "hat", "--bundle", "b").stdout
    (shop / "hat" / "newer.png").write_bytes(encoded(photo(98)))
    run("sync", out, shop, "--bundle", "b")
    run("add", whole, shop, "--bundle", "b")
    assert len(vectors_of(out)) == 8
    np.testing.assert_allclose(vectors_of(out), cut(vectors_of(whole), 8), atol=1e-5)

    [hits] = printed(
        run("search", out, "--image", shop / "f.gif", "--bundle", "b", "-k", "3", "--json")
    )["hits"]
    short = cut(vectors_of(whole), 8)
    scores = short @ short[sorted(contents_of(whole)).index("f.gif")]
    assert hits[0]["key"] == "f.gif"
    np.testing.assert_allclose([h["score"] for h in hits], np.sort(scores)[::-1][:3], atol=1e-6)
    assert run("verify", out, "--bundle", "b").exit_code == 0


def contents_of(path) -> list[str]:
    with closing(Gallery.open(path)) as gallery:
        return list(contents(gallery))


def test_more_numbers_than_the_bundle_makes_are_refused(run, shop, out, tmp_path) -> None:
    line = failure(run("build", shop, "--bundle", "b", "--out", out, "--dims", "33"))
    assert "dims = 33 is not one of 1 to 32, the numbers of a vector of this bundle" in line
    assert not out.exists()
    result = run("build", "--vectors", tmp_path, "--out", out, "--dims", "8")
    assert result.exit_code == 2
    Gallery.create(out, name="wide", bundle_id="b" * 64, dim=64).close()
    line = failure(run("add", out, shop, "--bundle", "b", "--image-root", shop))
    assert "has vectors of 64 numbers, but its bundle makes 32" in line


def test_a_rebuild_with_another_model_stays_short(run, shop, out, tmp_path) -> None:
    run("build", shop, "--bundle", "b", "--out", out, "--dims", "8")
    run("export", out, "--out", tmp_path / "dump.parquet")
    run("import", tmp_path / "dump.parquet", "--out", tmp_path / "imported")
    new = FakeEmbedder(bundle_id="c" * 64, dim=64)
    read = lambda item: (shop / item.path).read_bytes()
    for path, made in ((out, "made"), (tmp_path / "imported", "made-too")):
        with closing(CatchUp(path, new, read)) as follower:
            rebuild(follower, tmp_path / made)
    pixels = [new.preprocess((shop / key).read_bytes()) for key in sorted(contents_of(out))]
    expected = cut(new.embed(np.stack(pixels)), 8)
    for made in ("made", "made-too"):
        np.testing.assert_allclose(vectors_of(tmp_path / made), expected, atol=1e-6)
