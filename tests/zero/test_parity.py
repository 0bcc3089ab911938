"""DataParallel in a plain loop equals one process: losses, gradient norms, gradients and weights of three steps, in float64, to 1e-10."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from lightning_par.zero import ZeroOptions
from tests.harness import run_world
from tests.zero.bare import Case, Place, adamw, assert_parity, data_parallel, next_token, outcomes, rows, sgd
from tests.zero.models import Awkward, all_frozen_but_one, heads, listed_heads

STAGES = (0, 1, 2, 3)
SMALL, MIDDLE, BIG = (ZeroOptions(min_unit_mb=0, bucket_mb=size) for size in (1e-9, 5e-4, 25.0))

checkpointed = partial(Awkward, checkpointed="non-reentrant")
wrapped = partial(Awkward, wrapped=True)
reentrant = partial(Awkward, checkpointed="reentrant", order=(0, 2, 1))
skipping = partial(Awkward, order=(2, 0))


def alternating(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    """One head in one step, the other in the next."""
    return nn.functional.cross_entropy(module(ids, place.step % 2).flatten(0, 1), ids.flatten())


def apart(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    """Head A on rank 0, head B on the others, in one step."""
    return nn.functional.cross_entropy(module(ids, min(place.index, 1)).flatten(0, 1), ids.flatten())


def spare_on_one_rank(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    """A submodule that only the last rank of the second step uses."""
    loss = next_token(module, ids, place)
    return loss + module.spare(torch.ones(3)).sum() if (place.step, place.index) == (1, 1) else loss


def summed(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    """The whole module called twice before one backward."""
    return next_token(module, ids, place) + next_token(module, ids.flip(1), place) ** 2


def one_after_the_other(module: nn.Module, ids: Tensor, place: Place) -> tuple[Tensor, Tensor]:
    """Two backwards through one graph before the step."""
    logits = module(ids).flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids.flatten()), logits.square().mean()


def part_of_the_outputs(module: nn.Module, ids: Tensor, place: Place) -> Tensor:
    """Of two outputs the loss takes one, and the layers are called out of order from step to step."""
    module.order = ((0, 1, 2), (2, 1, 0), (1, 1, 0))[place.step]
    logits, _unused = module(ids), module.norm(module.spare(torch.ones(4, 3)).sum() * torch.ones(5))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


CASES = {
    "Z7 Z8 zero-sized, unused, tied, frozen, one element": Case(options=MIDDLE),
    "accumulation 2, sgd": Case(optimizers=sgd, accumulate=2, options=MIDDLE),
    "Z12 accumulation 3": Case(accumulate=3, options=MIDDLE),
    "D3 a bucket for each parameter": Case(options=SMALL),
    "D3 one bucket for everything": Case(options=BIG),
    "checkpointed inside layers": Case(checkpointed, optimizers=sgd, accumulate=2, options=MIDDLE),
    "checkpointed layers": Case(wrapped, options=SMALL),
    "checkpointed with use_reentrant=True, each layer once": Case(reentrant, accumulate=2, options=SMALL),
    "Z15 all frozen but one": Case(all_frozen_but_one),
    "a layer that is never called": Case(skipping, options=MIDDLE),
    "Z8 used on one rank in one step": Case(loss=spare_on_one_rank, options=SMALL),
    "Z9 heads alternate": Case(heads, loss=alternating),
    "Z9 a head on each rank": Case(heads, loss=apart, accumulate=2),
    "Z11 two forwards, one backward": Case(loss=summed, options=MIDDLE),
    "Z11 two forwards, one backward, checkpointed": Case(checkpointed, loss=summed, options=SMALL),
    "Z11 two backwards, one step": Case(loss=one_after_the_other, options=MIDDLE),
    "Z11 two backwards, one step, accumulation 2": Case(loss=one_after_the_other, accumulate=2, options=SMALL),
    "D1 loss on part of the outputs, layers in another order": Case(loss=part_of_the_outputs, options=SMALL),
    "Z9 heads alternate, each a unit": Case(listed_heads, loss=alternating),
}

UNITS = {
    "stage3 nothing fetched ahead": Case(stage=3, options=ZeroOptions(min_unit_mb=0, prefetch=0)),
    "stage3 three units fetched ahead": Case(checkpointed, stage=3, options=ZeroOptions(min_unit_mb=0, prefetch=3)),
    "stage3 small units": Case(wrapped, stage=3, options=ZeroOptions(min_unit_mb=0, units=("Linear", "LayerNorm"))),
    "stage3 layers that stay whole": Case(
        stage=3, accumulate=2, options=ZeroOptions(min_unit_mb=0, ignored=("layers.0", "norm", "frozen"))
    ),
}
EVERYWHERE = UNITS | {f"stage{stage} {name}": case.at(stage) for stage in STAGES for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_loop_equals_one_process(stage: int, name: str) -> None:
    key = f"stage{stage} {name}"
    assert_parity(EVERYWHERE[key], [rank[key] for rank in outcomes(EVERYWHERE, 2)])


THREE = {
    f"stage{stage} {name}": CASES[name].at(stage)
    for stage in STAGES
    for name in (
        "Z7 Z8 zero-sized, unused, tied, frozen, one element",
        "Z12 accumulation 3",
        "D3 a bucket for each parameter",
        "checkpointed inside layers",
        "Z9 a head on each rank",
        "Z11 two backwards, one step, accumulation 2",
    )
}


@pytest.mark.parametrize("name", THREE)
def test_on_three_ranks_too(name: str) -> None:
    assert_parity(THREE[name], [rank[name] for rank in outcomes(THREE, 3)])


@pytest.mark.parametrize("name", UNITS)
def test_how_units_come_and_go_changes_nothing(name: str) -> None:
    assert_parity(EVERYWHERE[name], [rank[name] for rank in outcomes(EVERYWHERE, 2)])


def _twice() -> list[str]:
    torch.set_default_dtype(torch.float64)
    told = []
    for stage in STAGES:
        module = reentrant(order=(0, 2, 0, 1))
        del module.spare, module.empty_last  # whose buckets would hold up the others until the end of backward
        for layer in module.layers:
            del layer.empty
        mesh, _ = data_parallel(module, sgd(module), stage, options=SMALL)
        loss = next_token(module, rows(0, 0), Place(0, 0, mesh.rank))
        with pytest.raises(RuntimeError) as caught:
            loss.backward()
        told.append(str(caught.value))
    return told


def test_Z11_reentrant_checkpointing_of_a_layer_that_is_used_twice_is_refused_by_name() -> None:
    """Its inner backwards each hand out a gradient, the first of which is under way already."""
    for told in run_world(_twice, 2):
        for text in told:
            assert "layers.0." in text
            assert "use_reentrant=False" in text


REPLICATED = {
    f"stage{stage} {name}": replace(CASES[name], stage=stage, replicate=2)
    for stage in (1, 2, 3)
    for name in ("Z12 accumulation 3", "Z9 a head on each rank", "Z11 two backwards, one step", "checkpointed layers")
}


@pytest.mark.parametrize("name", REPLICATED)
def test_sharding_inside_and_replicating_across_equals_one_process(name: str) -> None:
    assert_parity(REPLICATED[name], [rank[name] for rank in outcomes(REPLICATED, 4)])


PRODUCT = {
    f"stage{stage} k{accumulate} {optimizer.__name__} {size} {layers}": Case(
        model, optimizer, stage=stage, accumulate=accumulate, options=options
    )
    for stage, accumulate, optimizer, (size, options), (layers, model) in product(
        STAGES,
        (1, 2, 3),
        (sgd, adamw),
        {"small": SMALL, "big": BIG}.items(),
        {"plain": Awkward, "checkpointed": checkpointed, "wrapped": wrapped}.items(),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.long)])
def test_every_stage_accumulation_optimizer_and_bucket_size(world: int) -> None:
    results = outcomes(PRODUCT, world)
    for name, case in PRODUCT.items():
        assert_parity(case, [rank[name] for rank in results])
