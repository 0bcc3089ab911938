"""ParallelPrecision: dtypes of weights and compute, and clipping over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.zero import ModelGradients

PrecisionName = Literal["32-true", "64-true", "bf16-mixed"]


class ParallelPrecision(Precision):
    """Numbers formats of a run under ``HybridParallelStrategy``; ``Trainer(precision=...)`` alone gives the same plugin.

    ============  ========================  =========  =========  ===============  ==========
    precision     weights                   compute    gradients  optimizer state  checkpoint
    ============  ========================  =========  =========  ===============  ==========
    32-true       as built (float32)        as built   as weights as weights       as weights
    64-true       float64                   float64    float64    float64          float64
    bf16-mixed    as built (float32)        autocast   as weights as weights       as weights
    ============  ========================  =========  =========  ===============  ==========

    Clipping is by the norm of the whole model's gradient, whatever the layout.

    Raises:
        ValueError: ``precision`` is none of these.
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(f"precision={precision!r} is not supported here: choose one of {', '.join(get_args(PrecisionName))}")
        self.precision: str = precision
        self._device_type = "cpu"
        self._gradients: ModelGradients | None = None

    @classmethod
    def of(cls, plugin: Precision) -> ParallelPrecision:
        """Ours for the plugin that ``Trainer(precision=...)`` made."""
        if isinstance(plugin, ParallelPrecision):
            return plugin
        if type(plugin) not in (Precision, DoublePrecision, MixedPrecision, HalfPrecision):
            raise TypeError(
                f"the precision plugin {type(plugin).__name__} cannot be used with this strategy, which has a plugin of its own: give "
                f"Trainer(precision=...) one of {', '.join(get_args(PrecisionName))}, or plugins=[a subclass of ParallelPrecision]"
            )
        return cls(plugin.precision)

    def use(self, device: torch.device, gradients: ModelGradients | None) -> None:
        """Where autocast computes, and where clipping finds the gradients of all ranks (None before optimizers stand)."""
        self._device_type, self._gradients = device.type, gradients

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double() if self.precision == "64-true" else module

    @override
    def convert_input(self, data: Any) -> Any:
        if self.precision != "64-true":
            return data
        return apply_to_collection(data, Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)

    @override
    def tensor_init_context(self) -> AbstractContextManager:
        return _default_dtype(torch.float64) if self.precision == "64-true" else nullcontext()

    @override
    def module_init_context(self) -> AbstractContextManager:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        autocast = (
            torch.autocast(self._device_type, torch.bfloat16, cache_enabled=False) if self.precision == "bf16-mixed" else nullcontext()
        )
        with self.tensor_init_context(), autocast:
            yield

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self._gradients is not None, "the strategy has not set up its optimizers yet"
        self._gradients.clip_norm(optimizer, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self._gradients is not None, "the strategy has not set up its optimizers yet"
        self._gradients.clip_value(optimizer, float(clip_val))


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
