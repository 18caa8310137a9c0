"""Memory of a service process under load, and its throughput.

    python benchmarks/sizing.py [--backbones mobilenet_v2 resnet50] [--seconds 8]

`kinlens-serve` with a network at 224 px in fp32 and a gallery of 10,000 items of 128 dimensions,
loaded with new images by 16 busy connections. Memory is that of the service with all its processes,
in MB: `own` is memory that the kernel cannot reclaim (Pss_Anon), shared pages counted once. The
last column is the memory of one search thread: the difference of the first two rows, divided by
the difference of their search threads.
"""

import tempfile
from pathlib import Path

from harness import heading, load, options, row, sample_images, serving
from search import IMAGES, gallery, small_bundle

ITEMS, CONNECTIONS = 10_000, 16
FORMS = {
    "1 search thread": ("KINLENS_SEARCH_THREADS=1",),
    "4 search threads, as by default on two cores": ("KINLENS_SEARCH_THREADS=4",),
    "--workers 2": ("KINLENS_WORKERS=2",),
}


def main() -> None:
    args = options(__doc__, backbones=["mobilenet_v2", "resnet50"], seconds=8.0)
    with tempfile.TemporaryDirectory() as name:
        images = sample_images(Path(name) / "images", IMAGES)
        tables = [measured(Path(name) / trunk, trunk, images, args.seconds)
                  for trunk in args.backbones]  # fmt: skip
    heading("trunk", "form", "searches/s", "own MB", "MB per search thread")
    for table in tables:
        for cells in table:
            row(*cells)


def measured(folder: Path, backbone: str, images: Path, seconds: float) -> list[list[object]]:
    """A row for each form of the service."""
    folder.mkdir()
    bundle = small_bundle(folder, backbone)
    made = gallery(folder / "gallery", bundle, ITEMS)
    found: list[list[object]] = []
    for form, variables in FORMS.items():
        with serving(bundle, made, prefix=("env", *variables)) as server:
            load(server.url, images, CONNECTIONS, min(3, seconds))
            figures = load(server.url, images, CONNECTIONS, seconds, "--start", 100_000)
            found.append([backbone, form, figures["qps"], own_mb(server.pid), ""])
    found[1][-1] = (float(str(found[1][3])) - float(str(found[0][3]))) / 3
    return found


def own_mb(pid: int) -> float:
    """Memory of a process and its descendants, without file pages."""
    tasks = [*Path(f"/proc/{pid}/task").glob("*/children")]
    below = {int(child) for task in tasks for child in task.read_text().split()}
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return int(fields["Pss_Anon"].split()[0]) * 1024 / 1e6 + sum(map(own_mb, below))


if __name__ == "__main__":
    main()
