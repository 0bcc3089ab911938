"""What layers cost, by the time they take: forward and backward, the modules around them included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from lightning_par.pipeline.aside import aside, lent
from lightning_par.pipeline.errors import PipelineError
from lightning_par.pipeline.segments import Segments

ROUNDS = 3
"""Runs that are measured, after one that warms up."""


@dataclass(frozen=True)
class LayerCosts:
    """What each layer costs its stage, and what the first and the last stage carry besides; in any unit."""

    layers: tuple[float, ...]
    first: float = 0.0
    last: float = 0.0

    @classmethod
    def agreed(cls, measured: Sequence[LayerCosts]) -> LayerCosts:
        """What several ranks found, as one: the median of each number."""
        layers = tuple(median(times) for times in zip(*(costs.layers for costs in measured), strict=True))
        return cls(layers, median(costs.first for costs in measured), median(costs.last for costs in measured))


def weigh(
    module: nn.Module,
    layers: str,
    step: Callable[[], Tensor | None],
    device: torch.device,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> LayerCosts:
    """Run the user's step a few times on the whole module and measure. It leaves no trace in the module; no gradient comes to be.

    Each layer is on ``device`` while it runs, and nothing else but what does not belong to a layer: the module need not fit there.

    Args:
        step: runs the user's step and returns its loss, or None where there is no backward (in evaluation).

    Raises:
        PipelineError: the step did not run all layers.
    """
    blocks = module.get_submodule(layers)
    inside = set(blocks.modules())
    rest = [part for part in module.modules() if part not in inside or part is blocks]
    stopwatch = _Stopwatch([rest, *(list(block.modules()) for block in blocks), rest], device, clock)
    segments = Segments(module, layers, stopwatch.close, stopwatch.at_work)
    with aside(module), lent(rest, device), segments.cut():
        for _ in range(1 + ROUNDS):
            stopwatch.begin()
            segments.end(step())
    if missing := [i for i in range(len(blocks)) if i not in segments.ran]:
        raise PipelineError(
            f"balance=profile: the step did not run {', '.join(f'{layers}.{i}' for i in missing)}, so there is no telling what they cost; "
            "balance by parameters, by flops or by hand"
        )
    first, *own, last = (min(times[1:]) for times in zip(*stopwatch.rounds, strict=True))
    return LayerCosts(tuple(own), first, last)


class _Stopwatch:
    """Seconds of each segment, forward and backward, by round."""

    def __init__(self, parts: Sequence[Sequence[nn.Module]], device: torch.device, clock: Callable[[], float]) -> None:
        self._parts, self._device, self._clock = parts, device, clock
        self._recomputed = False
        self.rounds: list[list[float]] = []

    def begin(self) -> None:
        self.rounds.append([0.0] * len(self._parts))
        self._mark = self._now()

    @contextmanager
    def at_work(self, layer: nn.Module) -> Iterator[None]:
        """Inside, the layer is on the device; bringing it there takes no time of its."""
        with lent(list(layer.modules()), self._device):
            self._recomputed, self._mark = _is_checkpointed(), self._now()
            yield
            self._recomputed = False

    def close(self, segment: int, ends: list[Tensor], entry: Tensor | None) -> None:
        forward = self._now() - self._mark
        parameters = [param for part in self._parts[segment] for param in part._parameters.values() if param is not None]
        sources = [leaf for leaf in (entry, *parameters) if leaf is not None and leaf.requires_grad]
        if ends and sources:
            ones = [torch.ones_like(end) for end in ends]
            torch.autograd.grad(ends, list(dict.fromkeys(sources)), ones, retain_graph=True, allow_unused=True)
        now = self._now()
        self.rounds[-1][segment] += now - self._mark + (forward if self._recomputed else 0)
        self._mark = now

    def _now(self) -> float:
        """Once all that was asked of the device is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return self._clock()


@torch.enable_grad()
def _is_checkpointed() -> bool:
    """Whether whoever calls the layer keeps its activations away, to compute them again for backward."""
    probe = torch.ones((), requires_grad=True).exp()  # saves its result
    return getattr(probe.grad_fn._raw_saved_result, "unpack_hook", None) is not None
