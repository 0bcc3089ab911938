"""Segments: a run of the user's step on the whole module, cut where its layers begin and end.

Segment 0 is what comes before the first layer, segment ``i + 1`` is layer i (with what comes between it and the layer before), and the
last one is what comes after the last layer, to the loss. Gradients do not flow from one to another: each is a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from lightning_par.pipeline.boundary import Inlet, is_plain
from lightning_par.pipeline.shown import Shown
from lightning_par.pipeline.torch_functions import map_tensors

Close = Callable[[int, list[Tensor], Tensor | None], None]
"""Told where a segment ends: its number, the tensors of its end that need a gradient, and the leaf behind its beginning."""


class Segments:
    """Cuts runs of ``module`` at the members of its list ``layers``.

    Args:
        at_work: makes the context in which a layer runs, the cut behind it included.
        made: is told tensors in place of layers' outputs, of which nothing is known.
    """

    def __init__(
        self,
        module: nn.Module,
        layers: str,
        close: Close,
        at_work: Callable[[nn.Module], AbstractContextManager] = nullcontext,
        made: Callable[[Tensor], object] = lambda tensor: None,
    ) -> None:
        self._list, self._close, self._at_work, self._made = module.get_submodule(layers), close, at_work, made
        self._last = len(self._list) + 1
        self.entry: Tensor | None = None
        """The leaf behind its beginning."""
        self.at = 0
        """The segment that runs."""
        self.ran: set[int] = set()
        """Layers that ran."""
        self.behind: dict[Tensor, int] = {}
        """The layer behind whose output a leaf is, for each leaf there."""
        self.within: dict[Tensor, int] = {}
        """The layer into which a leaf leads, for each leaf before a layer."""
        self.opaque: dict[int, Any] = {}
        """By layer, what is in its output that is neither a tensor nor plain: it could not be cut there."""

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Inside, the list holds stand-ins that cut."""
        before = dict(self._list._modules)
        for i, (name, layer) in enumerate(before.items()):
            self._list._modules[name] = _Cut(layer, _index=i, _segments=self)
        try:
            yield
        finally:
            self._list._modules.update(before)

    def end(self, values: Any) -> None:
        """The step has come to its end with these values: its loss, or whatever matters."""
        self._turn(self._last, values)
        self.entry = None

    def around(self, index: int, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer as a segment."""
        args, kwargs = self._turn(index + 1 if index else 0, (args, kwargs))
        if self.entry is not None:
            self.within[self.entry] = index
        self.at = index + 1
        self.ran.add(index)
        with self._at_work(layer), saved_tensors_hooks(_itself, _itself):  # who checkpoints the layer must not see this
            output = layer(*args, **kwargs)
            self.opaque.update((index, leaf) for leaf in tree_leaves(output) if not is_plain(leaf))
            output = self._turn(index + 1, map_tensors(self._afresh, output))
        self.at = index + 2
        if self.entry is not None:
            self.behind[self.entry] = index
        return output

    def _afresh(self, tensor: Tensor) -> Tensor:
        """A layer's output as the next stage gets it: nothing is known of it but that."""
        if tensor.requires_grad:
            return tensor
        with torch._C.DisableTorchFunction():
            fresh = _elsewhere(tensor.view_as(tensor))
        self._made(fresh)
        return fresh

    def _turn(self, segment: int, values: Any) -> Any:
        """The same values, at the beginning of the next segment's graph."""
        ends = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._close(segment, ends, self.entry)
        if not ends:
            self.entry = None
            return values
        with torch._C.DisableTorchFunction():  # nobody shall see where these come from
            inlet = Inlet([_elsewhere(tensor.detach()) for tensor in ends], grad=True)
        self.entry = inlet.entry
        begins, inlet.tensors = iter(inlet.tensors), []  # the graph keeps the inlet
        return tree_map(lambda leaf: next(begins) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf, values)


class _Cut(Shown):
    """A layer that is run as a segment."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._segments.around(self._index, self._stands_for, args, kwargs)


def _elsewhere(tensor: Tensor) -> Tensor:
    """On the meta device, one in memory of its own."""
    strided = tensor.is_meta and tensor.layout == torch.strided
    return tensor.new_empty_strided(tensor.size(), tensor.stride()) if strided else tensor


def _itself(tensor: Tensor) -> Tensor:
    return tensor
