"""Which package may import which, read from the source, and what an import costs."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = (
    *("embedder", "rendered", "training", "indexer", "quality", "service", "commands"),
    "library",
)
ALLOWED = {
    "kinlens": set(),  # the client and what travels over HTTP: the leaf of all
    "embedder": set(),
    "rendered": {"embedder"},  # of which the errors
    "training": {"embedder", "rendered"},
    "indexer": {"embedder"},
    "quality": {"embedder", "indexer"},
    "service": {"embedder", "indexer", "quality"},
    "library": {"embedder", "indexer", "quality", "training"},  # Python without a service
    "commands": {"embedder", "indexer", "quality", "library"},  # the program kinlens-index
    "training.commands": {"library"},  # and what training may import
    "service.commands": {"library"},
}
ONLY_IN = {
    "torch": {"training"},
    "torchvision": {"training"},
    "faiss": {"indexer"},
    "onnxruntime": {"embedder", "training"},  # of which training uses the quantizer alone
    "fastapi": {"service"},
    "redis": {"service"},
    "pymilvus": {"indexer"},
    "pyarrow": {"indexer"},
    "huggingface_hub": {"library"},
    "mcp": {"kinlens"},
    "langchain_core": {"kinlens"},
}
FACADE = (
    "kinlens.indexer.gallery",
    "kinlens.indexer.galleries",
    "kinlens.indexer.types",
    "kinlens.indexer.entries",
    "kinlens.indexer.store",
    "kinlens.indexer.images",
    "kinlens.indexer.uploads",
    "kinlens.indexer.filters.",
    "kinlens.indexer.ingest.",
    "kinlens.indexer.checks.",
)
"""What the service may see of the indexer."""


def folder_of(package: str) -> Path:
    """The library has no use outside of the package, so its folder is not at the top."""
    return ROOT / "kinlens/library" if package == "library" else ROOT / package


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        folder = folder_of(package)
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(("kinlens", *parts)).removesuffix(".__init__")] = path
    for path in (ROOT / "kinlens").glob("*.py"):
        found[f"kinlens.{path.stem}"] = path
    return found


def package_of(name: str) -> str | None:
    """The folder of a module such as kinlens.indexer.gallery; None for other packages."""
    parts = name.split(".")
    if parts[0] != "kinlens":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in PACKAGES else "kinlens"


@cache
def imports(path: Path) -> set[str]:
    """Every module named in an import statement, at the top of the file or inside a function."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            named.add(node.module)
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
    return named


def test_rooms_import_only_in_the_allowed_direction() -> None:
    for name, path in modules().items():
        folder = package_of(name)
        assert folder is not None
        if name in ("kinlens.__init__", "kinlens.commands.programs"):
            continue  # the entry points of users
        packages = {package_of(imported) for imported in imports(path)} & set(PACKAGES)
        commands = ALLOWED.get(".".join(name.split(".")[1:3]), set())
        wrong = packages - ALLOWED[folder] - commands - {folder}
        assert not wrong, f"{path} imports {wrong}"


def test_the_service_sees_the_facade_of_the_indexer_alone() -> None:
    known = modules()
    indexer = {name for name in known if name.startswith("kinlens.indexer.")}
    inner = {name for name in indexer if not name.startswith(FACADE)}
    for name, path in known.items():
        if name.startswith("kinlens.service."):
            wrong = imports(path) & inner
            assert not wrong, f"{path} imports {wrong}"


def test_a_heavy_package_is_imported_in_its_room_alone() -> None:
    for package, allowed in ONLY_IN.items():
        users = {
            package_of(name)
            for name, path in modules().items()
            if package in {imported.split(".")[0] for imported in imports(path)}
        }
        assert users <= allowed, package
    for name, path in modules().items():
        if name.startswith("kinlens.training."):
            used = {i for i in imports(path) if i.split(".")[0] == "onnxruntime"}
            assert all(i.startswith("onnxruntime.quantization") for i in used), f"{name}: {used}"


def cycle(graph: Mapping[str, Set[str]]) -> list[str]:
    """One way from a node back to itself, or nothing."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> list[str]:
        if name in trail:
            return [*trail[trail.index(name) :], name]
        if name in done:
            return []
        done.add(name)
        routes = (visit(other, [*trail, name]) for other in sorted(graph[name]))
        return next((route for route in routes if route), [])

    return next((route for route in (visit(name, []) for name in graph) if route), [])


def test_modules_do_not_import_each_other_in_circles() -> None:
    known = modules()
    graph = {name: imports(path) & known.keys() - {name} for name, path in known.items()}
    assert cycle(graph) == []


def test_packages_do_not_import_each_other_in_circles() -> None:
    """A folder is one node; a module next to the folders of its package is a node of its own."""
    known = {name: path for name, path in modules().items() if path.stem != "__init__"}
    node_of = {
        name: name if name.count(".") <= 2 else name.rpartition(".")[0]
        for name, path in known.items()
    }
    graph: dict[str, set[str]] = {node: set() for node in node_of.values()}
    for name, path in known.items():
        graph[node_of[name]] |= {node_of[other] for other in imports(path) & known.keys()}
    assert cycle({node: others - {node} for node, others in graph.items()}) == []
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


TRAINING = ("torch", "torchvision", "onnx", "matplotlib")
SERVING = ("fastapi", "uvicorn", "faiss", "onnxruntime", "redis", "torch")


@pytest.mark.parametrize(
    ("part", "heavy"),
    [
        ("kinlens.embedder", TRAINING),
        ("kinlens.library", (*TRAINING, "pandas", "pyarrow")),
        ("kinlens.indexer", TRAINING),
        ("kinlens.rendered", SERVING),
        ("kinlens.service", (*TRAINING, "redis")),
        ("kinlens.client", ("starlette", "numpy", "typer", *SERVING)),
        ("kinlens.values", ("numpy", "pydantic", "httpx")),
        ("kinlens.training.__main__", (*TRAINING, "numpy", "pydantic", "scipy", "pandas")),
        ("kinlens.training.runner", (*TRAINING[1:], "scipy", "pandas", "sklearn")),
        ("kinlens.service.commands.keys", ("onnxruntime", *SERVING)),
        ("kinlens.service.jobs", ("fastapi", "torch")),
        ("kinlens.service.encoding.fork_server", ("structlog", "kinlens.indexer", *SERVING[:3])),
    ],
)
def test_a_part_loads_nothing_heavy_that_it_does_not_need(part: str, heavy: tuple[str]) -> None:
    names = [name for name in modules() if name == part or name.startswith(f"{part}.")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_code_imports_a_folder_at_the_top_instead_of_the_package() -> None:
    """`import service` works from the root of a clone, and would load each module twice."""
    listed = [
        path for name in ("tests", "scripts", "benchmarks") for path in (ROOT / name).rglob("*.py")
    ]
    for path in [*modules().values(), *listed]:
        wrong = {name.split(".")[0] for name in imports(path)} & set(PACKAGES)
        assert not wrong, f"{path} imports {wrong}; import kinlens.{wrong.pop()}"


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_folder_has_at_most_twelve_modules_and_an_empty_init_file(folder: str) -> None:
    files = list(folder_of(folder).rglob("*.py"))
    folders = Counter(path.parent for path in files if path.stem[0] != "_")
    assert {str(folder): count for folder, count in folders.items() if count > 12} == {}
    public = ROOT / "training/__init__.py"  # the library, see docs/stability.md
    inits = [path for path in files if path.name == "__init__.py" and path != public]
    assert [path for path in inits if path.read_text()] == []


def private_names(path: Path) -> Iterator[str]:
    """Where a test uses a name of the project that begins with one underscore, as "line: name"."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    foreign = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name.split(".")[0] not in ("kinlens", "tests")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kinlens":
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", *foreign}:
            found = [node.attr]
        else:
            continue
        for name in found:
            if name.startswith("_") and not name.startswith("__"):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"


def test_tests_use_no_private_name_and_no_other_test_module() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [name for path in files for name in private_names(path)]
    found += [
        f"{path}: {name}, put what they share into tests/support"
        for path in files
        for name in imports(path)
        if re.match(r"tests\.(\w+\.)*test_", name) and "indexer" not in path.parts
    ]
    assert not found, "Say it through a public name:\n" + "\n".join(found)
