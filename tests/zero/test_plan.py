"""The flat layout, as plain data: nothing is lost, nothing overlaps, and every rank's span is as long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_par.layout import ShardSpec
from lightning_par.zero import BucketPlan, ParameterInfo, ZeroOptions, plan_buckets
from lightning_par.zero.units import REST, assign, find_units
from tests.zero.models import Awkward


def infos(*sizes: int, dtype: torch.dtype = torch.float32) -> list[ParameterInfo]:
    params = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]
    return [ParameterInfo(f"p{i}", param, ShardSpec.whole(param)) for i, param in enumerate(params)]


def check(plans: Sequence[BucketPlan], members: Sequence[ParameterInfo], ranks: int) -> None:
    placed = [slot.info.name for plan in plans for slot in plan.slots]
    assert sorted(placed) == sorted(info.name for info in members), "each parameter has one place"
    for plan in plans:
        assert plan.size % ranks == 0
        end = 0
        for slot in plan.slots:
            assert slot.span.start >= end
            assert slot.span.size == slot.info.param.numel()
            end = slot.span.stop
        assert end <= plan.size
        spans = [plan.owned(ranks, index) for index in range(ranks)]
        assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 200), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_parameter_has_one_place(sizes: list[int], ranks: int, limit: int, whole: bool) -> None:
    members = infos(*sizes)
    plans = plan_buckets(members, ranks, limit, whole=frozenset(info.param for info in members) if whole else frozenset())
    check(plans, members, ranks)
    for plan in plans:
        if not whole:
            assert plan.size - sum(slot.span.size for slot in plan.slots) < ranks, "padding is less than a rank"
        for slot in plan.slots if whole else ():
            owners = [index for index in range(ranks) if plan.owned(ranks, index).intersect(slot.span).size]
            assert len(owners) == min(1, slot.span.size), "no parameter crosses from one rank to the next"


def test_buckets_follow_the_backward_pass_and_their_size() -> None:
    members = infos(10, 10, 10, 10)
    assert [[slot.info.name for slot in plan.slots] for plan in plan_buckets(members, 2, 80)] == [["p3", "p2"], ["p1", "p0"]]
    assert len(plan_buckets(members, 2, 1)) == 4
    assert len(plan_buckets(members, 2, 10**9)) == 1


def test_dtypes_and_frozen_parameters_are_kept_apart() -> None:
    members = infos(3, 4) + infos(5, dtype=torch.float64)
    members[0].param.requires_grad_(False)
    plans = plan_buckets(members, 2, 10**9)
    assert [plan.kind.dtype for plan in plans] != [torch.float32] * 2
    assert sum(len(plan.slots) for plan in plans) == 2, "frozen parameters have no gradients to bucket"


def test_whole_parameters_are_balanced() -> None:
    members = infos(3, 5, 4, 6)
    (plan,) = plan_buckets(members, 2, 10**9, whole=frozenset(info.param for info in members))
    assert plan.size == 18, "9 elements a rank"


def test_units_are_layers_and_the_rest() -> None:
    module = Awkward()
    units = find_units(module)
    owner = assign(module, units)
    assert [units[layer] for layer in module.layers] == [0, 1, 2]
    assert {owner[p] for p in module.layers[1].parameters()} == {1}
    assert owner[module.embed.weight] == owner[module.gain.gain] == REST
    assert set(owner) == set(module.parameters())
    assert find_units(module, ("Linear",)).keys() == {m for m in module.modules() if type(m) is nn.Linear}
    with pytest.raises(ValueError, match="names Missing"):
        find_units(module, ("Linear", "Missing"))


class Uncalled(nn.Module):
    """Holds layers and a weight; nobody calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))


def test_members_that_are_never_called_are_no_units_but_theirs_are() -> None:
    pairs = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]) for _ in range(2))
    module = nn.ModuleDict({"pairs": pairs, "holder": Uncalled(), "deep": nn.ModuleDict({"net": nn.Linear(2, 2)})})
    units = find_units(module)
    assert list(units) == [*pairs[0], *pairs[1], module["holder"].inner, module["deep"]["net"]]
    assert list(find_units(module, least=1000).values()) == [0] * 6, "neighbours may share one across containers"
    assert assign(module, units)[module["holder"].weight] == REST
    with pytest.raises(ValueError, match="names Uncalled, but only what has a forward"):
        find_units(module, ("Uncalled",))


def test_a_parameter_that_two_units_share_belongs_to_the_rest() -> None:
    shared = nn.Linear(3, 3)
    module = nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared, nn.Linear(3, 3))])
    owner = assign(module, find_units(module))
    assert owner[shared.weight] == REST
    assert owner[module[1][1].weight] != REST


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"bucket_mb": 0}, "bucket_mb=0"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"min_unit_mb": -1}, "min_unit_mb=-1"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8' must be one of float64, float32"),
        ({"bucket_mb": -1, "prefetch": 0.5}, "bucket_mb=-1.*prefetch=0.5"),
    ],
)
def test_options_out_of_range_are_named(fields: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ZeroOptions(**fields)


def test_options_that_do_not_exist_are_named() -> None:
    with pytest.raises(TypeError, match=r"ZeroOptions has no 'bucket', 'offload'; there are bucket_mb, .*prefetch"):
        ZeroOptions.of({"bucket": 3, "offload": None})


def test_neighbours_share_a_unit_until_it_is_big_enough() -> None:
    module = nn.Module()
    module.first = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(5))  # 16 bytes each
    module.second = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(2))
    numbers = {least: list(find_units(module, least=least).values()) for least in (0, 16, 32, 1000)}
    assert numbers == {0: [0, 1, 2, 3, 4, 5, 6], 16: [0, 1, 2, 3, 4, 5, 6], 32: [0, 0, 1, 1, 1, 2, 2], 1000: [0] * 5 + [1] * 2}
