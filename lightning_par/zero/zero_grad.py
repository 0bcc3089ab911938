"""zero_grad where a gradient has two homes.

From stage 1 on gradients end in the optimizer's shards, and before that, while they accumulate, they are in the module's parameters.
``optimizer.zero_grad`` knows only the former, ``module.zero_grad`` only the latter; users call either and mean both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class ZeroGrad:
    """In place of the ``zero_grad`` of ``owner``: it, and the same for the gradients' other home. A copy of the owner has its own again.

    Args:
        others: gives the tensors of that other home.
        forget: drops what is of neither.
    """

    def __init__(self, owner: nn.Module | Optimizer, others: Callable[[], Iterable[Tensor]], forget: Callable[[], object]) -> None:
        self.owner, self.others, self.forget = owner, others, forget
        owner.zero_grad = self

    def __call__(self, set_to_none: bool = True) -> None:
        type(self.owner).zero_grad(self.owner, set_to_none)
        for tensor in self.others():
            if tensor.grad is not None and not set_to_none:
                tensor.grad.zero_()
            else:
                tensor.grad = None
        self.forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (type(self.owner).zero_grad, self.owner)

    def remove(self) -> None:
        """The owner has its own again."""
        self.owner.__dict__.pop("zero_grad", None)
