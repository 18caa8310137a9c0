"""Forms as RFC 7578 and real clients write them, and hostile ones."""

import contextlib
import time

import pytest
from fastapi import HTTPException

from tests.support.seams import Part, parse_form

FORM = "multipart/form-data; boundary=B"
DISPOSITION = b"Content-Disposition: form-data; "
END = b"\r\n--B--\r\n"


def form(parameters: bytes = b'name="k"', content: bytes = b"3", end: bytes = END) -> bytes:
    return b"--B\r\n" + DISPOSITION + parameters + b"\r\n\r\n" + content + end


K = Part("k", False, b"3")


@pytest.mark.parametrize(
    "body",
    [
        form(),
        form(end=END + b"an epilogue\r\n--B\r\n"),
        b"a preamble\r\n" + form(),
        form(b"name=k"),
        form(b"  name = k ;"),
        form(b"name*=utf-8''other; name=k"),
        form().replace(b"Content-Disposition", b"content-DISPOSITION"),
        form().replace(b"Content", b"Content-Type: text/plain\r\nContent", 1),
    ],
)
def test_a_field_is_read_in_every_spelling(body: bytes) -> None:
    assert parse_form(body, FORM) == [K]


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        (b'name="image"; filename="q.png"', "image"),
        (b'name="image"; filename=""', "image"),
        (b'name="image"; filename="a;b; name=other.png"', "image"),
        (b'name="image"; filename="a\\"b; name=\\"other\\".png"', "image"),
        (b'name="image"; filename="a"b".png"', "image"),
        (b'name="image"; filename="C:\\fakepath\\"', "image"),
        (b'name="a\\"b"; filename=q.png', 'a"b'),
        ('name="größe"; filename="größe.png"'.encode(), "größe"),
    ],
)
def test_a_file_is_read_under_every_name(parameters: bytes, name: str) -> None:
    content = b"\x89PNG\r\n\r\n--\r\n--A\r\n\x00"
    assert parse_form(form(parameters, content), FORM) == [Part(name, True, content)]


def test_boundaries_have_every_spelling_and_parts_keep_their_order() -> None:
    for given, boundary in (('"B"', b"B"), ('"a; b"', b"a; b"), ("x" * 71, b"x" * 71)):
        content_type = f"multipart/form-data; charset=utf-8; BOUNDARY={given}"
        assert parse_form(form().replace(b"--B", b"--" + boundary), content_type) == [K]
    body = form(end=b"\r\n") + form(b'name="empty"', b"", b"\r\n") + form()
    assert parse_form(body, FORM) == [K, Part("empty", False, b""), K]
    assert parse_form(b"--B--\r\n", FORM) == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "its end is missing"),
        (form(end=b""), "its end is missing"),
        (form().replace(b"\r\n", b"\n"), "followed by a line break"),
        (form(content=b"a\r\n--B-x\r\nb"), "followed by a line break"),
        (form(b'name="k"; filename="' + b"x" * 5_000 + b'"'), "no end within"),
        (form(b'name=""'), "no name"),
        (form(b'name="\xe4"'), "a name is not UTF-8"),
        (form().replace(b"Content-Disposition:", b"Content-Disposition :"), "up to 8 lines"),
        (form().replace(b"Content", b"A: b\r\n" * 9 + b"Content"), "up to 8 lines"),
        (form(end=b"\r\n") * 1_001 + b"--B--", "more than 1,000 parts"),
    ],
)
def test_an_unreadable_form_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises(HTTPException, match=reason) as refused:
        parse_form(body, FORM)
    assert refused.value.status_code == 400


@pytest.mark.parametrize(
    "body",
    [
        form(content=b"\r\n--B-x" * 2_500_000),
        form(content=b"\r\n--A-x" * 2_500_000),
        b"".join(form(b'name="k";a="' + b'\\";a="' * 600, end=b"\r\n") for _ in range(1_000)),
    ],
    ids=["near-boundaries", "other boundaries", "parameters"],
)
def test_a_hostile_form_costs_no_more_than_an_honest_one(body: bytes) -> None:
    """A parser that looks at each candidate in Python takes a hundred times as long."""

    def cost_s(sent: bytes) -> float:
        started = time.thread_time()
        with contextlib.suppress(HTTPException):
            parse_form(sent, FORM)
        return time.thread_time() - started

    honest = form(content=b"\r\n-----" * 2_500_000)
    assert cost_s(body) < 10 * min(cost_s(honest) for _ in range(3))
