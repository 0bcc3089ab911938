"""Which module is sharded how: patterns in Hugging Face's words, resolved to module names.

A plan is a mapping from patterns to words (``styles.STYLES``); ``*`` stands for one segment of a dotted name. It is found as the
attribute ``tp_plan`` of any submodule, its patterns relative to that submodule: ``PreTrainedModel.tp_plan`` of transformers (which
already holds the base model's plan under its prefix), or a class attribute of one's own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from torch import nn

from lightning_par.tensor.styles import ALIASES, STYLES


class PlanError(ValueError):
    """A plan that cannot be applied to this module; the message lists every reason."""

    def __init__(self, reasons: list[str]) -> None:
        count = "1 reason" if len(reasons) == 1 else f"{len(reasons)} reasons"
        super().__init__(f"this module cannot be sharded over tp, for {count}:\n" + "\n".join(f"  - {reason}" for reason in reasons))
        self.reasons = reasons


def resolve_plan(module: nn.Module, patterns: Mapping[str, str] | None = None) -> dict[str, str]:
    """From the name of each module that the plan speaks of (its first, where it has several) to its word. No communication.

    Args:
        module: any module, for example a LightningModule around the model.
        patterns: the plan, relative to ``module``; None = the plans found in it.

    Raises:
        PlanError: no plan, unknown words, patterns that match nothing, or two words for one module; all at once.
    """
    patterns = _found_patterns(module) if patterns is None else patterns
    first_name = {id(child): name for name, child in reversed(list(module.named_modules(remove_duplicate=False)))}
    names = {name: first_name[id(child)] for name, child in module.named_modules(remove_duplicate=False)}
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    words: dict[str, dict[str, str]] = defaultdict(dict)  # module name -> {word: pattern}
    reasons = []
    for pattern, spelling in patterns.items():
        word = ALIASES.get(spelling, spelling)
        if word not in STYLES:
            reasons.append(f"{pattern!r}: unknown style {spelling!r}; known are {', '.join([*STYLES, *ALIASES])}")
        matched = _matching(pattern, names)
        for name in matched:
            words[names[name]].setdefault(word, pattern)
        if not matched:
            reasons.append(f"{pattern!r}: {_why_unmatched(pattern, parameters)}")
    for name, by_word in words.items():
        if len(by_word) > 1:
            reasons.append(f"{name}: two styles, " + " and ".join(f"{word!r} by {pattern!r}" for word, pattern in by_word.items()))
    if reasons:
        raise PlanError(reasons)
    return {name: next(iter(words[name])) for name in names if name in words}


def with_ties(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """The plan, completed by what ties demand: no communication, no new error.

    A plan may shard a head by rows and be silent on the embedding that shares its weight, or the other way round (transformers plans do
    not know whether a model ties them). The silent side then takes the word that keeps its input and output whole, so that both
    keep the same rows.
    """
    complete = dict(plan)
    for owners in parameter_owners(module).values():
        cut_by_rows = any(STYLES[plan[name]].cut.get(key) == 0 for name, key in owners if name in plan)
        for name, key in owners:
            if cut_by_rows and key == "weight" and name not in plan:
                owner = module.get_submodule(name)
                if isinstance(owner, nn.Embedding):
                    complete[name] = "embedding_rowwise"
                elif isinstance(owner, nn.Linear):
                    complete[name] = "colwise_gather_output"
    return complete


def parameter_owners(module: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """For each parameter, by its first name: every (module name, attribute) it is registered as. More than one is a tie."""
    first_name = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[str, list[tuple[str, str]]] = {name: [] for name in first_name.values()}
    for name, child in module.named_modules():
        for key, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
            owners[first_name[id(parameter)]].append((name, key))
    return owners


def _found_patterns(module: nn.Module) -> dict[str, str]:
    """The plans of the outermost modules that have one: a module's plan speaks for everything below it."""
    found: dict[str, str] = {}
    speakers: list[str] = []
    for name, child in module.named_modules():
        if any(name.startswith(speaker) for speaker in speakers):
            continue
        if plan := getattr(child, "tp_plan", None):
            prefix = f"{name}." if name else ""
            speakers.append(prefix)
            found |= {prefix + pattern: word for pattern, word in plan.items()}
    if not found:
        raise PlanError([_why_no_plan(module)])
    return found


def _why_no_plan(module: nn.Module) -> str:
    silent = [f"{type(child).__name__}.tp_plan" for child in module.modules() if hasattr(child, "tp_plan")]
    seen = f"{', '.join(dict.fromkeys(silent))} is empty" if silent else f"neither {type(module).__name__} nor any module in it has one"
    return (
        f"no plan: {seen}. Give the model a class attribute tp_plan, from patterns of module names to styles, for example "
        '{"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}, or train it with tp=1'
    )


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def _why_unmatched(pattern: str, parameters: list[str]) -> str:
    if _matching(pattern, parameters):
        return "names a parameter; a style is for a module"
    return "matches no module; `*` stands for one segment of a name"
