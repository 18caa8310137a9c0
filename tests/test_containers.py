"""Containers without an engine: each line of the Dockerfiles runs here, and the rest is checked."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kinlens.embedder.bundle import Bundle
from kinlens.embedder.session import OnnxEmbedder
from kinlens.indexer.ingest.build import build_gallery
from kinlens.indexer.ingest.sources import folder_source
from kinlens.service.commands.processes import GRACE_S
from kinlens.service.settings import Settings
from tests.support.dockerfiles import ROOT, Scratch, environment, parse
from tests.support.seams import Locations
from tests.support.servers import free_port
from tests.support.waiting import until
from tests.tiny import encoded, photo

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
CPU = ROOT / "docker/service.Dockerfile"
GPU = ROOT / "docker/service-gpu.Dockerfile"
TRAINING = ROOT / "docker/training.Dockerfile"
COMPOSE = ROOT / "docker-compose.yml"
DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana/dashboards/kinlens.json"
ALERTS = DEPLOY / "prometheus/alerts.yml"
BIN = Path(sys.executable).parent
NAMES = [path.name.removesuffix(".Dockerfile") for path in DOCKERFILES]
IMAGE_MB = 500
BASE_MB = 130  # python:3.13-slim, unpacked
COMPOSED: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSED["services"]


def resolved(reported: str) -> set[str]:
    """Names of the packages that an installation, or a dry run of one, has chosen."""
    return set(re.findall(r"^ \+ ([a-z0-9._-]+)==", reported, re.MULTILINE))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """A scratch image in which the packaging tools are installed, as in the first RUN."""
    scratch = Scratch(tmp_path_factory.mktemp("image") / "scratch")
    scratch.copy(next(i for i in parse(CPU) if i.word == "COPY"))
    try:
        scratch.run(next(i.rest for i in parse(CPU) if i.word == "RUN"))
    except AssertionError as error:
        if "No matching distribution" in str(error) or "onnection" in str(error):
            pytest.skip(f"no index of packages can be reached: {str(error)[-300:]}")
        raise
    return scratch


@pytest.fixture(scope="module")
def image(scratch: Scratch) -> Scratch:
    """The CPU image: every COPY and RUN of its Dockerfile, in order, in the scratch folder."""
    for instruction in parse(CPU):
        if instruction.word == "COPY":
            scratch.copy(instruction)
        elif instruction.word == "RUN" and "constraints.txt uv" not in instruction.rest:
            if "useradd" in instruction.rest and not can_add_users():
                sys.stdout.write(f"not run, since that needs root: {instruction.rest}\n")
                continue
            scratch.run(scratch.moved(instruction.rest))
    return scratch


def can_add_users() -> bool:
    return os.getuid() == 0 and shutil.which("useradd") is not None


@pytest.fixture(scope="module")
def shop(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gallery of a few images, made with the tiny bundle."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "pictures").mkdir()
    for number in range(4):
        (folder / f"pictures/{number}.png").write_bytes(encoded(photo(number)))
    source = folder_source(folder / "pictures")
    build_gallery(source, OnnxEmbedder.open(tiny_bundle), folder / "gallery")
    return folder / "gallery"


class Container:
    """The ENTRYPOINT of the CPU image, running on a free port."""

    def __init__(self, image: Scratch, bundle: Path, gallery: Path, log: Path) -> None:
        self.image = image
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        instructions = parse(CPU)
        [self.health] = [i for i in instructions if i.word == "HEALTHCHECK"]
        [entrypoint] = [i for i in instructions if i.word == "ENTRYPOINT"]
        given = {name: image.moved(text) for name, text in environment(instructions).items()}
        given |= {"KINLENS_BUNDLE": str(bundle), "KINLENS_GALLERIES": f"shop={gallery}"}
        self.variables = image.variables(given | {"KINLENS_PORT": str(self.port)})
        self.log = log
        self.errors = log.open("w")
        program, *arguments = entrypoint.arguments
        self.process = subprocess.Popen(
            [image.folder / "opt/kinlens/bin" / program, *arguments],
            cwd=image.folder / "state",
            env=self.variables,
            stdout=self.errors,
            stderr=self.errors,
        )

    def ready(self) -> bool:
        """Whether it answers, which is asked more cheaply than by a HEALTHCHECK."""
        assert self.process.poll() is None, self.log.read_text()
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/ready"):
            return True
        return False

    def healthy(self) -> bool:
        """Run the HEALTHCHECK as the engine does."""
        program, *arguments = self.health.arguments
        done = subprocess.run(
            [self.image.folder / "opt/kinlens/bin" / program, *arguments],
            env=self.variables,
            capture_output=True,
        )
        return done.returncode == 0

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=40)
        self.errors.close()
        return code


@pytest.fixture(scope="module")
def container(
    image: Scratch, tiny_bundle: Bundle, shop: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Container]:
    log = tmp_path_factory.mktemp("container") / "log.txt"
    container = Container(image, tiny_bundle.path, shop, log)
    until(container.ready)
    yield container
    if container.process.poll() is None:
        container.stop()


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_dockerfiles_have_no_finding_of_hadolint(path: Path) -> None:
    done = subprocess.run([BIN / "hadolint", path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("path", DOCKERFILES, ids=NAMES)
def test_images_are_small_on_purpose_and_run_without_root(path: Path) -> None:
    instructions = parse(path)
    words = [i.word for i in instructions]
    assert words.count("FROM") == 2, "what builds is no part of what runs"
    last = instructions[len(words) - words[::-1].index("FROM") :]
    assert [i.rest for i in last if i.word == "USER"] == ["10001:10001"]
    assert not [i for i in last if i.word == "RUN" and "install " in i.rest.split("useradd")[0]]
    [health] = [i for i in last if i.word == "HEALTHCHECK"]
    assert health.arguments[0] == "python"
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines()}
    for copied in (i for i in instructions if i.word == "COPY" and "--from" not in i.rest):
        for source in copied.rest.split()[:-1]:
            assert source in allowed, f".dockerignore leaves {source} out"
            assert (ROOT / source).exists()


def test_every_line_of_the_cpu_image_builds_it_without_torch(image: Scratch) -> None:
    python = image.folder / "opt/kinlens/bin/python"
    code = (
        "import importlib.util as u, kinlens.service.app; "
        "print([n for n in ('torch', 'torchvision', 'pip', 'pytest') if u.find_spec(n)])"
    )
    done = subprocess.run(
        [python, "-c", code], cwd="/", env=image.variables({}), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr
    files = [path for path in (image.folder / "opt/kinlens").rglob("*") if path.is_file()]
    megabytes = sum(path.lstat().st_size for path in files if not path.is_symlink()) / 2**20
    sys.stdout.write(f"CPU image: {megabytes:.0f} MiB of packages, {BASE_MB} MiB of Python\n")
    assert megabytes + BASE_MB < IMAGE_MB
    if can_add_users():
        users = (image.folder / "root/etc/passwd").read_text()
        assert "kinlens:x:10001:10001:" in users
        assert (image.folder / "state").stat().st_uid == 10001


def test_the_cpu_image_serves_is_healthy_and_ends_with_its_signal(
    image: Scratch, tiny_bundle: Bundle, shop: Path, tmp_path: Path, container: Container
) -> None:
    assert container.healthy()
    answer = httpx.post(f"{container.url}/search", files={"image": encoded(photo(2))})
    assert answer.json()["hits"][0]["key"] == "2.png"
    other = Container(image, tiny_bundle.path, shop, tmp_path / "log.txt")
    until(other.ready)
    assert other.healthy()
    assert other.stop() == 0
    assert not other.healthy()


@pytest.mark.parametrize(
    ("path", "with_them", "without"),
    [
        (CPU, {"onnxruntime", "faiss-cpu", "redis", "opentelemetry-sdk"}, {"torch"}),
        (GPU, {"onnxruntime-gpu", "faiss-gpu-cuvs"}, {"torch", "onnxruntime", "faiss-cpu"}),
        (TRAINING, {"torch", "torchvision", "timm", "onnxruntime", "faiss-cpu"}, {"faiss-gpu"}),
    ],
    ids=["cpu", "gpu", "training"],
)
def test_every_image_resolves_to_what_it_needs_for_its_own_python(
    scratch: Scratch, path: Path, with_them: set[str], without: set[str]
) -> None:
    instructions = parse(path)
    [version] = [i.rest[7:] for i in instructions if i.rest.startswith("PYTHON=")]
    own = str(scratch.folder / "opt" / path.stem)
    reported = ""
    for instruction in instructions:
        if instruction.word == "COPY":
            scratch.copy(instruction)
        elif "uv pip install" in instruction.rest:
            command = scratch.moved(instruction.rest).replace(f"{scratch.folder}/opt/kinlens", own)
            dry = f"uv pip install --dry-run --python-version {version}"
            reported += scratch.run(command.replace("uv pip install", dry))
    found = resolved(reported)
    assert with_them <= found
    assert not without & found


def test_the_worker_of_the_training_image_waits_for_jobs_and_ends_with_its_signal(
    tmp_path: Path, tiny_bundle: Bundle
) -> None:
    instructions = parse(TRAINING)
    [entrypoint] = [i for i in instructions if i.word == "ENTRYPOINT"]
    [arguments] = [i.arguments for i in instructions if i.word == "CMD"]
    [health] = [i for i in instructions if i.word == "HEALTHCHECK"]
    given = environment(instructions) | {"KINLENS_STATE": str(tmp_path)}
    variables = os.environ | given | {"PATH": f"{BIN}:/usr/bin:/bin"}
    variables |= {"KINLENS_BUNDLE": str(tiny_bundle.path)}
    worker = subprocess.Popen([BIN / entrypoint.arguments[0], *arguments], env=variables)
    check = [sys.executable, *health.arguments[1:]]
    try:
        until(lambda: subprocess.run(check, env=variables).returncode == 0)
        time.sleep(1)
        assert worker.poll() is None
    finally:
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(timeout=40)
    assert code in {0, -signal.SIGTERM}


def test_compose_is_valid() -> None:
    schema = ["--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [BIN / "check-jsonschema", *schema, COMPOSE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_starts_service_and_cache_and_the_rest_by_profile() -> None:
    always = {name for name, service in SERVICES.items() if not service.get("profiles")}
    assert always == {"service", "redis"}
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert profiles == {"gpu", "training", "milvus", "scale", "observability"}
    for service in SERVICES.values():
        if "build" in service:
            assert (ROOT / service["build"]["dockerfile"]).exists()
        else:
            assert re.fullmatch(r"[a-z]+(/[a-z]+)?:[\w.-]+", service["image"])
            assert not service["image"].endswith(":latest")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists()
            elif not source.startswith("$"):
                assert source in COMPOSED["volumes"]


def test_the_profile_scale_is_three_replicas_over_milvus_behind_a_balancer() -> None:
    replica, balancer = SERVICES["replica"], SERVICES["balancer"]
    assert replica["deploy"]["replicas"] == 3
    assert set(replica["depends_on"]) == {"redis", "milvus"}
    assert "scale" in SERVICES["milvus"]["profiles"]
    assert balancer["depends_on"] == ["replica"]
    given = {
        name.removeprefix("KINLENS_").lower(): re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        for name, value in replica["environment"].items()
        if name in ("KINLENS_GALLERIES", "KINLENS_PICTURES")
    }
    [place] = Locations(Settings(**given)).list_galleries()
    assert place.address == "milvus://milvus:19530/shop"
    assert place.uploads is not None
    config = (DEPLOY / "haproxy/haproxy.cfg").read_text()
    assert "server-template replica 3 replica:8000" in config
    checks = re.findall(r"^  server-template .* inter (\d+)s fall (\d+)", config, re.MULTILINE)
    [(every_s, times)] = checks
    assert drain_s(replica) > int(every_s) * int(times)


def test_the_image_of_replicas_can_store_uploads_in_milvus_and_s3() -> None:
    extras = SERVICES["replica"]["build"]["args"]["EXTRAS"].split()
    assert {"milvus", "s3", "otel"} <= set(extras)


def drain_s(service: dict[str, Any]) -> int:
    """The drain of a container; by default there is none."""
    given = service["environment"]["KINLENS_DRAIN_S"] or "${KINLENS_DRAIN_S:-0}"
    [seconds] = re.findall(r"^\$\{KINLENS_DRAIN_S:-(\d+)\}$", given)
    return int(seconds)


@pytest.mark.parametrize("name", SERVICES)
def test_each_container_has_no_more_rights_than_it_needs(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is (name != "milvus")
    assert service["mem_limit"]
    assert service["pids_limit"]
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    for variable, value in service.get("environment", {}).items():
        if re.search("PASSWORD|SECRET|TOKEN", variable):
            assert variable.endswith("__FILE")
            assert value.startswith("/run/secrets/")
    assert set(service.get("secrets", [])) <= set(COMPOSED["secrets"])


def test_the_service_gets_the_address_of_redis_from_a_secret(tmp_path: Path) -> None:
    (tmp_path / "run/secrets").mkdir(parents=True)
    (tmp_path / "run/secrets/redis_url").write_text("redis://kinlens:secret@redis:6379/0\n")
    (tmp_path / "kinlens-serve").write_text('#!/bin/sh\necho "$KINLENS_REDIS_URL" "$@"\n')
    (tmp_path / "kinlens-serve").chmod(0o755)
    command = [
        part.replace("$$", "$").replace("/run/secrets", f"{tmp_path}/run/secrets")
        for part in SERVICES["worker"]["entrypoint"] + SERVICES["worker"]["command"]
    ]
    done = subprocess.run(
        command, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True, text=True
    )
    assert done.stdout == "redis://kinlens:secret@redis:6379/0 work\n", done.stderr


def test_compose_passes_every_setting_to_the_service_but_those_of_its_image() -> None:
    of_the_image = {"host", "port", "state", "device", "redis_url", "milvus_token"}
    names = {f"KINLENS_{name.upper()}" for name in set(Settings.model_fields) - of_the_image}
    assert names <= set(SERVICES["service"]["environment"])
    for name in ("service-gpu", "worker", "replica"):
        assert names - {"KINLENS_WORKERS"} <= set(SERVICES[name]["environment"])
    for service in ("service", "service-gpu", "worker", "replica"):
        for name, value in SERVICES[service]["environment"].items():
            assert name.startswith("KINLENS_")
            assert value != "", f"{name} without a value is written without quotes"


@pytest.mark.parametrize("name", ["service", "service-gpu", "worker", "replica"])
def test_the_engine_waits_for_the_end_of_requests_that_the_service_waits_for(name: str) -> None:
    service = SERVICES[name]
    given = service["environment"]["KINLENS_SHUTDOWN_TIMEOUT_S"]
    default = re.fullmatch(r"\$\{KINLENS_SHUTDOWN_TIMEOUT_S:-(\d+)\}", given)
    assert default
    assert int(default[1]) == 30, "as in docs/containers.md"
    limit_s = drain_s(service) + int(default[1]) + GRACE_S
    assert int(service["stop_grace_period"].removesuffix("s")) > limit_s


def test_what_training_downloads_goes_where_the_container_may_write() -> None:
    given = environment(parse(TRAINING))
    code = (
        "import torch.hub, huggingface_hub.constants as c; "
        "print(torch.hub.get_dir(), c.HF_HUB_CACHE, c.HF_ASSETS_CACHE, sep=chr(10))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": os.environ["PATH"], "HOME": "/home/kinlens"} | given,
        capture_output=True,
        text=True,
    )
    folders = done.stdout.split()
    assert len(folders) == 3, done.stderr
    assert all(Path("/state/cache") in Path(folder).parents for folder in folders), folders
    assert any(volume.endswith(":/state") for volume in SERVICES["worker"]["volumes"])


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    """What deploy/make_secrets.py writes, in a folder of its own."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(DEPLOY / "make_secrets.py", tmp_path / "deploy")
    command = [sys.executable, tmp_path / "deploy/make_secrets.py"]
    written = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert written[1] == b"", "secrets that are there stay"
    return tmp_path / "deploy/secrets"


def test_the_secrets_are_those_that_compose_mounts(secrets: Path) -> None:
    for secret in COMPOSED["secrets"].values():
        assert (secrets / Path(secret["file"]).name).read_text().strip()
    assert secrets.stat().st_mode & 0o777 == 0o700
    done = subprocess.run(
        ["git", "check-ignore", "deploy/secrets/redis.acl"], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 0, "secrets must not be committed"


def test_redis_takes_its_command_and_lets_in_only_who_has_the_password(secrets: Path) -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    import redis

    port = free_port()
    program, *options = SERVICES["redis"]["command"]
    options = [word.replace("/run/secrets/redis_acl", f"{secrets}/redis.acl") for word in options]
    process = subprocess.Popen(
        [program, *options, "--port", str(port), "--bind", "127.0.0.1"],
        cwd=secrets,
        stdout=subprocess.DEVNULL,
    )
    address = (secrets / "redis_url.txt").read_text().strip()
    with (
        redis.Redis.from_url(address.replace("redis:6379", f"127.0.0.1:{port}")) as client,
        redis.Redis(port=port) as stranger,
    ):

        def answers() -> bool:
            with contextlib.suppress(redis.ConnectionError):
                return bool(stranger.ping())
            return False

        until(answers)
        client.set("kinlens:1:e:x", b"value", ex=60)
        assert client.mget(["kinlens:1:e:x"]) == [b"value"]
        assert client.eval("return redis.call('incr', KEYS[1])", 1, "LIMITS:x") == 1
        with pytest.raises(redis.RedisError):
            client.config_get("*")
        with pytest.raises(redis.RedisError):
            stranger.get("kinlens:1:e:x")
    process.terminate()
    process.wait(timeout=20)


def expressions() -> dict[str, str]:
    """Every PromQL expression of the dashboard and of the alerts by its title."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = {
        f"{panel['title']} {target['refId']}": target["expr"]
        for panel in panels
        for target in panel.get("targets", [])
    }
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        found |= {rule["alert"]: rule["expr"] for rule in group["rules"]}
    return found


def test_every_metric_of_dashboard_and_alerts_is_one_of_a_running_service(
    container: Container,
) -> None:
    httpx.post(f"{container.url}/search", files={"image": encoded(photo(1))}).raise_for_status()
    text = httpx.get(f"{container.url}/metrics").text
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    known = set(kinds)
    for name, kind in kinds.items():
        if kind == "histogram":
            known |= {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    for title, expression in expressions().items():
        used = set(re.findall(r"\bkinlens_\w+", expression))
        assert used or title == "KinlensDown", f"{title} asks for nothing"
        assert used <= known, f"{title} asks for {used - known}"
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]"))


def test_the_configuration_of_prometheus_and_grafana_fits_together() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).exists() for name in prometheus["rule_files"])
    [job] = [each for each in prometheus["scrape_configs"] if each["job_name"] == "kinlens"]
    assert set(job["dns_sd_configs"][0]["names"]) <= set(SERVICES)
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in {"critical", "warning"}
            assert set(rule["annotations"]) == {"summary", "description"}
    provisioning = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    dashboard = json.loads(DASHBOARD.read_text())
    used = [panel["datasource"]["uid"] for panel in dashboard["panels"] if "targets" in panel]
    assert set(used) == {source["uid"]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    [provider] = yaml.safe_load((provisioning / "dashboards/kinlens.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in SERVICES["grafana"]["volumes"]]
    assert provider["options"]["path"] in mounted
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"


def test_no_file_of_the_containers_names_a_registry_or_a_foreign_host() -> None:
    files = [*DOCKERFILES, COMPOSE, ROOT / ".dockerignore"]
    files += [path for path in DEPLOY.rglob("*") if path.is_file() and "secrets" not in path.parts]
    for path in files:
        text = path.read_text()
        hosts = set(re.findall(r"https?://([\w.-]+)", text))
        assert hosts <= {"localhost", "127.0.0.1", "prometheus", "kinlens"}, f"{path} names {hosts}"
        assert not re.search(r"\b(docker|ghcr|quay|gcr|nvcr|public\.ecr)\.(io|aws)\b", text)


def test_images_of_the_project_use_one_version_of_python() -> None:
    arguments = {i.rest for path in DOCKERFILES for i in parse(path) if i.word == "ARG"}
    [version] = (each for each in arguments if each.startswith("PYTHON="))
    assert version.removeprefix("PYTHON=") >= "3.11"
