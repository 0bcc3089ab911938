"""Random numbers of a step that a pipeline runs on every stage."""

from __future__ import annotations

import random
from types import TracebackType

import numpy as np
import torch


class MicrobatchStreams:
    """Inside the block random generators of this process go on from streams of their own for every micro-batch.

    Every stage of a pipeline runs the user's step for every micro-batch, so what the step draws before the layers (noise, time steps, a
    mask) must be the same on each, whichever micro-batches a rank runs in between and whatever its layers draw. What layers draw (dropout)
    must differ from stage to stage. Both follow from the state of torch's CPU generator, which must be the same on all ranks of the
    pipeline, and from ``moment``. Afterwards all generators are as they were: nobody draws from them, as in a process whose step draws
    nothing, so that samples come in the order of any other layout.

    Covers the generators of torch (CPU, and ``device``'s), NumPy (the global one) and Python's ``random``.

    Args:
        count: how many micro-batches there are.
        moment: what tells this step from others, the same on all ranks.
    """

    def __init__(self, count: int, device: torch.device, moment: str) -> None:
        self._count, self._moment = count, moment
        self._device = None if device.type in ("cpu", "meta") else torch.get_device_module(device)

    def __enter__(self) -> MicrobatchStreams:
        self._torch, self._numpy, self._python = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._on_device = None if self._device is None else self._device.get_rng_state()
        generator = torch.Generator()
        generator.set_state(self._torch)
        now = torch.randint(2**62, (), generator=generator, device="cpu").item()
        seeds = random.Random(f"{now} {self._moment}")
        self._seeds = [seeds.getrandbits(62) for _ in range(self._count)]
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
        self._seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def reach(self, microbatch: int, stage: int) -> None:
        """The layers of a stage begin: from here on torch draws what no other stage does."""
        self._seed(self._seeds[microbatch] + stage)

    def _seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device is not None:
            self._device.manual_seed(seed)
