"""The files of deploy/ for systemd and Kubernetes: linted, with real commands and settings alone.

Compose and Grafana are in tests/test_containers.py, the proxies in tests/http/load.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_args

import httpx
import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.errors import GalleryCorruptError
from kinlens.embedder.manifest import BundleManifest
from kinlens.indexer.catalog.schema import SCHEMA_VERSION, check_schema
from kinlens.indexer.exchange.milvus_collection import MilvusFacts
from kinlens.indexer.exchange.parquet import SCHEMA
from kinlens.indexer.exchange.published import PublishedSnapshot
from kinlens.indexer.folder.manifest import GalleryManifest
from kinlens.indexer.index.segment import SegmentManifest
from kinlens.indexer.ingest.parts import Part
from kinlens.indexer.ingest.shards import ShardsManifest
from kinlens.indexer.live.backup import BackupReport
from kinlens.service.access.keys import KeyStore
from kinlens.service.encoding.sandbox import ALLOWED_CALLS
from kinlens.service.http.server import GRACE_S
from kinlens.service.settings import Settings
from tests.support.dockerfiles import ROOT
from tests.support.proxies import program
from tests.support.routes import RIGHTS
from tests.support.servers import free_port

DEPLOY = ROOT / "deploy"
SYSTEMD = DEPLOY / "systemd"
OVERLAYS = DEPLOY / "kubernetes/overlays"
BIN = Path(sys.executable).parent
SERVING = ("kinlens-serve", "kinlens-serve@")
VERSIONS = ("1.30", "1.37")
"""Of Kubernetes: the oldest and the newest that the manifests are for."""
MOST_EXPOSED = 2.5  # of 10, by systemd-analyze; a unit without any limit has 9.6
OPERATORS = ("/metrics", "/ready", "/startup", "/admin", "/jobs")
WITHOUT_ADDRESS = (*OPERATORS, "/keys", "/audit")
"""Also not passed by an Ingress, which cannot tell where a caller is."""

PATHS = sorted({route.partition(" ")[2] for route in RIGHTS})

PAGE = ROOT / "docs/production.md"
FILES = [
    path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and "secrets" not in path.parts
]


def run(*command: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_setting_that_a_file_names_is_one_of_the_service() -> None:
    for path in FILES:
        named = re.findall(r"\bKINLENS_([A-Z_]*[A-Z])\b", path.read_text())
        assert {name.lower() for name in named} <= set(Settings.model_fields), path


def test_every_file_that_the_page_installs_is_there() -> None:
    named = set(re.findall(r"\bdeploy/[\w./@*-]+\w", PAGE.read_text()))
    assert len(named) > 8
    for name in named:
        assert list(ROOT.glob(name)), name
    alerts = set(re.findall(r"`(Kinlens\w+)`", PAGE.read_text()))
    rules = (DEPLOY / "prometheus/alerts.yml").read_text()
    assert alerts <= set(re.findall(r"alert: (\w+)", rules))
    jobs = [
        re.findall(r"job_name: (\w+)", (DEPLOY / "prometheus" / name).read_text())
        for name in ("host.yml", "prometheus.yml")
    ]
    assert jobs[0] == jobs[1], "the alerts name the job"


def test_the_page_says_which_schemas_are_read_and_written(tmp_path: Path) -> None:
    def schemas(model: type[BaseModel]) -> tuple[set[int], int]:
        field = model.model_fields["schema_version"]
        return set(get_args(field.annotation)), field.default

    def is_read(version: int) -> bool:
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(f"PRAGMA user_version = {version}")
            with contextlib.suppress(GalleryCorruptError):
                check_schema(tmp_path, connection)
                return True
        return False

    KeyStore(tmp_path / "keys.json").create("office", ["admin"])
    keys = json.loads((tmp_path / "keys.json").read_text())["schema_version"]
    row = re.compile(
        r"^\| ([^|]+) \| [^|]+ \| (\d)(?: to (\d)|, ([\d, ]+))? \| (\d) \|", re.MULTILINE
    )
    printed = {
        name: (
            {
                *range(int(first), int(last or first) + 1),
                *map(int, others.split(", ") if others else ()),
            },
            int(written),
        )
        for name, first, last, others, written in row.findall(PAGE.read_text())
    }
    assert printed == {
        "model bundle": schemas(BundleManifest),
        "gallery": schemas(GalleryManifest),
        "catalogue": ({version for version in range(20) if is_read(version)}, SCHEMA_VERSION),
        "segment": schemas(SegmentManifest),
        "backup of a gallery": schemas(BackupReport),
        "export as Parquet": ({int(SCHEMA)}, int(SCHEMA)),
        "vectors of `kinlens-index embed`": schemas(ShardsManifest),
        "snapshot of `kinlens-index publish`": schemas(PublishedSnapshot),
        "collection on Milvus": schemas(MilvusFacts),
        "keys": ({keys}, keys),
    }


class Unit:
    """A unit of systemd, started by hand: the commands of its lines, with other paths."""

    def __init__(self, name: str, places: dict[str, str]) -> None:
        text = (SYSTEMD / f"{name}.service").read_text()
        self._lines = [line for line in text.splitlines() if line and line[0] not in "#["]
        self._places = places
        self.variables = {"PATH": os.environ["PATH"]}
        for line in self._lines:
            key, value = line.split("=", 1)
            if key == "Environment":
                self.variables |= dict([self._placed(value).split("=", 1)])
            elif key == "EnvironmentFile":
                self.variables |= environment(self._placed((SYSTEMD / "kinlens.env").read_text()))

    def _placed(self, text: str) -> str:
        for printed, here in self._places.items():
            text = text.replace(printed, here)
        return text

    def seconds(self, key: str) -> int:
        return int(self._value(key))

    def command(self, key: str) -> list[str]:
        """The words of a command; systemd writes %% for % and $$ for $."""
        value = self._placed(self._value(key)).replace("%%", "%").replace("$$", "$")
        shell, quoted, script = value.partition(" '")
        return [*shell.split(), script.rstrip("'")] if quoted else value.split()

    def _value(self, key: str) -> str:
        [value] = [line.split("=", 1)[1] for line in self._lines if line.startswith(f"{key}=")]
        return value


def environment(text: str) -> dict[str, str]:
    """What a file of variables sets."""
    return dict(
        line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#")
    )


@pytest.fixture
def places(tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path) -> dict[str, str]:
    """Where the things of the units are in a test."""
    port = str(free_port())
    return {
        "/opt/kinlens/bin": str(BIN),
        "/srv/kinlens/bundles/shop": str(tiny_bundle.path),
        "/srv/kinlens/galleries/shop": str(tiny_gallery),
        "/srv/kinlens/photos": str(tiny_gallery.parent),
        "/var/lib/kinlens": str(tmp_path / "state"),
        "/var/cache/kinlens": str(tmp_path / "cache"),
        "/var/backups/kinlens": str(tmp_path / "backups"),
        "%i": port,
        "KINLENS_PORT=8000": f"KINLENS_PORT={port}",
        "KINLENS_DRAIN_S=15": "KINLENS_DRAIN_S=1",  # a test does not wait for so long
    }


@contextmanager
def started(unit: Unit) -> Iterator["subprocess.Popen[bytes]"]:
    command = unit.command("ExecStart")
    process = subprocess.Popen(command, env=unit.variables, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_unit_starts_says_when_and_ends_in_its_time(places: dict[str, str]) -> None:
    unit = Unit("kinlens-serve@", places)
    with started(unit) as process:
        waiting = unit.variables | {"MAINPID": str(process.pid)}
        limit_s = unit.seconds("TimeoutStartSec")
        done = subprocess.run(unit.command("ExecStartPost"), env=waiting, timeout=limit_s)
        assert done.returncode == 0
        ready = httpx.get(f"http://127.0.0.1:{places['%i']}/ready").json()
        assert ready["status"] == "ready", ready
        process.send_signal(signal.SIGTERM)
        assert process.wait(unit.seconds("TimeoutStopSec")) == 0
    done = subprocess.run(unit.command("ExecStartPost"), env=waiting)
    assert done.returncode == 1, "it must not wait for a process that has ended"


def test_the_backup_unit_keeps_the_newest_backups_whatever_their_age(
    places: dict[str, str],
) -> None:
    unit, folder = Unit("kinlens-backup", places), Path(places["/var/backups/kinlens"])
    old = [folder / f"2020-01-{day:02}-0330" for day in range(1, 21)]
    for kept in (*old, folder / "before the move"):
        (kept / "part").mkdir(parents=True)
        os.utime(kept, (0, 0))
    for key in ("ExecStart", "ExecStartPost"):
        done = subprocess.run(unit.command(key), env=unit.variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    *kept, made, other = sorted(folder.iterdir())
    assert (kept, other.name) == (old[-13:], "before the move")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-\d{4}", made.name)


@pytest.mark.parametrize("name", SERVING)
def test_a_unit_waits_for_requests_and_drain_before_it_kills(name: str) -> None:
    unit = Unit(name, {})
    given = {key.removeprefix("KINLENS_").lower(): text for key, text in unit.variables.items()}
    settings = Settings(**{key: given[key] for key in Settings.model_fields if key in given})
    limit_s = settings.drain_s + settings.shutdown_timeout_s + GRACE_S
    assert unit.seconds("TimeoutStopSec") > limit_s
    if name == "kinlens-serve":
        assert settings.drain_s == 0, "one process has no other"
        return
    haproxy = (DEPLOY / "haproxy/haproxy.cfg").read_text()
    for every_s, times in re.findall(r"\binter (\d+)s fall (\d+)", haproxy):
        assert settings.drain_s > int(every_s) * int(times)
    [every_s] = re.findall(r"health_interval (\d+)s", (DEPLOY / "caddy/Caddyfile").read_text())
    assert settings.drain_s > int(every_s)


def test_units_have_limits_and_no_finding_of_systemd(tmp_path: Path) -> None:
    """As docs/production.md installs them, with programs that are here."""
    installed = tmp_path / "units"
    shutil.copytree(SYSTEMD, installed)
    for path in installed.glob("*.service"):
        path.write_text(path.read_text().replace("/opt/kinlens/bin", str(BIN)))
    shutil.copy(installed / "kinlens-serve@.service", installed / "kinlens-serve@8001.service")
    for unit in sorted(installed.glob("*.service")):
        reported = run(program("systemd-analyze"), "security", "--offline=yes", "--no-pager", unit)
        [level] = re.findall(r"exposure level for .*: ([\d.]+)", reported)
        assert float(level) < MOST_EXPOSED, reported
    units = sorted([*installed.glob("*.service"), *installed.glob("*.timer")])
    command = [program("systemd-analyze"), "verify", "--man=no", *units]
    done = subprocess.run(command, capture_output=True, text=True)
    if "bus" in done.stderr:
        pytest.skip(f"systemd-analyze cannot verify units here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_calls_that_units_allow_hold_those_of_the_decoder_sandbox() -> None:
    text = (SYSTEMD / "kinlens-.service.d/sandbox.conf").read_text()
    [line] = re.findall(r"^SystemCallFilter=(.*)$", text, re.MULTILINE)
    known = {}
    for part in run(program("systemd-analyze"), "syscall-filter").split("\n@"):
        name, *words = re.sub("#.*", "", part).split()
        known[f"@{name.removeprefix('@')}"] = words

    def calls(words: list[str]) -> Iterator[str]:
        for word in words:
            yield from calls(known[word]) if word.startswith("@") else [word]

    entering = {"prctl", "seccomp", "landlock_create_ruleset", "landlock_restrict_self"}
    assert entering | set(ALLOWED_CALLS.split()[::3]) <= set(calls(line.split()))


@pytest.fixture(scope="module")
def built() -> dict[str, list[dict[str, Any]]]:
    """The objects of each overlay."""
    kubectl = program("kubectl")
    about = json.loads(run(kubectl, "version", "--client", "--output", "json"))
    version = re.match(r"v(\d+)", about.get("kustomizeVersion", ""))
    if version is None or int(version[1]) < 4:  # that of kubectl 1.20 knows no components
        pytest.skip("kubectl has a kustomize below 4; install kubectl 1.25 or newer")
    names = sorted(path.name for path in OVERLAYS.iterdir())
    assert names == ["folder", "follow", "milvus", "writer"]
    texts = {name: run(kubectl, "kustomize", OVERLAYS / name) for name in names}
    return {name: list(yaml.safe_load_all(text)) for name, text in texts.items()}


def kinds(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] == kind]


def pod_of(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The pod of the service."""
    [found] = [d for d in kinds(objects, "Deployment") if d["metadata"]["name"] == "kinlens"]
    pod: dict[str, Any] = found["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_the_schema_of_kubernetes(built: dict[str, Any], version: str) -> None:
    for objects in built.values():
        for each in objects:
            kubernetes_validate.validate(each, version, strict=True)
        assert len({each["metadata"]["namespace"] for each in objects}) == 1


def test_jobs_embed_parts_with_the_options_that_there_are(tmp_path: Path) -> None:
    """As Slurm and Kubernetes set the number of a part. Skipped images are no failure of a part."""
    script = DEPLOY / "slurm/embed.sh"
    job = yaml.safe_load((DEPLOY / "kubernetes/jobs/embed.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(job, version, strict=True)
    [container] = job["spec"]["template"]["spec"]["containers"]
    count = job["spec"]["completions"]
    index = tmp_path / "kinlens-index"
    index.write_text('#!/bin/sh\necho "$@"\nexit $STATUS\n')
    index.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    slurm = {"SLURM_ARRAY_TASK_ID": str(count), "SLURM_ARRAY_TASK_COUNT": "2"}
    for command, env in (
        (["bash", script], slurm),
        ([*container["command"], *container["args"]], {"JOB_COMPLETION_INDEX": str(count - 1)}),
    ):
        for status, expected in (("0", 0), ("1", 1), ("3", 0)):
            env |= {"STATUS": status}
            done = subprocess.run(command, text=True, capture_output=True, env=path | env)
            assert done.returncode == expected
        words = done.stdout.split()
        assert words[0] == "embed"
        options = {word for word in words if word.startswith("--")}
        assert options <= {*re.findall(r"--[a-z-]+", run(BIN / "kinlens-index", "embed", "--help"))}
        assert Part.parse(words[words.index("--part") + 1]) == (count, count)


def test_names_within_an_overlay_lead_somewhere(built: dict[str, Any]) -> None:
    for name, objects in built.items():
        templates = [d["spec"]["template"] for d in kinds(objects, "Deployment")]
        labels = [template["metadata"]["labels"] for template in templates]
        ports = set()
        for template in templates:
            volumes = {volume["name"] for volume in template["spec"]["volumes"]}
            for container in template["spec"]["containers"]:
                assert {mount["name"] for mount in container["volumeMounts"]} == volumes, name
                ports |= {port["name"] for port in container.get("ports", [])}
        for service_ in kinds(objects, "Service"):
            assert service_["spec"]["selector"] in labels
            assert {port["targetPort"] for port in service_["spec"]["ports"]} <= ports
        for budget in kinds(objects, "PodDisruptionBudget"):
            assert budget["spec"]["selector"]["matchLabels"] in labels
        if name in ("folder", "writer"):
            assert not kinds(objects, "HorizontalPodAutoscaler"), "it has one writer"


def test_each_overlay_names_the_image_of_all_its_containers(built: dict[str, Any]) -> None:
    for name, objects in built.items():
        pod = pod_of(objects)
        containers = pod["containers"] + pod.get("initContainers", [])
        assert {container["image"] for container in containers} == {"kinlens-shop:1"}, name


def test_a_pod_has_time_to_end_no_rights_and_probes_that_exist(built: dict[str, Any]) -> None:
    for objects in built.values():
        pod = pod_of(objects)
        container = pod["containers"][0]
        # Kubernetes gives each pod KINLENS_PORT=tcp://... where a Service is called kinlens.
        assert pod["enableServiceLinks"] is False
        given = {
            name.removeprefix("KINLENS_").lower(): text
            for each in kinds(objects, "ConfigMap")
            for name, text in each["data"].items()
        }
        settings = Settings(
            **{name: given[name] for name in Settings.model_fields if name in given}
        )
        limit_s = settings.drain_s + settings.shutdown_timeout_s + GRACE_S
        assert pod["terminationGracePeriodSeconds"] > limit_s
        probes = {
            key: probe["httpGet"]["path"] for key, probe in container.items() if "Probe" in key
        }
        assert probes == {
            "startupProbe": "/startup",
            "readinessProbe": "/ready",
            "livenessProbe": "/live",
        }
        ready = container["readinessProbe"]
        assert ready["timeoutSeconds"] > 5  # the limit of a readiness check
        if settings.drain_s:
            assert settings.drain_s > ready["periodSeconds"] * ready["failureThreshold"]
        for each in kinds(objects, "Deployment"):
            inside = each["spec"]["template"]["spec"]
            assert inside["securityContext"]["runAsNonRoot"] is True
            assert inside["automountServiceAccountToken"] is False
            for one in inside["containers"] + inside.get("initContainers", []):
                assert one["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert set(one["resources"]) == {"requests", "limits"}
        assert "/state" in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert pod["securityContext"]["runAsUser"] == 10001, "as in docker/service.Dockerfile"
    for name in ("follow", "milvus"):
        pod = pod_of(built[name])
        [volume] = [v["name"] for v in pod["volumes"] if "secret" in v]
        [mount] = [m for m in pod["containers"][0]["volumeMounts"] if m["name"] == volume]
        assert "subPath" not in mount, "Kubernetes does not update such a file"
        assert mount["readOnly"], "a change of keys through one replica must be refused"


def test_the_ingress_takes_the_largest_body_and_leaves_out_what_is_for_operators(
    built: dict[str, Any],
) -> None:
    assert not kinds(built["writer"], "Ingress")
    for objects in (objects for name, objects in built.items() if name != "writer"):
        [ingress] = kinds(objects, "Ingress")
        size = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
        assert int(size.removesuffix("k")) * 1024 == Settings().largest_body()
        paths = ingress["spec"]["rules"][0]["http"]["paths"]
        for path in paths:
            is_whole = path["pathType"] == "Exact"
            assert is_whole or path["path"] != "/", "this passes everything on"
            assert path["path"] not in OPERATORS
        whole = {p["path"] for p in paths if p["pathType"] == "Exact"}
        prefixes = tuple(p["path"] + "/" for p in paths if p["pathType"] == "Prefix")
        for path in PATHS:
            is_passed = path in whole or f"{path}/".startswith(prefixes)
            is_for_operators = f"{path}/".startswith(tuple(f"{n}/" for n in WITHOUT_ADDRESS))
            assert is_passed != is_for_operators, path


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("nginx/kinlens.conf", r"location ~ (\^/\(metrics\S+) \{"),
        ("haproxy/haproxy.cfg", r"acl private path,url_dec -m reg (\S+)"),
        ("caddy/Caddyfile", r"\tpath (/metrics .+)"),
    ],
)
def test_a_proxy_passes_every_route_that_is_not_for_operators(file: str, pattern: str) -> None:
    [private] = re.findall(pattern, (ROOT / "deploy" / file).read_text())
    for path in PATHS:
        is_refused = (
            any(fnmatchcase(path, each) for each in private.split())
            if file.startswith("caddy")
            else re.match(private, path) is not None
        )
        assert is_refused == f"{path}/".startswith(tuple(f"{n}/" for n in OPERATORS)), path
