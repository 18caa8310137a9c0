"""Do all that a user does with Kinlens, and print what it tried to connect to; run as a script.

    unshare --net python tests/support/quiet_machine.py FOLDER [--user ID] [--train]

The network has a loopback interface alone, where a proxy records each connection. The kernel counts
what finds no route. With a user id, that has no name and no home folder, and runs the service and a
build. `FOLDER/work`, where all commands run, has files with the names of modules, which write the
file `ran`.
"""

import argparse
import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

BIN = Path(sys.executable).parent
_UP = 0x8914, struct.pack("16sH14s", b"lo", 1, b"")  # SIOCSIFFLAGS, IFF_UP
# fmt: off
MODULES = (
    "abc", "argparse", "asyncio", "base64", "collections", "concurrent", "ctypes", "dataclasses",
    "email", "faiss", "fastapi", "getpass", "httpx", "importlib", "io", "json", "kinlens",
    "logging", "matplotlib", "multiprocessing", "numpy", "onnx", "onnxruntime", "openvino", "os",
    "PIL", "pickle", "platform", "pydantic", "pyarrow", "random", "ray", "redis", "rich", "runpy",
    "signal", "site", "sitecustomize", "sklearn", "socket", "sqlite3", "string", "subprocess",
    "tempfile", "threading", "timm", "torch", "torchvision", "typer", "types", "typing",
    "usercustomize", "uuid", "uvicorn", "warnings",
)
# fmt: on
ADAPT = {
    "model.backbone": "timm:test_resnet",
    "model.dim": 16,
    "model.hidden": 8,
    "model.views": 1,
    "model.batch_norm": "frozen",
    "input.size_px": 32,
    "input.resize_px": 36,
    "input.test_px": 32,
    "optimizer.min_steps": 4,
    "optimizer.batch_size": 8,
    "runtime.workers": 0,
    "runtime.device": "cpu",
}


class Proxy(threading.Thread):
    """Records the first line of each connection, and closes it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lines: list[str] = []

    def run(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                self.lines.append(connection.recv(4096).split(b"\r\n")[0].decode())


def without_route() -> int:
    """Packets that this network namespace could not send to any address."""
    found = 0
    for file in ("snmp", "snmp6"):
        text = Path("/proc/net", file).read_text()
        if file == "snmp":
            names, numbers = re.findall(r"^Ip: (.*)$", text, re.MULTILINE)
            found += int(dict(zip(names.split(), numbers.split(), strict=True))["OutNoRoutes"])
        else:
            found += int(re.findall(r"Ip6OutNoRoutes\s+(\d+)", text)[0])
    return found


def report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


class Walk:
    """Runs commands in `folder/work`, which write to `out`; a failure ends the walk."""

    def __init__(
        self, out: Path, environment: dict[str, str], before: list[str], trains: bool
    ) -> None:
        """`before` are the words before each command."""
        self.folder, self.out = out.parent, out
        self.environment, self.trains = environment, trains
        self.before = before
        out.mkdir()
        out.chmod(0o777)

    def run(self, name: str, *words: object) -> str:
        began = time.monotonic()
        command = [*self.before, BIN / name, *map(str, words)]
        done = subprocess.run(
            command, cwd=self.folder / "work", env=self.environment, capture_output=True, text=True
        )
        text = done.stdout + done.stderr
        report(f"{time.monotonic() - began:.1f} s: {name} {words[0]}")
        if done.returncode:
            raise SystemExit(f"{name} {' '.join(map(str, words))}:\n{text}")
        return done.stdout

    def build(self, bundle: Path) -> None:
        """A gallery, and a search in it."""
        shop, gallery = self.folder / "shop", self.out / "gallery"
        self.run("kinlens-index", "build", shop, "--bundle", bundle, "--out", gallery)
        self.run("kinlens-index", "search", gallery, "--bundle", bundle, "--image", self.photo)

    def offline(self, bundle: Path, weights: Path) -> None:
        """Every other kind of command without a service."""
        shop, gallery = self.folder / "shop", self.out / "gallery"
        settings = [f"--set={name}={json.dumps(value)}" for name, value in ADAPT.items()]
        adapt = ("--data", shop, "--weights", weights, "--backbone", ADAPT["model.backbone"])
        serve = ("--bundle", bundle, "--gallery", f"shop={gallery}", "--port", 0)
        self.run("kinlens-serve", "check", *serve, "--precision", "auto", "--engine", "auto")
        self.run("kinlens-train", "data", "doctor", shop)
        vectors = ("--out", self.out / "vectors")
        self.run("kinlens-index", "embed", shop, "--bundle", bundle, *vectors)
        if not self.trains:
            return
        run = ("--out", self.out / "adapted", "--run", self.out / "run")
        self.run("kinlens-train", "adapt", *adapt, *run, *settings)

    @property
    def photo(self) -> Path:
        return next((self.folder / "shop").rglob("*.png"))

    def service(self, bundle: Path, weights: Path) -> None:
        """The service in `work`, to which the files come after its start, and each kind of job."""
        state = self.out / "state"
        key = self.run("kinlens-serve", "keys", "create", "a", "--scope", "admin", "--state", state)
        environment = self.environment | {
            "PYTHONPATH": os.pathsep,  # two empty entries: the working directory
            "KINLENS_TRAINING_WEIGHTS": f"tiny={weights}",
        }
        words = ["--bundle", bundle, "--gallery", f"shop={self.out / 'gallery'}", "--port", "0"]
        modules = [(self.folder / "work" / f"{name}.py") for name in MODULES]
        contents = [module.read_text() for module in modules]
        for module in modules:
            module.unlink()
        with subprocess.Popen(
            [*self.before, BIN / "kinlens-serve", *words, "--state", state, "--precision", "auto"],
            cwd=self.folder / "work",
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split()[3]
                for module, content in zip(modules, contents, strict=True):
                    module.write_text(content)
                headers = {"X-API-Key": key.strip()}
                with httpx.Client(
                    base_url=url, headers=headers, timeout=60, trust_env=False
                ) as client:
                    self._ask(client)
            finally:
                process.terminate()

    def _ask(self, client: httpx.Client) -> None:
        data = self.photo.read_bytes()
        for path in ("/", "/docs", "/ready", "/metrics"):
            client.get(path).raise_for_status()
        client.post("/search", files={"image": data}).raise_for_status()
        bundle_id = client.get("/galleries/shop").json()["bundle_id"]
        train = {"job": "adapt", "gallery": "shop", "class_attribute": "class"}
        train |= {"overrides": ADAPT | {"model.weights": "tiny"}, "swap": "never"}
        jobs: list[tuple[str, Any]] = [
            ("/galleries/shop/compact", None),
            ("/galleries/shop/rebuild", {"bundle_id": bundle_id, "swap": "never"}),
        ]
        jobs += [("/jobs/train", train)] if self.trains else []
        for path, body in jobs:
            began = time.monotonic()
            answer = client.post(path, json=body)
            if answer.status_code != 202:
                raise SystemExit(f"{path}: {answer.text}")
            job = answer.json()
            while job["state"] in ("queued", "running"):
                time.sleep(0.1)
                job = client.get(f"/jobs/{job['id']}").json()
            report(f"{time.monotonic() - began:.1f} s: {path}")
            if job["state"] != "succeeded":
                log = client.get(f"/jobs/{job['id']}/log").json()["text"]
                raise SystemExit(f"{path}: {job['error']}\n{log}")


def main(folder: Path, user: int | None, trains: bool) -> None:
    with socket.socket() as link:
        fcntl.ioctl(link, *_UP)
    proxy = Proxy()
    proxy.start()
    environment = {name: value for name, value in os.environ.items() if "KINLENS" not in name}
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        environment |= {name: proxy.url, name.lower(): proxy.url}
    environment |= {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    for name in ("PYTHONPATH", "XDG_CACHE_HOME", "USER", "LOGNAME"):
        environment.pop(name, None)
    (folder / "home").mkdir()
    environment["HOME"] = str(folder / "home")
    before: list[str] = []
    homeless = environment
    if user is not None:
        homeless = {name: value for name, value in environment.items() if name != "HOME"}
        ids = ("--reuid", "--regid")
        before = ["setpriv", "--clear-groups", *(f"{id_}={user}" for id_ in ids)]
        # It may read the interpreter wherever that is, and write only where anyone may.
        for kind in ("inh-caps", "ambient-caps", "bounding-set"):
            before.append(f"--{kind}={'-all,' if kind != 'ambient-caps' else ''}+dac_read_search")
    shown = "f'{__file__} ran in {sys.orig_argv} with {sys.path}\\n'"
    mark = (
        f"import sys\nopen({str(folder / 'ran')!r}, 'a').write({shown})\nraise SystemExit('ran')\n"
    )
    for name in MODULES:
        (folder / "work" / f"{name}.py").write_text(mark)
    unreachable = without_route()
    files = folder / "bundle", folder / "weights.pt"
    own = Walk(folder / "own", environment, [], trains)
    serving = Walk(folder / "serving", homeless, before, trains)
    for walk in (own, serving):
        walk.build(files[0])
    for walk in (own, serving) if trains else (own,):
        walk.offline(*files)
    for walk in (own, serving) if trains else (serving,):
        walk.service(*files)
    ran = folder / "ran"
    home = [str(path) for path in (folder / "home").rglob("*") if path.is_file()]
    found: dict[str, Any] = {
        "proxied": proxy.lines,
        "direct": without_route() - unreachable,
        "home": home,
    }
    found["ran"] = ran.read_text() if ran.exists() else ""
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--user", type=int)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    main(options.folder, options.user, options.train)
