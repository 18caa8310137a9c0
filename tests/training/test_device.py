"""Devices and what is set for the process while training steps run."""

import pytest
import torch

from kinlens.training.device import on_device, tuned

CPU = torch.device("cpu")


def test_batches_stay_in_order_and_none_is_lost() -> None:
    batches = [(torch.full((2, 3), n), torch.tensor([n, n])) for n in range(5)]
    found = [int(labels[0]) for _, labels in on_device(batches, CPU)]
    assert found == [0, 1, 2, 3, 4]


def test_what_steps_set_for_the_process_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    options: list[dict[int, int]] = []
    monkeypatch.setattr("kinlens.training.device._set_malloc", options.append)
    with pytest.raises(KeyboardInterrupt), tuned(CPU):
        raise KeyboardInterrupt
    kept, back = options
    assert kept.keys() == back.keys()
    before = torch.backends.cudnn.benchmark
    with tuned(torch.device("cuda")):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
