"""Feedback is stored once, and without data about the sender."""

import contextlib
import csv
import io
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from kinlens.service.commands.program import app
from tests.support.seams import FeedbackStore, Question
from tests.support.servers import render
from tests.support.shops import Shop, assert_problem, sha256, start_shop
from tests.support.waiting import until
from tests.tiny import encoded

HEADER = ["query", "query_key", "item", "action"]
Row = tuple[str, str, str, str]


@pytest.fixture
def shop(tmp_path: Path, photos: list[bytes]) -> Iterator[Shop]:
    """Six items, and feedback with images."""
    shop = start_shop(tmp_path / "state", feedback="pictures")
    shop.put({f"{n}.png": photos[n] for n in range(6)})
    yield shop
    shop.close()


def answer_id(shop: Shop, data: bytes, **fields: Any) -> Any:
    return shop.search(data, **fields).json()["answer_id"]


def send(shop: Shop, named: str, item: str, action: str, image: bytes | None = None) -> Any:
    fields = {"answer_id": named, "item": item, "action": action}
    if image is None:
        return shop.client.post("/feedback", json=fields)
    return shop.client.post("/feedback", data=fields, files={"image": image})


def rows_of(text: str) -> list[Row]:
    header, *rows = csv.reader(io.StringIO(text))
    assert header == HEADER
    return [(query, key, item, action) for query, key, item, action in rows]


def sent_to(shop: Shop) -> list[Row]:
    """What the service gives out."""
    response = shop.client.get(f"{shop.url}/feedback")
    assert response.headers["content-type"].startswith("text/csv"), response.text
    return rows_of(response.text)


def similar(shop: Shop, key: str) -> str:
    """The answer to a search with an item."""
    [item] = [item for item in shop.items()["items"] if item["key"] == key]
    found: str = shop.client.get(f"{shop.url}/items/{item['id']}/similar").json()["answer_id"]
    return found


def test_feedback_is_stored_and_exported_once_in_order(shop, photos, tmp_path) -> None:
    """Against a list: two images and an item; each sent twice."""
    asked = {"": "", "5.png": similar(shop, "5.png")}
    asked |= {f"pictures/{sha256(d)}.jpg": answer_id(shop, d) for d in photos[8:10]}
    by_name = {sha256(data): data for data in photos}
    expected: list[Row] = []
    for place, (asked_with, named) in enumerate(sorted(asked.items())[1:]):
        is_photo = asked_with.startswith("pictures/")
        image = by_name[Path(asked_with).stem] if is_photo else None
        for action in ("clicked", "wrong", "bought"):
            for _ in range(2):
                assert send(shop, named, f"{place}.png", action, image).status_code == 204
            pair = (asked_with, "") if is_photo else ("", asked_with)
            expected.append((*pair, f"{place}.png", action))
    assert sent_to(shop) == expected
    counts = shop.client.get(f"{shop.url}/feedback", params={"format": "json"}).json()
    assert counts == {"clicked": 3, "bought": 3, "wrong": 3, "pairs": 9}
    assert shop.running.metric("kinlens_feedback_total", action="bought") == 3
    out = tmp_path / "out"
    reported = call("export", "--state", str(shop.state), "--out", str(out))
    assert "9 pairs of 9" in reported
    assert rows_of((out / "pairs.csv").read_text("utf-8")) == expected
    exported = {f"pictures/{file.name}" for file in (out / "pictures").iterdir()}
    assert exported == {row[0] for row in expected if row[0]}


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["feedback", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


def test_two_services_store_each_feedback_once(shop) -> None:
    with contextlib.closing(start_shop(shop.state, feedback="pictures")) as other:
        named = similar(shop, "0.png")
        assert similar(other, "0.png") == named, "the secret of the signatures is shared"
        wanted = [(f"{n}.png", action) for n in range(1, 6) for action in ("clicked", "wrong")]

        def judge(number: int) -> int:
            item, action = wanted[number // 2 % len(wanted)]
            return send((shop, other)[number % 2], named, item, action).status_code

        with ThreadPoolExecutor(8) as senders:
            assert set(senders.map(judge, range(4 * len(wanted)))) == {204}
    assert sorted(sent_to(shop)) == sorted(("", "0.png", *shown) for shown in wanted)


def test_while_it_is_off_nothing_is_accepted_or_written(tmp_path, photos) -> None:
    shop = start_shop(tmp_path / "state")
    shop.put({"a": photos[0]})
    assert "answer_id" not in shop.search(photos[0]).text
    assert shop.gallery()["feedback"] == "off"
    problem = assert_problem(send(shop, "x", "a", "clicked"), 404, "not-found")
    assert "KINLENS_FEEDBACK" in problem["detail"]
    assert_problem(shop.client.get(f"{shop.url}/feedback"), 404, "not-found")
    shop.close()
    assert not list(shop.state.glob("feedback*"))


def test_only_answers_to_one_whole_image_or_item_have_an_id(shop, photos) -> None:
    assert answer_id(shop, photos[0], crop="0,0,0.5,0.5") is None
    files = [("image", photos[0]), ("image", photos[1])]
    assert shop.client.post("/search", files=files).json()["answer_id"] is None
    apart = shop.client.post("/search/batch", files=files).json()
    assert all(one["answer"]["answer_id"] for one in apart["answers"])
    assert answer_id(shop, photos[0], negative="0.png") == answer_id(shop, photos[0])


def test_a_forged_answer_id_is_refused(shop, tmp_path, photos) -> None:
    own = answer_id(shop, photos[7])
    with contextlib.closing(FeedbackStore(tmp_path / "other")) as store:
        foreign = store.sign(Question("shop", "1" * 64, item="1.png"))
    middle = len(own) // 2
    changed = own[:middle] + ("A" if own[middle] != "A" else "B") + own[middle + 1 :]
    for forged in (changed, foreign, own[:9], "", "ü ="):
        problem = assert_problem(send(shop, forged, "1.png", "wrong"), 422, "invalid-parameter")
        assert "Send the answer_id of an answer unchanged" in problem["detail"]
    assert sent_to(shop) == []


def test_invalid_feedback_is_refused_by_name(shop, photos) -> None:
    named = answer_id(shop, photos[7])
    problem = assert_problem(send(shop, named, "away.png", "wrong"), 404, "unknown-item")
    assert "'away.png'" in problem["detail"]
    problem = assert_problem(send(shop, named, "1.png", "seen"), 422, "invalid-parameter")
    assert "'clicked', 'bought' or 'wrong'" in problem["detail"]
    other = send(shop, named, "1.png", "wrong", photos[6])
    assert "not the image" in assert_problem(other, 422, "invalid-parameter")["detail"]
    assert sent_to(shop) == []


def test_nothing_about_the_sender_is_stored(shop, photos, tmp_path) -> None:
    exif = Image.Exif()
    exif[0x010F], exif[0x9286] = "Camera of Ada", "at home"
    query_photo = encoded(render(30, 900), "JPEG", exif=exif)
    keys = shop.running.runtime.keys
    shop.client.headers["Authorization"] = f"Bearer {keys.create('till-of-ada', ['search'])}"
    shop.client.headers["X-Request-ID"] = "request-of-ada"
    sent = send(shop, answer_id(shop, query_photo), "1.png", "bought", query_photo)
    assert sent.status_code == 204
    files = [file for file in shop.state.glob("feedback*") if file.is_file()]
    [kept] = (shop.state / "feedback" / "pictures").iterdir()
    for file in [*files, kept]:
        content = file.read_bytes()
        for secret in (b"Ada", b"-of-ada", b"127.0.0.1", b"kl_", b"home"):
            assert secret not in content, (file, secret)
        assert file.stat().st_mode & 0o077 == 0
    assert kept.name == f"{sha256(query_photo)}.jpg"
    assert kept.stat().st_mtime % 86_400 == 0
    with Image.open(kept) as image:
        assert (image.format, max(image.size), len(image.getexif())) == ("JPEG", 640, 0)
    database = sqlite3.connect(shop.state / "feedback.sqlite")
    [row] = database.execute("SELECT * FROM feedback")
    assert row[0] == 1
    assert len(row[-1]) == len("2026-01-01")
    database.close()


def test_pairs_mode_stores_no_image(tmp_path, photos) -> None:
    shop = start_shop(tmp_path / "state", feedback="pairs")
    shop.put({"a": photos[0], "b": photos[1]})
    named = answer_id(shop, photos[5])
    refused = assert_problem(send(shop, named, "a", "clicked", photos[5]), 422, "invalid-parameter")
    assert "without it" in refused["detail"]
    assert send(shop, named, "a", "clicked").status_code == 204
    assert send(shop, similar(shop, "a"), "b", "wrong").status_code == 204
    assert sent_to(shop) == [("", "a", "b", "wrong")]
    shop.close()
    assert not list((shop.state / "feedback" / "pictures").iterdir())
    head, row = call("show", "--state", str(shop.state)).splitlines()
    assert head.split() == ["Gallery", "Clicked", "Bought", "Wrong", "Pairs"]
    assert row.split() == ["shop", "1", "0", "1", "1"]


def test_searches_continue_while_feedback_cannot_be_written(shop, photos) -> None:
    named = answer_id(shop, photos[7])
    holder = sqlite3.connect(shop.state / "feedback.sqlite", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with ThreadPoolExecutor(4) as senders:
        waiting = [senders.submit(send, shop, named, f"{n}.png", "wrong") for n in range(4)]
        for data in photos:
            assert shop.search(data).status_code == 200
        assert not any(one.done() for one in waiting)
        holder.execute("ROLLBACK")
        assert [one.result().status_code for one in waiting] == [204] * 4
    holder.close()
    assert shop.client.get(f"{shop.url}/feedback?format=json").json()["wrong"] == 4


def test_what_is_old_cleared_or_above_the_limit_is_deleted_with_its_image(tmp_path) -> None:
    photos = tmp_path / "feedback" / "pictures"
    with contextlib.closing(FeedbackStore(tmp_path, max_rows=5, days=30)) as store:
        for number in range(8):
            store.add(Question("shop", "v", item="q"), f"{number}", "clicked")
        assert [pair.item for pair in store.pairs("shop")] == ["3", "4", "5", "6", "7"]
        for number in range(8):  # the image of the first two rows is still that of a later one
            image = f"{number % 7:x}" * 64
            store.add(Question("shop", "v", image=image), f"{number}", "clicked", b"jpeg")
        assert {file.name[0] for file in photos.iterdir()} == set("34560")
        for gallery, photo in (("a", "1" * 64), ("b", "1" * 64), ("b", "2" * 64)):
            store.add(Question(gallery, "v", image=photo), "item", "bought", b"jpeg")
        (photos / ".stage-1").touch()  # of a write that was cut short
        with contextlib.closing(sqlite3.connect(tmp_path / "feedback.sqlite")) as database:
            database.execute("UPDATE feedback SET day = '2020-02-02' WHERE gallery != 'b'")
            database.commit()
        store.tidy()
        assert sorted(file.name for file in photos.iterdir()) == [f"{n * 64}.jpg" for n in "12"]
        assert store.galleries() == ["b"]
        assert "2 feedbacks" in call("clear", "--state", str(tmp_path), "--gallery", "b")
    assert not list(photos.iterdir())


def test_old_feedback_is_deleted_also_by_a_service_that_accepts_none(shop, photos) -> None:
    """As the setting was taken back: nobody would delete the photos."""
    for photo, age in ((photos[6], "old"), (photos[7], "new")):
        send(shop, answer_id(shop, photo), "1.png", "wrong", photo).raise_for_status()
        if age == "old":
            with contextlib.closing(sqlite3.connect(shop.state / "feedback.sqlite")) as database:
                database.execute("UPDATE feedback SET day = '2020-02-02'")
                database.commit()
    kept = shop.state / "feedback" / "pictures"
    shop.close()
    with contextlib.closing(start_shop(shop.state)):
        until(lambda: [file.stem for file in kept.iterdir()] == [sha256(photos[7])])


@pytest.mark.parametrize("while_off", [False, True])
def test_a_deleted_gallery_loses_its_feedback(shop, photos, while_off: bool) -> None:
    named = answer_id(shop, photos[7])
    assert send(shop, named, "1.png", "wrong", photos[7]).status_code == 204
    if while_off:
        with contextlib.closing(start_shop(shop.state)) as other:
            assert other.client.delete(shop.url).status_code == 204
            other.create("shop")
    else:
        assert shop.client.delete(shop.url).status_code == 204
        assert_problem(send(shop, named, "1.png", "wrong"), 404, "unknown-gallery")
        shop.create("shop")
    with contextlib.closing(FeedbackStore(shop.state)) as store:
        assert store.pairs("shop") == []
    assert not list((shop.state / "feedback" / "pictures").iterdir())
