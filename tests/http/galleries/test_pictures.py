"""The images of items: found by id or refused; small ones made in the decoding processes."""

import http.client
import io
import json
import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
import structlog
from PIL import Image

from kinlens.embedder.fake import FakeEmbedder
from kinlens.embedder.preprocess import MAX_SIDE_PX
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.quality.calibrator import Calibrator
from tests.support.servers import Running, workers_of
from tests.support.shops import PROBLEM, assert_problem, make_gallery, start_shop
from tests.support.waiting import until
from tests.tiny import encoded, photo

SECRET = b"secret-outside-of-the-catalogue"
WAIT_S = 20.0
SIDES_PX = (160, 320, 480, 640)


@pytest.fixture(scope="module")
def catalogue(tmp_path_factory: pytest.TempPathFactory, photos: list[bytes]) -> Path:
    """A folder of four images, next to a file that must never be shown; and their gallery."""
    catalogue = tmp_path_factory.mktemp("real") / "catalogue"
    catalogue.mkdir()
    for number, data in enumerate(photos[:4]):
        (catalogue / f"{number}.png").write_bytes(data)
    (catalogue.parent / "secret.txt").write_bytes(SECRET)
    build_gallery(folder_source(catalogue), FakeEmbedder(), catalogue.parent / "shop")
    return catalogue


@pytest.fixture(scope="module")
def service(catalogue: Path) -> Iterator[Running]:
    """A service with that gallery; who changes a file puts it back."""
    given = (f"shop={catalogue.parent / 'shop'}",)
    with closing(start_shop(catalogue.parent / "state", create=False, galleries=given)) as shop:
        yield shop.running


def fetch(service: Any, target: str) -> tuple[int, str, bytes]:
    """Status, media type and body for a target that is sent byte by byte as it is given."""
    connection = http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=WAIT_S)
    connection.request("GET", target)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, response.headers.get_content_type(), body


def first_link(service: Any, data: bytes) -> str:
    link: str = service.search(data, k=1).json()["hits"][0]["image"]
    return link


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    assert image.format == "JPEG"
    return image


ITEMS = """
    ../../secret.txt                ..%2f..%2fsecret.txt        ..%2F..%2Fsecret.txt
    %2e%2e%2f%2e%2e%2fsecret.txt    %2e%2e/%2e%2e/secret.txt    ..%252f..%252fsecret.txt
    ..%5c..%5csecret.txt            ..%c0%af..%c0%afsecret.txt  0/../../../secret.txt
    0%2f..%2f..%2fsecret.txt        0%00..%2fsecret.txt         {secret}        {encoded}
    0%2f{encoded}   file:%2f%2f{encoded}    %2fetc%2fpasswd     //etc/passwd    0.png
    ..%2fcatalogue%2f0.png          -1      99999999999999999999                0       5
"""
GALLERIES = ".. %2e%2e ..%2fshop {encoded} %2fetc shop%2f.. shop%00 . SHOP"
FILES_OF_THE_PAGE = """
    /ui/../app.py       /ui/..%2fapp.py         /ui/%2e%2e/settings.py
    /ui//etc/passwd     /ui/%2fetc%2fpasswd     /..%2f..%2fetc%2fpasswd
"""


def test_nothing_in_an_address_reaches_another_file(service, catalogue, photos) -> None:
    secret = str(catalogue.parent / "secret.txt")
    names = {"secret": secret, "encoded": quote(secret, safe="")}
    targets = [f"/galleries/shop/items/{item}" for item in ITEMS.split()]
    targets += [f"{target}/image" for target in targets]
    targets += [f"/galleries/{name}/items/0/image" for name in GALLERIES.split()]
    for target in (*targets, *FILES_OF_THE_PAGE.split()):
        status, media_type, body = fetch(service, target.format(**names))
        assert status in {400, 404, 422}, target
        assert media_type == PROBLEM
        assert SECRET not in body
        assert json.loads(body)["request_id"]
    assert service.client.get("/galleries/shop/items/1/image").content == photos[0]


@pytest.mark.parametrize("change", ["removed", "changed", "a link"])
def test_a_changed_or_missing_file_is_404(service, catalogue, photos, change: str) -> None:
    file, link = catalogue / "1.png", first_link(service, photos[1])
    before = service.metric("kinlens_missing_images_total", gallery="shop")
    file.unlink()
    if change == "changed":
        file.write_bytes(photos[0])
    elif change == "a link":
        file.symlink_to(catalogue.parent / "secret.txt")
    response = service.client.get(link)
    assert "Restore the file" in assert_problem(response, 404, "unknown-item")["detail"]
    assert service.metric("kinlens_missing_images_total", gallery="shop") > before
    assert SECRET not in response.content
    file.unlink(missing_ok=True)
    file.write_bytes(photos[1])
    assert service.client.get(link).content == photos[1]


def test_a_missing_image_of_each_gallery_is_logged(tmp_path, closes, photos) -> None:
    given = []
    for name in ("shoes", "bags"):
        (tmp_path / name).mkdir()
        for number in (0, 1):
            (tmp_path / name / f"{number}.png").write_bytes(photos[number])
        build_gallery(folder_source(tmp_path / name), FakeEmbedder(), tmp_path / f"{name}-gallery")
        shutil.rmtree(tmp_path / name)
        given.append(f"{name}={tmp_path / f'{name}-gallery'}")
    shop = closes(start_shop(tmp_path / "state", create=False, galleries=tuple(given)))
    with structlog.testing.capture_logs() as events:
        for target in ("shoes/items/0", "shoes/items/1", "bags/items/0", "bags/items/1"):
            assert shop.client.get(f"/galleries/{target}/image").status_code == 404
    missing = [each for each in events if each["event"] == "image file is missing"]
    assert [each["gallery"] for each in missing] == ["shoes", "bags"]


def test_errors_do_not_name_the_gallery_as_its_folder_does(tmp_path, closes, photos) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "0.png").write_bytes(photos[0])
    build_gallery(folder_source(tmp_path / "p"), FakeEmbedder(), tmp_path / "inner-tenant-7")
    given = (f"shop={tmp_path / 'inner-tenant-7'}",)
    shop = closes(start_shop(tmp_path / "state", create=False, galleries=given))
    label = {"label": '{"keys": ["none"]}'}
    answers = [
        *(shop.client.get(f"/galleries/shop/items/99{end}") for end in ("", "/image", "/similar")),
        shop.client.get("/galleries/shop/items/by-key/none"),
        shop.client.patch("/galleries/shop/items", json={"changes": {"none": {"a": 1}}}),
        shop.client.post("/galleries/shop/golden", files={"image": photos[0]}, data=label),
    ]
    for answer in answers:
        assert answer.status_code in (404, 422)
        assert "inner-tenant-7" not in answer.text


def test_a_link_of_an_old_generation_is_404(shop, data) -> None:
    """Ids start again in each generation."""
    shop.put({"old": data[0]})
    link = shop.link("old")
    make_gallery(shop.folder, "", count=0)
    shop.put({"new": data[1]})
    old, new = (one.rpartition("=")[2] for one in (link, shop.link("new")))
    for headers in ({}, {"if-none-match": f'"{new}-2"'}):
        problem = assert_problem(shop.client.get(link, headers=headers), 404, "unknown-item")
        assert all(text in problem["detail"] for text in (old, new, "Search again"))
    assert shop.client.get(link.partition("?")[0]).content == data[1]


def test_a_known_image_is_304_without_reading_the_file(service, catalogue, photos) -> None:
    link = first_link(service, photos[3])
    headers = service.client.get(link).headers
    assert headers["cache-control"] == "private, no-cache"
    etag = headers["etag"]
    (catalogue / "3.png").unlink()
    again = service.client.get(link, headers={"if-none-match": f'"other", {etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == etag
    assert service.client.get(link, headers={"if-none-match": '"other"'}).status_code == 404
    (catalogue / "3.png").write_bytes(photos[3])


def test_a_damaged_catalogue_is_503_and_not_ready(tmp_path, data, closes) -> None:
    make_gallery(tmp_path / "galleries" / "shop", "k")
    with closing(Gallery.open(tmp_path / "galleries" / "shop")) as gallery:
        Calibrator(gallery).fit()  # else the service does, and its pages are in memory
    shop = closes(start_shop(tmp_path))
    (catalog,) = shop.folder.glob("versions/*/catalog.sqlite")
    with closing(Gallery.open(tmp_path / "galleries" / "shop")) as gallery:
        gallery.update({"k-0": {"price": 1}})  # so that pages in memory count no more
    for file in (catalog, catalog.with_name("catalog.sqlite-wal")):
        file.write_bytes(bytes(file.stat().st_size))
    problem = assert_problem(shop.search(data[0]), 503, "gallery-unavailable")
    assert "catalog" not in problem["detail"]
    ready = shop.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["checks"]["gallery shop"] == "failed with GalleryCorruptError"
    assert shop.client.get("/live").status_code == 200


def test_a_damaged_vector_is_logged_and_the_gallery_served(tmp_path, data, closes, caplog) -> None:
    make_gallery(tmp_path / "galleries" / "shop", "k")
    (catalog,) = (tmp_path / "galleries" / "shop").glob("versions/*/catalog.sqlite")
    with closing(sqlite3.connect(catalog)) as connection:
        connection.execute("UPDATE vectors SET crc = crc + 1 WHERE id = 2")
        connection.commit()
    shop = closes(start_shop(tmp_path))
    until(lambda: "the vector of item 2 does not fit its checksum" in caplog.text)
    assert shop.search(data[0]).status_code == 200


def test_each_size_of_an_image_has_its_own_etag(shop) -> None:
    shop.put({"k": encoded(photo(3, (900, 600)))})
    link = shop.link("k")
    whole = shop.client.get(link)
    etags = {"whole": whole.headers["etag"]}
    for side in SIDES_PX:
        answer = shop.client.get(f"{link}&size={side}")
        assert opened(answer.content).size == (side, round(side * 2 / 3))
        assert len(answer.content) < len(whole.content)
        assert answer.headers["cache-control"] == "private, max-age=604800, immutable"
        etags[f"&size={side}"] = answer.headers["etag"]
    assert len({*etags.values()}) == 5
    for size in ("0", "161", "-1", "x", "99999999999"):
        response = shop.client.get(f"{link}&size={size}")
        assert_problem(response, 422, "invalid-parameter")
    for gone in (False, True):  # also an image that the browser has goes with its item
        if gone:
            assert shop.remove("k") == 1
        for side in SIDES_PX:
            headers = {"if-none-match": etags[f"&size={side}"]}
            answer = shop.client.get(f"{link}&size={side}", headers=headers)
            assert answer.status_code == (404 if gone else 304)


def test_an_upload_is_shown_in_a_format_of_browsers(shop) -> None:
    kinds = ("PNG", "JPEG", "AVIF", "BMP", "TIFF", "HEIF")
    for kind in kinds:
        media_type = kind.lower() if kind in kinds[:3] else "jpeg"
        data = encoded(photo(3), kind)
        shop.put({kind: data})
        response = shop.client.get(shop.link(kind))
        assert response.headers["content-type"] == f"image/{media_type}"
        assert (response.content == data) is (kind.lower() == media_type)
        assert media_type == "avif" or response.content[:2] in (b"\x89P", b"\xff\xd8")


def test_a_lost_upload_is_404_until_it_is_put_again(shop, data) -> None:
    shop.put({"k": data[3]})
    link = shop.link("k")
    [name] = shop.photos()
    file = shop.folder / "pictures" / name[:2] / name
    file.write_bytes(b"damaged")
    assert_problem(shop.client.get(link), 503, "gallery-unavailable")
    file.unlink()
    assert_problem(shop.client.get(link), 404, "unknown-item")
    assert shop.put({"k": data[3]})["unchanged"] == 1
    assert shop.client.get(link).content == data[3]


def test_an_image_is_converted_once_outside_the_service(tmp_path, monkeypatch, closes) -> None:
    """One at a time with two search threads, in a worker."""
    shop = closes(start_shop(tmp_path))
    workers = workers_of(shop.running)
    render, now, made = workers.render, 0, 0

    def counted(*arguments: Any) -> bytes:
        nonlocal now, made
        now, made = now + 1, made + 1
        assert now == 1
        jpeg = render(*arguments)
        now -= 1
        return jpeg

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("decoded in the service")

    monkeypatch.setattr(workers, "render", counted)
    for module in ("kinlens.embedder.preprocess", "kinlens.indexer.images"):
        monkeypatch.setattr(f"{module}.decode", forbidden)
    shop.put({f"{n}": encoded(photo(n, (3000, 400)), "TIFF") for n in range(3)})
    links = [shop.link(f"{n}") for n in range(3)]
    with ThreadPoolExecutor(9) as clients:
        for answer in clients.map(shop.client.get, links * 3):
            assert opened(answer.content).size == (MAX_SIDE_PX, 273)
            assert answer.headers["content-type"] == "image/jpeg"
    assert made == 3
