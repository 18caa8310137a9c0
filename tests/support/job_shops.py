"""A shop in a state folder, for the tests of jobs."""

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import GalleryError
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.ingest.build import BuildSettings, build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.models import JobModel
from kinlens.service.settings import Settings
from tests.support.seams import Job, JobManager, params_of, store_bundle
from tests.support.waiting import until
from tests.tiny import encoded, photo

TRAINER = Path(__file__).with_name("fake_trainer.py")
Content = dict[str, tuple[str, dict[str, object]]]


def write_photos(root: Path, classes: int = 6, each: int = 4) -> None:
    """Images of a class are one image with a little noise."""
    for number in range(classes):
        folder = root / f"class-{number}"
        folder.mkdir(parents=True)
        for copy in range(each):
            pixels = np.asarray(photo(number)).astype(np.int16)
            noise = np.random.default_rng(copy).integers(-6, 7, pixels.shape)
            noisy = Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))
            (folder / f"{copy}.png").write_bytes(encoded(noisy))


class JobShop:
    """A gallery `shop`, made with bundle `old`; the state folder knows bundle `new` as well."""

    def __init__(self, folder: Path, old: Bundle, new: Bundle, **settings: Any) -> None:
        self.old, self.new = old, new
        self.state = folder / "state"
        self.photos = folder / "pictures"
        self.path = self.state / "galleries" / "shop"
        write_photos(self.photos)
        self.build("shop")
        store_bundle(new.path, self.state / "bundles")
        chosen = {"bundle": old.path, "state": self.state, "training_command": self.trainer()}
        self.settings = Settings(**chosen | settings)
        self.manager = JobManager(self.settings)

    def reopen(self, **changes: Any) -> None:
        """Another manager, with these settings changed, watches the jobs until `close`."""
        self.manager.close()
        self.settings = self.settings.model_copy(update=changes)
        self.manager = JobManager(self.settings)
        self.manager.open()

    def close(self) -> None:
        for job in self.manager.store.active():
            self.manager.cancel(job.id)
        until(lambda: not self.manager.store.active())
        self.manager.close()

    def build(self, name: str) -> Path:
        path = self.state / "galleries" / name
        embedder = OnnxEmbedder.open(self.old)
        build_gallery(folder_source(self.photos), embedder, path, BuildSettings(name=name))
        return path

    def trainer(self, seconds: float = 0.05, epochs: int = 2) -> str:
        words = [sys.executable, str(TRAINER), str(self.new.path), str(seconds), str(epochs)]
        return shlex.join(words)

    def start(self, kind: Any, gallery: str = "shop", **params: Any) -> Job:
        return self.manager.start(gallery, params_of(kind, params), "test")

    def ended(self, job: Job) -> Job:
        """The job, once it has ended."""
        until(lambda: not self.manager.store.get(job.id).is_active)
        return self.manager.store.get(job.id)

    def succeeded(self, job: Job) -> dict[str, Any]:
        """What a job has found that must end well."""
        done = self.ended(job)
        assert done.state == "succeeded", (done, self.manager.log(job.id).text)
        assert done.report is not None
        return done.report

    def failed(self, job: Job) -> str:
        """Why a job failed that must."""
        done = self.ended(job)
        assert done.state == "failed", done
        return done.error or ""

    def gallery(self) -> Gallery:
        return Gallery.open(self.path)

    def content(self) -> Content:
        with contextlib.closing(self.gallery()) as gallery:
            return {item.key: (item.sha256, dict(item.attributes)) for item in gallery.items()}

    def bundle_id(self) -> str:
        with contextlib.closing(self.gallery()) as gallery:
            return gallery.bundle_id


def size_of(path: Path) -> int:
    """How many items a gallery has that is being made."""
    with (
        contextlib.suppress(GalleryError),
        contextlib.closing(Gallery.open(path, load_index=False)) as gallery,
    ):
        return gallery.size
    return 0


def processes_of(job: JobModel) -> list[int]:
    """The numbers of all processes of a job."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if f"KINLENS_JOB_ID={job.id}".encode() in environment.split(b"\0") and not is_zombie:
            found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]
