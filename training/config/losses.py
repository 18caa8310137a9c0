"""The `loss` table of a job: which loss, by `name`, and its options."""

import inspect
from functools import cache
from typing import Any

from pydantic import ConfigDict, GetCoreSchemaHandler, create_model
from pydantic_core import CoreSchema, core_schema

from training.config.section import Section


class Loss(Section):
    """Name and options of a loss of `training.losses.table`.

    Options, defaults and bounds are those of the loss's constructor. They are read with the first
    job, not with this module, since the losses load torch.
    """

    model_config = ConfigDict(defer_build=True)

    name: str

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if cls is not Loss:
            return handler(source)
        choices = {name: handler.generate_schema(kind) for name, kind in _settings().items()}
        return core_schema.tagged_union_schema(choices, discriminator="name")


def proxy_anchor() -> Loss:
    """The loss of a job that names none."""
    return _settings()["proxy_anchor"](name="proxy_anchor")


@cache
def _settings() -> dict[str, type[Loss]]:
    from training.losses.table import GIVEN, LOSSES

    found = {}
    for name, kind in LOSSES.items():
        options: dict[str, Any] = {
            option: (parameter.annotation, parameter.default)
            for option, parameter in inspect.signature(kind).parameters.items()
            if option not in GIVEN
        }
        found[name] = create_model(name, __base__=Loss, name=(str, name), **options)
    return found
