"""What the work of a job is given."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embedder.session import OnnxEmbedder, SessionSettings
from indexer.gallery import Gallery
from indexer.ingest.rebuild import ReadImage
from indexer.ingest.sources import ANY_SIZE, Record, read_image
from indexer.types import Item
from service.galleries.pictures import PictureFolder
from service.jobs.folders import JobFolders
from service.jobs.params import Params
from service.jobs.plan import Plan
from service.jobs.record import Job
from service.jobs.steps import Steps
from service.jobs.store import JobStore


@dataclass(frozen=True, slots=True)
class Context:
    """A job, what it was told, and where it keeps its files."""

    job: Job
    params: Params
    plan: Plan
    folders: JobFolders
    store: JobStore
    steps: Steps

    def open_embedder(self, bundle: Path) -> OnnxEmbedder:
        """A bundle in a session like that of the service, for pictures of any size.

        Under precision auto the machine of the job chooses, as that of the service did.

        Raises: BundleError, also if it lacks the precision that the service asks for.
        """
        plan = self.plan
        settings = SessionSettings(
            plan.device, plan.threads, plan.allow_cpu_fallback, plan.precision
        )
        return OnnxEmbedder.open(bundle, settings, ANY_SIZE)

    def read_image(self, gallery: Gallery) -> ReadImage:
        """How to read the picture of an item: from the image root, or as it was uploaded."""
        root = self.plan.image_root or gallery.image_root
        pictures = PictureFolder(self.plan.gallery)

        def read(item: Item | Record) -> bytes:
            if item.path:
                return read_image(root, item.path, ANY_SIZE.max_bytes)
            return pictures.read(item.sha256)

        return read

    def tell(self, **found: Any) -> None:
        """Add to the report of the job, in the store and in its folder."""
        report = (self.store.get(self.job.id).report or {}) | found
        self.store.report(self.job.id, report)
        self.folders.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
