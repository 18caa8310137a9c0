"""The notebooks of examples/, run from the first cell to the last in a kernel of their own.

Their trainings are shortened, except under `long`. They are stored without outputs: these hold
photos and change with each run.
"""

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests.training.jobs import TINY_TRUNK

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
LOOPBACK = "127.0.0.1"
GUARD = f"""
import os, sys

def guard(event, given):
    if event == "socket.connect":
        address = given[1]
        is_foreign = isinstance(address, tuple) and address[0] != {LOOPBACK!r}
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        address = given[0]
        is_foreign = address not in (None, "", "localhost", {LOOPBACK!r})
    else:
        return
    if is_foreign:
        with open(os.environ["CONNECTIONS"], "a") as file:
            print(event, address, file=file)

sys.addaudithook(guard)
"""
"""A module that Python imports at its start, in the kernel and in each process that it starts. It
records the connections and look-ups of names that do not stay on this machine."""
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
client = NotebookClient(notebook, kernel_name="python3", timeout=200)
kernel = client.create_kernel_manager()
client.execute()
nbformat.write(notebook, sys.argv[2])
print(kernel.ip)
"""
SHOWN = {
    "quickstart": ["first result is right", "data:image/jpeg;base64", "recall@1"],
    "research": ["proxy_anchor", "NormFace", "MAP@R", "R@1"],
}
"""What outputs have, by notebook."""
PLOTS = {"quickstart": 3, "research": 2}
SHORTER = {
    "quickstart": ("weights=WEIGHTS,", f"weights=WEIGHTS, backbone='{TINY_TRUNK}',"),
    "research": ("STEPS = (0, 1), 60", "STEPS = (0, 1), 6"),
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.parametrize("form", ["shorter", pytest.param("shipped", marks=pytest.mark.long)])
def test_a_notebook_runs_and_connects_to_nothing(path: Path, tmp_path: Path, form: str) -> None:
    connections = tmp_path / "connections"
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(GUARD)
    text = path.read_text(encoding="utf-8")
    if form == "shorter":
        before, after = SHORTER[path.stem]
        assert text.count(before) == 1
        text = text.replace(before, after)
    (tmp_path / "given.ipynb").write_text(text, encoding="utf-8")
    own = {
        "PYTHONPATH": tmp_path / "start",
        "CONNECTIONS": connections,
        "OMP_NUM_THREADS": 1,
        **dict.fromkeys(("HOME", "TMPDIR", "IPYTHONDIR", "JUPYTER_DATA_DIR"), tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, tmp_path / "given.ipynb", tmp_path / "run.ipynb"],
        cwd=tmp_path,
        env=os.environ | {name: str(value) for name, value in own.items()},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, f"{LOOPBACK}\n"), done.stderr[-4000:]
    notebook = nbformat.read(tmp_path / "run.ipynb", as_version=4)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    shown = str(outputs)
    assert [text for text in SHOWN[path.stem] if text not in shown] == []
    assert sum("image/png" in out.get("data", ()) for out in outputs) == PLOTS[path.stem]
    assert "Warning" not in shown
    assert not connections.exists(), connections.read_text()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
    assert "kinlens" in code[0].source
