"""Whether any element of any gradient is infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def overflowed(grads: Sequence[Tensor], device: torch.device) -> Tensor:
    """[gradients]: 1.0 for each that has an element which is not finite, else 0.0, on ``device``.

    None may be empty. Reads each once, waits for nobody.
    """
    if not grads:
        return torch.zeros(0, dtype=torch.float32, device=device)
    greatest = torch.stack([norm.float() for norm in torch._foreach_norm(list(grads), math.inf)])
    return (~greatest.isfinite()).float()
