import numpy as np
import pytest
import torch
from torch import nn

from tests.training.flow_cases import rows, trained_like
from training.flows import ConditionalGlow


def parameters(flow: nn.Module) -> int:
    return sum(parameter.numel() for parameter in flow.parameters())


@pytest.mark.parametrize(("dim", "count"), [(128, 1_402_880), (512, 2_635_520)])
def test_its_size_is_that_of_the_authors(dim: int, count: int) -> None:
    flow = ConditionalGlow(dim)
    assert parameters(flow) == count
    assert sum(isinstance(module, nn.Linear) for module in flow.modules()) == 80


def test_its_permutations_are_the_authors_and_leave_the_random_streams_alone() -> None:
    torch.manual_seed(0)
    stream = torch.get_rng_state()
    for module in ConditionalGlow(16, layers=2, hidden=4).modules():
        if isinstance(module, nn.Linear):
            last = module
    torch.set_rng_state(stream)
    np.random.seed(7)
    before = np.random.get_state()
    flow = ConditionalGlow(16, layers=2, hidden=4)
    for then, now in zip(before, np.random.get_state(), strict=True):
        assert np.array_equal(then, now)
    assert torch.equal(flow.blocks[-1].second.conditioner[-1].weight, last.weight)
    for number, block in enumerate(flow.blocks):
        np.random.seed(number)
        assert block.order.tolist() == np.random.permutation(16).tolist()


def test_torch_draws_the_weights_and_nothing_else() -> None:
    torch.manual_seed(0)
    flow = ConditionalGlow(6, layers=3, hidden=4)
    after = torch.get_rng_state()
    torch.manual_seed(0)
    for module in flow.modules():
        if isinstance(module, nn.Linear):
            fresh = nn.Linear(module.in_features, module.out_features)
            assert torch.equal(fresh.weight, module.weight)
            assert torch.equal(fresh.bias, module.bias)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_stored_flow_brings_its_permutations_along() -> None:
    flow = trained_like(ConditionalGlow(6, layers=2, hidden=4))
    state = flow.state_dict()
    assert [name for name in state if "order" in name] == [f"blocks.{b}.order" for b in range(5)]
    state["blocks.0.order"] = state["blocks.0.order"].flip(0)
    other = ConditionalGlow(6, layers=2, hidden=4).double()
    other.load_state_dict(state)
    x, condition = rows(3, 6), rows(3, 6)
    assert not torch.allclose(other(x, condition).y, flow(x, condition).y)
    torch.testing.assert_close(other.inverse(other(x, condition).y, condition), x)


def test_the_condition_acts_in_every_coupling() -> None:
    flow = trained_like(ConditionalGlow(6, condition_dim=3, layers=3, hidden=8))
    x, condition = rows(4, 6), rows(4, 3)
    log_scales = flow(x, condition).log_scales  # (10, 4, 6)
    moved = flow(x, condition + 0.1).log_scales
    assert log_scales.shape == (10, 4, 6)
    assert ((log_scales != moved) == (log_scales != 0)).all()
    assert ((log_scales != 0).sum(dim=2) == 3).all()


def test_another_condition_is_another_map() -> None:
    flow = trained_like(ConditionalGlow(5, layers=3, hidden=8))
    x, condition = rows(4, 5), rows(4, 5)
    y = flow(x, condition).y
    torch.testing.assert_close(flow.inverse(y, condition), x, atol=1e-5, rtol=0)
    assert (flow.inverse(y, condition.flip(0)) - x).abs().max() > 0.01


def test_a_new_flow_is_not_the_identity() -> None:
    torch.manual_seed(0)
    x = rows(4, 8).float()
    assert (ConditionalGlow(8)(x, x).y - x).abs().max() > 0.01


@pytest.mark.parametrize(("setting", "value"), [("blocks", 0), ("layers", 0)])
def test_empty_flows_are_refused(setting: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{setting} = 0 must be at least 1"):
        ConditionalGlow(4, **{setting: value})
