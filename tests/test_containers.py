"""Containers without an engine: each line of the Dockerfiles runs here, and the rest is checked."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kinlens.embedder.bundle import Bundle
from kinlens.service.http.server import GRACE_S
from kinlens.service.settings import Settings
from tests.support.dockerfiles import ROOT, Scratch, environment, parse
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
COMPOSED: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSED["services"]


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
                continue  # it needs root
            scratch.run(scratch.moved(instruction.rest))
    return scratch


def can_add_users() -> bool:
    return os.getuid() == 0 and shutil.which("useradd") is not None


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


@pytest.mark.long
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
    assert megabytes + 130 < 500  # with python:3.13-slim, unpacked
    if can_add_users():
        users = (image.folder / "root/etc/passwd").read_text()
        assert "kinlens:x:10001:10001:" in users
        assert (image.folder / "state").stat().st_uid == 10001


@pytest.mark.long
def test_the_cpu_image_serves_is_healthy_and_ends_with_its_signal(
    image: Scratch, tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path
) -> None:
    instructions = parse(CPU)
    [health, entrypoint] = [i for i in instructions if i.word in ("HEALTHCHECK", "ENTRYPOINT")]
    url = f"http://127.0.0.1:{(port := free_port())}"
    given = {name: image.moved(text) for name, text in environment(instructions).items()}
    given |= {"KINLENS_BUNDLE": str(tiny_bundle.path), "KINLENS_GALLERIES": f"shop={tiny_gallery}"}
    variables = image.variables(given | {"KINLENS_PORT": str(port)})
    bin_folder = image.folder / "opt/kinlens/bin"

    def healthy() -> bool:
        check = [bin_folder / health.arguments[0], *health.arguments[1:]]
        return subprocess.run(check, env=variables, capture_output=True).returncode == 0

    with (tmp_path / "log.txt").open("w") as log:
        command = [bin_folder / entrypoint.arguments[0], *entrypoint.arguments[1:]]
        process = subprocess.Popen(command, env=variables, cwd=tmp_path, stdout=log, stderr=log)
    try:
        until(lambda: healthy() or process.poll() is not None)
        answer = httpx.post(f"{url}/search", files={"image": encoded(photo(2))})
        assert answer.json()["hits"][0]["key"] == "2.png"
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=40)
    assert code == 0, (tmp_path / "log.txt").read_text()
    assert not healthy()


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "with_them", "without"),
    [
        (CPU, {"onnxruntime", "faiss-cpu"}, {"torch", "pytest"}),
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
    found = set(re.findall(r"^ \+ ([a-z0-9._-]+)==", reported, re.MULTILINE))
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
    assert given["TORCH_HOME"].startswith("/state/"), "downloads go where it may write"
    assert given["HF_HOME"].startswith("/state/")
    try:
        until(lambda: subprocess.run(check, env=variables).returncode == 0)
        assert worker.poll() is None
    finally:
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(timeout=40)
    assert code in {0, -signal.SIGTERM}


def test_compose_starts_service_and_cache_and_the_rest_by_profile() -> None:
    always = {name for name, service in SERVICES.items() if not service.get("profiles")}
    assert always == {"service", "redis"}
    profiles = {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
    assert profiles == {"gpu", "training", "milvus", "scale", "observability"}
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (ROOT / source).exists()
    schema = ["--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [BIN / "check-jsonschema", *schema, COMPOSE], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_profile_scale_is_three_replicas_over_milvus_behind_a_balancer() -> None:
    replica, balancer = SERVICES["replica"], SERVICES["balancer"]
    assert replica["deploy"]["replicas"] == 3
    assert set(replica["depends_on"]) == {"redis", "milvus"}
    assert "scale" in SERVICES["milvus"]["profiles"]
    assert balancer["depends_on"] == ["replica"]
    assert {"milvus", "s3", "otel"} <= set(replica["build"]["args"]["EXTRAS"].split())
    assert "milvus://milvus:19530/shop" in replica["environment"]["KINLENS_GALLERIES"]
    assert replica["environment"]["KINLENS_PICTURES"]
    config = (DEPLOY / "haproxy/haproxy.cfg").read_text()
    assert "server-template replica 3 replica:8000" in config
    [(every_s, times)] = re.findall(r"^  server-template .* inter (\d+)s fall (\d+)", config, re.M)
    assert drain_s(replica) > int(every_s) * int(times)


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
    assert given == "${KINLENS_SHUTDOWN_TIMEOUT_S:-30}", "as in docs/containers.md"
    limit_s = drain_s(service) + 30 + GRACE_S
    assert int(service["stop_grace_period"].removesuffix("s")) > limit_s


def made_secrets(tmp_path: Path) -> Path:
    """What deploy/make_secrets.py writes, in a folder of its own."""
    (tmp_path / "deploy").mkdir()
    shutil.copy(DEPLOY / "make_secrets.py", tmp_path / "deploy")
    command = [sys.executable, tmp_path / "deploy/make_secrets.py"]
    written = [subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2)]
    assert written[1] == b"", "secrets that are there stay"
    secrets = tmp_path / "deploy/secrets"
    assert secrets.stat().st_mode & 0o777 == 0o700
    for secret in COMPOSED["secrets"].values():
        assert (secrets / Path(secret["file"]).name).read_text().strip()
    return secrets


def test_redis_takes_its_command_and_lets_in_only_who_has_the_password(tmp_path: Path) -> None:
    secrets = made_secrets(tmp_path)
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


def test_the_dashboard_and_the_alerts_ask_for_metrics_of_the_service(running_service) -> None:
    metrics = running_service.client.get("/metrics").text
    known = set(re.findall(r"^# TYPE (\w+)", metrics, re.MULTILINE))
    used = set(re.findall(r"\bkinlens_\w+", DASHBOARD.read_text() + ALERTS.read_text()))
    parts = {name for name in used if re.sub("_(bucket|sum|count)$", "", name) in known}
    assert used - known - parts == set()


def test_the_configuration_of_prometheus_and_grafana_fits_together() -> None:
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).exists() for name in prometheus["rule_files"])
    provisioning = DEPLOY / "grafana/provisioning"
    [source] = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    dashboard = json.loads(DASHBOARD.read_text())
    used = [panel["datasource"]["uid"] for panel in dashboard["panels"] if "targets" in panel]
    assert set(used) == {source["uid"]}
    [provider] = yaml.safe_load((provisioning / "dashboards/kinlens.yml").read_text())["providers"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
