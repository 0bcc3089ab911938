"""Float32 masters: what an optimizer updates in place of half-precision values.

Note [Half-precision weights]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
bfloat16 has 8 significant bits: an update below half a step of the last one (2^-9 of the value downwards, 2^-8 upwards) is lost when it is
added. So the optimizer gets a float32 master of this rank's span, its gradients and states are float32 too, and the values
that compute are the master, rounded (Micikevicius et al., Mixed Precision Training, arXiv 1710.03740, section 3.1). Without a master of its
own a span is widened for as long as the optimizer's step takes, so all the optimizer sees is the same, but what is kept is rounded:
to the nearest, which loses small updates, or stochastically, which keeps them on average (Gupta et al., arXiv 1502.02551, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class HalfWeights:
    """How parameters of half precision are updated. See Note [Half-precision weights].

    Args:
        masters: keep a float32 copy between steps.
        stochastic_rounding: without masters: round bfloat16 values up or down by chance.
    """

    masters: bool = True
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.masters and self.stochastic_rounding:
            raise ValueError("stochastic_rounding=True needs masters=False: a master keeps what rounding would lose")


class Master:
    """The float32 twin of a flat span of half-precision values.

    Args:
        span: of this rank, kept equal to the rounded master.
        seed: of stochastic rounding; equal on ranks that keep equal spans.
    """

    def __init__(self, span: Tensor, half: HalfWeights, seed: int) -> None:
        self.span, self.stays = span, half.masters
        self.values = span.float()
        self._rounding = torch.Generator(span.device).manual_seed(seed) if half.stochastic_rounding else None

    def before_step(self) -> None:
        """The optimizer is about to read and write ``values``."""
        if not self.stays:
            self.values.untyped_storage().resize_(self.values.nbytes)
            self.values.copy_(self.span)

    def after_step(self) -> None:
        """It did."""
        if self._rounding is None:
            self.span.copy_(self.values)
        else:
            self.span.copy_(round_stochastically(self.values, self._rounding))
        self.rest()

    def keep_edits(self) -> None:
        """The span was edited: the master follows where it was, and stays as exact as it is elsewhere."""
        if self.stays:
            edited = self.span != self.values.to(self.span.dtype)
            torch.where(edited, self.span.float(), self.values, out=self.values)

    def rest(self) -> None:
        """No optimizer needs ``values`` before the next step."""
        if not self.stays:
            self.values.untyped_storage().resize_(0)


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """bfloat16 of float32: the nearer of the two neighbours is the likelier, so that the mean is kept. Infinities and NaN stay."""
    bits = values.view(torch.int32)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    cut = ((bits + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)
