"""Every flow as ONNX: traced with one batch size, run with others."""

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from tests.training.flow_cases import rows, trained_like
from training.flows import NICE, ConditionalGlow, RealNVP

DIM = 7
FLOWS = {
    "real_nvp": (lambda: RealNVP(DIM, layers=3, hidden=8), 1),
    "nice": (lambda: NICE(DIM, layers=3, hidden=8), 1),
    "glow": (lambda: ConditionalGlow(DIM, DIM, blocks=2, layers=3, hidden=8), 2),
}


class Exported(nn.Module):
    """A flow that gives plain tensors: y (B, D) and log |det| (B,)."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        output = self.flow(*inputs)
        return output.y, output.log_det


def inputs_of(count: int, batch: int) -> tuple[Tensor, ...]:
    return tuple(rows(count * batch, DIM).float().chunk(count))


def write(net: nn.Module, inputs: tuple[Tensor, ...], path: Path) -> None:
    names = [f"x{number}" for number in range(len(inputs))]
    batch = torch.export.Dim("n", min=1)
    with torch.no_grad():
        torch.onnx.export(
            net,
            inputs,
            path,
            dynamo=True,
            external_data=False,
            opset_version=20,
            input_names=names,
            output_names=["y", "log_det"],
            dynamic_shapes=(tuple({0: batch} for _ in inputs),),
            verbose=False,
        )


@pytest.mark.filterwarnings("ignore:# The axis name")  # two inputs of one batch size
@pytest.mark.parametrize("kind", FLOWS)
def test_a_flow_runs_in_onnx_at_any_batch_size(kind: str, tmp_path: Path) -> None:
    build, count = FLOWS[kind]
    net = Exported(trained_like(build()).float()).eval()
    write(net, inputs_of(count, 2), tmp_path / "flow.onnx")
    session = onnxruntime.InferenceSession(
        tmp_path / "flow.onnx", providers=["CPUExecutionProvider"]
    )
    names = [node.name for node in session.get_inputs()]
    for batch in (1, 3, 7):
        inputs = inputs_of(count, batch)
        found = session.run(None, dict(zip(names, (x.numpy() for x in inputs), strict=True)))
        with torch.no_grad():
            expected = net(*inputs)
        for ours, theirs in zip(expected, found, strict=True):
            torch.testing.assert_close(torch.from_numpy(theirs), ours, atol=1e-5, rtol=0)
