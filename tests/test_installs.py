"""The wheel in new environments: each extra is installed alone and runs its main command."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle
from tests.tiny import encoded, photo

ROOT = Path(__file__).parents[1]
UV = Path(sys.executable).parent / "uv"

PARTS = (
    *("commands", "embedder", "indexer", "library", "quality", "rendered", "service", "training"),
)

pytestmark = pytest.mark.skipif(not UV.is_file(), reason="needs uv, as `make test` installs it")


def run(*command: object, cwd: Path, ok: bool = True) -> str:
    """All output of a command, in an environment without the settings of the tests."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | {"COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert (done.returncode == 0) == ok, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source archive as a release builds it."""
    folder = tmp_path_factory.mktemp("dist")
    try:
        run(UV, "build", "--quiet", "--out-dir", folder, ROOT, cwd=folder)
    except AssertionError as error:
        if "Failed to fetch" in str(error) or "onnection" in str(error):
            pytest.skip(f"no index of packages can be reached: {str(error)[-300:]}")
        raise
    [wheel] = folder.glob("*.whl")
    return wheel


class Install:
    """A new environment with the wheel and some extras."""

    def __init__(self, folder: Path, wheel: Path, extras: str) -> None:
        self.folder = folder
        self.bin = folder / "env/bin"
        run(UV, "venv", "--quiet", "--python", sys.executable, folder / "env", cwd=folder)
        pins = ("--constraint", ROOT / "constraints.txt")
        python = ("--python", self.bin / "python")
        run(UV, "pip", "install", "--quiet", *python, *pins, f"{wheel}{extras}", cwd=folder)

    def run(self, command: str, *words: object, ok: bool = True) -> str:
        return run(self.bin / command, *words, cwd=self.folder, ok=ok)

    def python(self, code: str, ok: bool = True) -> str:
        return self.run("python", "-c", code, ok=ok)


def test_the_wheel_holds_one_package_without_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [about] = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    assert "](https://github.com/kinlens/kinlens/blob/main/docs/tutorial.md" in about
    assert "](docs/" not in about, "registries show the README without the other files"
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"kinlens"}
    for part in ("", *(f"{name}/" for name in PARTS)):
        assert {f"kinlens/{part}py.typed", f"kinlens/{part}__init__.py"} <= names
    assert "kinlens/service/ui/search/index.html" in names
    assert "kinlens/training/jobs/shop.toml" in names


def test_the_base_install_is_a_client_and_names_extras(wheel: Path, tmp_path: Path) -> None:
    install = Install(tmp_path, wheel, "")
    (tmp_path / "service.py").write_text("raise SystemExit('a module of the user')")
    code = "import kinlens; kinlens.Client(); kinlens.AsyncClient(); print(kinlens.__version__)"
    assert install.python(code).strip()
    installed = run(UV, "pip", "list", "--python", install.bin / "python", cwd=tmp_path)
    assert not {"numpy", "faiss-cpu", "onnxruntime", "fastapi"} & set(installed.split())
    for name in ("load_bundle", "open_gallery"):
        output = install.python(f"import kinlens; kinlens.{name}('x')", ok=False)
        assert "pip install 'kinlens[cpu]' or pip install 'kinlens[gpu]'" in output
    for command, extra in (("index", "cpu"), ("serve", "cpu"), ("train", "cpu,training")):
        output = install.run(f"kinlens-{command}", "--help", ok=False)
        assert f"pip install 'kinlens[{extra}]'" in output
        assert "Traceback" not in output


def test_the_extra_cpu_indexes_and_serves(wheel: Path, tiny_bundle: Bundle, tmp_path: Path) -> None:
    install = Install(tmp_path, wheel, "[cpu]")
    (tmp_path / "shop").mkdir()
    for number in range(4):
        (tmp_path / f"shop/{number}.png").write_bytes(encoded(photo(number)))
    bundle = ("--bundle", tiny_bundle.path)
    install.run("kinlens-index", "build", "shop", *bundle, "--out", "gallery")
    checked = install.run("kinlens-serve", "check", *bundle, "--gallery", "shop=gallery")
    assert "4 items" in checked
    code = (
        "import kinlens\n"
        f"bundle = kinlens.load_bundle({str(tiny_bundle.path)!r})\n"
        "gallery = kinlens.open_gallery('gallery', bundle)\n"
        "[hits] = gallery.search(bundle.embed_files(['shop/2.png']), k=3)\n"
        "print([hit.key for hit in hits][0])"
    )
    assert install.python(code).strip() == "2.png"
    jobs = "from kinlens.service.jobs.params import training_jobs as jobs; print('shop' in jobs())"
    assert install.python(jobs).strip() == "True"
    output = install.run("kinlens-train", "fit", "demo", ok=False)
    assert "pip install 'kinlens[cpu,training]'" in output


@pytest.mark.long
def test_the_extra_training_trains_and_names_extras(wheel: Path, tmp_path: Path) -> None:
    install = Install(tmp_path, wheel, "[training]")
    small = [
        word
        for setting in (
            "data.products=12",
            "data.views=4",
            "data.root=products",
            "optimizer.epochs=1",
            "optimizer.batch_size=8",
            "runtime.workers=0",
        )
        for word in ("--set", setting)
    ]
    install.run("kinlens-train", "fit", "demo", "--out", "run", *small)
    output = install.run("kinlens-train", "export", "run", "--out", "bundle", ok=False)
    assert "pip install 'kinlens[cpu]' or pip install 'kinlens[gpu]'" in output
