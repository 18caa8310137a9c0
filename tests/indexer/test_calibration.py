"""Probabilities that the gallery which answers can vouch for."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit
from kinlens.indexer.entries import Entry
from kinlens.indexer.gallery import Gallery
from kinlens.quality.calibration import Calibrated, Fit, Shares, choose
from kinlens.quality.calibrator import Calibrator
from kinlens.quality.fitting import Labelled
from tests.embedder.bundles import CALIBRATION as BUNDLE

DIM = 24


def photos(products: int, views: int, noise: float = 0.18, seed: int = 0) -> Embeddings:
    """Unit vectors (products, views, D) around the centre of each product."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((products, 1, DIM))
    vectors = centres / np.linalg.norm(centres, axis=2, keepdims=True)
    vectors = vectors + noise * rng.standard_normal((products, views, DIM))
    return (vectors / np.linalg.norm(vectors, axis=2, keepdims=True)).astype(np.float32)


def right(product: int) -> Callable[[Hit], bool]:
    return lambda hit: hit.attributes["product"] == f"p{product}"


def entries(vectors: Embeddings, attribute: str = "product") -> list[Entry]:
    return [
        Entry(
            f"{product}/{view}",
            vectors[product, view],
            f"{product * 1000 + view:064x}",
            {attribute: f"p{product}"},
        )
        for product, view in np.ndindex(vectors.shape[:2])
    ]


@pytest.fixture
def make(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Gallery]:
    def made(vectors: Embeddings, attribute: str = "product") -> Gallery:
        gallery = Gallery.create(tmp_path / "g", name="g", bundle_id="b", dim=DIM)
        request.addfinalizer(gallery.close)
        gallery.add(entries(vectors, attribute))
        return gallery

    return made


def usable(gallery: Gallery) -> Calibrated:
    found = choose(Calibrator(gallery).stored(), None, None)
    assert isinstance(found, Calibrated), found
    return found


def asked(
    gallery: Gallery, queries: Embeddings, products: list[str | None], prior: float
) -> tuple[np.ndarray, np.ndarray]:
    """What the best hits say, and whether they are right."""
    calibrated, reported, true = usable(gallery), [], []
    for query, product in zip(queries, products, strict=True):
        [hits] = gallery.search(query[None], 20)
        reported.append(Shares(calibrated, prior, hits, hits).of(hits[0]))
        true.append(hits[0].attributes["product"] == product)
    return np.array(reported), np.array(true)


@pytest.mark.parametrize(("views", "prior"), [(3, 0.5), (8, 0.0)])
def test_the_probability_of_the_best_hit_is_right_for_new_photos(
    make, views: int, prior: float
) -> None:
    """The gallery judges itself by its own items; photos that it never saw ask."""
    products = 80
    gallery = make(photos(products, views))
    gallery.compact()
    Calibrator(gallery).fit_if_outdated()
    fresh = photos(products + 80, 4, seed=1)
    present = [fresh[n, v] for n in range(products) for v in range(4)]
    names: list[str | None] = [f"p{n}" for n in range(products) for _ in range(4)]
    if prior:
        present += [fresh[n, v] for n in range(products, products + 80) for v in range(4)]
        names += [None] * 320
    reported, true = asked(gallery, np.array(present), names, prior)
    assert reported.mean() == pytest.approx(true.mean(), abs=0.07)
    sure = reported > 0.7
    assert sure.sum() > 20
    assert true[sure].mean() > 0.7


def test_a_gallery_is_calibrated_again_after_much_change_and_by_no_compaction(make) -> None:
    vectors = photos(60, 4)
    gallery = make(vectors[:40])
    calibrator = Calibrator(gallery)
    gallery.compact()
    assert calibrator.stored() is None
    calibrator.fit_if_outdated()
    found = calibrator.stored()
    assert (found.product, found.products, found.labelled, found.items) == ("product", 40, 160, 160)
    assert isinstance(found.gallery, Fit)
    assert max(found.gallery.errors) < 0.15
    [file] = gallery.path.rglob("calibration.json")
    file.write_text("{")
    again = Calibrator(gallery)
    assert again.stored() is None
    file.unlink()
    again.fit_if_outdated()
    assert again.stored() == calibrator.stored() == found
    gallery.add(entries(vectors)[160:190])
    calibrator.fit_if_outdated()
    assert calibrator.stored() == found
    gallery.add(entries(vectors)[190:])  # a fifth more
    calibrator.fit_if_outdated()
    assert (calibrator.stored().products, calibrator.stored().items) == (60, 240)


def test_products_are_named_by_the_best_attribute_or_the_one_that_was_chosen(make) -> None:
    gallery = make(photos(40, 4), attribute="shelf")
    Calibrator(gallery).fit_if_outdated()
    reported = choose(Calibrator(gallery).stored(), BUNDLE, None)
    assert "No attribute names the product of an item" in str(reported)
    for name in ("class", "product"):
        gallery.update({f"{p}/{v}": {name: f"p{p}"} for p in range(40) for v in range(4)})
        Calibrator(gallery).fit()
        assert usable(gallery).product == name
    Calibrator(gallery).fit("shelf")
    Calibrator(gallery).fit()  # it is remembered
    assert usable(gallery).product == "shelf"
    with pytest.raises(InvalidParameterError, match="no attribute 'brand'"):
        Calibrator(gallery).fit("brand")


@pytest.mark.parametrize(
    ("products", "views", "noise", "reason"),
    [
        (15, 6, 0.18, "The gallery has 15 products; at least 16 are needed"),
        (60, 2, 0.18, "The products have 2.0 images on average; at least 16 products need 3"),
        (40, 16, 0.03, "and 0 wrong hits among the ten best"),  # all searches are right
    ],
)
def test_a_gallery_that_cannot_be_calibrated_says_why(
    make, products: int, views: int, noise: float, reason: str
) -> None:
    gallery = make(photos(products, views, noise))
    Calibrator(gallery).fit()
    reported = choose(Calibrator(gallery).stored(), None, "The model was exported without images.")
    assert reason in str(reported)
    assert "The model was exported without images." in str(reported)


def test_copies_of_the_query_photo_are_not_evidence(make) -> None:
    """A shop that lists each photo twice must not look like one that finds everything."""
    vectors = photos(60, 4, noise=0.3)
    single = make(vectors)
    Calibrator(single).fit()
    alone = usable(single)
    single.add(
        Entry(f"again/{one.key}", one.vector, f"f{one.sha256[1:]}", one.attributes)
        for one in entries(vectors)
    )
    Calibrator(single).fit()
    twice = usable(single)
    fresh = photos(60, 2, noise=0.3, seed=1)[:, 0]
    reported = []
    for calibrated in (alone, twice):
        hits = [single.search(query[None], 20)[0] for query in fresh]
        reported.append(np.mean([Shares(calibrated, 0.1, h, h).of(h[0]) for h in hits]))
    assert reported[1] < reported[0] + 0.15


def test_golden_photos_come_first_and_products_that_are_absent_count(make) -> None:
    gallery = make(photos(60, 1))
    Calibrator(gallery).fit()
    assert isinstance(choose(Calibrator(gallery).stored(), None, None), str)
    fresh = photos(90, 3, seed=1)
    queries = [
        Labelled(fresh[n, v], f"p{n}", right(n) if n < 60 else None)
        for n in range(90)
        for v in range(3)
    ]
    Calibrator(gallery).fit_golden(lambda _: queries)
    found = usable(gallery)
    assert found.source == "golden"
    assert found.fit.searches == 2 * 180 + 90
    asking = photos(90, 3, seed=2)
    names: list[str | None] = [f"p{n}" if n < 60 else None for n in range(90)]
    reported, true = asked(gallery, asking[:, 0], names, 1 / 3)
    assert reported.mean() == pytest.approx(true.mean(), abs=0.1)
    Calibrator(gallery).fit()  # keeps the figures of the golden set
    assert usable(gallery).source == "golden"
    for count, reason in ((45, "has 15 products; at least 16"), (48, "at least 50 and 100 are")):
        Calibrator(gallery).fit_golden(lambda _, some=queries[:count]: some)
        assert reason in str(Calibrator(gallery).stored().golden)


def test_a_golden_curve_is_kept_until_the_gallery_has_other_items(make) -> None:
    """Also when another process calibrates meanwhile."""
    gallery, fresh = make(photos(60, 4)), photos(60, 4, seed=1)

    def queries() -> Iterator[Labelled]:
        for n in range(60):
            for v in range(4):
                yield Labelled(fresh[n, v], f"p{n}", right(n))
        with contextlib.closing(Gallery.open(gallery.path)) as other:
            other.add(entries(photos(62, 4)))
            Calibrator(other).fit()

    found = Calibrator(gallery).fit_golden(lambda _: queries())
    assert isinstance(found.golden, Fit)
    assert isinstance(found.gallery, Fit)
    assert (found.items, usable(gallery).source) == (248, "golden")
    gallery.add(entries(photos(100, 4)))  # the sixty and forty others
    Calibrator(gallery).fit_if_outdated()
    found = usable(gallery)
    assert found.source == "gallery"
    assert "run when the gallery had other items or products. Run it again" in str(found.reason)


def test_products_with_different_numbers_of_images_are_asked_for_equally_often(make) -> None:
    """A product of one image cannot search, and customers ask for it as often as for the others."""
    vectors = photos(160, 12)
    gallery = make(vectors[:, :1])
    gallery.add(entries(vectors[:40]))
    Calibrator(gallery).fit()
    fresh = photos(160, 4, seed=1)
    names: list[str | None] = [f"p{n}" for n in range(160) for _ in range(4)]
    reported, true = asked(gallery, fresh.reshape(-1, DIM), names, 0.0)
    assert reported.mean() == pytest.approx(true.mean(), abs=0.07)
    rare = np.arange(len(reported)) >= 40 * 4
    assert reported[rare].mean() == pytest.approx(true[rare].mean(), abs=0.12)
    bundle = Calibrator(gallery).stored()
    alone = bundle.model_copy(update={"gallery": "none"})
    assert "far more or fewer than the average of 3.8" in str(choose(alone, BUNDLE, None))


def test_a_gallery_that_names_few_of_its_products_has_no_probabilities(make) -> None:
    gallery = make(photos(60, 8))
    Calibrator(gallery).fit()
    assert usable(gallery).source == "gallery"
    gallery.update({f"{p}/{v}": {"product": None} for p in range(60) for v in range(0, 8, 4)})
    Calibrator(gallery).fit()
    reported = choose(Calibrator(gallery).stored(), BUNDLE, None)
    assert "360 of 480 items have the attribute `product`" in str(reported)
    assert "at least 95% are needed" in str(reported)
