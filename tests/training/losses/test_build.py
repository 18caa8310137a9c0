import inspect
from typing import get_args

import pytest
import torch
from pydantic import BaseModel, TypeAdapter, ValidationError
from torch import nn

from tests.training.losses.cases import CLASSES, DIM, batch, value
from training.config.losses import Loss
from training.config.section import Section
from training.losses.build import build_loss

SECTIONS: dict[str, type[BaseModel]] = {
    kind.model_fields["name"].default: kind for kind in get_args(get_args(Loss)[0])
}
ADAPTER: TypeAdapter[Loss] = TypeAdapter(Loss)


def test_there_are_thirteen_losses_each_a_direct_section() -> None:
    assert len(SECTIONS) == 13
    assert set(SECTIONS.values()) <= set(Section.__subclasses__())


@pytest.mark.parametrize("name", SECTIONS)
def test_the_name_in_a_job_gives_its_loss(name: str) -> None:
    settings = ADAPTER.validate_python({"name": name})
    assert type(settings) is SECTIONS[name]
    assert torch.isfinite(value(build_loss(settings, CLASSES, DIM), *batch()))


@pytest.mark.parametrize("name", SECTIONS)
def test_defaults_of_a_job_are_those_of_the_loss(name: str) -> None:
    settings = SECTIONS[name]()
    loss = build_loss(settings, CLASSES, DIM)
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(type(loss)).parameters.items()
        if key not in ("classes", "dim")
    }
    assert settings.model_dump(exclude={"name", "beta_per_class"}) == defaults


def changed(name: str) -> dict[str, object]:
    """Every option of the loss with another value than its default."""
    options: dict[str, object] = {}
    for key, field in SECTIONS[name].model_fields.items():
        if isinstance(field.default, bool):
            options[key] = not field.default
        elif isinstance(field.default, str):
            options[key] = next((o for o in get_args(field.annotation) if o != field.default), name)
        else:
            options[key] = 7 if isinstance(field.default, int) else 0.75
    return options


def kept(loss: nn.Module, key: str) -> object:
    """What the loss keeps of an option."""
    if key == "learn_beta":
        return len(list(loss.parameters()))
    if key == "beta_per_class":
        return len(loss.beta)
    found = getattr(loss, {"margin_degrees": "margin", "normalize": "normalized"}.get(key, key))
    return found[0].item() if isinstance(found, torch.Tensor) else found


@pytest.mark.parametrize("name", SECTIONS)
def test_every_option_of_a_job_reaches_the_loss(name: str) -> None:
    usual = build_loss(SECTIONS[name](), CLASSES, DIM)
    other = build_loss(SECTIONS[name](**changed(name)), CLASSES, DIM)
    for key in changed(name).keys() - {"name"}:
        assert kept(other, key) != kept(usual, key), key


def test_beta_per_class_has_a_beta_for_each_class() -> None:
    per_class = ADAPTER.validate_python({"name": "margin", "beta_per_class": True})
    assert build_loss(per_class, CLASSES, DIM).beta.shape == (CLASSES,)
    fixed = ADAPTER.validate_python({"name": "margin", "learn_beta": False})
    assert list(build_loss(fixed, CLASSES, DIM).parameters()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "nothing"},
        {"name": "arcface", "scale": 0},
        {"name": "arcface", "margin_degrees": 90},
        {"name": "contrastive", "margin": 1.5},
        {"name": "triplet", "mining": "easy"},
        {"name": "soft_triple", "centres_per_class": 0},
        {"name": "proxy_nca", "margin": 0.1},
        {"name": "n_pair", "l2": -1},
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(wrong)
