"""The whole road, as the README has it: drawn products, training, bundle, gallery, service."""

import asyncio
import re
import shlex
import shutil
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from typer.testing import CliRunner

import indexer.__main__
import training.__main__
from embedder.bundle import Bundle
from embedder.session import OnnxEmbedder
from indexer.gallery import Gallery
from service.app import create_app
from service.settings import Settings
from tests.training.jobs import TINY_TRUNK, calibrated_weights

README = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
LINES = re.findall(r"^    (kinlens-(?:train|index) .*?)(?:  +#.*)?$", README, re.MULTILINE)
APPS = {"kinlens-train": training.__main__.app, "kinlens-index": indexer.__main__.app}
# As small as a test: the same commands about fewer products, with a network of four blocks.
SHORTER = {
    "data render": ["--products", "6", "--views", "4", "--size-px", "40"],
    "fit": [
        word
        for setting in (
            f"model.backbone={TINY_TRUNK}",
            "model.dim=16",
            "model.batch_norm=frozen",
            "input.size_px=32",
            "input.test_px=32",
            "input.resize_px=36",
            "optimizer.batch_size=4",
            "optimizer.epochs=1",
            "runtime.workers=0",
        )
        for word in ("--set", setting)
    ],
}


def test_the_steps_of_the_readme_lead_from_a_folder_to_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights, shop = calibrated_weights(tmp_path / "weights.pth"), tmp_path / "shop"
    steps = [line for line in LINES if "/shop" in line or " shop.toml" in line]
    assert [" ".join(line.split()[:2]) for line in steps] == [
        "kinlens-train data",
        *("kinlens-train new", "kinlens-train fit", "kinlens-train export"),
        *("kinlens-index build", "kinlens-index add"),
        *("kinlens-index remove", "kinlens-index search"),
    ]
    for line in steps:
        name, *words = shlex.split(line.replace("/tmp/shop", str(shop)))
        if words[0] == "add":
            photo = next(shop.rglob("*.jpg"))
            (shop / "new").mkdir()
            shutil.copy(photo, shop / "new")
            shutil.copy(photo, tmp_path / "photo.jpg")
        words += next((more for start, more in SHORTER.items() if line.find(f" {start} ") > 0), [])
        words += ["--set", f"model.weights={weights}"] if words[0] == "fit" else []
        done = CliRunner().invoke(APPS[name], words)
        assert done.exit_code == 0, f"{line}\n{done.output}{done.exception!r}"
    bundle = Bundle.open(tmp_path / "bundles/shop")
    gallery = Gallery.open(tmp_path / "galleries/shop", expected_bundle_id=bundle.bundle_id)
    app = create_app(Settings(), embedder=OnnxEmbedder.open(bundle), galleries={"shop": gallery})
    asyncio.run(find_each(app, bundle.bundle_id, shop, [item.key for item in gallery.items()][:8]))


async def find_each(app: FastAPI, bundle_id: str, root: Path, keys: list[str]) -> None:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        assert (await client.get("/ready")).status_code == 200
        for key in keys:
            data = (root / key).read_bytes()
            answer = await client.post("/search", files={"image": data}, data={"k": "3"})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert body["bundle_id"] == bundle_id
            assert body["hits"][0]["score"] > 0.999
            picture = await client.get(body["hits"][0]["image"])
            assert picture.content == data
