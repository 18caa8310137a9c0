"""Dockerfiles as tests run them: parsed, with the folders of the image moved into a scratch one."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
_MOVED = ("/opt/kinlens", "/state", "/run/secrets")


@dataclass(frozen=True)
class Instruction:
    """One line of a Dockerfile, its continuations joined: `word` is RUN, COPY and so on."""

    word: str
    rest: str

    @property
    def arguments(self) -> list[str]:
        """The exec form, after options such as --interval and an inner CMD."""
        given: list[str] = json.loads(self.rest[self.rest.index("[") :])
        return given


def parse(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile in order."""
    text = "\n".join(
        line for line in path.read_text().splitlines() if line and not line.startswith("#")
    )
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [Instruction(*line.split(maxsplit=1)) for line in lines]


def environment(instructions: list[Instruction]) -> dict[str, str]:
    """What the ENV lines set."""
    words = [word for i in instructions if i.word == "ENV" for word in shlex.split(i.rest)]
    return dict(word.split("=", 1) for word in words)


@dataclass
class Scratch:
    """A folder that is used as the root of an image; `python` is the one of its base image."""

    folder: Path
    log: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "src").mkdir(parents=True)
        (self.folder / "state").mkdir()
        (self.folder / "root/etc").mkdir(parents=True)
        for name in ("passwd", "group", "shadow", "gshadow"):
            (self.folder / "root/etc" / name).touch()
        subprocess.run([sys.executable, "-m", "venv", self.folder / "python"], check=True)

    def moved(self, text: str) -> str:
        """`text` with paths of the image inside the folder; the cache of uv is used."""
        for path in _MOVED:
            text = re.sub(rf"(?<![\w/]){path}(?!\w)", str(self.folder / path[1:]), text)
        prefix = f"--prefix {self.folder}/root"
        text = re.sub(r"^(groupadd|useradd) |(?<=&& )(groupadd|useradd) ", rf"\g<0>{prefix} ", text)
        return text.replace("--no-cache ", "")

    def copy(self, instruction: Instruction) -> None:
        """COPY from the project; what a stage copies from another one is in its place already."""
        if instruction.rest.startswith("--from="):
            return
        *sources, target = instruction.rest.split()
        for source in sources:
            into = self.folder / "src" / target
            if (ROOT / source).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.rmtree(into, ignore_errors=True)
                shutil.copytree(ROOT / source, into, symlinks=True, ignore=ignored)
            else:
                into = into / source if target.endswith("/") else into
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, into)

    def run(self, command: str, **variables: str) -> str:
        """Run a shell line as RUN does; returns its output. Fails the test if it fails."""
        done = subprocess.run(
            ["sh", "-ec", command],
            cwd=self.folder / "src",
            env=self.variables(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        self.log.append(f"$ {command}\n{done.stdout}")
        assert done.returncode == 0, self.log[-1]
        return done.stdout

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        """The environment of a process in the image."""
        kept = {name: value for name, value in os.environ.items() if _is_kept(name)}
        path = f"{self.folder}/opt/kinlens/bin:{self.folder}/python/bin:/usr/sbin:/usr/bin:/bin"
        return kept | {"OMP_NUM_THREADS": "1"} | dict(given) | {"PATH": path}


def _is_kept(name: str) -> bool:
    """What a build needs to reach an index of packages, and nothing of the tests' own settings."""
    return (
        name.startswith(("PIP_", "UV_", "SSL_"))
        or name.lower().endswith("_proxy")
        or (name in {"HOME", "LANG"})
    )
