"""Probabilities that the gallery which answers can vouch for."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kinlens.embedder.calibration import Curve
from kinlens.embedder.errors import InvalidParameterError
from kinlens.embedder.types import Embeddings, Hit
from kinlens.indexer.calibration import (
    CALIBRATION,
    Calibrated,
    Fit,
    Labelled,
    Shares,
    choose,
)
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.types import Entry, Group, SearchOptions
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
def make(tmp_path: Path) -> Iterator[Callable[..., Gallery]]:
    with contextlib.ExitStack() as opened:

        def made(vectors: Embeddings, attribute: str = "product") -> Gallery:
            gallery = Gallery.create(tmp_path / "g", name="g", bundle_id="b", dim=DIM)
            opened.callback(gallery.close)
            gallery.add(entries(vectors, attribute))
            return gallery

        yield made


def usable(gallery: Gallery) -> Calibrated:
    found = choose(gallery.calibration(), None, None)
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


@pytest.mark.parametrize("views", [3, 8])
@pytest.mark.parametrize("prior", [0.0, 0.5])
def test_the_probability_of_the_best_hit_is_right_for_new_photos(
    make: Callable[..., Gallery], views: int, prior: float
) -> None:
    """The gallery judges itself by its own items; photos that it never saw ask."""
    products = 80
    gallery = make(photos(products, views))
    gallery.compact()
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


def test_fewer_views_per_product_lower_the_probabilities(make: Callable[..., Gallery]) -> None:
    """Half the views of each product must not look like half the products."""
    gallery = make(photos(60, 8))
    fresh = photos(60, 2, seed=1)[:, 0]
    names: list[str | None] = [f"p{n}" for n in range(60)]
    gallery.calibrate()
    before, _ = asked(gallery, fresh, names, 0.1)
    gallery.remove(f"{p}/{v}" for p in range(60) for v in range(4, 8))
    gallery.calibrate()
    after, _ = asked(gallery, fresh, names, 0.1)
    assert after.mean() < before.mean()


def test_a_compaction_calibrates_and_the_file_belongs_to_the_generation(
    make: Callable[..., Gallery], tmp_path: Path
) -> None:
    gallery = make(photos(40, 4))
    assert gallery.calibration() is None
    gallery.compact()
    found = gallery.calibration()
    assert (found.product, found.products, found.labelled, found.items) == ("product", 40, 160, 160)
    assert isinstance(found.gallery, Fit)
    assert max(found.gallery.errors) < 0.15
    [file] = (tmp_path / "g").rglob(CALIBRATION)
    with contextlib.closing(Gallery.open(tmp_path / "g")) as again:
        assert again.calibration() == found
        file.write_text("{")
        assert again.calibration() == found  # as far as this process knows
        with contextlib.closing(Gallery.open(tmp_path / "g")) as later:
            assert later.calibration() is None
        file.unlink()
        again.calibrate_if_outdated()
        assert again.calibration() == found


def test_a_fifth_more_items_outdates_a_calibration(make: Callable[..., Gallery]) -> None:
    gallery = make(photos(40, 4))
    gallery.calibrate()
    before = gallery.calibration()
    more = photos(60, 4)
    gallery.add(entries(more)[160:190])
    gallery.calibrate_if_outdated()
    assert gallery.calibration() == before
    gallery.add(entries(more)[190:])
    gallery.calibrate_if_outdated()
    after = gallery.calibration()
    assert (after.products, after.items) == (60, 240)


def test_items_that_get_their_product_later_are_calibrated(make: Callable[..., Gallery]) -> None:
    gallery = make(photos(40, 4), attribute="shelf")
    gallery.calibrate_if_outdated()
    assert isinstance(choose(gallery.calibration(), None, None), str)
    gallery.update({f"{p}/{v}": {"product": f"p{p}"} for p in range(40) for v in range(4)})
    gallery.calibrate_if_outdated()
    assert usable(gallery).product == "product"


@pytest.mark.parametrize(
    ("products", "views", "reason"),
    [
        (15, 6, "The gallery has 15 products; at least 16 are needed"),
        (60, 1, "The products have 1.0 images on average; at least 16 products need 3"),
        (60, 2, "The products have 2.0 images on average"),
    ],
)
def test_a_gallery_that_cannot_be_calibrated_says_why_and_the_bundle_is_used(
    make: Callable[..., Gallery], products: int, views: int, reason: str
) -> None:
    gallery = make(photos(products, views))
    gallery.calibrate()
    because = "The model was exported without held-out images."
    reported = choose(gallery.calibration(), None, because)
    assert isinstance(reported, str)
    assert reason in reported
    assert "The model was exported without held-out images." in reported
    unlike = choose(gallery.calibration(), BUNDLE, None)
    assert isinstance(unlike, str)
    assert f"The gallery has {views:.1f} images" in unlike or "products" in unlike


def test_the_curve_of_a_bundle_is_used_for_a_similar_gallery(
    make: Callable[..., Gallery],
) -> None:
    gallery = make(photos(6, 2))
    gallery.calibrate()
    found = choose(gallery.calibration(), BUNDLE, None)
    assert isinstance(found, Calibrated)
    assert (found.source, found.product, found.products, found.views) == ("bundle", "product", 6, 2)
    assert "6 products; at least 16" in str(found.reason)


def test_without_an_attribute_that_names_products_there_is_no_calibration(
    make: Callable[..., Gallery],
) -> None:
    gallery = make(photos(40, 4), attribute="shelf")
    gallery.calibrate()
    reported = choose(gallery.calibration(), BUNDLE, None)
    assert "No attribute names the product of an item" in str(reported)
    gallery.calibrate("shelf")
    assert usable(gallery).product == "shelf"
    gallery.calibrate()  # it is remembered
    assert usable(gallery).product == "shelf"
    with pytest.raises(InvalidParameterError, match="no attribute 'brand'"):
        gallery.calibrate("brand")


def test_copies_of_the_query_photo_are_not_evidence(make: Callable[..., Gallery]) -> None:
    """A shop that lists each photo twice must not look like one that finds everything."""
    vectors = photos(60, 4, noise=0.3)
    single = make(vectors)
    single.calibrate()
    alone = usable(single)
    single.add(
        Entry(f"again/{one.key}", one.vector, f"f{one.sha256[1:]}", one.attributes)
        for one in entries(vectors)
    )
    single.calibrate()
    twice = usable(single)
    fresh = photos(60, 2, noise=0.3, seed=1)[:, 0]
    reported = []
    for calibrated in (alone, twice):
        hits = [single.search(query[None], 20)[0] for query in fresh]
        reported.append(np.mean([Shares(calibrated, 0.1, h, h).of(h[0]) for h in hits]))
    assert reported[1] < reported[0] + 0.15


def test_golden_photos_come_first_and_products_that_are_absent_count(
    make: Callable[..., Gallery],
) -> None:
    gallery = make(photos(60, 1))
    gallery.calibrate()
    assert isinstance(choose(gallery.calibration(), None, None), str)
    fresh = photos(90, 3, seed=1)

    queries = [
        (fresh[n, v], f"p{n}", right(n) if n < 60 else None) for n in range(90) for v in range(3)
    ]
    gallery.calibrate_golden(lambda _: queries)
    found = usable(gallery)
    assert found.source == "golden"
    assert found.fit.searches == 2 * 180 + 90
    asking = photos(90, 3, seed=2)
    names: list[str | None] = [f"p{n}" if n < 60 else None for n in range(90)]
    reported, true = asked(gallery, asking[:, 0], names, 1 / 3)
    assert reported.mean() == pytest.approx(true.mean(), abs=0.1)
    gallery.compact()  # a new segment keeps the figures of the golden set
    assert usable(gallery).source == "golden"
    for some, reason in (
        (queries[:45], "has 15 products; at least 16"),
        (queries[:48], "at least 50 and 100 are needed"),
    ):
        gallery.calibrate_golden(lambda _, some=some: some)
        few = gallery.calibration()
        assert reason in str(few.golden)


def test_a_golden_curve_is_of_the_gallery_that_it_was_run_on(make: Callable[..., Gallery]) -> None:
    gallery = make(photos(60, 4))
    fresh = photos(60, 4, seed=1)

    queries = [(fresh[n, v], f"p{n}", right(n)) for n in range(60) for v in range(4)]
    gallery.calibrate_golden(lambda _: queries)
    assert usable(gallery).source == "golden"
    gallery.add(entries(photos(100, 4)))  # the sixty and forty others
    gallery.calibrate_if_outdated()
    found = usable(gallery)
    assert found.source == "gallery"
    assert "run when the gallery had other items. Run it again" in str(found.reason)
    gallery.calibrate_golden(lambda _: queries)
    assert usable(gallery).source == "golden"
    gallery.remove(one.key for one in entries(photos(30, 4)))
    gallery.add(entries(photos(130, 4))[400:])  # as many items as before, a third of them new
    gallery.calibrate_if_outdated()
    assert usable(gallery).source == "gallery"


def test_products_with_different_numbers_of_images_are_asked_for_equally_often(
    make: Callable[..., Gallery],
) -> None:
    """A product of one image cannot search, and customers ask for it as often as for the others."""
    vectors = photos(160, 12)
    gallery = make(vectors[:, :1])
    gallery.add(entries(vectors[:40]))
    gallery.compact()
    fresh = photos(160, 4, seed=1)
    names: list[str | None] = [f"p{n}" for n in range(160) for _ in range(4)]
    reported, true = asked(gallery, fresh.reshape(-1, DIM), names, 0.0)
    assert reported.mean() == pytest.approx(true.mean(), abs=0.07)
    rare = np.arange(len(reported)) >= 40 * 4
    assert reported[rare].mean() == pytest.approx(true[rare].mean(), abs=0.12)
    bundle = gallery.calibration()
    alone = bundle.model_copy(update={"gallery": "none"})
    assert "far more or fewer than the average of 3.8" in str(choose(alone, BUNDLE, None))


def test_a_gallery_that_names_few_of_its_products_has_no_probabilities(
    make: Callable[..., Gallery],
) -> None:
    gallery = make(photos(60, 8))
    gallery.calibrate()
    assert usable(gallery).source == "gallery"
    gallery.update({f"{p}/{v}": {"product": None} for p in range(60) for v in range(0, 8, 4)})
    gallery.calibrate()
    reported = choose(gallery.calibration(), BUNDLE, None)
    assert "360 of 480 items have the attribute `product`" in str(reported)
    assert "at least 95% are needed" in str(reported)
    gallery.update({f"{p}/{v}": {"product": f"p{p}"} for p in range(60) for v in range(0, 8, 4)})
    gallery.calibrate_if_outdated()
    assert usable(gallery).source == "gallery"


def test_items_of_all_ages_search_for_each_other(make: Callable[..., Gallery]) -> None:
    """A catalogue is in the order of its folders or seasons."""
    gallery = make(photos(1200, 3)[:, :3])
    found: list[Embeddings] = []
    search = gallery.search

    def recorded(queries: Embeddings, k: int, *options: SearchOptions) -> list[list[Hit]]:
        found.append(queries)
        return search(queries, k, *options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gallery, "search", recorded)
        gallery.calibrate()
    items, vectors = gallery.items_at(gallery.ids().tolist())
    numbers = {vector.tobytes(): item.id for item, vector in zip(items, vectors, strict=True)}
    asking = [numbers[query.tobytes()] for query in np.concatenate(found)]
    assert len(asking) > 900
    assert np.mean(asking) == pytest.approx(1800, rel=0.05)


def test_searches_that_are_always_right_fit_nothing(make: Callable[..., Gallery]) -> None:
    gallery = make(photos(40, 16, noise=0.03))
    gallery.calibrate()
    reported = choose(gallery.calibration(), None, None)
    assert "and 0 wrong hits among the ten best" in str(reported)
    assert "Add products that look alike" in str(reported)


def test_the_attribute_of_a_product_replaces_that_of_its_folder(
    make: Callable[..., Gallery],
) -> None:
    gallery = make(photos(40, 4), attribute="class")
    gallery.calibrate()
    assert usable(gallery).product == "class"
    gallery.update({f"{p}/{v}": {"product": f"p{p}"} for p in range(40) for v in range(4)})
    gallery.compact()
    assert usable(gallery).product == "product"
    gallery.calibrate("class")  # the owner knows better
    gallery.compact()
    assert usable(gallery).product == "class"


def test_calibrations_of_two_processes_at_once_are_both_kept(make: Callable[..., Gallery]) -> None:
    gallery, fresh = make(photos(60, 4)), photos(60, 4, seed=1)
    gallery.calibrate()
    other = Gallery.open(gallery.path)

    def queries() -> Iterator[Labelled]:
        for n in range(60):
            for v in range(4):
                yield fresh[n, v], f"p{n}", right(n)
        other.add(entries(photos(70, 4)))
        other.calibrate()

    with contextlib.closing(other):
        found = gallery.calibrate_golden(lambda _: queries())
    assert isinstance(found.golden, Fit)
    assert isinstance(found.gallery, Fit)
    assert found.items == 280


# The probabilities of one answer

CURVE = Curve(slope=10.0, hits=0.5, below=0.0, absent=5.0, absent_best=2.0, absent_last=1.0)
KNOWN = Calibrated("gallery", CURVE, "product", 3, 2.0)


def hit(number: int, score: float, **attributes: str | bool | int) -> Hit:
    return Hit(number, f"k{number}", score, attributes)


HITS = [
    hit(1, 0.9, product="a", colour="red"),
    hit(2, 0.8, product="b", colour="red"),
    hit(3, 0.7, product="a", colour="blue"),
    hit(4, 0.6),
]


def test_disjoint_groups_and_none_of_them_are_one_whole() -> None:
    shares = Shares(KNOWN, 0.2, HITS, HITS)
    for by in ("product", "colour"):
        values = sorted({str(one.attributes[by]) for one in HITS if by in one.attributes})
        groups = [
            Group(v, 0.0, [one for one in HITS if one.attributes.get(by) == v]) for v in values
        ]
        groups.append(Group(None, 0.6, [HITS[3]]))
        likely = [shares.of_group(group, by) for group in groups]
        assert sum(likely) + shares.of_none([], groups, by) == pytest.approx(1)
        assert all(likely)
    products = shares.of(HITS[0]) + shares.of(HITS[1]) + shares.of(HITS[3])
    assert products + shares.of_none(HITS, None) == pytest.approx(1)
    assert shares.of(HITS[0]) == shares.of(HITS[2])


def test_a_filter_does_not_make_a_product_likelier() -> None:
    whole = Shares(KNOWN, 0.2, HITS, HITS)
    filtered = Shares(KNOWN, 0.2, HITS, HITS[1:2])
    assert filtered.of(HITS[1]) == whole.of(HITS[1])
    assert filtered.of_none(HITS[1:2], None) > whole.of_none(HITS, None)


def test_more_hits_do_not_change_what_the_best_ones_say() -> None:
    many = [hit(n, 0.9 - n / 500, product=f"p{n}") for n in range(200)]
    pages = [Shares(KNOWN, 0.1, many[:20], many[:k]) for k in (5, 20, 100, 200)]
    for one in many[:5]:
        assert len({page.of(one) for page in pages}) == 1
    last = pages[-1]
    assert sum(map(last.of, many)) + last.of_none(many, None) == pytest.approx(1)
    deep = Shares(KNOWN, 0.1, many[:20], many[150:170])
    assert sum(map(deep.of, many[150:170])) <= 1 - sum(map(deep.of, many[:20]))


def test_true_and_one_are_two_products() -> None:
    hits = [hit(1, 0.9, product=True), hit(2, 0.9, product=1)]
    shares = Shares(KNOWN, 0.0, hits, hits)
    assert shares.of(hits[0]) == pytest.approx(0.5)


def test_an_empty_gallery_has_nothing_that_is_right() -> None:
    shares = Shares(KNOWN, 0.1, [], [])
    assert shares.of_none([], None) == 1
