"""A variant: one way to train the model over the ranks, and what the bench hands to whoever builds one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from benchmarks.models import OptimizerName, Size, build_model, build_optimizer, global_batch
from lightning_par.comm import Trace

Batches = Callable[[int], tuple[Tensor, Tensor]]


class UnavailableError(Exception):
    """This variant cannot run here; the message says why. Every rank must come to the same answer."""


@dataclass
class Context:
    """What a builder works with.

    Attributes:
        mark: called with the name of the phase that just ended: ``forward``, ``backward`` (with the gradients reduced), ``step``,
            ``zero``; ours has ``hooks`` before ``backward``, when autograd is done and the rest of the reduction begins.
    """

    size: Size
    rank: int
    world: int
    optimizer_name: OptimizerName = "adamw"
    mark: Callable[[str], object] = lambda phase: None

    def model(self) -> nn.Module:
        return build_model(self.size)

    def optimizer(self, model: nn.Module) -> Any:
        return build_optimizer(self.optimizer_name, model.parameters())

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's slice of the global batch of a step."""
        share = self.size.batch // self.world
        mine = slice(self.rank * share, (self.rank + 1) * share)
        tokens, targets = global_batch(self.size, step)
        return tokens[mine], targets[mine]


@dataclass(frozen=True)
class Built:
    """``step(i)`` runs optimizer step ``i`` and returns this rank's loss, or None if the rank only looks on.

    ``settle`` waits for what a step leaves under way for the next one: it belongs to the time of a turn.
    """

    step: Callable[[int], Tensor | None]
    settle: Callable[[], object] = lambda: None
    trace: Trace | None = None


@dataclass(frozen=True)
class Variant:
    """A builder, and the ZeRO stage whose formula says what state a rank needs (parameters, gradients, optimizer)."""

    build: Callable[[Context], Built]
    stage: int = 0


def plain_loop(
    context: Context, model: nn.Module, optimizer: Any, batch: Callable[[int], tuple[Tensor, Tensor]]
) -> Callable[[int], Tensor]:
    """Forward, backward, step, zero_grad: the loop of everything that looks like a module and an optimizer."""

    def step(i: int) -> Tensor:
        loss = model(*batch(i))
        context.mark("forward")
        loss.backward()
        context.mark("backward")
        optimizer.step()
        context.mark("step")
        optimizer.zero_grad(set_to_none=True)
        context.mark("zero")
        return loss.detach()

    return step


def names_among(variants: Collection[str]) -> Callable[[str], list[str]]:
    """For argparse: a comma-separated list of these."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        if unknown := [name for name in names if name not in variants]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose among {', '.join(variants)}")
        return names

    return parse
