"""The manifest of a model bundle: frozen, versioned, an unknown key is an error."""

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Interpolation = Literal["bilinear", "bicubic", "lanczos"]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Preprocessing(_Frozen):
    """Resize the shorter side to `resize_px`, cut the central square of `crop_px`."""

    resize_px: int = Field(ge=8, le=4096)
    crop_px: int = Field(ge=8, le=4096)
    interpolation: Interpolation = "bilinear"

    @model_validator(mode="after")
    def _crop_fits(self) -> "Preprocessing":
        if self.crop_px > self.resize_px:
            raise ValueError(
                f"crop_px = {self.crop_px} is larger than resize_px = {self.resize_px}; "
                "make the crop at most as large as the resized shorter side"
            )
        return self


class Parity(_Frozen):
    """How far the ONNX file is from the network that it was exported from."""

    max_abs_difference: float
    batch_sizes: tuple[int, ...]
    recall_at_1_torch: float | None = None
    recall_at_1_onnx: float | None = None


class GoldenHashes(_Frozen):
    """sha256 of each file under `golden/`."""

    files: dict[str, str]


class BundleManifest(_Frozen):
    """All that is known about an exported model. `bundle_id` covers the model and this page."""

    schema_version: Literal[1] = 1
    name: str
    created_at: str
    dim: int = Field(ge=1)
    preprocessing: Preprocessing
    model_sha256: str
    golden: GoldenHashes
    backbone: str
    job: dict[str, Any] = Field(default_factory=dict)
    data_sha256: str | None = None
    split_sha256: str | None = None
    recall: dict[str, float] = Field(default_factory=dict)
    parity: Parity | None = None
    licence: str = "unspecified"
    versions: dict[str, str] = Field(default_factory=dict)
    bundle_id: str = ""

    def computed_id(self) -> str:
        """sha256 over this manifest without its id; `model_sha256` ties in the model file."""
        content = self.model_dump(mode="json", exclude={"bundle_id"})
        canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def with_id(self) -> "BundleManifest":
        """The same manifest, stamped with its own id."""
        return self.model_copy(update={"bundle_id": self.computed_id()})
