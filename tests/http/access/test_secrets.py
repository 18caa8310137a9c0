"""Keys and passwords are in no log line, metric, readiness report, problem or document."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest

from embedder.bundle import Bundle
from tests.support.seams import KeyStore
from tests.tiny import encoded, picture

ROOT = Path(__file__).parents[3]
PASSWORD = "hunter2"


@pytest.fixture(autouse=True)
def no_stray_loggers() -> None:
    logging.getLogger().handlers.clear()


@pytest.mark.redis
def test_a_day_of_keys_and_mistakes_leaves_no_secret_anywhere(
    tiny_bundle: Bundle, tiny_gallery: Path, tmp_path: Path, redis_server
) -> None:
    store = KeyStore(tmp_path / "state" / "keys.json")
    text = store.create("till", ["search"])
    secrets = [text, text.rsplit("_", 1)[1], PASSWORD, "kl_0badc0de_wrong"]
    environment = os.environ | {
        "KINLENS_REDIS_URL": f"redis://user:{PASSWORD}@127.0.0.1:{redis_server.port}/0",
        "KINLENS_RATE_LIMIT_PER_KEY": "3/minute",
        "KINLENS_LOG_LEVEL": "debug",
    }
    command = [sys.executable, "-m", "service", "--port", "0", "--state", str(tmp_path / "state")]
    command += ["--bundle", str(tiny_bundle.path), "--gallery", f"shop={tiny_gallery}"]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[3].rstrip("/")
            seen = _use(url, text)
            store.path.write_text(f'{{"keys": "{PASSWORD}"}}')  # damaged, with something in it
            seen += _use(url, text)
        finally:
            process.terminate()
            process.wait(timeout=60)
        seen.append(process.stdout.read())
        errors.seek(0)
        log = errors.read()
    events = [json.loads(line) for line in log.splitlines()]
    assert {event["event"] for event in events} >= {"request", "keys cannot be read"}
    assert any(event.get("principal") == "till" for event in events)
    for secret in secrets:
        assert secret not in log
        assert all(secret not in answer for answer in seen)


def _use(url: str, text: str) -> list[str]:
    """Right, wrong and odd requests; everything that was answered."""
    seen = []
    files = {"image": encoded(picture(0))}
    with httpx.Client(base_url=url, timeout=60) as client:
        for key in [text] * 5 + ["kl_0badc0de_wrong", f"{text}x", f"{text} {text}"]:
            for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                for method, path in (("POST", "/search"), ("PUT", "/galleries/shop/items")):
                    answer = client.request(method, path, headers=headers, files=files)
                    seen.append(answer.text + str(answer.headers))
        seen += [client.get(f"/nowhere?key={text}").text.replace(f"?key={text}", "")]
        for path in ("/live", "/ready", "/metrics", "/openapi.json", "/docs", "/galleries"):
            answer = client.get(path, headers={"x-api-key": text})
            seen.append(answer.text + str(answer.headers))
    return seen
