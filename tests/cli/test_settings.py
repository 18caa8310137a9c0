"""Settings: read from the environment once, each documented, each refused by name if wrong."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from service.commands.check import exposures
from service.settings import Settings, split_gallery

ROOT = Path(__file__).parents[2]
OPERATIONS = ROOT / "docs" / "operations.md"


def documented() -> dict[str, str]:
    """Name and default of each row of the settings table."""
    row = re.compile(r"^\| `KINLENS_([A-Z_]+)` \| ([^|]*) \|", re.MULTILINE)
    rows = row.findall(OPERATIONS.read_text(encoding="utf-8"))
    return {name.lower(): default.strip().strip("`").replace(",", "") for name, default in rows}


def test_every_setting_is_in_the_operations_page_and_nothing_else_is() -> None:
    assert set(documented()) == set(Settings.model_fields)


def test_the_defaults_in_the_operations_page_are_true() -> None:
    rows = documented()
    for name, field in Settings.model_fields.items():
        if field.default_factory is not None:
            assert rows[name] == "cores"
        elif field.default in (None, (), ""):
            assert rows[name] == "none"
        elif isinstance(field.default, tuple):
            assert rows[name] == ",".join(field.default)
        else:
            assert rows[name].lower() == str(field.default).lower(), name


def test_settings_come_from_the_environment_and_arguments_win(monkeypatch) -> None:
    monkeypatch.setenv("KINLENS_PORT", "9000")
    monkeypatch.setenv("KINLENS_GALLERIES", "shop=/a/b, /c ,")
    monkeypatch.setenv("KINLENS_REDIS_URL", "redis://cache:6379/0")
    monkeypatch.setenv("KINLENS_IMAGE_ROOTS", "shop=/pictures,other=relative")
    monkeypatch.setenv("KINLENS_ALLOWED_HOSTS", "shop.example, [::1]")
    settings = Settings(max_k=50)
    assert (settings.port, settings.max_k) == (9000, 50)
    assert settings.galleries == ("shop=/a/b", "/c")
    assert settings.image_roots == ("shop=/pictures", "other=relative")
    assert settings.allowed_hosts == ("shop.example", "[::1]")
    assert Settings(port=1).port == 1


def test_the_environment_is_not_read_at_import(monkeypatch) -> None:
    code = "import service.__main__, service.app, service.api.operations; print('imported')"
    environment = {"KINLENS_PORT": "no number", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", 70_000),
        ("max_k", 10_001),
        ("max_megapixels", 0),
        ("device", "tpu"),
        ("redis_url", "http://cache"),
        ("redis_url", "redis://cache:port/0"),
        ("redis_url", "redis://cache/first"),
        ("redis_url", "redis://cache/0?colour=red"),
        ("galleries", ("bad name=/a",)),
        ("galleries", ("shop=",)),
        ("image_roots", ("/no/name",)),
        ("image_roots", ("=/a",)),
        ("image_roots", ("shop=",)),
        ("image_roots", ("bad name=/a",)),
        ("allowed_hosts", ("http://shop",)),
        ("allowed_hosts", ("shop:80",)),
        ("allowed_hosts", ("*.shop",)),
        ("allowed_hosts", ("::1",)),
        ("anonymous_scopes", ("owner",)),
        ("anonymous_scopes", "search,all"),
        ("rate_limit_per_key", "600"),
        ("rate_limit_per_address", "0/minute"),
        ("rate_limit_per_address", "many/day"),
        ("trusted_proxies", ("proxy",)),
        ("trusted_proxies", ("10.0.0.0/33",)),
        ("trusted_proxies", ("0.0.0.0/0",)),
        ("cors_origins", ("shop.example",)),
        ("cors_origins", ("https://shop.example/",)),
        ("cors_origins", ("https://shop.example/path",)),
        ("cors_origins", ("https://SHOP.example",)),
        ("cors_origins", ("null",)),
        ("training_data", ("/data",)),
        ("training_data", ("bad name=/data",)),
        ("training_data", ("a=/data", "a=/other")),
        ("training_weights", ("/weights.pth",)),
        ("training_weights", ("current=/weights.pth",)),
        ("training_command", " "),
        ("otlp_endpoint", "collector:4318"),
        ("precision", "fp8"),
        ("workers", 0),
        ("workers", 65),
        ("jobs", "there"),
        ("decode_memory_mb", 100),
        ("max_concurrent_uploads", 0),
        ("shutdown_timeout_s", 0),
        ("lanes", 0),
        ("unknown", 1),
    ],
)
def test_a_value_outside_its_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})


def test_a_default_k_above_the_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="default_k = 30 is above max_k = 20"):
        Settings(default_k=30, max_k=20)


@pytest.mark.parametrize(
    "url",
    [
        "redis://cache",
        "redis://cache:6379/0",
        "rediss://user:hunter2@cache/3?ssl_cert_reqs=none",
        "unix:///run/redis.sock?db=1",
    ],
)
def test_an_address_that_redis_takes_is_kept_and_an_empty_one_is_none(url: str) -> None:
    settings = Settings(redis_url=url)
    assert settings.redis_url is not None
    assert settings.redis_url.get_secret_value() == url
    assert Settings(redis_url="").redis_url is None


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:hunter2@cache:abc/0",
        "redis://user:hunter2",
        "redis://user:hunter2@cache/0?db=x",
        "redis://user:hunter2@[::1/0",
        "http://user:hunter2@cache",
    ],
)
def test_an_address_that_redis_does_not_take_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ValidationError, match="the Redis address cannot be read") as refused:
        Settings(redis_url=url)
    assert "hunter2" not in str(refused.value)


def test_settings_do_not_change_and_do_not_show_the_password_of_redis() -> None:
    settings = Settings(redis_url="redis://user:hunter2@cache/0")
    assert "hunter2" not in repr(settings)
    with pytest.raises(ValidationError):
        settings.port = 1


def test_a_gallery_is_a_path_with_or_without_a_name() -> None:
    assert split_gallery("shop=/a/b") == ("shop", Path("/a/b"))
    assert split_gallery("/a/b") == (None, Path("/a/b"))


def test_the_settings_of_access_come_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("KINLENS_ANONYMOUS_SCOPES", "")
    monkeypatch.setenv("KINLENS_TRUSTED_PROXIES", "10.0.0.5, 10.1.0.0/16,::1")
    monkeypatch.setenv("KINLENS_CORS_ORIGINS", "https://shop.example, http://localhost:3000")
    monkeypatch.setenv("KINLENS_RATE_LIMIT_PER_ADDRESS", "10/second;1000/hour")
    monkeypatch.setenv("KINLENS_TRAINING_DATA", "shoes=/data/shoes,bags=/data/bags")
    monkeypatch.setenv("KINLENS_OTLP_ENDPOINT", "")
    settings = Settings()
    assert settings.anonymous_scopes == ()
    assert settings.trusted_proxies == ("10.0.0.5", "10.1.0.0/16", "::1")
    assert settings.cors_origins == ("https://shop.example", "http://localhost:3000")
    assert settings.rate_limit_per_address == "10/second;1000/hour"
    assert settings.training_data == ("shoes=/data/shoes", "bags=/data/bags")
    assert settings.otlp_endpoint is None


@pytest.mark.parametrize("scope", ["write", "admin"])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "shop.example"])
def test_changes_without_a_key_are_refused_on_an_address_that_others_reach(
    host: str, scope: str
) -> None:
    with pytest.raises(ValidationError, match="anonymous_scopes") as refused:
        Settings(host=host, anonymous_scopes=("search", scope))
    assert "keys create" in str(refused.value)
    assert Settings(host=host).anonymous_scopes == ("search",)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1", "localhost"])
def test_changes_without_a_key_may_be_opened_on_this_machine(host: str) -> None:
    assert Settings(host=host, anonymous_scopes=("admin",)).is_local()


def test_what_settings_open_is_said_with_its_cure(tmp_path: Path) -> None:
    assert exposures(Settings()) == []
    assert exposures(Settings(host="10.0.0.5", anonymous_scopes=())) == []
    (crowd,) = exposures(Settings(host="10.0.0.5"))
    assert "KINLENS_RATE_LIMIT_PER_ADDRESS" in crowd
    limited = Settings(host="0.0.0.0", rate_limit_per_address="60/minute")
    (hosts,) = exposures(limited)
    assert "KINLENS_ALLOWED_HOSTS" in hosts
    (origins,) = exposures(Settings(cors_origins=("*",)))
    assert "KINLENS_CORS_ORIGINS" in origins
    (counts,) = exposures(Settings(workers=4, rate_limit_per_key="60/minute"))
    assert "KINLENS_REDIS_URL" in counts
    tmp_path.chmod(0o777)
    (folder,) = exposures(Settings(state=tmp_path))
    assert "chmod" in folder


@pytest.mark.parametrize(("workers", "share"), [("1", 8), ("3", 2), ("64", 1)])
def test_processes_share_the_cores_unless_told_otherwise(
    monkeypatch, workers: str, share: int
) -> None:
    monkeypatch.setattr("service.settings.core_count", lambda: 8)
    monkeypatch.setenv("KINLENS_WORKERS", workers)
    settings = Settings()
    assert settings.lanes == share
    assert Settings(workers=2).lanes == 4
    monkeypatch.setenv("KINLENS_LANES", "5")
    assert Settings().lanes == 5
    with pytest.raises(ValueError, match="1 validation error") as refused:
        Settings(workers=0)
    assert "workers" in str(refused.value)
