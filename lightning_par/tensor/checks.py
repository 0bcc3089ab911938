"""What a resolved plan would get wrong on this module, said before anything is changed.

Note [Parameters inside the sharded region]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Between a column- and a row-parallel layer each rank has its own features or heads. A parameter that is used there but kept whole (the
norm of each query head, a learned slope) sees only this rank's part, so its gradient is one term of a sum; left alone, the ranks would
drift apart with no error. It needs the word ``replicated_with_grad_allreduce``::

    x ──┬─ q_proj (colwise) ── q_norm ──┬── attention ── o_proj (rowwise) ── y
        └─ k_proj (colwise) ── k_norm ──┘
                              └ each rank normalizes its own heads: the gradient is partial

Where a module stands cannot be read off its name, but its width tells most cases: beside a colwise and a rowwise layer, what is as wide
as the hidden state stands outside the region (a norm in front); any other width is suspect and must be told by a word, be it
``replicate``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import nn

from lightning_par.layout import split
from lightning_par.tensor.in_place import reaches_super
from lightning_par.tensor.plan import parameter_owners
from lightning_par.tensor.styles import STYLES, Style

_READ_WEIGHTS_DIRECTLY = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Parents that use their children's weights without calling them (all of the time, or on a fast path in evaluation)."""


def violations(module: nn.Module, plan: Mapping[str, str], size: int) -> list[str]:
    """Every reason why ``plan`` (module names to words) cannot be applied to ``module`` over ``size`` ranks; once for all alike layers."""
    found = []
    for name, word in plan.items():
        found += [f"{_pattern(name)}: {reason}" for reason in _of_module(module, name, word, size)]
    found += [*_of_ties(module, plan), *_of_regions(module, plan)]
    return list(dict.fromkeys(found))


def _pattern(name: str) -> str:
    """The name as a plan would write it: ``layers.3.norm`` -> ``layers.*.norm``."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) or "the module itself"


def _of_module(module: nn.Module, name: str, word: str, size: int) -> list[str]:
    child, style = module.get_submodule(name), STYLES[word]
    if not isinstance(child, style.base):
        return [f"{word!r} is for nn.{style.base.__name__}, but this is a {type(child).__name__}"]
    if style.parallel is None:
        return []
    parent = module.get_submodule(name.rpartition(".")[0])
    return [*_of_class(child, style, parent), *_of_options(child), *_of_sizes(child, style, size), *_of_heads(child, parent, word, size)]


def _of_class(child: nn.Module, style: Style, parent: nn.Module) -> Iterator[str]:
    own = type(child)
    if not set(dict(child.named_parameters())) <= {"weight", "bias"} or "weight" not in child._parameters:
        yield f"{own.__name__} has other parameters than weight and bias (is it parametrized?); shard the plain layer instead"
    elif not reaches_super(own, style.base):
        yield f"{own.__name__}.forward does not call super().forward, so its matrix product cannot be replaced; keep it out of the plan"
    if parent is not child and isinstance(parent, _READ_WEIGHTS_DIRECTLY):
        yield f"{type(parent).__name__} reads this module's weight without calling it; keep it out of the plan"


def _of_options(child: nn.Module) -> Iterator[str]:
    if isinstance(child, nn.Embedding):
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(child, option) not in (None, False):
                yield f"{option}={getattr(child, option)} does not work on a sharded embedding; turn it off, or keep it out of the plan"


def _of_sizes(child: nn.Module, style: Style, size: int) -> Iterator[str]:
    for key, dim in style.cut.items():
        parameter = child._parameters.get(key)
        if parameter is not None and not split(parameter.shape[dim], size)[-1].size:
            yield f"dim {dim} of its {key} has {parameter.shape[dim]} elements, too few for {size} ranks; lower tp"


def _of_heads(child: nn.Module, parent: nn.Module, word: str, size: int) -> Iterator[str]:
    """An attention that says its ``head_dim`` must get whole heads, equally many on each rank."""
    head_dim = getattr(parent, "head_dim", None)
    if word != "colwise" or not isinstance(head_dim, int) or child.weight.shape[0] % head_dim:
        return
    heads = child.weight.shape[0] // head_dim
    if heads % size:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        yield f"its {heads} heads of {head_dim} features cannot be shared by {size} ranks; choose tp among {divisors}"


def _of_ties(module: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """A parameter that is registered in several places must be cut alike, and its gradient be complete or partial, in all of them."""
    for name, owners in parameter_owners(module).items():
        fates = {f"{owner}.{key}": _fate(plan.get(owner, "replicate"), key) for owner, key in owners}
        if len(set(fates.values())) > 1:
            told = ", ".join(f"{_pattern(place)} ({fate})" for place, fate in fates.items())
            yield f"{_pattern(name)}: one parameter in places that treat it differently: {told}; give them styles that agree, or untie it"


def _fate(word: str, key: str) -> str:
    style = STYLES[word]
    if key in style.cut:
        return f"cut along dim {style.cut[key]}"
    return "whole, with partial gradient" if style.partial else "whole"


def _of_regions(module: nn.Module, plan: Mapping[str, str]) -> Iterator[str]:
    """See Note [Parameters inside the sharded region]."""
    for name, parent in module.named_modules():
        children = {child: plan.get(f"{name}.{child}" if name else child) for child, _ in parent.named_children()}
        opening = [child for child, word in children.items() if word == "colwise"]
        closing = [child for child, word in children.items() if word == "rowwise"]
        if opening and closing:
            outside = _widths_outside(parent, opening, closing)
            for inner, key, shape in _unplanned_parameters(name, parent, plan):
                if (shape or (0,))[-1] not in outside:
                    yield (
                        f"{_pattern(inner)}: its {key} of shape {shape} stands beside {opening[0]} (colwise) and {closing[0]} (rowwise), "
                        "and the plan has no word for it; 'replicated_with_grad_allreduce' if it is used between the two, else 'replicate'"
                    )


def _widths_outside(parent: nn.Module, opening: list[str], closing: list[str]) -> set[int | None]:
    """The widths of what enters the region and of what leaves it, unless a head is as wide."""
    entering = {getattr(parent.get_submodule(child), "in_features", None) for child in opening}
    leaving = {getattr(parent.get_submodule(child), "out_features", None) for child in closing}
    return (entering | leaving) - {getattr(parent, "head_dim", None)}


def _unplanned_parameters(name: str, parent: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The first parameter (its weight, as a rule) of each module in ``parent`` that has some and no word: (module, attribute, shape)."""
    for inner, module in parent.named_modules(prefix=name):
        first = next(iter(module.named_parameters(recurse=False)), None)
        if first is not None and inner not in plan:
            yield inner, first[0], tuple(first[1].shape)
