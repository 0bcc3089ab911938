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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_par.layout import Span

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
        span: of this rank; between steps the rounded master, unless somebody edits it.
        keys: for each part of the span: its place, the place of its first element in its parameter, and a number that stands for
            that parameter: with these, stochastic rounding does not depend on how parameters are laid out.
    """

    def __init__(self, span: Tensor, half: HalfWeights, keys: Sequence[tuple[Span, int, int]]) -> None:
        self.span, self.stays, self._stochastic, self._keys = span, half.masters, half.stochastic_rounding, keys
        self.values = span.float()
        self.steps = 0

    def before_step(self) -> None:
        """The optimizer is about to read and write ``values``. Where the span was edited since the last step they follow it."""
        if self.stays:
            edited = self.span != self.values.to(self.span.dtype)
            torch.where(edited, self.span.float(), self.values, out=self.values)
        else:
            self.values.untyped_storage().resize_(self.values.nbytes)
            self.values.copy_(self.span)

    def after_step(self) -> None:
        """It did."""
        self.span.copy_(self.values)
        self.steps += 1
        for place, first, key in self._keys if self._stochastic else ():
            values = self.values[place.slice()]
            self.span[place.slice()] = round_stochastically(values, first, key * 1_000_003 + self.steps)
        self.rest()

    def loaded(self) -> None:
        """What is kept was read from a checkpoint."""
        if self.stays:
            self.span.copy_(self.values)

    def rest(self) -> None:
        """No optimizer needs ``values`` before the next step."""
        if not self.stays:
            self.values.untyped_storage().resize_(0)


def round_stochastically(values: Tensor, first: int, seed: int) -> Tensor:
    """bfloat16 of float32: the nearer of the two neighbours is the likelier, so that the mean is kept. Infinities and NaN stay.

    An element's chance is decided by ``seed`` and its number, counted from ``first``: a hash (the finalizer of SplitMix64, Steele et al.,
    OOPSLA 2014) in place of a random generator.
    """
    number = torch.arange(first, first + values.numel(), device=values.device, dtype=torch.int64)
    number.mul_(_GOLDEN).add_(_signed(seed * _SPREAD))  # spread, lest one step's noise is another's, shifted
    for shift, factor in ((30, _MIX1), (27, _MIX2)):
        number.bitwise_xor_((number >> shift) & ((1 << (64 - shift)) - 1)).mul_(factor)
    noise = ((number >> 40) & 0xFFFF).to(torch.int32)
    cut = ((values.view(torch.int32) + noise) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(torch.bfloat16)


def _signed(number: int) -> int:
    """The int64 with the last 64 bits of ``number``."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_GOLDEN, _MIX1, _MIX2 = map(_signed, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SPREAD = 0xD1342543DE82EF95
