"""The HTTP contract of the service: `python -m tests.golden.contract` records it again.

It is the OpenAPI document without its prose and examples. A change of it is a change for every
client: it belongs in the notes of a release.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from kinlens.embedder.fake import FakeEmbedder
from kinlens.service.app import create_app
from kinlens.service.settings import Settings

CONTRACT = Path(__file__).parent / "openapi.json"
_PROSE = {"summary", "description", "example", "examples"}


def contract_now() -> dict[str, Any]:
    """The contract of the code as it is."""
    with tempfile.TemporaryDirectory() as state:
        app = create_app(Settings(state=Path(state)), FakeEmbedder(), {})
        found: dict[str, Any] = without_prose(app.openapi(), is_property_list=False)
    return found


def without_prose(value: Any, *, is_property_list: bool) -> Any:
    """`value` without descriptions and examples; a property may have one of these names."""
    if isinstance(value, list):
        return [without_prose(one, is_property_list=False) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: without_prose(one, is_property_list=name == "properties")
        for name, one in value.items()
        if is_property_list or name not in _PROSE
    }


if __name__ == "__main__":
    text = json.dumps(contract_now(), indent=1, sort_keys=True, ensure_ascii=False)
    CONTRACT.write_text(text + "\n", encoding="utf-8")
