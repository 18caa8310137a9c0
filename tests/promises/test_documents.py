"""The blocks of README.md and docs/ as a reader types them, page by page, in one folder.

Each block of commands or Python runs, unless a comment before it gives the reason:
`<!-- not run: REASON -->`. The pages benchmarks.md and results.md are skipped: their commands take
hours. The tutorial runs in a folder of its own, since it starts from nothing. Trainings are
shortened, and the paths of the shop and of the state folder and the port are those of the test.
"""

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

import kinlens.commands.__main__
import kinlens.service.commands.program
import kinlens.training.__main__
from kinlens.embedder.bundle import Bundle
from kinlens.rendered.catalogue import render_view
from tests.support.own_process import ROOT, OwnProcess, own_process
from tests.training.jobs import TINY_TRUNK, calibrated_weights

APPS = {
    "kinlens-train": kinlens.training.__main__.app,
    "kinlens-index": kinlens.commands.__main__.app,
    "kinlens-serve": kinlens.service.commands.program.app,
}
FIRST = ("README", "galleries", "api", "client", "operations", "security", "service-jobs")
"""The README makes the gallery; the page about jobs replaces it."""
TUTORIAL = "docs/tutorial.md"
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").glob("*.md")],
    key=lambda page: FIRST.index(page.stem) if page.stem in FIRST else len(FIRST),
)
COMMAND = re.compile(
    r" *(?:\w+=\S* +)*(?:\w+=\$\(|export \w+=|echo |cp -|(?:\S*/)?"
    r"(?:kinlens-\w+|curl|make|python3?|pip|docker|torchrun|rsync) )"
    r"|.*\bclient\.\w+\(| *from \S+ import "
)
"""A line of a block that is to be run, or that is Python without a fence, which does not run."""
REASON = re.compile(r" *<!-- not run: (.+) -->")
PHOTOS = ("photo", "new", "shoe", "hat", "street", "front", "side", "query", "shelf", "cat")
SERVICE = "http://127.0.0.1:8000"
# Six blocks of a network, and as few products as a calibration needs.
TINY = [
    word
    for setting in (
        "model.dim=16",
        "model.batch_norm=frozen",
        "input.size_px=32",
        "input.test_px=32",
        "input.resize_px=36",
        "optimizer.batch_size=8",
        "optimizer.min_steps=1",
        "runtime.workers=0",
    )
    for word in ("--set", setting)
]
SHORTER = {
    "data render": ["--products", "18", "--views", "4", "--size-px", "40"],
    "adapt": ["--backbone", TINY_TRUNK, "--weights", "weights.pth", *TINY],
    "fit": [
        *("--set", f"model.backbone={TINY_TRUNK}", "--set", "model.weights=weights.pth"),
        *("--set", "optimizer.epochs=1", *TINY),
    ],
}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def is_typed(self) -> bool:
        """Whether it is something to run, and not a formula, a drawing or a table of files."""
        if self.language:
            return self.language in {"python", "json", "sh", "bash", "console"}
        return any(map(COMMAND.match, self.text.splitlines()))


def blocks_of(page: Path) -> Iterator[Block]:
    """Fenced and indented blocks, each with the reason in the comment before it."""
    lines = [*page.read_text("utf-8").splitlines(), ""]
    reason, number = None, 0
    while number < len(lines):
        first, line = number, lines[number]
        number += 1
        if line.startswith("```"):
            while lines[number] != "```":
                number += 1
            inside = lines[first + 1 : number]
            number += 1
        elif line.startswith("    ") and not lines[first - 1]:
            while lines[number].startswith("    "):
                number += 1
            inside = lines[first:number]
        else:
            given = REASON.match(line)
            reason = given[1] if given else reason if not line else None
            continue
        name = str(page.relative_to(ROOT))
        yield Block(name, first + 1, line.strip("` ") * (line[0] == "`"), "\n".join(inside), reason)
        reason = None


BLOCKS = [
    block
    for page in PAGES
    if page.stem not in {"benchmarks", "results"}
    for block in blocks_of(page)
    if block.is_typed()
]


class Terminal:
    """Types the commands of the pages, with separate variables for each page. The service that a
    page takes for granted keeps running for the next page.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: OwnProcess | None = None
        self.is_default = False
        self.serving, self.others = contextlib.ExitStack(), contextlib.ExitStack()

    def close(self) -> None:
        self.serving.close()

    @contextlib.contextmanager
    def page(self) -> Iterator[None]:
        if not self.is_default:
            self.running = None
            self.serving.close()
        self.names: dict[str, Any] = {"__name__": "example"}
        with pytest.MonkeyPatch.context() as self.patch:
            yield
            if self.running is not None:
                self.cancel_jobs(self.running.url)
        self.others.close()

    def follow(self, page: str) -> None:
        with self.page():
            for block in BLOCKS:
                if block.page == page and block.reason is None:
                    self.type(block)

    def type(self, block: Block) -> None:
        if block.language == "python":
            self.run_python(block)
            return
        command = ""
        for line in block.text.splitlines():
            command += line + "\n"
            complete = subprocess.run(["bash", "-n", "-c", command], capture_output=True)
            if complete.returncode == 0 and not line.endswith("\\"):
                try:
                    self.run(command.strip())
                except AssertionError as error:
                    raise AssertionError(f"{block.name}: {command}\n{error}") from None
                command = ""
        assert not command, f"{block.name}: {command}"

    def run(self, command: str) -> str:
        """What a command prints; it must succeed, and searches must find something."""
        if (SERVICE in command and f"={SERVICE}" not in command) or "$SHOP" in command:
            self.serve_by_default()
        command = self.placed(command)
        if inner := re.fullmatch(r"(\w+)=\$\((.*)\)(?: +#.*)?", command, re.DOTALL):
            self.patch.setenv(inner[1], self.run(inner[2]).strip())
            return ""
        if re.match(r"(?:export \w+=|\w+=\S+$)", command):
            for word in self.words(command.removeprefix("export ")):
                self.patch.setenv(*word.split("=", 1))
            return ""
        if re.match(r"(?:\w+=\S* )*kinlens-", command):
            return self.run_own(self.words(command))
        return self.run_in_shell(command)

    def placed(self, text: str) -> str:
        url = self.running.url if self.running else SERVICE
        for printed, here in (
            ("/tmp/shop", self.folder / "shop"),
            ("/var/lib/kinlens", self.folder / "state"),
            (SERVICE, url),
        ):
            text = text.replace(printed, str(here))
        return text

    def words(self, command: str) -> list[str]:
        """The words of a command, as the shell hands them to a program."""
        done = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True)
        return done.stdout.decode().split("\0")[:-1]

    def run_own(self, words: list[str]) -> str:
        """In this process, which has loaded already what each command would load."""
        with pytest.MonkeyPatch.context() as patch:
            while "=" in words[0]:
                patch.setenv(*words.pop(0).split("=", 1))
            name, *words = words
            if name == "kinlens-serve" and (not words or words[0].startswith("--")):
                self.serve(*words)
                return ""
            if words[0] == "work":
                self.work()
                return ""
            more = []
            if name == "kinlens-train":
                more = SHORTER.get(words[0]) or SHORTER.get(" ".join(words[:2]), [])
            done = CliRunner().invoke(APPS[name], [*words, *more])
        assert done.exit_code == 0, f"{done.output}{done.exception!r}"
        return done.stdout

    def run_in_shell(self, command: str) -> str:
        """A job is refused while another one has the gallery: a reader waits for the first."""
        fail = 'set -o pipefail; curl() { command curl --fail-with-body -sS "$@"; }\n'
        for _ in range(200):
            done = subprocess.run(
                ["bash", "-c", fail + command], capture_output=True, text=True, timeout=60
            )
            if "urn:kinlens:problem:job-conflict" not in done.stdout:
                break
            time.sleep(0.2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert '"hits":[]' not in done.stdout, done.stdout
        assert not re.search(r'"failed":[1-9]', done.stdout), done.stdout
        return done.stdout

    def run_python(self, block: Block) -> None:
        self.serve_by_default()
        code = self.placed(block.text).replace("kl_...", os.environ["KEY"])
        # Line numbers of an error are those of the page.
        exec(compile("\n" * block.line + code, block.page, "exec"), self.names)

    def serve_by_default(self) -> None:
        """What a page takes for granted: the shop is served, and the reader has a key."""
        if "KEY" not in os.environ:
            name = f"reader-{time.monotonic_ns()}"
            self.run(
                f"KEY=$(kinlens-serve keys create {name} --scope admin --state /var/lib/kinlens)"
            )
        if self.running is not None:
            return
        shop = {"bundle": "bundles/shop", "galleries": "galleries/shop", "state": "state"}
        self.serve(feedback="pictures", **shop)
        self.is_default = True

    def serve(self, *words: str, **settings: str) -> None:
        self.serving.close()
        self.is_default = False
        service = own_process(self.folder / "log", *words, folder=self.folder, **settings)
        self.running = self.serving.enter_context(service)

    def cancel_jobs(self, url: str) -> None:
        """They would outlive the service, and hold the gallery while the next page is read."""
        with httpx.Client(base_url=url, headers={"X-API-Key": os.environ.get("KEY", "")}) as client:
            for job in client.get("/jobs").json().get("jobs", []):
                client.post(f"/jobs/{job['id']}/cancel")

    def work(self) -> None:
        worker = self.others.enter_context(
            subprocess.Popen([sys.executable, "-m", "kinlens.service", "work"])
        )
        self.others.callback(worker.terminate)
        with pytest.raises(subprocess.TimeoutExpired):
            worker.wait(1)


@contextlib.contextmanager
def opened(folder: Path, new: Path) -> Iterator[Terminal]:
    """A terminal in a folder with the files of a reader: weights, photos and a new bundle."""
    trainer = [sys.executable, ROOT / "tests/support/fake_trainer.py", new, 1, 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("KINLENS_")]:
            patch.delenv(name)
        # Services run in the folder, and import the code of this checkout.
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        patch.setenv("KINLENS_TRAINING_COMMAND", shlex.join(map(str, trainer)))
        calibrated_weights(folder / "weights.pth")
        shutil.copytree(new, folder / "bundles/new")
        for product, name in enumerate(PHOTOS):
            render_view(product, 90, size_px=64).save(folder / f"{name}.jpg", quality=95)
        (folder / "labelled.csv").write_text("image,class\nhat.jpg,p000-bag-MIRVI\n")
        with contextlib.closing(Terminal(folder)) as terminal:
            yield terminal


@pytest.fixture(scope="module")
def terminal(
    tmp_path_factory: pytest.TempPathFactory, make_tiny_bundle: Callable[..., Bundle]
) -> Iterator[Terminal]:
    """In a folder where all commands of the README have run."""
    with opened(tmp_path_factory.mktemp("documents"), make_tiny_bundle(1).path) as terminal:
        terminal.follow("README.md")
        yield terminal


@pytest.mark.long
def test_the_tutorial_runs_as_printed_from_an_empty_folder(
    tmp_path: Path, make_tiny_bundle: Callable[..., Bundle]
) -> None:
    with opened(tmp_path, make_tiny_bundle(1).path) as terminal:
        terminal.follow(TUTORIAL)


@pytest.mark.parametrize(
    "page", dict.fromkeys(block.page for block in BLOCKS if block.reason is None)
)
def test_a_page_runs_as_printed(page: str, terminal: Terminal) -> None:
    if page not in {"README.md", TUTORIAL}:
        terminal.follow(page)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.reason], ids=lambda block: block.name)
def test_a_block_that_does_not_run_says_why(block: Block) -> None:
    pytest.skip(f"{block.name}: {block.reason}")
