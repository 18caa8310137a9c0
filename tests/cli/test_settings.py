"""Settings: read from the environment once, each documented, each refused by name if wrong."""

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from kinlens.service.checks import exposures
from kinlens.service.commands.program import app
from kinlens.service.settings import GROUPS, Settings
from kinlens.service.variables import unknown_variables, variables


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["settings", *arguments], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_setting_is_printed_with_its_group_and_meaning() -> None:
    printed = call()
    words = " ".join(printed.split())
    for name, each in zip(Settings.model_fields, variables(), strict=True):
        assert each.name == f"KINLENS_{name.upper()}"
        assert each.meaning.endswith("."), f"{name} has no docstring"
        assert f"  {each.name}  default: {each.default}" in printed
        assert each.meaning.replace("`", "") in words
    for name, limits in {
        "PORT": "at least 0, at most 65,535",
        "NO_MATCH_PRIOR": "at least 0, below 1",
        "INDEX_DEVICE": "cpu or cuda",
        "ANONYMOUS_SCOPES": "search, write, admin or embed",
        "ADMIN_LINK": "true or false",
    }.items():
        assert re.search(rf"KINLENS_{name}  default: [^\n;]+; {limits}\n", printed)
    assert [line for line in printed.splitlines() if line[0] != " "] == [*GROUPS.values()]


def test_a_printed_default_is_the_default_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    defaults = Settings()
    for each in variables():
        if each.default == "none":
            field = Settings.model_fields[each.name.removeprefix("KINLENS_").lower()]
            assert field.default in (None, (), "")
        elif each.default != "cores + 2":
            monkeypatch.setenv(each.name, each.default.split()[0])
    assert Settings() == defaults


def test_set_variables_are_printed_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"REDIS_URL": "redis://:hunter2@cache", "MILVUS_TOKEN": "hunter2"}
    for name, value in (secret | {"OTLP_ENDPOINT": "http://me:hunter2@host"}).items():
        monkeypatch.setenv(f"KINLENS_{name}", value)
    monkeypatch.setenv("kinlens_port", "9000")
    printed = call()
    assert "hunter2" not in printed
    assert printed.count("set to: ***\n") == len(secret)
    assert "set to: http://***@host" in printed
    assert "default: 8000; at least 0, at most 65,535\n    set to: 9000\n" in call("KINLENS_PORT")


def test_an_unknown_variable_is_a_warning_with_the_nearest_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GALERIES", "XYZZY", "JOB_ID", "SHARED", "WORKERS", "MAX_HELD_BYTES", "MAX_MEGAPIXELS")
    for name in names:
        monkeypatch.setenv(f"KINLENS_{name}", "1")
    near, at_least, fixed, removed, far = unknown_variables()
    assert near.startswith("KINLENS_GALERIES is no setting and is ignored. Did you mean KINLENS_GA")
    assert "256 MiB, or twice the largest body" in at_least
    assert "Its value is always 64.0." in fixed
    assert "several services behind a proxy" in removed
    assert "Did you mean" not in at_least + fixed + removed + far
    report = json.loads(CliRunner().invoke(app, ["check", "--json"]).stdout)
    warned = [found["text"] for found in report["findings"] if found["subject"] == "environment"]
    assert warned == [near, at_least, fixed, removed, far]


def test_settings_come_from_the_environment_and_arguments_win(monkeypatch) -> None:
    given = {
        "PORT": ("9000", 9000),
        "GALLERIES": ("shop=/a/b, /c ,", ("shop=/a/b", "/c")),
        "ALLOWED_HOSTS": ("shop.example, [::1]", ("shop.example", "[::1]")),
        "ANONYMOUS_SCOPES": ("", ()),
        "TRUSTED_PROXIES": ("10.0.0.5, 10.1.0.0/16,::1", ("10.0.0.5", "10.1.0.0/16", "::1")),
        "RATE_LIMIT_PER_ADDRESS": ("10/second;1000/hour", "10/second;1000/hour"),
        "FOLLOW": ("2m", 120),
        "RATE_LIMIT_PER_KEY": (" ", " "),
        "OTLP_ENDPOINT": ("", None),
        "REDIS_URL": ("", None),
    }
    for name, (text, _) in given.items():
        monkeypatch.setenv(f"KINLENS_{name}", text)
    settings = Settings(search_threads=50)
    assert settings.search_threads == 50
    for name, (_, expected) in given.items():
        assert getattr(settings, name.lower()) == expected
    assert Settings(port=1).port == 1


WRONG = {
    "port": ["70000"],
    "device": ["tpu"],
    "galleries": ["bad name=/a", "shop=", "shop=milvus://host/", "shop=milvus://me@host/shop"],
    "image_roots": ["/no/name", "=/a", "shop=", "bad name=/a"],
    "allowed_hosts": ["http://shop", "shop:80", "*.shop", "::1"],
    "anonymous_scopes": ["owner", "search,all"],
    "rate_limit_per_key": ["600", "many", "-1/minute", "5/fortnight", "5/s;x"],
    "rate_limit_per_address": ["0/minute", "many/day"],
    "trusted_proxies": ["proxy", "10.0.0.0/33", "0.0.0.0/0"],
    "cors_origins": ["a.eu", "https://a.eu/", "https://A.eu", "https://a.eu/path", "null"],
    "training_data": ["/data", "bad name=/data", "a=/data,a=/other"],
    "training_weights": ["/weights.pth", "current=/weights.pth"],
    "otlp_endpoint": ["collector:4318"],
    "unknown": ["1"],
    "redis_url": [
        "http://user:hunter2@cache",
        "redis://user:hunter2@cache:port/0",
        "redis://user:hunter2",
        "redis://cache/hunter2",
        "redis://user:hunter2@cache/0?db=x",
        "redis://user:hunter2@[::1/0",
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_value_outside_its_range_is_refused_by_name_and_not_shown(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValidationError, match=name) as refused:
            Settings(**{name: value})
        assert "hunter2" not in str(refused.value)


def test_a_copy_of_a_gallery_without_a_folder_is_refused() -> None:
    with pytest.raises(ValidationError, match="--replica-folder"):
        Settings(galleries=("shop=s3://a/shop",))


def test_two_of_the_largest_bodies_fit_into_memory() -> None:
    assert Settings().held_bytes() == 256 * 2**20
    large = Settings(max_upload_bytes=10**9)
    assert large.held_bytes() == 2 * large.largest_body() > 2 * 10**9


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "shop.example"])
def test_changes_without_a_key_are_refused_on_an_address_that_others_reach(host: str) -> None:
    for scope in ("write", "admin"):
        with pytest.raises(ValidationError, match="anonymous_scopes") as refused:
            Settings(host=host, anonymous_scopes=("search", scope))
        assert "keys create" in str(refused.value)
    for local in ("127.0.0.9", "::1", "localhost"):
        assert Settings(host=local, anonymous_scopes=("admin",)).is_local()


@pytest.mark.parametrize(
    ("settings", "cures"),
    [
        ({}, []),
        ({"host": "10.0.0.5", "anonymous_scopes": ()}, []),
        ({"host": "10.0.0.5"}, ["KINLENS_RATE_LIMIT_PER_ADDRESS"]),
        ({"host": "0.0.0.0", "rate_limit_per_address": "9/day"}, ["KINLENS_ALLOWED_HOSTS"]),
        ({"image_links": "signed"}, ["KINLENS_RATE_LIMIT_PER_ADDRESS"]),
        ({"cors_origins": ("*",)}, ["KINLENS_CORS_ORIGINS"]),
        ({"state": Path("OPEN")}, ["chmod go-w"]),
    ],
)
def test_what_settings_expose_is_reported(settings, cures, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("OPEN").mkdir()
    Path("OPEN").chmod(0o777)
    found = exposures(Settings(**settings))
    assert len(found) == len(cures)
    assert all(cure in text for text, cure in zip(found, cures, strict=True))


def test_a_text_in_no_setting_is_named_and_exits_with_1() -> None:
    result = CliRunner().invoke(app, ["settings", "NOSUCH"])
    assert result.exit_code == 1
    assert "No setting contains 'NOSUCH'" in result.output
