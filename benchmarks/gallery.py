"""What a gallery costs beside raw FAISS, hnswlib and usearch, from 10,000 to 10,000,000 items.

    python benchmarks/gallery.py [--sizes 10k,100k,1m,10m] [--dims 128,512] [--full]

Vectors: benchmarks/clustered.py. Ceiling of searches: raw FAISS, with the gallery's own index file
read into memory and searched with the gallery's tuned parameters, in rounds that take turns with
the gallery's. `nearest` is its counterpart; `search` fetches keys and attributes as well. hnswlib
and usearch search with the smallest ef that reaches the gallery's recall@10, or 0.98 where the
gallery is exact, up to 1,000,000 vectors (of 512 numbers only with --full). One query runs on one
thread, a batch on all cores.

Recall is that of held-out queries against a comparison with every vector. Memory: resident growth
of a fresh process that opens the gallery and answers 1,000 queries, over the size of the codes that
the index compares with. Ceiling of a build from images: a bare loop (gallery_images.py).

10m is measured with 128 numbers alone. The sizes that do not fit the machine are refused before.
On 2 cores 10k and 100k take minutes, 1m and 10m about half an hour each; --parts chooses.
"""

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from clustered import clustered_queries
from gallery_changes import measure_changes, measure_compaction
from gallery_contest import of_faiss, of_gallery, peers
from gallery_filters import QUERIES, measure_filters, selections
from gallery_images import measure_images
from gallery_make import K, Setting, build, codes_mb, label, refusal, segment_folder
from gallery_process import FRESH, answer, drop_cached_pages, fresh, serve
from gallery_report import Report, Target
from gallery_speed import compare
from gallery_truth import true_neighbours

from embedder.types import Embeddings
from indexer.gallery import Gallery
from indexer.index.segment import read_manifest

SIZES = {"10k": 10_000, "100k": 100_000, "1m": 1_000_000, "10m": 10_000_000}
PARTS = ("process", "speed", "peers", "filters", "changes", "compaction", "images")
LARGEST_FOR_PEERS = 1_000_000
LARGEST_FOR_512 = 1_000_000
SLOWEST_TO_COMPACT_S = 1200.0
LEAST_CODES_MB = 64
"""Below this the fixed cost of a process hides what an index takes."""

RECALL = Target(0.98)
MEMORY = Target(1.2, is_upper=True)
FIRST_ANSWER_S = Target(1.0, is_upper=True)
GROWTH_OF_P50 = Target(3.0, is_upper=True)


def main() -> None:
    if sys.argv[1:2] == [FRESH]:
        serve(sys.argv[2:])
        return
    options = parse()
    report = Report()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="gallery-benchmark-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for setting in settings(options, folder):
            measure(setting, options, report)
        compare_sizes(report)
        if "images" in options.parts:
            measure_images(folder / "images", report)
    finally:
        if not options.folder:
            shutil.rmtree(folder)
        elif not options.keep:
            shutil.rmtree(folder / "images", ignore_errors=True)
        if options.json:
            report.write_json(options.json)
    if options.markdown:
        print(f"\n{report.markdown()}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    words = lambda text: text.lower().split(",")
    parser.add_argument("--sizes", type=words, default=["10k", "100k"])
    parser.add_argument("--dims", type=lambda text: [int(word) for word in words(text)])
    parser.add_argument("--parts", type=words, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--full", action="store_true", help="peers also at 1m x 512")
    parser.add_argument("--index", default="auto", help="the kind of index, in place of the plan's")
    parser.add_argument("--memory-mb", type=float, help="what the plan may use")
    parser.add_argument("--folder", type=Path, help="where galleries are made")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="with --folder: galleries that were not changed, to use again",
    )
    parser.add_argument("--json", type=Path, help="file to write all figures to")
    parser.add_argument("--markdown", action="store_true", help="print one table at the end")
    options = parser.parse_args()
    options.dims = options.dims or [128, 512]
    if unknown := (set(options.sizes) - set(SIZES)) | (set(options.parts) - set(PARTS)):
        parser.error(f"{min(unknown)} is none of {', '.join((*SIZES, *PARTS))}")
    return options


def settings(options: argparse.Namespace, folder: Path) -> list[Setting]:
    return [
        Setting(SIZES[size], dim, folder, options.index, options.memory_mb)
        for size in options.sizes
        for dim in options.dims
        if SIZES[size] <= LARGEST_FOR_512 or dim <= 128
    ]


def measure(setting: Setting, options: argparse.Namespace, report: Report) -> None:
    """All figures of one gallery; its files go afterwards."""
    try:
        _measure(setting, options, report)
    finally:
        # Changes make it another gallery than the one that was built.
        if not options.keep or {"changes", "compaction"} & set(options.parts):
            shutil.rmtree(setting.path, ignore_errors=True)


def _measure(setting: Setting, options: argparse.Namespace, report: Report) -> None:
    report.begin(str(setting))
    with_peers = "peers" in options.parts and has_peers(setting, options.full)
    if reason := refusal(setting, with_peers):
        report.add("index", f"refused: {reason}")
        return
    if with_peers and not all(map(importlib.util.find_spec, ("hnswlib", "usearch"))):
        report.add("peers", "skipped: hnswlib and usearch come with the extra `bench`")
        with_peers = False
    build_s = make(setting, report)
    if "process" in options.parts:
        measure_process(setting, report)
    queries = clustered_queries(setting.n, setting.dim)
    if {"speed", "filters"} & set(options.parts):
        measure_searches(setting, queries, options.parts, with_peers, report)
    if "changes" in options.parts:
        measure_changes(setting, queries, report)
    if "compaction" in options.parts and build_s <= SLOWEST_TO_COMPACT_S:
        measure_compaction(setting, queries, report)
    elif "compaction" in options.parts:
        report.add("compaction", f"skipped: a build takes {build_s:,.0f} s")


def has_peers(setting: Setting, is_full: bool) -> bool:
    return setting.n <= LARGEST_FOR_PEERS and (
        is_full or setting.n * setting.dim <= LARGEST_FOR_PEERS * 128
    )


def make(setting: Setting, report: Report) -> float:
    """Build the gallery unless it was kept; returns the seconds."""
    seconds = 0.0
    if not setting.path.exists():
        made = fresh(build, setting)
        seconds = made["seconds"]
        report.add("build from vectors", seconds, "s")
        report.add("build: vectors/s", setting.n / seconds)
        report.add("build: peak memory", made["peak_mb"], "MB")
    manifest = read_manifest(segment_folder(setting))
    report.add("index", manifest.kind)
    report.add("index: efSearch or nprobe", manifest.effort)
    report.add("index: k_factor", manifest.k_factor)
    return seconds


def measure_process(setting: Setting, report: Report) -> None:
    """Memory and start, in fresh processes; nobody else has the gallery open."""
    drop_cached_pages(setting.path)
    cold = fresh(answer, setting)
    warm = fresh(answer, setting)
    codes = codes_mb(setting)
    report.add("codes", codes, "MB")
    bounded = codes >= LEAST_CODES_MB
    for name, words in (("VmRSS", "all"), ("RssAnon", "its own"), ("RssFile", "pages of files")):
        target = MEMORY if bounded and name == "VmRSS" else None
        report.add(f"memory / codes: {words} ({name})", warm[name] / codes, "", target)
    without = (warm["VmRSS"] - warm["vectors"]) / codes
    report.add("memory / codes: all but the mapped vectors behind them", without)
    target = FIRST_ANSWER_S if setting.n <= SIZES["1m"] else None
    report.add("open to first answer", warm["first_answer_s"], "s", target)
    report.add("open to first answer, files not cached", cold["first_answer_s"], "s")


def measure_searches(
    setting: Setting, queries: Embeddings, parts: list[str], with_peers: bool, report: Report
) -> None:
    truth = true_neighbours(setting.n, setting.dim, queries, K)[""]
    gallery = Gallery.open(setting.path)
    if "speed" in parts:
        ours = of_gallery(gallery, queries, truth)
        contestants = [*ours, of_faiss(setting, queries, truth)]
        if with_peers:
            contestants += peers(setting, queries, truth, min(ours[0].recall, RECALL.bound))
        for contestant in contestants:
            target = RECALL if contestant.name in ("nearest", "search") else None
            report.add(f"recall@{K}, {contestant.name}", contestant.recall, "", target)
            if contestant.build_s is not None and contestant.effort is not None:
                report.add(f"{contestant.name}: build", contestant.build_s, "s")
                report.add(f"{contestant.name}: ef", contestant.effort)
        compare(contestants, queries, report)
        del contestants
    if "filters" in parts:
        chosen = queries[:QUERIES]
        among = true_neighbours(setting.n, setting.dim, chosen, K, selections(setting.n))
        measure_filters(gallery, chosen, among, report)
    gallery.close()


def compare_sizes(report: Report) -> None:
    """How p50 grows from 100,000 to 10,000,000."""
    small, large = (label(SIZES[size], 128) for size in ("100k", "10m"))
    name = "one query, nearest: p50"
    before, after = report.value(small, name), report.value(large, name)
    if before is not None and after is not None:
        report.begin(f"{large} against {small}")
        report.add("p50, growth", after / before, "", GROWTH_OF_P50)


if __name__ == "__main__":
    main()
