"""Stage 3: which parameters come and go together, and when.

Note [Coming and going]
~~~~~~~~~~~~~~~~~~~~~~~
A unit is a layer (a member of a ModuleList or Sequential), or the rest of the model. Its values are whole while it is *used*: from the
start of a forward of its module to the end, and from the moment the gradient of that forward's output arrives until that of another
unit's does. (The rest has no module of its own: each module that owns some of it counts, and between two of those it may go. So does a
module within a layer that is called while the layer is not.)

All of it is one small cache. Using a unit gathers it unless it is here, then starts to gather those that will be used next, as the
sequence of uses in the last pass tells; to make room, the unit whose last use is longest ago is freed. So ``1 + prefetch`` units are
whole at a time, whether a pass goes forward, backward, recomputes, calls modules twice, in another order or not at all::

    uses       rest  0  1  2  rest | rest  2  1  0          (the head's use of the rest serves backward too, as does layer 2's)
    gathers    rest  0  1  2  rest |       .  1  0
                     ^ each started while the unit before it computes

All sharding ranks must use units in the same order, since each gather is a collective.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from lightning_par.zero.bucket import Bucket

REST = -1
"""The number of the unit of everything that is in no layer."""


def find_units(module: nn.Module, classes: Sequence[str] = (), least: int = 0) -> dict[nn.Module, int]:
    """The modules that come and go as one, with the numbers of their units in order of registration.

    Those of the named classes, else the members of every outermost ModuleList, Sequential or ModuleDict. A member that has no forward (one
    more such container, say) is never called: its own members take its place. Neighbours within one outermost container share a unit until
    it holds ``least`` bytes of parameters.

    Raises:
        ValueError: a named class has no instance in the module, or no forward.
    """
    if classes:
        named = {type(m).__name__: m for m in module.modules() if type(m).__name__ in classes}
        if missing := set(classes) - named.keys():
            raise ValueError(f"ZeroOptions(units=...) names {', '.join(sorted(missing))}, but the module has no instance of that class")
        if idle := [name for name, m in named.items() if not _is_called(m)]:
            raise ValueError(f"ZeroOptions(units=...) names {', '.join(idle)}, but only what has a forward can be a unit")
    found: dict[nn.Module, nn.Module] = {}

    def visit(parent: nn.Module, container: nn.Module | None) -> None:
        if isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            container = container or parent
        for child in parent.children():
            is_unit = type(child).__name__ in classes if classes else container is not None and _is_called(child)
            if is_unit and any(True for _ in child.parameters()):
                found.setdefault(child, container or parent)
            elif child not in found:
                visit(child, None if _is_called(child) else container)

    visit(module, None)
    return _join(found, least)


def _is_called(module: nn.Module) -> bool:
    """It has a forward."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _join(parents: dict[nn.Module, nn.Module], least: int) -> dict[nn.Module, int]:
    """Number modules, neighbours alike until they hold ``least`` bytes; too small a last one of a parent goes with those before it."""
    runs: list[tuple[nn.Module, list[nn.Module], int]] = []
    for module, parent in parents.items():
        size = sum(param.nbytes for param in module.parameters())
        if runs and runs[-1][0] is parent and (runs[-1][2] < least or _rest(parents, module, parent) < least):
            runs[-1] = (parent, [*runs[-1][1], module], runs[-1][2] + size)
        else:
            runs.append((parent, [module], size))
    return {module: number for number, (_, run, _) in enumerate(runs) for module in run}


def _rest(parents: dict[nn.Module, nn.Module], first: nn.Module, parent: nn.Module) -> int:
    """Bytes of ``first`` and the modules after it in its parent."""
    siblings = [module for module, theirs in parents.items() if theirs is parent]
    return sum(param.nbytes for module in siblings[siblings.index(first) :] for param in module.parameters())


def assign(module: nn.Module, units: dict[nn.Module, int]) -> dict[nn.Parameter, int]:
    """The unit of every parameter; one that several units share belongs to the rest."""
    owner: dict[nn.Parameter, int] = {}
    for unit, number in units.items():
        for param in unit.parameters():
            owner[param] = number if owner.get(param, number) == number else REST
    inside = {inner for unit in units for inner in unit.modules()}
    for submodule in module.modules():
        if submodule not in inside:
            for param in submodule.parameters(recurse=False):
                owner[param] = REST
    return owner


class Residency:
    """The cache of whole units. See Note [Coming and going].

    Args:
        buckets: of each unit.
        prefetch: units gathered ahead.
    """

    def __init__(self, buckets: dict[int, list[Bucket]], prefetch: int) -> None:
        self.buckets, self.capacity = buckets, 1 + prefetch
        self._storages = {bucket.values.untyped_storage()._cdata for members in buckets.values() for bucket in members}
        self._whole: list[int] = []  # by last use, the oldest first
        self._inside: dict[int, int] = dict.fromkeys(buckets, 0)  # forwards under way
        self._pass: list[int] = []
        self._gathered: list[int] = []
        self._last_pass: dict[bool, list[int]] = {}  # by whether it had a backward pass
        self._place = 0

    def use(self, unit: int) -> None:
        """Make a unit's values whole, now, and those of the next ones soon."""
        if not self._pass or self._pass[-1] != unit:
            self._pass.append(unit)
            self._advance(unit)
        self._fetch(unit)
        for bucket in self.buckets[unit]:
            bucket.open_values()
        self._inside[unit] += 1  # whatever makes room now, this one stays
        for upcoming in self._upcoming():
            if upcoming not in self._whole:
                self._fetch(upcoming)
        self._inside[unit] -= 1

    def use_together(self, units: Iterable[int]) -> None:
        """Use several at once: none makes room for another."""
        for unit in units:
            self._inside[unit] += 1
        for unit in units:
            self.use(unit)
        for unit in units:
            self._inside[unit] -= 1

    def enter(self, unit: int) -> None:
        """A forward that needs the unit begins."""
        self._inside[unit] += 1
        self.use(unit)

    def leave(self, unit: int) -> None:
        """It ends: values stay for a while, but outside a forward nobody may use them."""
        self._inside[unit] -= 1
        if not self._inside[unit] and not in_backward():
            for bucket in self.buckets[unit]:
                bucket.close_values()

    def is_inside(self, units: Iterable[int]) -> bool:
        """Forwards that need all of these are under way."""
        return all(self._inside[unit] for unit in units)

    def holds(self, tensor: Tensor) -> bool:
        """It is a view of a parameter's values."""
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.layout == torch.strided and tensor.untyped_storage()._cdata in self._storages

    def drop(self) -> None:
        """Free everything: values are about to change, or the step is over."""
        for unit in list(self._whole):
            self._free(unit)

    def end_pass(self, *, backward: bool) -> list[int]:
        """A step is over: free everything, and remember the order for the next. The units that were gathered since the last, in order."""
        self.drop()
        self._inside = dict.fromkeys(self.buckets, 0)
        self._last_pass[backward] = self._pass
        gathered, self._gathered = self._gathered, []
        self._pass, self._place = [], 0
        return gathered

    def _fetch(self, unit: int) -> None:
        if unit in self._whole:
            self._whole.remove(unit)
        else:
            self._make_room()
        away = [bucket for bucket in self.buckets[unit] if not bucket.is_whole]
        for bucket in away:
            bucket.gather()
        self._gathered += [unit] if away else []
        self._whole.append(unit)

    def _make_room(self) -> None:
        idle = [unit for unit in self._whole if not self._inside[unit]]
        for unit in idle[: max(0, len(self._whole) - self.capacity + 1)]:
            self._free(unit)

    def _free(self, unit: int) -> None:
        self._whole.remove(unit)
        for bucket in self.buckets[unit]:
            bucket.free()

    def _order(self) -> list[int]:
        return self._last_pass.get(torch.is_grad_enabled() or in_backward(), [])

    def _advance(self, unit: int) -> None:
        """Find the present place in the last pass's order; past its end nothing is foretold."""
        order = self._order()
        self._place = next((place + 1 for place in range(self._place, len(order)) if order[place] == unit), len(order))

    def _upcoming(self) -> list[int]:
        return list(dict.fromkeys(self._order()[self._place : self._place + self.capacity - 1]))


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


def install(module: nn.Module, units: dict[nn.Module, int], owner: dict[nn.Parameter, int], residency: Residency) -> list[RemovableHandle]:
    """Hook every unit, and every other module that owns parameters, so that its forward and backward use its unit."""
    handles = []
    inside = {inner for unit in units for inner in unit.modules()} - units.keys()
    scripted = {inner for m in module.modules() if isinstance(m, torch.jit.ScriptModule) for inner in m.modules()}
    for host in module.modules():
        params = host.parameters(recurse=host in units)
        numbers = sorted({owner[param] for param in params if param in owner} & residency.buckets.keys())
        if numbers and not (host in inside and host in scripted):
            handles += _hook(host, numbers, residency, part=host in inside)
    return handles


def _hook(host: nn.Module, numbers: list[int], residency: Residency, *, part: bool) -> list[RemovableHandle]:
    """``part``: of a unit, whose own forward does all this where it is under way."""
    entered: list[bool] = []  # for each forward of the host that is under way, the innermost last

    def is_foreign(module: nn.Module) -> bool:
        """A copy of the host, with values of its own, or a part of what is compiled with the unit."""
        return module is not host or (part and torch.compiler.is_compiling())

    def before(module: nn.Module, _args: Any) -> None:
        if is_foreign(module):
            return
        entered.append(not (part and residency.is_inside(numbers)))
        for number in numbers if entered[-1] else ():
            residency.enter(number)

    def after(module: nn.Module, _args: Any, output: Any) -> Any:
        if is_foreign(module) or not (entered and entered.pop()):
            return None
        if any(map(residency.holds, _tensors(output))):  # it returns a part of its own parameter
            output = _mapped(output, lambda tensor: tensor.clone() if residency.holds(tensor) else tensor)
        for number in numbers:
            residency.leave(number)
        if type(host) is not nn.Embedding:  # its backward needs no values
            _before_backward(output, lambda: residency.use_together(numbers))
        return output

    if not part:  # whoever compiles more than a unit must end his graph here: values come and go
        before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    # called after an exception too: non-reentrant checkpointing ends a recomputation with one
    return [host.register_forward_pre_hook(before), host.register_forward_hook(after, always_call=True)]


def _before_backward(output: Any, action: Callable[[], object]) -> None:
    """Call ``action`` as soon as the gradient of any tensor of ``output`` is there."""
    for tensor in _tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda _grad: _run(action))


def _tensors(output: Any) -> Iterator[Tensor]:
    """Those in what a module returned, in dataclasses too."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            yield from _tensors(list(_fields(leaf).values()))


def _mapped(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same, with ``change(tensor)`` in place of each of these tensors."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        if not (values := _fields(leaf)):
            return leaf
        made = copy.copy(leaf)
        for name, value in values.items():
            object.__setattr__(made, name, _mapped(value, change))
        return made

    return tree_map(one, output)


def _fields(leaf: Any) -> dict[str, Any]:
    """Of a dataclass; of anything else none."""
    return {field.name: getattr(leaf, field.name) for field in fields(leaf)} if is_dataclass(leaf) and not isinstance(leaf, type) else {}


def _run(action: Callable[[], object]) -> None:
    """A gradient hook that returns something replaces the gradient."""
    action()
