"""The shop demos on miniature trees in the layout of the official data sets."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from tests.tiny import encoded, photo
from tests.training.official_layouts import write_layout

ROOT = Path(__file__).parents[1]


def run(folder: Path, *words: object) -> "subprocess.CompletedProcess[str]":
    """Run the demo as `make` does, with its files below `folder`."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts/demo.py"), *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def demo(name: str, root: Path, bundle: Bundle, folder: Path) -> "subprocess.CompletedProcess[str]":
    flags = ("--bundle", bundle.path, "--allow-partial", "--check")
    return run(folder, name, "--root", root, *flags)


def write_grocery(root: Path) -> Path:
    """Three classes of groceries: names, a train and a test list, and their images."""
    heads = ("Class Name (str)", "Class ID (int)", "Coarse Class Name (str)", "Coarse Class ID")
    rows = [",".join(heads)]
    lists: dict[str, list[str]] = {"train": [], "test": []}
    for number, name in enumerate(("Gala", "Lime", "Milk")):
        rows.append(f"{name},{number},{name[0]}-kind,{number}")
        for part, views in (("train", 3), ("test", 1)):
            for view in range(views):
                path = f"{part}/Fruit/{name}/{name}_{view:03d}.jpg"
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(encoded(photo(number, (64, 48)), "JPEG"))
                lists[part].append(f"{path}, {number}, {number}")
    (root / "classes.csv").write_text("\n".join(rows) + "\n")
    for part, lines in lists.items():
        (root / f"{part}.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize(
    ("name", "kind", "published"),
    [("sop", "sop", "96.2"), pytest.param("grocery", "", "", marks=pytest.mark.long)],
)
def test_a_demo_goes_from_the_official_folder_to_recall_beside_the_paper(
    name: str, kind: str, published: str, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    if kind:
        write_layout(kind, root, classes=3, images=4)
    else:
        write_grocery(root)
    done = demo(name, root, tiny_bundle, tmp_path)
    # A network without training finds little: what is asked for is the whole road and its table.
    assert "R@1" in done.stdout, done.stdout + done.stderr
    assert "this run" in done.stdout
    assert published in done.stdout
    assert "error" not in done.stdout
    offered = [Path(line) for line in done.stdout.splitlines() if line.startswith(str(root))]
    assert offered
    assert all(path.is_file() for path in offered)


def interrupted(folder: Path, number: int, *words: object) -> str:
    """What the demo prints that gets this signal, with its commands, as indexing begins."""
    with subprocess.Popen(
        [sys.executable, str(ROOT / "scripts/demo.py"), *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("$ kinlens-index build"):
                os.killpg(process.pid, number)
    return "".join(lines)


def test_the_demo_runs_on_own_photos_and_continues_after_any_stop(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    for number in range(12):
        path = tmp_path / "shop" / f"mug-{number // 3}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(photo(number), "JPEG", quality=95))
    path.with_name("damaged.jpg").write_bytes(b"no image")
    words = ("--check", "--images", tmp_path / "shop", "--bundle", tiny_bundle.path)
    assert "The same command continues" in interrupted(tmp_path, signal.SIGINT, *words)
    assert "The previous demo was stopped" in interrupted(tmp_path, signal.SIGKILL, *words)
    done = run(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The previous demo was stopped" in done.stdout
    assert "12 of 12 photos find themselves" in done.stdout
    assert not (tmp_path / ".kinlens/demo/unfinished.txt").exists()


def test_a_port_that_is_taken_is_told_before_anything_is_trained(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(tmp_path, "--port", port)
    assert done.returncode == 1
    assert f"Port {port} is in use" in done.stdout
    assert "PORT=8001" in done.stdout
    assert "$ kinlens-" not in done.stdout, "no command was begun"
