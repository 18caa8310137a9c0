"""The pictures of items, from a real gallery on a real file system: found by number, or refused."""

import errno
import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from embedder.fake import FakeEmbedder
from indexer.gallery import Gallery
from indexer.ingest.build import build_gallery
from indexer.ingest.sources import folder_source
from service.app import create_app
from service.settings import Settings
from tests.support.servers import Running, run
from tests.support.shops import assert_problem, start_shop
from tests.tiny import encoded, picture

PROBLEM = "application/problem+json"
SECRET = b"secret-outside-of-the-catalogue"
WAIT_S = 20.0


def make_catalogue(folder: Path, pictures: list[bytes]) -> Path:
    """A folder of four pictures, beside a file that must never be shown; and their gallery."""
    catalogue = folder / "catalogue"
    catalogue.mkdir()
    for number, data in enumerate(pictures[:4]):
        (catalogue / f"{number}.png").write_bytes(data)
    (folder / "secret.txt").write_bytes(SECRET)
    build_gallery(folder_source(catalogue), FakeEmbedder(), folder / "shop")
    return catalogue


@pytest.fixture(scope="module")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("real")


@pytest.fixture(scope="module")
def real_service(real_folder: Path, pictures: list[bytes]) -> Iterator[Running]:
    """A service with a real gallery, for tests that change nothing."""
    make_catalogue(real_folder, pictures)
    gallery = Gallery.open(real_folder / "shop")
    service = run(create_app(Settings(), FakeEmbedder(), {"shop": gallery}))
    yield service
    service.close()
    gallery.close()


@pytest.fixture
def catalogue(tmp_path: Path, pictures: list[bytes]) -> Path:
    return make_catalogue(tmp_path, pictures)


@pytest.fixture
def built(catalogue: Path) -> Path:
    """The gallery of the catalogue."""
    return catalogue.parent / "shop"


@pytest.fixture
def shop(built: Path) -> Iterator[Gallery]:
    gallery = Gallery.open(built)
    yield gallery
    gallery.close()


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


def test_the_link_of_a_hit_shows_the_indexed_file(start_service, shop, pictures) -> None:
    service = start_service(galleries={"shop": shop})
    for data in pictures[:4]:
        response = service.client.get(first_link(service, data))
        assert response.content == data
        assert response.headers["content-type"] == "image/png"
        assert response.headers["cache-control"] == "private, no-cache"


@pytest.mark.parametrize(
    "item",
    [
        "../../secret.txt",
        "..%2f..%2fsecret.txt",
        "..%2F..%2Fsecret.txt",
        "%2e%2e%2f%2e%2e%2fsecret.txt",
        "%2e%2e/%2e%2e/secret.txt",
        "..%252f..%252fsecret.txt",
        "..%5c..%5csecret.txt",
        "..%c0%af..%c0%afsecret.txt",
        "0/../../../secret.txt",
        "0%2f..%2f..%2fsecret.txt",
        "0%00..%2fsecret.txt",
        "{secret}",
        "{encoded_secret}",
        "0%2f{encoded_secret}",
        "file:%2f%2f{encoded_secret}",
        "%2fetc%2fpasswd",
        "//etc/passwd",
        "0.png",
        "..%2fcatalogue%2f0.png",
        "-1",
        "99999999999999999999",
        "0",
        "5",
    ],
)
def test_nothing_in_the_place_of_a_number_reaches_a_file(
    real_service, real_folder, pictures, item: str
) -> None:
    secret = str(real_folder / "secret.txt")
    item = item.format(secret=secret, encoded_secret=quote(secret, safe=""))
    for target in (f"/galleries/shop/items/{item}/image", f"/galleries/shop/items/{item}"):
        status, media_type, body = fetch(real_service, target)
        assert status in {400, 404, 422}, target
        assert media_type == PROBLEM
        assert SECRET not in body
        assert json.loads(body)["request_id"]
    assert real_service.client.get("/galleries/shop/items/1/image").content == pictures[0]


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2fshop", "{encoded}", "%2fetc", "shop%2f..", "shop%00", ".", "SHOP"],
)
def test_nothing_in_the_place_of_a_gallery_name_reaches_a_file(
    real_service, real_folder, pictures, name: str
) -> None:
    built = real_folder / "shop"
    name = name.format(encoded=quote(str(built), safe=""))
    status, media_type, _ = fetch(real_service, f"/galleries/{name}/items/0/image")
    assert (status, media_type) in ((404, PROBLEM), (400, PROBLEM))
    assert real_service.client.get("/galleries/shop/items/1/image").content == pictures[0]


@pytest.mark.parametrize(
    ("target", "status"),
    [
        ("/ui/../app.py", 404),
        ("/ui/..%2fapp.py", 404),
        ("/ui/%2e%2e/settings.py", 404),
        ("/ui//etc/passwd", 404),
        ("/ui/%2fetc%2fpasswd", 404),
        ("/..%2f..%2fetc%2fpasswd", 404),
    ],
)
def test_the_files_of_the_page_lead_nowhere_else(running_service, target: str, status: int) -> None:
    assert fetch(running_service, target)[:2] == (status, PROBLEM)


def test_a_file_that_became_a_link_to_elsewhere_is_not_followed(
    start_service, shop, catalogue, pictures
) -> None:
    service = start_service(galleries={"shop": shop})
    (catalogue / "1.png").unlink()
    (catalogue / "1.png").symlink_to(catalogue.parent / "secret.txt")
    response = service.client.get(first_link(service, pictures[1]))
    assert_problem(response, 404, "unknown-item")
    assert SECRET not in response.content
    assert service.client.get(first_link(service, pictures[2])).content == pictures[2]


@pytest.mark.parametrize("change", ["removed", "changed"])
def test_a_file_that_is_not_what_was_indexed_is_404_and_says_what_to_do(
    start_service, shop, catalogue, pictures, change: str
) -> None:
    service = start_service(galleries={"shop": shop})
    file = catalogue / "1.png"
    file.unlink() if change == "removed" else file.write_bytes(pictures[0])
    link = first_link(service, pictures[1])
    problem = assert_problem(service.client.get(link), 404, "unknown-item")
    assert "Put it back" in problem["detail"]
    file.write_bytes(pictures[1])
    assert service.client.get(link).content == pictures[1]


def test_an_image_root_that_cannot_be_read_is_503_and_green_again_when_it_can(
    start_service, shop, catalogue, pictures
) -> None:
    service = start_service(galleries={"shop": shop})
    link = first_link(service, pictures[0])
    away = catalogue.rename(catalogue.with_name("away"))
    catalogue.symlink_to(catalogue)  # whoever opens it gets an error that is not "missing"
    problem = assert_problem(service.client.get(link), 503, "gallery-unavailable")
    assert str(catalogue) not in problem["detail"]
    assert service.search(pictures[1]).status_code == 200
    catalogue.unlink()
    away.rename(catalogue)
    assert service.client.get(link).content == pictures[0]


def test_a_disk_that_fails_while_serving_is_503_without_a_word_of_its_paths(
    start_service, shop, pictures, monkeypatch
) -> None:
    def fail(*_: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error", "/mnt/secret/1.png")

    service = start_service(galleries={"shop": shop})
    link = first_link(service, pictures[1])
    with monkeypatch.context() as patch:
        patch.setattr("indexer.ingest.pictures.source_bytes", fail)
        response = service.client.get(link)
    problem = assert_problem(response, 503, "gallery-unavailable")
    assert int(response.headers["retry-after"]) >= 1
    assert "secret" not in json.dumps(problem)
    assert service.client.get(link).content == pictures[1]


def test_a_catalogue_that_is_damaged_while_serving_is_503_and_readiness_turns_red(
    start_service, shop, built, pictures
) -> None:
    service = start_service(galleries={"shop": shop})
    (catalog,) = built.glob("versions/*/catalog.sqlite")
    catalog.write_bytes(bytes(catalog.stat().st_size))
    response = service.search(pictures[0])
    problem = assert_problem(response, 503, "gallery-unavailable")
    assert "catalog" not in problem["detail"]
    ready = service.client.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["checks"]["gallery shop"] == "failed with GalleryCorruptError"
    assert service.client.get("/live").status_code == 200


def test_a_picture_that_takes_too_long_is_503_and_so_are_those_behind_it(
    start_service, gallery, pictures, until, monkeypatch
) -> None:
    held = threading.Event()
    service = start_service(request_timeout_ms=300, lanes=1)
    monkeypatch.setattr(gallery, "image", lambda _: held.wait(WAIT_S))
    for number in range(2):
        response = service.client.get(f"/galleries/shop/items/{number}/image")
        problem = assert_problem(response, 503, "deadline-exceeded")
        assert "0.3 s" in problem["detail"]
        assert int(response.headers["retry-after"]) >= 1
    assert service.runtime.pools["file"].waiting == 0
    monkeypatch.undo()
    held.set()
    until(lambda: service.client.get("/galleries/shop/items/2/image").content == pictures[2])


def test_a_picture_that_the_browser_has_is_304_without_reading_the_file(
    start_service, shop, catalogue, pictures
) -> None:
    service = start_service(galleries={"shop": shop})
    link = first_link(service, pictures[3])
    etag = service.client.get(link).headers["etag"]
    shutil.rmtree(catalogue)
    again = service.client.get(link, headers={"if-none-match": f'"other", {etag}'})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == etag
    assert service.client.get(link, headers={"if-none-match": '"other"'}).status_code == 404


def test_a_link_from_before_a_rebuild_is_404_and_names_both_generations(
    start_service, shop, catalogue, built, pictures
) -> None:
    old_link = first_link(start_service(galleries={"shop": shop}), pictures[2])
    (catalogue / "0.png").unlink()  # numbers start anew
    build_gallery(folder_source(catalogue), FakeEmbedder(), built)
    renewed = Gallery.open(built)
    service = start_service(galleries={"shop": renewed})
    assert old_link.endswith(f"?version={shop.generation}")
    etag = f'"{renewed.generation}-2"'
    for headers in ({}, {"if-none-match": etag}):
        response = service.client.get(old_link, headers=headers)
        problem = assert_problem(response, 404, "unknown-item")
        assert shop.generation in problem["detail"]
        assert renewed.generation in problem["detail"]
        assert "Search again" in problem["detail"]
    assert service.client.get(first_link(service, pictures[2])).content == pictures[2]
    unversioned = service.client.get(old_link.partition("?")[0])
    assert unversioned.content == pictures[3]
    renewed.close()


def test_a_picture_of_an_item_that_is_gone_is_404_even_if_the_browser_has_it(
    start_service, gallery, pictures
) -> None:
    service = start_service()
    link = first_link(service, pictures[11])
    etag = service.client.get(link).headers["etag"]
    assert service.client.get(link, headers={"if-none-match": etag}).status_code == 304
    gallery.size = 11  # the last one is gone
    for headers in ({}, {"if-none-match": etag}):
        assert_problem(service.client.get(link, headers=headers), 404, "unknown-item")


def test_an_uploaded_picture_is_shown_as_a_browser_can_show_it(tmp_path) -> None:
    shop = start_shop(tmp_path)
    for kind, media_type in (("PNG", "png"), ("JPEG", "jpeg"), ("BMP", "jpeg"), ("TIFF", "jpeg")):
        data = encoded(picture(3), kind)
        [item] = shop.put({kind: data})["items"]
        response = shop.client.get(f"/galleries/shop/items/{item['id']}/image")
        assert response.headers["content-type"] == f"image/{media_type}"
        assert (response.content == data) is (kind.lower() == media_type)
        assert response.content[:2] in (b"\x89P", b"\xff\xd8")
    shop.close()


def test_an_upload_that_is_gone_is_404_and_comes_back_when_it_is_put_again(tmp_path) -> None:
    shop = start_shop(tmp_path)
    data = encoded(picture(3))
    [item] = shop.put({"k": data})["items"]
    link = f"/galleries/shop/items/{item['id']}/image"
    [file] = [
        file
        for file in tmp_path.glob("galleries/shop/pictures/*/*")
        if file.name in shop.pictures()
    ]
    file.write_bytes(b"damaged")
    assert_problem(shop.client.get(link), 503, "gallery-unavailable")
    file.unlink()
    assert_problem(shop.client.get(link), 404, "unknown-item")
    assert shop.put({"k": data})["unchanged"] == 1
    assert shop.client.get(link).content == data
    shop.close()
