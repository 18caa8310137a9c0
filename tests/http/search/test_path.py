"""The modules of the service that a search passes on its way."""

import threading
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import kinlens
from tests.support.servers import DEFAULTS, create_app, run, settings_of

SERVICE = Path(kinlens.__file__).parent / "service"
WARM = 6


def test_a_search_with_a_new_image_passes_at_most_fourteen_modules(
    tiny_settings: dict[str, Any], photos: list[bytes]
) -> None:
    paths = [set[Path]() for _ in photos]
    counted: set[Path] | None = None

    def profile(frame: FrameType, event: str, _: object) -> None:
        if counted is not None and event == "call":
            counted.add(Path(frame.f_code.co_filename))

    settings = settings_of(**DEFAULTS | tiny_settings, reload_interval_ms=600_000)
    threading.setprofile(profile)  # of all threads that start from now on
    try:
        with closing(run(create_app(settings))) as service:
            for photo, path in zip(photos, paths, strict=True):
                counted = path
                service.search(photo).raise_for_status()
            counted = None
    finally:
        threading.setprofile(None)
    passed = [
        {str(path.relative_to(SERVICE)) for path in each if path.is_relative_to(SERVICE)}
        for each in paths[WARM:]
    ]
    modules = min(passed, key=len)  # other work may run at the same time
    assert "encoding/workers.py" in modules, "the search was answered from the cache"
    modules.add("observe/logs.py")  # tests drop the events
    assert len(modules) <= 14, sorted(modules)
