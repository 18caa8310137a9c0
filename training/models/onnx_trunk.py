"""The network of an imported bundle as a trunk: it runs in onnxruntime and never learns.

Shapes: B images, S pixels a side, C dimensions of a vector.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kinlens.embedder.engines.models import SessionSettings, create_session, run_plain
from kinlens.embedder.errors import JobError
from kinlens.embedder.machine import core_count


class OnnxTrunk(nn.Module):
    """uint8 images (B, 3, S, S) to unit vectors (B, C), by the ONNX file `content` on the CPU.

    The file is a buffer: checkpoints keep it, and features are cached under its content.
    """

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.register_buffer("file", torch.frombuffer(bytearray(content), dtype=torch.uint8))

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> "OnnxTrunk":
        """The trunk of an `EmbeddingNet` with this state dict."""
        return cls(state["trunk.file"].numpy().tobytes())

    def content(self) -> bytes:
        """The ONNX file."""
        content: bytes = self.get_buffer("file").cpu().numpy().tobytes()
        return content

    @cached_property
    def _session(self) -> Any:
        return create_session(self.content(), SessionSettings(threads=core_count()))

    @property
    def side(self) -> int:
        """S."""
        return int(self._session.get_inputs()[0].shape[-1])

    @property
    def channels(self) -> int:
        """C."""
        return int(self._session.get_outputs()[0].shape[-1])

    def forward(self, images: Tensor) -> Tensor:
        """Raises: JobError for images of another size."""
        if images.shape[-1] != self.side:
            raise JobError(
                f"The imported network takes images of {self.side} px, and the job has "
                f"{images.shape[-1]} px. Set input.size_px and input.test_px to {self.side}."
            )
        name = self._session.get_inputs()[0].name
        vectors = run_plain(self._session, name, images.cpu().numpy())
        return torch.from_numpy(vectors).to(images.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> "OnnxTrunk":
        return self  # it never changes, and a session cannot be copied
