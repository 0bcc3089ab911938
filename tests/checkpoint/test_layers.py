"""Which layer of a pipeline is what in a module: told, found by order, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_par.checkpoint import CheckpointError
from lightning_par.checkpoint.deepspeed.stages import COPY, merge, orders, owners
from lightning_par.checkpoint.layers import find_layers, tell_layers
from lightning_par.checkpoint.source import LAYERS, MODULE, OPTIMIZERS, Entry, Source

MEMBERS = ["0.weight", "2.norm.weight", "2.up.weight", "3.norm.weight", "3.up.weight", "7.weight"]
MODEL = ["embed.weight", "blocks.0.norm.weight", "blocks.0.up.weight", "blocks.1.norm.weight", "blocks.1.up.weight", "head.weight"]


def _layered() -> Source:
    entries = {f"model.{name}": Entry.of(torch.tensor([float(place)])) for place, name in enumerate(MEMBERS)}
    entries |= {"optimizer.0.3.up.weight.exp_avg": Entry.of(torch.tensor([9.0])), "rng.0.torch": Entry.of(torch.tensor([1]))}
    told = {"aliases": {name: name for name in MEMBERS}, "buffers": ["2.norm.weight"], "frozen": [], LAYERS: ["0", "2", "3", "7"]}
    metas = [{"groups": [{"params": ["3.up.weight", "0.weight"], "lr": 0.1}], "scalars": {"0.weight": {"n": 1}}}]
    return Source(Path("layered"), "made by hand", {MODULE: told, OPTIMIZERS: metas}, entries)


@pytest.mark.parametrize(
    "layers",
    [
        ["embed", "blocks.*", "head"],
        ["embed", "blocks.0", "blocks.1", "head"],
        {"0": "embed", "2": "blocks.0", "3": "blocks.1", "7": "head"},
        {0: "embed", 2: "blocks.0", 3: "blocks.1", 7: "head"},
        None,
    ],
    ids=str,
)
def test_everything_gets_the_name_that_it_has_in_the_module(layers: object) -> None:
    keys = {name: name for name in MODEL}
    got = find_layers(_layered(), keys) if layers is None else tell_layers(_layered(), layers)
    assert [name for name in got.entries if name.startswith("model.")] == [f"model.{name}" for name in MODEL]
    assert [got.read(f"model.{name}").item() for name in MODEL] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert got.read("optimizer.0.blocks.1.up.weight.exp_avg").item() == 9.0
    assert "rng.0.torch" in got.entries
    assert got.meta[MODULE] == {"aliases": keys, "buffers": ["blocks.0.norm.weight"], "frozen": []}
    told = {"params": ["blocks.1.up.weight", "embed.weight"], "lr": 0.1}
    assert got.meta[OPTIMIZERS] == [{"groups": [told], "scalars": {"embed.weight": {"n": 1}}}]


def test_a_tied_head_may_have_no_layer_of_its_own() -> None:
    names = [MODEL[0], "tied.weight", *MODEL[1:]]
    keys = {name: MODEL[0] if name == "tied.weight" else name for name in names}
    got = find_layers(_layered(), keys)
    assert [name for name in got.entries if name.startswith("model.")] == [f"model.{name}" for name in MODEL]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (["embed", "a.*", "b.*"], "with `\\*` more than once it is ambiguous"),
        (["embed", "*.*", "head"], "with `\\*` more than once it is ambiguous"),
        (["embed", "blocks.0", "head"], "3 names, but layered has 4 layers: 0, 2, 3, 7"),
        ({"0": "embed"}, "the layers of layered are 0, 2, 3, 7; name each of them"),
        (["embed", "blocks.0", "blocks.0", "head"], "two layers cannot have one name"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(layers: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tell_layers(_layered(), layers)


def test_another_module_is_refused_with_the_way_out() -> None:
    keys = {name: name for name in MODEL if "blocks.1" not in name}
    with pytest.raises(
        CheckpointError, match=r"layer 3 of the pipeline has norm.weight, up.weight, but the model goes on with head.weight"
    ):
        find_layers(_layered(), keys)
    with pytest.raises(CheckpointError, match=r"layer 7 .* but the model has nothing more: .*say it: lightning-par convert layers="):
        find_layers(_layered(), {name: name for name in MODEL if name != "head.weight"})
    named = tell_layers(_layered(), ["embed", "blocks.*", "head"])
    assert find_layers(named, {"other": "other"}) is named
    with pytest.raises(CheckpointError, match=r"is no checkpoint of a pipeline of DeepSpeed"):
        tell_layers(named, ["embed"])


def test_tied_layers_of_one_shape_are_told_apart_by_their_values() -> None:
    first, second, third = torch.randn(3, 2), torch.randn(3, 2), torch.randn(3, 2)
    layers = {0: {"weight": first.bfloat16()}, 2: {"weight": second.bfloat16()}, 5: {"weight": third}, 6: {"weight": first.bfloat16()}}
    trained = {"tied_modules.a.weight": second, "tied_modules.b.weight": first, "5.weight": third}
    assert owners(layers, {name: Entry.of(value) for name, value in trained.items()}) == {"a": [2], "b": [0, 6]}


def test_groups_of_stages_become_one_by_their_options() -> None:
    def stage(decay: list[str], rest: list[str]) -> dict:
        groups = [{"lr": 0.1, "params": decay}, {"lr": 0.2, "params": rest}]
        return {"groups": [group for group in groups if group["params"]], "scalars": {}}

    whole = merge([stage(["tied", "a"], []), stage([], ["b"]), stage(["tied", "c"], ["d"])])
    assert whole["groups"] == [{"lr": 0.1, "params": ["tied", "a", "c"]}, {"lr": 0.2, "params": ["b", "d"]}]
    twice = {"groups": [{"lr": 0.1, "params": ["a"]}, {"lr": 0.1, "params": ["b"]}], "scalars": {}}
    assert merge([twice])["groups"] == twice["groups"]


def test_numbers_are_told_by_shapes_or_not_at_all() -> None:
    layers = {
        0: {"w": torch.zeros(4, 3)},
        1: {"w": torch.zeros(2, 3), "b": torch.zeros(2), "shift": torch.zeros(9)},
        2: {"b": torch.zeros(5)},
    }
    plain = [[[(4, 3)], []], [[(2, 3)], [(2,), (5,)]]]
    assert orders(layers, ["1.shift"], plain) == [[["0.w"], []], [["1.w"], ["1.b", "2.b"]]]
    assert orders(layers, ["1.shift"], [[[(4, 3)]], [[(4, 3), (2, 3), (2,), (5,)]]]) == [[["0.w"]], [[COPY, "1.w", "1.b", "2.b"]]]
    assert orders(layers, ["1.shift"], [[[(4, 3)]], [[(2, 3), (2,)]]]) == [[["0.w"]], [["1.w", "1.b"]]]  # the last one is frozen
    assert orders(layers, ["1.shift"], [[[(4, 3)]], [[(2, 3), (2,), (8,)]]]) is None
    assert orders(layers, ["1.shift"], [[[(4, 3)]], [[(2, 3), None, (5,)]]]) is None
    same = {0: {"b": torch.zeros(5)}, 1: {"b": torch.zeros(5)}}
    assert orders(same, [], [[[(5,)], [(5,)]]]) is None
