"""What agents use: the tools of `kinlens-serve mcp`, and the retriever for LangChain."""

import asyncio
import base64
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kinlens import Client
from kinlens.agents import read_image, shop_link
from kinlens.client import NewItem
from kinlens.embedder.bundle import Bundle
from kinlens.errors import ArgumentError, ClientError, InvalidError
from tests.support.seams import KeyStore, Limits
from tests.support.servers import DEFAULTS, create_app, run, settings_of
from tests.support.shops import Shop
from tests.support.words import with_tower
from tests.tiny import encoded, photo

pytest.importorskip("tokenizers", reason="needs kinlens[text]")

COUNT = 6
COLOURS = ("red", "green")
PRODUCT_URL = "https://shop.example/p/{product}?in={colour}"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images that an agent may name, next to one that it may not."""
    folder = tmp_path_factory.mktemp("agents") / "images"
    (folder / "new shoes").mkdir(parents=True)
    for path in ("3.png", "new shoes/4.png", "../secret.png"):
        (folder / path).write_bytes(encoded(photo(4 if "4" in path else 3)))
    (folder / "way-out.png").symlink_to("../secret.png")
    (folder / "notes.txt").write_text("not an image")
    return folder


@pytest.fixture(scope="module")
def shop(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """A service that reads words and asks for keys, with a gallery of six mugs and an empty one."""
    folder = tmp_path_factory.mktemp("shop")
    bundle = with_tower(tiny_bundle, folder, folder / "bundle")
    admin = KeyStore(folder / "keys.json").create("owner", ["admin"])
    settings: dict[str, Any] = {
        "bundle": bundle.path,
        "anonymous_scopes": (),
        "product_url": PRODUCT_URL,
    }
    app = create_app(settings_of(**DEFAULTS, state=folder, **settings))
    with closing(Shop(run(app), folder)) as made, Client(made.running.url, key=admin) as client:
        client.create_gallery("mugs")
        client.create_gallery("none")
        client.put_many("mugs", [NewItem(f"mug/{n}", encoded(photo(n)), of(n)) for n in range(6)])
        yield made


@pytest.fixture(scope="module")
def key(shop: Shop) -> str:
    """A key that may search, and no more."""
    return str(KeyStore(shop.state / "keys.json").create("agent", ["search"]))


@pytest.fixture
def client(shop: Shop, key: str) -> Iterator[Client]:
    with Client(shop.running.url, key=key) as client:
        yield client


def of(number: int) -> dict[str, Any]:
    sizes = ["S", "M"]
    more = {"price": float(number), "product": f"mug no {number}", "sizes": sizes}
    return {"colour": COLOURS[number % 2], **more} if number else {"sizes": sizes}


def data_url(number: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(encoded(photo(number))).decode()}"


def use_tools(url: str, key: str, calls: list[tuple[str, dict[str, Any]]], *words: str) -> Any:
    """What each call of a tool returns, from the program as an agent starts it."""
    from mcp import Client as Agent
    from mcp import StdioServerParameters

    program = StdioServerParameters(
        command=sys.executable,
        args=["-m", "kinlens.service", "mcp", "--url", url, *words],
        env={"KINLENS_API_KEY": key},
    )

    async def use() -> Any:
        async with Agent(program) as agent:
            tools = (await agent.list_tools()).tools
            answers = [await agent.call_tool(name, arguments) for name, arguments in calls]
            return tools, answers

    return asyncio.run(use())


def test_an_agent_searches_with_images_and_words_and_reads_items(
    shop: Shop, key: str, images: Path
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("search", {"image": "3.png", "gallery": "mugs", "k": 2}),
        ("search", {"image": "new shoes/4.png", "gallery": "mugs", "filter": "price < 4"}),
        ("search", {"image": data_url(1), "gallery": "mugs", "k": 1}),
        ("search", {"text": "green mug", "gallery": "mugs"}),
        ("similar", {"key": "mug/3", "gallery": "mugs", "k": 3}),
        ("item", {"key": "mug/2", "gallery": "mugs"}),
        ("item", {"key": "mug/0", "gallery": "mugs"}),
        ("similar", {"key": "mug/3"}),
        ("search", {"image": "3.png", "gallery": "none"}),
    ]
    tools, answers = use_tools(shop.running.url, key, calls, "--images", str(images))
    assert [tool.name for tool in tools] == ["search", "similar", "item"]
    assert all(tool.annotations.read_only_hint for tool in tools)
    assert all(tool.description and tool.output_schema for tool in tools)
    found = [answer.structured_content for answer in answers]
    best = found[0]["items"][0]
    link = "https://shop.example/p/mug%20no%203?in=green"
    assert (best["key"], best["link"], best["attributes"]) == ("mug/3", link, of(3))
    assert best["score"] == pytest.approx(1, abs=1e-3)
    assert best["probability"] is None
    assert found[0]["gallery"] == "mugs"
    assert len(found[0]["items"]) == 2
    assert {item["key"] for item in found[1]["items"]} == {"mug/1", "mug/2", "mug/3"}
    assert [item["key"] for item in found[2]["items"]] == ["mug/1"]
    with Client(shop.running.url, key=key) as client:
        by_words = client.search(texts=["green mug"], gallery="mugs", k=5)
    assert [item["key"] for item in found[3]["items"]] == [hit.key for hit in by_words.hits]
    assert "mug/3" not in {item["key"] for item in found[4]["items"]}
    assert len(found[4]["items"]) == 3
    assert found[5]["attributes"] == of(2)
    assert found[5]["link"] == "https://shop.example/p/mug%20no%202?in=red"
    assert found[6]["link"] is None, "it lacks an attribute of the link"
    assert not found[8]["items"]
    assert found[7]["gallery"] == "mugs", "the first one is the default"


def test_an_agent_reads_why_a_call_was_refused_and_no_file_outside(
    shop: Shop, key: str, images: Path
) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"image": "../secret.png"}, "outside of the folder"),
        ({"image": str(images.parent / "secret.png")}, "outside of the folder"),
        ({"image": "way-out.png"}, "outside of the folder"),
        ({"image": "file:../secret.png"}, "outside of the folder"),
        ({"image": "/etc/passwd"}, "outside of the folder"),
        ({"image": "missing.png"}, "is not a file"),
        ({"image": "a\0.png"}, "cannot be a path"),
        ({"image": "data:image/png;base64,***"}, "not a data URL in base64"),
        ({"image": "data:image/png,abc"}, "has no ;base64"),
        ({"image": "notes.txt"}, "415"),
        ({"image": "3.png", "gallery": "shoes"}, "404"),
        ({"image": "3.png", "filter": "price <"}, "422"),
        ({"image": "3.png", "k": 51}, "less than or equal to 50"),
        ({}, "422"),
    ]
    calls = [("search", {"gallery": "mugs", **arguments}) for arguments, _ in refused]
    _, answers = use_tools(shop.running.url, key, calls, "--images", str(images))
    for answer, (arguments, reason) in zip(answers, refused, strict=True):
        assert answer.is_error, arguments
        assert reason in answer.content[0].text, arguments
    last: list[tuple[str, dict[str, Any]]] = [("search", {"image": "3.png", "gallery": "mugs"})]
    _, [unread] = use_tools(shop.running.url, key, last)
    assert "no folder of images" in unread.content[0].text
    _, [unknown] = use_tools(shop.running.url, "kl_unknown", [("item", {"key": "mug/1"})])
    assert "401" in unknown.content[0].text


def test_a_key_without_galleries_is_told_so(shop: Shop, images: Path) -> None:
    blind = KeyStore(shop.state / "keys.json").create(
        "blind", ["search"], limits=Limits(galleries=("elsewhere",))
    )
    _, [answer] = use_tools(shop.running.url, blind, [("item", {"key": "mug/1"})])
    assert answer.is_error
    assert "no gallery that this key can see" in answer.content[0].text


ALONE = """
import importlib, sys
events = []
sys.addaudithook(lambda name, _: events.append(name) if name.startswith("socket.") else None)
for name in {names!r}:
    importlib.import_module(name)
print([name for name in events if name in ("socket.connect", "socket.getaddrinfo")])
"""


def test_the_packages_of_others_open_no_connection_when_they_are_imported() -> None:
    names = ["kinlens.langchain", "mcp", "mcp.server.mcpserver", "kinlens.agents"]
    names += ["kinlens.library.hub", "huggingface_hub.hf_api", "huggingface_hub.file_download"]
    code = ALONE.format(names=names)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_missing_package_is_named_with_its_extra() -> None:
    for package, code, extra in (
        ("langchain_core", "import kinlens.langchain", "langchain"),
        ("mcp", "sys.argv[1:] = ['mcp']; kinlens.service.__main__.main()", "mcp"),
    ):
        hidden = f"import sys; sys.modules[{package!r}] = None; import kinlens.service.__main__\n"
        done = subprocess.run([sys.executable, "-c", hidden + code], capture_output=True, text=True)
        assert done.returncode == 1
        assert f"pip install 'kinlens[{extra}]'" in done.stderr


def test_the_command_refuses_what_it_cannot_use_in_one_line(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "kinlens.service", "mcp"]
    for words, status, reason in (
        (["--url", "shop"], 1, "http"),
        (["--images", str(tmp_path / "none")], 2, "does not exist"),
    ):
        done = subprocess.run(
            [*program, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        assert (done.returncode, done.stdout) == (status, "")
        assert done.stderr.startswith("error: ")
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def retrieve(client: Client, images: Path) -> Callable[..., Any]:
    from kinlens.langchain import KinlensRetriever

    def retriever(**options: Any) -> Any:
        given = {"client": client, "gallery": "mugs", "images": images}
        return KinlensRetriever(**given | options)

    return retriever


def test_a_retriever_makes_documents_of_items(retrieve: Callable[..., Any]) -> None:
    document = retrieve(k=1).invoke("file:3.png")[0]
    assert document.id == document.metadata["key"] == "mug/3"
    assert document.page_content.splitlines()[0] == "mug/3"
    assert set(document.page_content.splitlines()[1:]) == {
        *("colour: green", "price: 3.0", "product: mug no 3", "sizes: S, M")
    }
    assert document.metadata["link"] == "https://shop.example/p/mug%20no%203?in=green"
    assert document.metadata["gallery"] == "mugs"
    assert document.metadata["score"] == pytest.approx(1, abs=1e-3)
    assert document.metadata["attributes"]["price"] == 3


def test_a_retriever_works_as_each_runnable_does(
    retrieve: Callable[..., Any], client: Client
) -> None:
    retriever = retrieve(k=2)
    queries = ["file:3.png", "file:new%20shoes/4.png", data_url(1), "green mug"]
    documents = retriever.batch(queries)
    assert [found[0].id for found in documents[:3]] == ["mug/3", "mug/4", "mug/1"]
    by_words = client.search(texts=["green mug"], gallery="mugs", k=2)
    assert [document.id for document in documents[3]] == [hit.key for hit in by_words.hits]
    assert documents == [asyncio.run(retriever.ainvoke(query)) for query in queries]
    assert documents == asyncio.run(retriever.abatch(queries))
    chain = retriever | (lambda found: [document.id for document in found])
    assert chain.invoke("file:3.png")[0] == "mug/3"


def test_options_of_a_search_reach_the_service(retrieve: Callable[..., Any]) -> None:
    found = retrieve(search_kwargs={"filter": "price < 3"}).invoke("file:3.png")
    assert {document.id for document in found} == {"mug/1", "mug/2"}
    groups = retrieve(search_kwargs={"group_by": "colour", "group_size": 1}).invoke("file:3.png")
    assert groups[0].id == "mug/3"
    assert len({document.metadata["attributes"].get("colour") for document in groups}) == 3
    assert retrieve(search_kwargs={"min_score": 1.0, "filter": "price > 5"}).invoke("a") == []


def test_what_a_retriever_cannot_find_is_an_error_of_the_client(
    retrieve: Callable[..., Any],
) -> None:
    for query in ("file:../secret.png", "file:way-out.png", "file:missing.png", "data:,x"):
        with pytest.raises(ArgumentError):
            retrieve().invoke(query)
    with pytest.raises(ArgumentError, match="no folder of images"):
        retrieve(images=None).invoke("file:3.png")
    with pytest.raises(ClientError, match="404"):
        retrieve(gallery="shoes").invoke("file:3.png")
    with pytest.raises(InvalidError):
        retrieve().invoke("")


def test_a_link_needs_its_attributes_and_is_an_address_of_the_web() -> None:
    values = {"url": "https://a.example/1", "n": 5.0, "half": 0.5, "new": True, "list": ("a", "b")}
    values |= {"script": "javascript:alert(1)", "none": " ", "umlaut": "Höhe/ü"}
    assert shop_link("url", values) == "https://a.example/1"
    assert shop_link("/p/{n}/{half}/{new}", values) == "/p/5/0.5/true"
    assert shop_link("https://a.example/{umlaut}", values) == "https://a.example/H%C3%B6he%2F%C3%BC"
    for template in ("", "missing", "script", "none", "n", "/p/{list}", "/p/{empty}", "{script}"):
        assert shop_link(template, values) is None, template


def test_paths_need_a_folder_and_a_data_url_needs_none(images: Path) -> None:
    assert read_image(data_url(2), None) == encoded(photo(2))
    assert read_image("3.png", images) == images.resolve() / "3.png"
    assert read_image(str(images / "3.png"), images) == images.resolve() / "3.png"
    assert read_image((images / "3.png").as_uri(), images) == images.resolve() / "3.png"
    with pytest.raises(ArgumentError, match="no folder"):
        read_image("3.png", None)
