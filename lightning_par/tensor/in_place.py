"""Turning a module into its sharded kind without making a new module.

Note [In place, by class]
~~~~~~~~~~~~~~~~~~~~~~~~~
The user's module object must stay: it is registered under its name, hooks hang on it, other modules refer to it, and user code asks
``isinstance(m, nn.Linear)``. So only its class changes, to a subclass of ``nn.Linear`` or ``nn.Embedding`` with another ``forward``.
A user's own subclass keeps its forward, and ours is put beneath it in the method resolution order::

    class Scaled(nn.Embedding):                     Scaled[VocabParallelEmbedding]
        def forward(self, ids):                       -> Scaled.forward
            return super().forward(ids) * self.scale     -> VocabParallelEmbedding.forward
                                                            -> (nn.Embedding.forward is not reached)

which is right as long as every overridden forward does its matrix work through ``super()``; ``reaches_super`` looks for that.
The sizes that a module tells (``out_features``, ``num_embeddings``) stay those of the whole; its parameters are this rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_par.comm import Group
from lightning_par.layout import Span, split


@dataclass(frozen=True)
class Sharding:
    """The one thing a converted module is given: who holds the other parts of its weight, and which part is here.

    Attributes:
        group: the tensor-parallel ranks.
        total: the whole size of the dim that is cut (rows of a column-parallel weight or an embedding, columns of a row-parallel one).
    """

    group: Group
    total: int

    @property
    def span(self) -> Span:
        """This rank's part of the cut dim."""
        return split(self.total, self.group.size)[self.group.index]

    def __str__(self) -> str:
        return f"{self.span.start}:{self.span.stop} of {self.total} over {self.group.name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        return self  # a copy of a module (weight averaging) talks to the same ranks; process groups cannot be copied


def convert(module: nn.Module, base: type[nn.Module], parallel: type[nn.Module], sharding: Sharding) -> None:
    """Make ``module`` (a ``base`` or a subclass of it) behave as ``parallel``, itself a subclass of ``base``. No communication."""
    own = type(module)
    module.__class__ = parallel if own is base else type(f"{own.__name__}[{parallel.__name__}]", (own, parallel), {})
    module.sharding = sharding


def reaches_super(own: type[nn.Module], base: type[nn.Module]) -> bool:
    """Whether every ``forward`` between ``own`` and ``base`` calls ``super()``. See Note [In place, by class]."""
    between = own.__mro__[: own.__mro__.index(base)]
    forwards = [cls.__dict__["forward"] for cls in between if "forward" in cls.__dict__]
    return all("__class__" in getattr(getattr(f, "__code__", None), "co_freevars", ()) for f in forwards)
