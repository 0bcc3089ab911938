"""A stage's backward in two parts: what the previous stage waits for, and what can wait.

Note [Two parts of a backward]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Nodes of a stage's graph from which the stage's input can be reached are *inner*: their gradients are needed to get to the input. All
other nodes lead to parameters only; they hang on the inner nodes as *branches*::

    output <- mm <- add <- mm <- input      inner
              |     |      |
              t    (b)     t                branches; (b) is a parameter itself
             (w1)         (w2)

Part B runs the inner nodes, which autograd does without computing what branches off, and keeps the gradient that comes to each
node with branches. Part W runs each of these nodes again, for its branches alone, down to their parameters, whose gradients are
accumulated in the usual way, through the usual hooks. The graph is alive until then, but only the nodes that part W runs keep what they
saved: the others let go of it one by one as part B has run them, as they would in one piece. So what is held in between is the
activations that weights are multiplied with, and the gradients that came there. A hook on a tensor in between sees its gradient in both
parts if branches hang there; one on a parameter sees it once.

A parameter can wait for part W if it hangs on one node only (a weight used twice would receive, from the later use, what flows through
the earlier one too), and if that node can do half of its work: a custom ``autograd.Function`` computes all its gradients always (and may
communicate), and what a node saved may have to be computed again (activation checkpointing) or brought back (offloading). Parameters
that cannot wait get their gradients in part B, exactly. If that is all of them (on the first stage, which has no input; with all layers
checkpointed), part B is the ordinary backward, and part W does nothing. The parts are those of Qi et al., arXiv 2401.10241.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Rest = Callable[[], None]
"""What is left of a backward: part W, or sums."""


def backward(outputs: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """Run a graph backward in one piece."""
    if outputs:
        torch.autograd.backward(outputs, grads)


def backward_inputs(outputs: Sequence[GradientEdge], grads: Sequence[Tensor], entry: Tensor | None) -> Rest:
    """Run part B; call what it returns, once, to run part W. See Note [Two parts of a backward].

    Args:
        entry: the leaf behind the stage's input, up to whose node part B runs; None where the stage has no input.
    """
    branches = _find_branches([edge.node for edge in outputs], entry)
    if entry is None or not branches.waiting or any(leaf.variable._backward_hooks for leaf in branches.at_once):
        backward(outputs, grads)  # a hook on a parameter must see its gradient once, and taking it out is once already
        return nothing
    sources = [edge for node in branches.waiting for edge in _arrivals(node)]
    at_once = [GradientEdge(leaf, 0) for leaf in branches.at_once]
    with _letting_go(branches.only_now):
        found = torch.autograd.grad(outputs, [get_gradient_edge(entry), *sources, *at_once], grads, retain_graph=True, allow_unused=True)
    there = {edge: grad for edge, grad in zip([*sources, *at_once], found[1:], strict=True) if grad is not None}
    backward(*_take(at_once, there))
    todo = [(*_take(_arrivals(node), there), leaves) for node, leaves in branches.waiting.items()]
    return functools.partial(_backward_branches, todo)


def _backward_branches(todo: list[tuple[list[GradientEdge], list[Tensor], list[Node]]]) -> None:
    """Part W: node by node, each of which goes with what it held."""
    while todo:
        outputs, grads, leaves = todo.pop()
        if outputs:
            torch.autograd.backward(outputs, grads, inputs=[leaf.variable for leaf in leaves])


@contextmanager
def _letting_go(nodes: Collection[Node]) -> Iterator[None]:
    """Inside, each of these nodes lets go of the tensors it saved once it has run, though the graph is kept."""
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.register_hook(functools.partial(_forget, node)).remove)
        yield


def _forget(node: Node, *_: object) -> None:
    for saved in _saved(node):
        with suppress(RuntimeError):  # nothing was saved there, or it is someone's to bring back
            saved.register_hooks(_nothing_of, _is_gone)


@dataclass(frozen=True)
class _Branches:
    """What hangs on the inner nodes of a graph: the nodes of parameters.

    Attributes:
        waiting: those that can wait for part W, by the inner node on which they hang.
        at_once: those that cannot.
        only_now: the nodes with saved tensors that part W does not run.
    """

    waiting: dict[Node, list[Node]]
    at_once: list[Node]
    only_now: list[Node]


def _find_branches(outputs: Sequence[Node], entry: Tensor | None) -> _Branches:
    inner: set[Node] = set() if entry is None else {get_gradient_edge(entry).node}
    below: dict[Node, frozenset[Node]] = {}  # the parameters to which a node that is not inner leads
    owners: dict[Node, set[Node]] = {}  # the inner nodes on which a parameter hangs
    everything = list(children_first(outputs))
    for node in everything:
        children = [child for child, _ in node.next_functions if child is not None]
        if any(child in inner for child in children):
            inner.add(node)
            for leaf in frozenset().union(*(below.get(child, ()) for child in children)):
                owners.setdefault(leaf, set()).add(node)
        elif node not in inner:
            below[node] = frozenset().union(*(below[child] for child in children)) | ({node} if is_leaf(node) else set())
    apart = frozenset().union(*(below.get(node, ()) for node in outputs))  # hangs on no inner node, or not only
    waiting: dict[Node, list[Node]] = {}
    for leaf, nodes in owners.items():
        if len(nodes) == 1 and leaf not in apart and _does_halves(node := next(iter(nodes))):
            waiting.setdefault(node, []).append(leaf)
    waits = {leaf for leaves in waiting.values() for leaf in leaves}
    at_once = [leaf for leaf in {**owners, **dict.fromkeys(apart)} if leaf not in waits]
    later = set(children_first(list(waiting), without=inner - waiting.keys()))
    return _Branches(waiting, at_once, [node for node in everything if node not in later and _saved_names(type(node))])


def children_first(roots: Sequence[Node], without: Collection[Node] = ()) -> Iterator[Node]:
    """Every node of a graph once, after those that it leads to; not those given, nor what only they lead to."""
    seen: set[Node] = set(without)
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None and child not in seen]


def is_leaf(node: Node) -> bool:
    """Whether it is the node of a parameter (``variable``), or of another leaf."""
    return type(node).__name__ == "AccumulateGrad"


def _does_halves(node: Node) -> bool:
    """Whether a node can compute some of its gradients now and the others later, without doing anything twice."""
    if isinstance(node, BackwardCFunction):
        return False
    return not any(getattr(value, "unpack_hook", None) for value in _saved(node))


def _saved(node: Node) -> list[Any]:
    """The handles of the tensors that a node saved."""
    entries = [getattr(node, name) for name in _saved_names(type(node))]
    return [value for entry in entries for value in (entry if isinstance(entry, tuple) else (entry,))]


@functools.cache
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved"))


def _arrivals(node: Node) -> list[GradientEdge]:
    """Where gradients come to a node, one for each of its outputs in the forward pass."""
    return [GradientEdge(node, i) for i in range(len(node._input_metadata))]


def _take(edges: Sequence[GradientEdge], grads: dict[GradientEdge, Tensor]) -> tuple[list[GradientEdge], list[Tensor]]:
    """The edges that have a gradient, and those gradients, which are taken out."""
    there = [edge for edge in edges if edge in grads]
    return there, [grads.pop(edge) for edge in there]


def nothing(*_: object) -> None:
    """Part W where part B was all, and any other rest or hook that does nothing."""


def _nothing_of(tensor: Tensor) -> None:
    """What is kept of a saved tensor that nobody will ask for."""


def _is_gone(kept: None) -> Tensor:
    raise RuntimeError("this part of the graph has run backward already, and has let go of what it saved")
