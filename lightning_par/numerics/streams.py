"""Random numbers of a step that a pipeline runs on every stage."""

from __future__ import annotations

import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SEEDS = torch.Generator()
"""Where seeds of streams come from. Nobody else draws from it. Checkpoints hold its state, as that of other generators."""


def seed_streams() -> None:
    """A run begins: let seeds follow from torch's CPU generator, which is left as it is."""
    SEEDS.set_state(torch.get_rng_state())
    SEEDS.manual_seed(int(torch.randint(2**62, (), generator=SEEDS, device="cpu")))


class MicrobatchStreams:
    """Inside the block random generators of this process go on from streams of their own for every micro-batch.

    Every stage of a pipeline runs the user's step for every micro-batch, so what the step draws before the layers (noise, time steps, a
    mask) must be the same on each, whichever micro-batches a rank runs in between and whatever its layers draw. What layers draw (dropout)
    must differ from stage to stage. Both follow from ``SEEDS``, whose state must be the same on all ranks of the pipeline. Afterwards all
    other generators are as they were: nobody draws from them, as in a process whose step draws nothing, so that samples come in the
    order of any other layout.

    Covers the generators of torch (CPU, and ``device``'s), NumPy (the global one) and Python's ``random``.

    Args:
        count: how many micro-batches there are.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = _module_of(device)

    def __enter__(self) -> MicrobatchStreams:
        self._seeds: list[int] = torch.randint(2**62, (self._count,), generator=SEEDS, device="cpu").tolist()
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._on_device = None if self._device is None else self._device.get_rng_state()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        if self._device is not None:
            self._device.set_rng_state(self._on_device)

    def begin(self, microbatch: int) -> None:
        """The step of a micro-batch begins: on every stage it draws the same."""
        seed = self._seeds[microbatch]
        _seed(self._device, seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def reach(self, microbatch: int, stage: int) -> None:
        """The layers of a stage begin: from here on torch draws what no other stage does."""
        _seed(self._device, self._seeds[microbatch] + stage)


class Apart:
    """Lets a module that runs on some stages only draw (torch's numbers) from a stream of its own, which one number of the step's gives.

    Stages that it does not run on draw that number (``pass_by``), so that what the step draws afterwards is the same on all of them. The
    stream follows from the state in which the module was entered: activation checkpointing draws the same again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._states: list[tuple[Tensor, Any, Tensor | None]] = []
        module.register_forward_pre_hook(torch.compiler.disable(self._enter), prepend=True)
        module.register_forward_hook(torch.compiler.disable(self._leave), always_call=True)

    def _enter(self, module: nn.Module, *_: Any) -> None:
        number, device = pass_by(), _module_of(next(module.parameters()).device)
        self._states.append((torch.get_rng_state(), device, None if device is None else device.get_rng_state()))
        _seed(device, number)

    def _leave(self, *_: Any) -> None:
        on_host, device, on_device = self._states.pop()
        torch.set_rng_state(on_host)
        if device is not None:
            device.set_rng_state(on_device)


def pass_by() -> int:
    """The number that a call of a module costs the step's stream, on whichever stage."""
    return int(torch.randint(2**62, (), device="cpu"))


def _module_of(device: torch.device) -> Any:
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


def _seed(device: Any, seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    if device is not None:
        device.manual_seed(seed)
