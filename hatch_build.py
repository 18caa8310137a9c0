"""A check before a build: the links of `kinlens/` lead to the folders at the top."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinksHook(BuildHookInterface):
    """Without links, as in a ZIP download, the wheel would silently lack these packages."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Raises: RuntimeError where a link is missing."""
        folders = "commands embedder indexer quality rendered service training"
        for name in folders.split():
            if not Path(self.root, "kinlens", name, "__init__.py").is_file():
                raise RuntimeError(
                    f"kinlens/{name} is not a link to {name}/ here, as in a ZIP download or in a "
                    "clone on Windows without core.symlinks. Use git clone with links, the "
                    ".tar.gz archive, or the wheel."
                )
