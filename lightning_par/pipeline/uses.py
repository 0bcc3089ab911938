"""In which order a module's parts are used, seen in a dry run: on the meta device, where nothing is computed and nothing takes memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map_only

from lightning_par.pipeline.aside import aside, lent
from lightning_par.pipeline.segments import Segments


@dataclass(frozen=True)
class Uses:
    """Parameters by where they are used: before the layers, inside (or between) them, after them.

    A name is that of the module through which one was used: of a tie, each module uses its own.
    """

    before: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    after: frozenset[str] = frozenset()

    def of(self, parameters: Collection[str]) -> frozenset[str]:
        """Where any of these is used."""
        return frozenset(place for place, names in vars(self).items() if names & set(parameters))


def dry_run(module: nn.Module, layers: str, step: Callable[[Any], Any], batch: Any) -> Uses:
    """Run the user's step on a batch without its numbers, and see. Raises what the step raises: it may need numbers.

    Args:
        step: takes a batch and returns what comes of it: its loss, or whatever matters.
    """
    meta = torch.device("meta")
    found: list[set[Tensor]] = []

    def close(segment: int, ends: list[Tensor], entry: Tensor | None) -> None:
        found[min(segment, 1) if segment <= count else 2] |= _leaves(ends)

    count = len(module.get_submodule(layers))
    found += [set(), set(), set()]
    segments = Segments(module, layers, close)
    with aside(module), lent(list(module.modules()), meta):
        names = {param: name for name, param in module.named_parameters()}
        with segments.cut(), meta:
            segments.end(step(tree_map_only(Tensor, lambda tensor: tensor.to(meta), batch)))
    return Uses(*(frozenset(names[leaf] for leaf in leaves if leaf in names) for leaves in found))


def _leaves(tensors: Iterable[Tensor]) -> set[Tensor]:
    """The parameters from which these were computed."""
    todo: list[Node] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen, leaves = set(todo), set()
    while todo:
        node = todo.pop()
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        children = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= children
        todo += children
    return leaves
