"""Whether any element of any gradient is infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def overflowed(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """1.0 if an element of ``grads`` is not finite, else 0.0: 0-dim, on ``device``. Reads every gradient once, waits for nobody."""
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), device=device)
    greatest = torch.stack([norm.float() for norm in torch._foreach_norm(grads, math.inf)])
    return (~greatest.isfinite()).any().float()
