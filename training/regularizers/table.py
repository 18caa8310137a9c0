"""The regularizers of jobs, by name. To add one, add a class to this folder and a line here.

The constructor of a regularizer defines the options of a job, as that of a loss does: all its
parameters except `dim`, the length of an embedding.
"""

import inspect

from kinlens.training.parts.fields import Options, OwnRegularizer
from kinlens.training.parts.own import own_part
from kinlens.training.regularizers.base import Regularizer
from kinlens.training.regularizers.determinant import DeterminantRegularizer
from kinlens.training.regularizers.graph_consistency import GraphConsistencyRegularizer
from kinlens.training.regularizers.koleo import KoLeoRegularizer
from kinlens.training.regularizers.non_isotropy import NonIsotropyRegularizer
from kinlens.training.regularizers.skewed_mean import SkewedMeanRegularizer

REGULARIZERS: dict[str, type[Regularizer]] = {
    "determinant": DeterminantRegularizer,
    "skewed_mean": SkewedMeanRegularizer,
    "non_isotropy": NonIsotropyRegularizer,
    "graph_consistency": GraphConsistencyRegularizer,
    "koleo": KoLeoRegularizer,
}

GIVEN = ("dim",)
"""Constructor arguments of a regularizer that are not options."""


def build_regularizer(name: str, options: Options, dim: int) -> Regularizer:
    """The regularizer of a job's table `regularizers.NAME`, for embeddings of length D."""
    kind = kind_of(name, options)
    given = {"dim": dim} if "dim" in inspect.signature(kind).parameters else {}
    names = dict(options).keys() - {"share", "name"}
    made: Regularizer = kind(**given, **{option: getattr(options, option) for option in names})
    return made


def kind_of(name: str, options: Options) -> type[Regularizer]:
    kind: type[Regularizer]
    kind = own_part(options.name) if isinstance(options, OwnRegularizer) else REGULARIZERS[name]
    return kind
