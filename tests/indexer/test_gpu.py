"""Search on a GPU: the same laws on a fake one and, where there is one, on a real one."""

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest

from kinlens.embedder.errors import PlanError, ProviderError
from kinlens.indexer.entries import Entry
from kinlens.indexer.galleries import gpu_memory
from kinlens.indexer.gallery import Gallery
from kinlens.indexer.index import gpu
from kinlens.indexer.index.gpu import MAX_K, MAX_ROWS, failed_trial, why_no_gpu
from kinlens.indexer.index.plan import IndexSettings
from kinlens.indexer.types import Ids, Scores, SearchOptions
from tests.indexer.conftest import Run
from tests.indexer.oracle import BUNDLE, bitmap, clumped, units
from tests.support.fake_gpu import SETTINGS, Device, fake_gpu
from tests.support.recall import recall_at
from tests.support.seams import Effort, SegmentIndex, plan_compaction, plan_index
from tests.support.waiting import until

N, DIM = 6000, 32
VECTORS = clumped(N + 2000, DIM)
QUERIES = clumped(200, DIM, seed=9)
TARGET = 0.95
EFFORT = Effort(64, 16)
KINDS = {"flat": "cuda", "hnsw": "cpu", "ivf-pq": "cuda"}
"""Every kind, and the device that it is made for; all are searched on a GPU."""
SHORT_AND_LONG = ["flat", pytest.param("ivf-pq", marks=pytest.mark.long)]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    if request.param == "fake":
        yield fake_gpu(monkeypatch)
    elif why := why_no_gpu():
        pytest.skip(why)
    else:
        yield None
    gc.collect()


@pytest.fixture(autouse=True)
def _small_galleries_are_searched_as_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinlens.indexer.index.faiss.EXACT_BELOW", 100)
    monkeypatch.setattr("kinlens.indexer.index.faiss.LEAST_BYTES", 0)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU of which everything is known and to which anything can happen."""
    return fake_gpu(monkeypatch)


def index_of(kind: str, count: int = N, before: Callable[[], object] = int) -> SegmentIndex:
    """An index on the GPU; `before` is called when it is built and not there yet."""
    plan = plan_index(count, DIM, IndexSettings(kind, device=KINDS[kind]))
    index = SegmentIndex.build(plan, VECTORS[:count])
    before()
    index.use_gpu("The index", plan.parameters)
    assert index.gpu.wait(60)
    return index


def truth_of(index: SegmentIndex, k: int = 10) -> tuple[Scores, Ids]:
    return index.exact(QUERIES, k)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_answers_on_the_gpu_with_scores_of_full_precision(device, kind: str) -> None:
    with closing(index_of(kind)) as index:
        assert index.is_on_gpu
        scores, found = index.search(QUERIES, 10, EFFORT)
        truth = truth_of(index)
        assert recall_at(found, truth[1]) >= (0.999 if kind in ("flat", "hnsw") else TARGET)
        products = np.einsum("qd,qkd->qk", QUERIES, index.vectors(found))
        np.testing.assert_allclose(scores, products, atol=2e-6)
        for part in (1.0, 0.75, 0.02):
            allowed = bitmap(np.random.default_rng(3).random(N) < part)
            filtered = index.search(QUERIES, 10, EFFORT, allowed)[1]
            assert recall_at(filtered, index.exact(QUERIES, 10, allowed)[1]) >= TARGET
            assert (allowed[filtered >> 3] >> (filtered & 7) & 1).all()
        for k in (MAX_K, MAX_K + 1, 9999):  # more than a GPU selects come from the CPU
            scores, many = index.search(QUERIES[:3], k, Effort(512, 16))
            assert many.shape == (3, min(k, N))
            assert (np.diff(scores, axis=1) <= 0).all()
            assert recall_at(many, truth_of(index, k)[1][:3]) >= 0.9
        assert index.search(QUERIES[:0], 10, EFFORT)[1].shape == (0, 10)

        def ask(row: int) -> Ids:
            return index.search(QUERIES[row : row + 1], 8 + row % 3, EFFORT)[1]

        with ThreadPoolExecutor(16) as pool:  # each gets its own rows, as many as it asked for
            for row, alone in enumerate(pool.map(ask, range(len(QUERIES)))):
                assert alone.shape == (1, 8 + row % 3)
                assert recall_at(alone[:, :8], found[row : row + 1, :8]) >= 0.85


@pytest.mark.parametrize("kind", SHORT_AND_LONG)
def test_the_memory_of_the_gpu_is_freed_after_the_last_search(device: object, kind: str) -> None:
    index_of(kind, 1000).close()  # CUDA keeps what it has loaded once
    gc.collect()
    before = gpu_memory().free_mb
    for ends in ("closed", "dropped"):
        index = index_of(kind, 1000)
        index.search(QUERIES, 10, EFFORT)
        assert gpu_memory().free_mb < before
        if ends == "closed":
            index.close()
            assert recall_at(index.search(QUERIES, 10, EFFORT)[1], truth_of(index)[1]) >= TARGET
        del index
        gc.collect()
        until(lambda: gpu_memory().free_mb >= before - 16)


def made_for_gpu(path: Path, kind: str) -> Gallery:
    """A gallery of 3,000 items with an index that was built for a GPU."""
    made = Gallery.create(path, name="shop", bundle_id=BUNDLE, dim=DIM)
    made.add(item(number) for number in range(3000))
    made.compact(IndexSettings(kind, device="cuda", target_recall=TARGET))
    return made


@pytest.fixture(params=SHORT_AND_LONG)
def gallery(request: pytest.FixtureRequest, device: object, tmp_path: Path) -> Gallery:
    """Such a gallery, opened on the GPU."""
    made_for_gpu(tmp_path / "shop", request.param).close()
    return Gallery.open(tmp_path / "shop", device="cuda")


def item(number: int) -> Entry:
    return Entry(f"k{number}", VECTORS[number], f"{number:064x}", {"n": number})


def recall_of(gallery: Gallery) -> float:
    truth = gallery.nearest(QUERIES, 10, SearchOptions(exact=True))[1]
    return recall_at(gallery.nearest(QUERIES, 10)[1], truth)


def test_a_gallery_of_a_gpu_is_changed_compacted_and_served_there(gallery: Gallery) -> None:
    with closing(gallery):
        place = gallery.index_location()
        assert (place.device, place.reason) == ("cuda", None)
        assert place.gpu_memory_mb > 0
        assert recall_of(gallery) >= TARGET
        gallery.remove(f"k{number}" for number in range(0, 3000, 9))
        gallery.add(item(number) for number in range(3000, 3200))
        assert recall_of(gallery) >= TARGET
        report = gallery.compact(keep_removed_s=86_400.0)
        made = report.manifest
        assert (made.kind, made.settings.device) == (place.kind, "cuda")
        if made.kind != "flat":  # each device has an effort of its own
            assert min(made.recall, made.gpu.recall) >= TARGET
            assert (made.tuned.on_gpu, made.tuned.value) == (made.gpu.effort, made.effort)
        until(lambda: gallery.facts().segment.seq == made.seq)
        now = gallery.index_location()
        assert now.device == "cuda"
        assert recall_of(gallery) >= TARGET
        keys = {hit.key for hits in gallery.search(VECTORS[:50], 10) for hit in hits}
        assert not keys & {f"k{number}" for number in range(0, 3000, 9)}


def test_a_gallery_is_served_and_compacted_without_a_gpu_and_later_with_one_again(
    gallery: Gallery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind, path = gallery.index_location(), gallery.path
    gallery.close()
    with monkeypatch.context() as without:
        without.setattr(gpu, "failed_trial", lambda: "the driver is missing")
        with closing(Gallery.open(path, device="cuda")) as served:
            place = served.index_location()
            assert place.device == "cpu"
            assert "the driver is missing" in str(place.reason)
            assert "is searched on the CPU" in caplog.text
            assert recall_of(served) >= TARGET
            served.remove(["k4"])
            made = served.compact(keep_removed_s=0.0).manifest
            assert made.gpu is None or kind.kind == "ivf-pq"
            assert "The index is built for the CPU" in caplog.text
            assert recall_of(served) >= TARGET
    with closing(Gallery.open(path, device="cuda")) as back:
        assert recall_of(back) >= TARGET
        back.remove(["k5"])
        made = back.compact(keep_removed_s=0.0, from_scratch=True).manifest
        assert made.kind == kind.kind


def test_the_command_line_builds_for_a_gpu_and_says_where_model_and_index_are(
    device: object, run: Run, shop: Path, tmp_path: Path
) -> None:
    words = ("build", shop, "--bundle", "b", "--out", tmp_path / "g", "--index-device", "cuda")
    built = run(*words)
    assert built.exit_code == 0, built.output
    assert "model on " in built.stdout
    assert "the GPU (--index-device cuda)" in built.stdout
    assert "MB free" in built.stdout
    planned = run("plan", 10_000_000, 512, "--index-device", "cuda", "--json")
    plan = json.loads(planned.stdout)["plans"][0]
    assert 0 < plan["gpu_memory_mb"] < plan["gpu_free_mb"]
    words = (tmp_path / "g", "--image", shop / "cup/a.png", "--bundle", "b")
    found = run("search", *words, "--index-device", "cuda")
    assert "cup/a.png" in found.stdout


# What can happen to a GPU. A real one cannot be asked to do so.


def test_without_gpu_support_every_way_to_a_gpu_is_refused_by_name(fake, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "failed_trial", lambda: "no driver")
    with pytest.raises(ProviderError, match=r"cannot be used: no driver.*nvidia-smi"):
        gpu_memory()
    monkeypatch.setattr(faiss, "get_compile_options", lambda: "OPTIMIZE GPU")
    with pytest.raises(ProviderError, match=r"without cuVS.*kinlens\[gpu\]"):
        gpu_memory()
    monkeypatch.delattr(faiss, "StandardGpuResources")
    with pytest.raises(PlanError, match=r"no GPU support.*--index-device cpu"):
        plan_index(100, 16, IndexSettings(device="cuda"))
    with pytest.raises(ProviderError, match=r"no GPU support.*kinlens\[gpu\]"):
        gpu_memory()
    index = SegmentIndex.open("flat", units(100), None)
    index.use_gpu("The index", {})
    assert index.gpu.wait(60)
    assert not index.is_on_gpu
    assert index.search(units(1), 1, Effort(0))[1].tolist() == [[0]]


TRIALS = {
    "pass": None,
    "import sys; sys.exit('faiss finds no NVIDIA GPU')": "faiss finds no NVIDIA GPU",
    "raise RuntimeError('Error in f() at a.cu:1: Error: CUDA error 35')": "CUDA error 35",
    "import os; os.abort()": "a test search was killed by signal 6",
    "import time; time.sleep(60)": "a test search did not end within 1 s",
}


def test_the_first_search_may_fail_die_or_hang_in_a_process_of_its_own(monkeypatch) -> None:
    for program, fault in TRIALS.items():
        monkeypatch.setattr(gpu, "TRIAL", program)
        monkeypatch.setattr(gpu, "TRIAL_S", 1.0 if "sleep" in program else 60.0)
        failed_trial.cache_clear()
        try:
            assert failed_trial() == fault
        finally:
            failed_trial.cache_clear()


def test_while_the_gpu_lacks_memory_or_fails_the_cpu_answers_within_the_same_search(
    fake: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "RETRY_S", 0.2)
    taken = fake.free
    index = index_of("ivf-pq", before=lambda: setattr(fake, "free", 2**20))
    assert not index.is_on_gpu
    lacks = index.gpu.reason
    assert "MB of GPU memory, of which 1 MB are free" in str(lacks)
    assert recall_at(index.search(QUERIES, 10, EFFORT)[1], truth_of(index)[1]) >= TARGET
    fake.free = taken
    until(lambda: index.search(QUERIES, 10, EFFORT) and index.is_on_gpu)
    assert index.gpu.reason is None
    fake.breaks = True
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(index.search, QUERIES, 10, EFFORT) for _ in range(16)]
        for answer in answers:
            assert recall_at(answer.result()[1], truth_of(index)[1]) >= TARGET
    assert not index.is_on_gpu
    warned = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    reasons = (lacks, "CUDA error 719 launch failed")
    assert warned == [f"The index is searched on the CPU: {reason}" for reason in reasons]
    fake.breaks = False
    until(lambda: index.search(QUERIES, 10, EFFORT) and index.is_on_gpu)
    index.close()


def test_a_gpu_that_hangs_costs_a_few_seconds_once(fake, monkeypatch, caplog) -> None:
    monkeypatch.setattr(gpu, "SEARCH_S", 0.3)
    monkeypatch.setattr(gpu, "RETRY_S", 0.0)
    index = index_of("flat")
    fake.gate.clear()
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: index.search(QUERIES, 10, EFFORT)[1], range(16)):
            assert (found == truth_of(index)[1]).all()
    assert time.monotonic() - started < 20
    searches = fake.searches
    assert (index.search(QUERIES, 10, EFFORT)[1] == truth_of(index)[1]).all()
    assert "took more than 0.3 s" in caplog.text
    index.close()
    assert fake.searches == searches
    fake.gate.set()


def test_the_plan_counts_the_memory_of_the_gpu_and_of_the_machine(monkeypatch) -> None:
    def planned(n: int, free_gb: int, memory_mb: float = 1e6, **changes: object) -> str:
        device = fake_gpu(monkeypatch)
        device.free = free_gb * 2**30
        settings = IndexSettings(memory_mb=memory_mb, device="cuda")
        return plan_index(n, 512, replace(settings, **changes)).kind

    assert planned(500_000, 80) == "flat"
    assert planned(10_000_000, 80) == "ivf-pq"
    assert planned(10_000_000, 16) == "flat"  # which needs less of the GPU
    assert planned(10_000_000, 80, memory_mb=3_000) == "flat"  # and of the machine
    assert planned(10_000_000, 80, target_recall=1.0) == "flat"
    with pytest.raises(PlanError, match=r"1\d,\d{3} MB of the GPU, but there are only 8,192 MB"):
        planned(10_000_000, 10)
    with pytest.raises(PlanError, match=r"flat .*of the GPU, but there are only 2,048 MB"):
        planned(10_000_000, 4, kind="flat")
    with pytest.raises(PlanError, match=r"hnsw cannot be built on cuda.*--index-device cpu"):
        planned(1000, 80, kind="hnsw")
    flat = IndexSettings("flat", memory_mb=8000, device="cuda")
    plan = plan_compaction(10_000_000, 512, flat)  # which only the GPU can hold
    assert (plan.kind, plan.device) == ("flat", "cuda")
    with pytest.raises(PlanError, match="flat"):
        plan_compaction(10_000_000, 512, replace(flat, device="cpu"))
    halves = plan_index(10_000_000, 512, IndexSettings(memory_mb=1e6, device="cuda"), "fp16")
    assert halves.kind == "ivf-pq"


def test_a_gallery_of_a_gpu_without_memory_is_compacted_for_the_cpu(fake, tmp_path, caplog) -> None:
    with closing(made_for_gpu(tmp_path / "shop", "ivf-pq")) as lists:
        total, fake.total = fake.total, 2**31 + 2**18  # little more than what is reserved
        lists.remove(["k7"])
        made = lists.compact().manifest
        assert (made.kind, made.settings.device) == ("ivf-pq", "cuda")
        assert "The index is built for the CPU" in caplog.text
        assert recall_of(lists) >= TARGET
        fake.total = total


def test_a_gallery_with_a_graph_of_an_earlier_version_is_compared_until_it_is_compacted(
    fake, tmp_path
) -> None:
    made_for_gpu(tmp_path / "shop", "ivf-pq").close()
    [file] = (tmp_path / "shop").glob("versions/*/segments/*/segment.json")
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps({**manifest, "kind": "cagra"}))
    with closing(Gallery.open(tmp_path / "shop", device="cuda")) as opened:
        assert opened.index_location().kind == "flat"
        assert recall_of(opened) == 1.0
        opened.remove(["k7"])
        assert opened.compact().manifest.kind == "flat"  # as auto chooses


def test_queue_time_is_not_mistaken_for_a_gpu_that_hangs(fake, monkeypatch) -> None:
    monkeypatch.setattr(gpu, "SEARCH_S", 0.3)
    index = index_of("flat")
    search = fake.search
    monkeypatch.setattr(fake, "search", lambda rows: (time.sleep(0.1), search(rows)))
    with ThreadPoolExecutor(8) as pool:  # 800 queries in 13 parts, 1.3 seconds for the last
        for found in pool.map(lambda _: index.search(QUERIES[:100], 10, EFFORT)[1], range(8)):
            assert (found == truth_of(index)[1][:100]).all()
    assert max(fake.rows) == MAX_ROWS
    assert index.is_on_gpu
    index.close()


def test_a_small_index_stays_on_the_cpu(fake: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kinlens.indexer.index.faiss.LEAST_BYTES", 4 * N * DIM + 1)
    index = SegmentIndex.open("flat", VECTORS[:N], None)
    index.use_gpu("The index", {})
    assert index.gpu is None
    assert (index.search(QUERIES, 10, EFFORT)[1] == truth_of(index)[1]).all()
    assert not fake.searches


def test_the_fields_of_the_fake_are_those_of_the_wheel() -> None:
    if not hasattr(faiss, "GpuIndexFlatIP"):
        pytest.skip("faiss-gpu-cuvs is not installed (make install-gpu)")
    for name, fields in SETTINGS.items():
        real = getattr(faiss, name)()
        assert {field: getattr(real, field) for field in fields} == fields
