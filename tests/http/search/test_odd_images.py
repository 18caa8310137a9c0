"""Every broken or odd image gets its status, and the next good one is answered."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx

from kinlens.embedder.fake import FakeEmbedder
from tests.support.odd_images import (
    PROBLEMS,
    STREET_PHOTO,
    OddImage,
    fine,
    odd_images,
    street_photo,
)
from tests.support.servers import (
    DEFAULTS,
    FakeGallery,
    Running,
    create_app,
    run,
    settings_of,
    workers_of,
)
from tests.tiny import encoded

PATIENT_MS = 120_000
GOOD = OddImage("good", encoded(street_photo()), same=True)


@contextmanager
def started(**more: object) -> Iterator[Running]:
    """A service that decodes in processes, perhaps with more settings; item n is photo n."""
    embedder = FakeEmbedder()
    gallery = FakeGallery(embedder, [encoded(street_photo(n)) for n in range(12)])
    times = dict.fromkeys(("decode_timeout_ms", "request_timeout_ms"), PATIENT_MS)
    settings = settings_of(**DEFAULTS | times | more)
    service = run(create_app(settings, embedder, {"shop": gallery}))
    service.client.timeout = httpx.Timeout(PATIENT_MS / 1e3)
    yield service
    service.close()


def send(service: Running, image: OddImage) -> httpx.Response:
    files = {"image": (image.filename, image.data, "image/jpeg")}
    return service.client.post("/search", files=files, data={"k": "3"})


def fault_of(image: OddImage, response: httpx.Response) -> str | None:
    """What is wrong with the answer."""
    body = response.json()
    if response.status_code != image.status:
        return f"{response.status_code} instead of {image.status}: {body.get('detail')}"
    if image.status != 200:
        expected = f"urn:kinlens:problem:{PROBLEMS[image.status]}"
        return None if body["type"] == expected else f"{body['type']} instead of {expected}"
    best = body["hits"][0]
    if image.same and (best["id"] != STREET_PHOTO or best["score"] < 0.99):
        return f"item {best['id']} with {best['score']:.4f}"
    return None


def test_every_odd_image_gets_its_status() -> None:
    faults: dict[str, str | None] = {}
    assert len(odd_images()) >= 200
    assert {image.status for image in odd_images()} == {200, *PROBLEMS}
    assert sum(image.same for image in odd_images()) >= 100
    with started() as service:
        for number, image in enumerate(odd_images()):
            faults[image.name] = fault_of(image, send(service, image))
            if image.status != 200 and faults[image.name] is None:
                after = replace(GOOD, data=GOOD.data + number.to_bytes(4, "big"))  # in no cache
                faults[image.name] = fault_of(after, send(service, after))
        workers = workers_of(service)
        assert (workers.restarts, workers.kills) == (0, 0)
        assert service.runtime.search_threads.waiting == 0
        assert service.client.get("/ready").status_code == 200
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_an_image_that_claims_65535_px_costs_no_memory() -> None:
    """From the first one on: the process is new, and has loaded the decoders of rare formats."""
    claims = [i for i in odd_images() if i.name.startswith("claims-65535x65535")]
    assert len(claims) == 7
    assert all(len(image.data) < 2000 for image in claims)
    with started(search_threads=1) as service:
        for kind in ("JPEG", "AVIF", "HEIF"):
            good = replace(GOOD, data=fine(street_photo(), kind))
            assert fault_of(good, send(service, good)) is None
        before = peak_bytes(service)
        for number in range(20):
            for image in claims:
                sent = replace(image, data=image.data + number.to_bytes(4, "big"))
                assert fault_of(image, send(service, sent)) is None
        assert workers_of(service).restarts == 0
        assert peak_bytes(service) - before < 16 * 2**20


def peak_bytes(service: Running) -> int:
    """The most memory that the service and its decoding processes have had at any time.

    Of the latter it is address space, which counts what was asked for and never written to.
    """
    peaks = {"self": "VmHWM:", **dict.fromkeys(workers_of(service).pids, "VmPeak:")}
    lines = {process: Path(f"/proc/{process}/status").read_text() for process in peaks}
    return sum(1024 * int(lines[p].split(name)[1].split()[0]) for p, name in peaks.items())
