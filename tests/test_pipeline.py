"""The whole road in one test: rendered images, training, bundle, gallery, service."""

import asyncio
from pathlib import Path

import httpx
from fastapi import FastAPI

from embedder.session import OnnxEmbedder
from indexer.gallery import Gallery
from indexer.ingest.build import build_gallery
from indexer.ingest.sources import csv_source
from service.app import create_app
from service.settings import Settings
from tests.training.jobs import Silent, calibrated_weights, small_job
from training.checkpoint import load_checkpoint
from training.config.job import parse_job
from training.data.load import load_split
from training.data.records import LabelledImages, write_table
from training.export.bundle import export_checkpoint
from training.trainer import fit


def first_eight(images: LabelledImages) -> LabelledImages:
    return LabelledImages(images.root, images.paths[:8], images.labels[:8], images.class_names)


def test_each_image_of_the_gallery_is_found_at_rank_1(tmp_path: Path) -> None:
    weights = calibrated_weights(tmp_path / "weights.pth")
    job = small_job(tmp_path / "products", weights=weights, steps_per_epoch=2).as_dict()
    job["data"] |= {"products": 4, "views": 4}
    parsed = parse_job(job)
    split = load_split(parsed.data)
    history = fit(parsed, split, tmp_path, Silent())
    assert load_checkpoint(tmp_path).step == 2
    assert len(history) == 1
    bundle = export_checkpoint(load_checkpoint(tmp_path), split, tmp_path / "bundle")

    write_table(tmp_path / "gallery.csv", first_eight(split.test))
    embedder = OnnxEmbedder.open(bundle)
    source = csv_source(tmp_path / "gallery.csv", tmp_path / "products")
    build_gallery(source, embedder, tmp_path / "gallery")
    gallery = Gallery.open(tmp_path / "gallery", expected_bundle_id=bundle.bundle_id)

    app = create_app(Settings(), embedder=embedder, galleries={"products": gallery})
    asyncio.run(find_each(app, bundle.bundle_id, tmp_path / "products", split.test.paths[:8]))


async def find_each(app: FastAPI, bundle_id: str, root: Path, paths: tuple[str, ...]) -> None:
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        assert (await client.get("/ready")).status_code == 200
        for path in paths:
            data = (root / path).read_bytes()
            answer = await client.post("/search", files={"image": data}, data={"k": "3"})
            assert answer.status_code == 200, answer.text
            body = answer.json()
            assert body["bundle_id"] == bundle_id
            assert body["hits"][0]["key"] == path
            assert body["hits"][0]["score"] > 0.999
            assert body["hits"][0]["attributes"]["class"] == Path(path).parts[0]
            assert (await client.get(body["hits"][0]["image"])).content == data
