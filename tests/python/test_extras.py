"""A function, class or command that lacks a package names the extras that bring it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kinlens.embedder.bundle import Bundle

PACKAGES = {
    "training": (
        *("torch", "torchvision", "onnx", "onnxscript", "pandas", "scipy", "sklearn", "pooch"),
        *("matplotlib", "tomli_w"),
    ),
    "core": ("numpy", "PIL", "rich", "typer", "lark", "faiss", "onnxruntime", "fastapi"),
    "hub": ("huggingface_hub", "httpx2"),
    "langchain": ("langchain_core",),
    "parquet": ("pyarrow",),
    "milvus": ("pymilvus",),
    "search": ("optuna",),
    "timm": ("timm", "safetensors"),
}
"""The modules that an extra brings."""

SHOP = "'photos', 'out'"
TRAINING = {
    "kinlens.adapt": SHOP,
    "kinlens.import_model": "'a.onnx', 'out', size=8, mean=0, std=1, licence='mit'",
    "kinlens.teach_words": "'bundle', 'gallery', 'out', text_model='a.onnx', tokenizer='t.json'",
    "kinlens.training.crossval": "'demo'",
    "kinlens.training.evaluate": "'run'",
    "kinlens.training.export": "'run', 'out'",
    "kinlens.training.fit": "'demo', out='out'",
    "kinlens.training.new": "'photos', 'job.toml'",
    "kinlens.training.search": "'demo', 'space.toml'",
    "kinlens.training.tournament": "'grid.toml', plan=True",
}
"""Calls that need `kinlens[training]`."""

CALLS = [
    *(("training", name, words) for name, words in TRAINING.items()),
    *(("core", name, words) for name, words in TRAINING.items()),
    ("core", "kinlens.attach", "'bundle', 'out', boxes='a.onnx'"),
    ("core", "kinlens.training.compare", "'study.json', ['runs/a']"),
    ("core", "kinlens.training.doctor", "'photos'"),
    ("core", "kinlens.training.download", "'cub', '.'"),
    ("core", "kinlens.training.render", "'drawn'"),
    ("core", "kinlens.training.split", SHOP),
    ("training", "kinlens.training.ProxyAnchorLoss", "2, 2"),
    ("training", "kinlens.training.download", "'cub', '.', url='http://127.0.0.1:1/a.tgz'"),
    *(("training", f"kinlens.plot.{name}", "{}") for name in ("recall", "spectrum", "map")),
    ("training", "kinlens.plot.calibration", "{}"),
    *(
        ("core", f"kinlens.{name}", "'x', 'y'")
        for name in ("build", "compare", "compare_plans", "create_gallery", "import_gallery")
    ),
    *(
        ("core", f"kinlens.{name}", "'x', 'y'")
        for name in ("load_bundle", "open_gallery", "plan", "restore_gallery", "Gallery")
    ),
    ("hub", "kinlens.load_bundle", "'hf://shop/shoes'"),
    ("langchain", "kinlens.langchain.KinlensRetriever", ""),
    ("milvus", "kinlens.open_gallery", "'milvus://127.0.0.1:1/shop'"),
    ("parquet", "kinlens.import_gallery", "'shop.parquet', 'out'"),
    ("search", "kinlens.training.search", "'demo', 'space.toml'"),
]

COMMANDS = [
    *(
        ("training", "kinlens.training.__main__", words)
        for words in (
            *("adapt --data photos --out out", "crossval demo", "evaluate run", "export run"),
            *("fit demo", "new --data photos", "search demo --space space.toml"),
            "tournament grid.toml --plan",
            "import a.onnx --size 8 --mean 0 --std 1 --licence mit --out out",
            "teach-words bundle gallery --text-model a.onnx --tokenizer t.json --out out",
            "data download cub --root . --url http://127.0.0.1:1/a.tgz",
        )
    ),
    *(
        ("core", "kinlens.training.__main__", words)
        for words in (
            *("report study.json runs/a", "data doctor photos", "data render drawn"),
            "attach bundle --boxes a.onnx --out out",
        )
    ),
    ("core", "kinlens.commands.__main__", "stats gallery"),
    ("core", "kinlens.commands.programs", "index stats gallery"),
    ("core", "kinlens.service.__main__", "check"),
    ("timm", "kinlens.training.__main__", "export --backbone timm:test_resnet --out out"),
    ("milvus", "kinlens.commands.__main__", "stats milvus://127.0.0.1:1/shop"),
    ("parquet", "kinlens.commands.__main__", "import shop.parquet --out out"),
]

CODE = """
import contextlib, importlib, io, json, os, sys
hidden, calls, commands = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(hidden))
texts = {}
import kinlens
for name, words in calls:
    try:
        module, _, last = name.rpartition(".")
        place = kinlens.plot if module == "kinlens.plot" else importlib.import_module(module)
        value = eval(f"f({words})", {"f": getattr(place, last)})
        texts[name] = f"it returned {value!r}"
    except BaseException as error:
        texts[name] = f"{type(error).__name__}: {error}"
for module, words in commands:
    sys.argv[1:] = words.split()
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        try:
            importlib.import_module(module).main()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=err)
    texts[words] = err.getvalue()
print(json.dumps(texts))
"""


@pytest.mark.parametrize("extra", PACKAGES)
def test_a_missing_package_is_named_with_its_extra(
    extra: str, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    (tmp_path / "bundle").symlink_to(tiny_bundle.path)
    for name in ("photos/a", "photos/b", "run", "gallery", "runs/a"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("photos/a/0.jpg", "photos/b/0.jpg", "a.onnx", "t.json", "shop.parquet"):
        (tmp_path / name).write_bytes(b"0")
    (tmp_path / "grid.toml").write_text('job = "demo"\nseeds = [0]\n')
    (tmp_path / "space.toml").write_text('["optimizer.lr"]\nlow = 1e-5\nhigh = 1e-3\n')
    calls = [(name, words) for group, name, words in CALLS if group == extra]
    commands = [(module, words) for group, module, words in COMMANDS if group == extra]
    asked = json.dumps([PACKAGES[extra], calls, commands])
    done = subprocess.run(
        [sys.executable, "-c", CODE, asked], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    texts = json.loads(done.stdout.splitlines()[-1])
    assert len(texts) == len(calls) + len(commands)
    silent = {name: text for name, text in texts.items() if "pip install 'kinlens[" not in text}
    assert not silent, json.dumps(silent, indent=1)
