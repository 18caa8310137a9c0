"""The commands of a shop speak its words, in all that they print, their help and their errors."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kinlens.commands.__main__
import kinlens.service.commands.program
import kinlens.training.__main__
from tests.support.detectors import write_detector
from tests.support.own_process import own_process
from tests.support.words import write_encoder, write_tokenizer
from tests.tiny import write_tiny_onnx
from tests.training.jobs import TINY_TRUNK, calibrated_weights

LABORATORY = re.compile(r"\b(trunks?|heads?|folds?|alpha|R@1)\b", re.IGNORECASE)
APPS: dict[str, Any] = {
    "train": kinlens.training.__main__.app,
    "index": kinlens.commands.__main__.app,
    "serve": kinlens.service.commands.program.app,
}
TINY = (
    f"--backbone {TINY_TRUNK} --weights weights.pth "
    "--set input={size_px=32,resize_px=36} --set model.dim=16 "
    "--set runtime={workers=0,device='cpu'}"
)
ONNX = "tiny.onnx --size 16 --mean 0 --std 1 --scale 255"
"""A shop's commands, in the order in which she types them, and their exit status."""
SHOP = (
    ("train adapt --data photos --out bundles/shop --map --precision int8 " + TINY, 0),
    ("index build photos --bundle bundles/shop --out galleries/shop", 0),
    ("index search galleries/shop --bundle bundles/shop --image PHOTO", 0),
    ("index search galleries/shop --bundle bundles/shop --image PHOTO -k 2 --group-by class", 0),
    ("index golden add galleries/shop --query PHOTO --attribute class=PRODUCT", 0),
    ("index golden run galleries/shop --bundle bundles/shop", 0),
    ("index golden runs galleries/shop", 0),
    ("index golden list galleries/shop", 0),
    ("index calibrate galleries/shop", 0),
    ("index plan 1000000 512", 0),
    ("index stats galleries/shop", 0),
    ("index verify galleries/shop", 0),
    ("index sync galleries/shop photos --bundle bundles/shop", 0),
    (f"train import {ONNX} --licence mit --images photos --out bundles/imported", 0),
    ("train adapt --bundle bundles/imported --data photos --out bundles/again --run run", 0),
    ("train attach bundles/shop --boxes boxes.onnx --out bundles/boxes", 0),
    (
        "train teach-words bundles/shop galleries/shop --text-model encoder.onnx "
        "--tokenizer words.json --out bundles/words",
        None,  # words of drawn products may be proven or not
    ),
    ("serve check --bundle bundles/shop --gallery shop=galleries/shop", 0),
)
MISTAKES = (
    "train adapt --data nowhere --out bundles/x",
    "train adapt --data photos --out bundles/shop",
    "train adapt --data empty --out bundles/x",
    "train adapt --data one --out bundles/x",
    "train adapt --bundle bundles/nowhere --data photos --out bundles/x",
    "train adapt --bundle bundles/shop --backbone resnet50 --data photos --out bundles/x",
    "train adapt --data photos --out bundles/x --backbone resnet51",
    "train adapt --data photos --out bundles/x --weights tiny.onnx",
    "train adapt --data photos --out bundles/x --precision int4",
    "train adapt --data photos --out bundles/x --set optimizer.epochs=9 --run run",
    f"train import {ONNX} --out bundles/x",
    "train import tiny.onnx --size 32 --mean 0 --std 1 --scale 255 --licence mit --out bundles/x",
    "train import weights.pth --size 16 --mean 0 --std 1 --licence mit --out bundles/x",
    "train attach bundles/shop --boxes tiny.onnx --out bundles/x",
    "train teach-words bundles/shop galleries/shop --text-model tiny.onnx "
    "--tokenizer words.json --out bundles/x",
    "index build nowhere --bundle bundles/shop --out galleries/x",
    "index search galleries/shop --bundle bundles/imported --image PHOTO",
    "index search galleries/shop --bundle bundles/shop --image tiny.onnx",
    "index search galleries/shop --bundle bundles/shop --text mug",
    "index golden run galleries/nowhere --bundle bundles/shop",
    "serve check --bundle bundles/imported --gallery shop=galleries/shop",
    "serve check --bundle bundles/nowhere --gallery shop=galleries/shop",
)
HELP = (
    *("train adapt", "train import", "train attach", "train teach-words", "index", "index build"),
    *("index add", "index sync", "index search", "index golden", "index golden add"),
    *("index golden run", "index golden runs", "index calibrate", "serve", "serve check"),
)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    render = f"data render {folder / 'photos'} --products 34 --views 3 --size-px 40"
    assert CliRunner().invoke(APPS["train"], render.split()).exit_code == 0
    (folder / "empty").mkdir()
    products = sorted((folder / "photos").glob("p0*"))
    shutil.copytree(products[0], folder / "one" / products[0].name)
    calibrated_weights(folder / "weights.pth")
    write_tiny_onnx(folder / "tiny.onnx")
    write_detector(folder / "boxes.onnx")
    write_encoder(folder / "encoder.onnx")
    write_tokenizer(folder / "words.json")
    return folder


def printed(command: str, photo: Path) -> tuple[str, int]:
    """What a program prints, its error included, and its exit status."""
    words = command.replace("PHOTO", str(photo)).replace("PRODUCT", photo.parent.name).split()
    done = CliRunner().invoke(APPS[words[0]], words[1:])
    error = "" if done.exception is None or done.exit_code != 1 else str(done.exception)
    return f"{done.output}\n{error}", done.exit_code


def test_no_command_of_a_shop_prints_a_word_of_the_laboratory(
    shop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers", reason="needs kinlens[text]")
    monkeypatch.chdir(shop)
    monkeypatch.setenv("XDG_CACHE_HOME", str(shop / "cache"))
    photo = sorted(Path("photos").glob("*/*.*"))[0]
    found = []
    for command, status in (*SHOP, *((mistake, ...) for mistake in MISTAKES)):
        text, code = printed(command, photo)
        assert status in (code, None, ...), f"{command}\n{text}"
        assert status is not ... or code != 0, f"{command} is no mistake:\n{text}"
        found += [f"{command}: {line}" for line in text.splitlines() if LABORATORY.search(line)]
    files = ("--bundle", "bundles/shop", "--gallery", "shop=galleries/shop")
    with own_process(shop / "log", *files, folder=shop, log_level="info") as service:
        pass
    text = service.output + service.errors()
    found += [f"serve: {line}" for line in text.splitlines() if LABORATORY.search(line)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("command", HELP)
def test_no_help_for_a_shop_has_a_word_of_the_laboratory(command: str) -> None:
    program, *words = command.split()
    text = CliRunner().invoke(APPS[program], [*words, "--help"]).output
    assert "Usage" in text
    assert not LABORATORY.findall(text)
