"""Files that are either the old or the new ones, never half of each."""

import json
import os
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write `path`; a reader, or a crash, sees the whole old or the whole new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stage = path.with_name(path.name + ".tmp")
    with stage.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    stage.replace(path)


def replace_json(path: Path, content: Any) -> None:
    """`replace_text` with indented JSON."""
    replace_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
