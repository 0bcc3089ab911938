"""What is no tensor is saved as plain data, and what cannot be told that way is named."""

from __future__ import annotations

import copy
import enum
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import OmegaConf

from lightning_par.checkpoint import CheckpointError, native, plain
from lightning_par.comm import Group
from lightning_par.comm.trace import Trace

World = Group("world", trace=Trace())
"""Of one process."""


class Color(enum.Enum):
    RED = "red"


def test_K20_keys_are_plain_too_or_left_out_and_named(tmp_path: Path) -> None:
    keys: list[Any] = [Color.RED, np.int64(3), np.str_("text"), (np.int64(1), "two"), Path("a/b"), None, 0.5, object, frozenset({1}), "red"]
    dropped: list[str] = []
    told = plain({"state": {key: place for place, key in enumerate(keys)}}, dropped)
    wanted = {"red": 0, 3: 1, "text": 2, (1, "two"): 3, "a/b": 4, None: 5, 0.5: 6}
    assert told == {"state": wanted}
    assert [place.partition(" (its key is a ")[2] for place in dropped] == ["builtins.type)", "builtins.frozenset)", "builtins.str)"]
    native.save(tmp_path / "last", {}, told, World)
    assert native.read_meta(tmp_path / "last") == {"state": wanted}


def test_a_checkpoint_that_could_not_be_read_does_not_take_the_place_of_the_last(tmp_path: Path) -> None:
    native.save(tmp_path / "last", {}, {"value": 1}, World)
    with pytest.raises(CheckpointError, match=r"rank 0: .*meta\.pt names .*Color"):
        native.save(tmp_path / "last", {}, {"value": Color.RED}, World)
    assert native.read_meta(tmp_path / "last") == {"value": 1}
    assert torch.load(tmp_path / "last/meta.pt", weights_only=True) == {"value": 1}


def test_containers_come_back_as_what_they_were(tmp_path: Path) -> None:
    state = {"set": {1, 2}, "bytes": bytearray(b"ab"), "count": Counter("aab"), "order": OrderedDict(b=1, a=2), "pair": (1, [2])}
    state["size"] = torch.Size([2, 3])
    told = plain(state | {"steps": range(3)}, dropped := [])
    assert dropped == ["steps (builtins.range, which comes back as a list)"]
    native.save(tmp_path / "last", {}, told, World)
    back = native.read_meta(tmp_path / "last")
    assert back == state | {"steps": [0, 1, 2]}
    assert [type(value) for value in back.values()] == [set, bytearray, Counter, OrderedDict, tuple, torch.Size, list]


class Pair(NamedTuple):
    first: Any
    second: Any


def test_containers_that_come_back_as_another_class_are_named() -> None:
    state = {
        "last": deque([1.0, 2.0], maxlen=2),
        "counts": [defaultdict(int, a=1)],
        "pair": Pair(1, frozenset({2})),
        "some": {frozenset({1})},
        "options": OmegaConf.create({"a": [1, 2]}),
        "hyper_parameters": AttributeDict(width=3),
    }
    told = plain(state, dropped := [], "callbacks.Mean")
    kept = {"last": [1.0, 2.0], "counts": [{"a": 1}], "pair": (1, {2}), "some": [{1}]}
    assert told == kept | {"options": {"a": [1, 2]}, "hyper_parameters": {"width": 3}}
    assert dropped == [
        f"callbacks.Mean.{place}, which comes back as a {kind})"
        for place, kind in (
            ("last (collections.deque", "list"),
            ("counts[0] (collections.defaultdict", "dict"),
            ("pair[1] (builtins.frozenset", "set"),
            (f"pair ({__name__}.Pair", "tuple"),
            ("some[0] (builtins.frozenset", "set"),
            ("some (builtins.set", "list"),
        )
    ]
    assert plain({Pair(1, 2): 3}, dropped := []) == {(1, 2): 3}
    assert len(dropped) == 1


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_are_not_simply_in_memory_are_saved_or_left_out_and_named(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    odd = {"rows": torch.eye(3).to_sparse_csr(), "none": torch.ones(2, device="meta"), "many": torch.nested.nested_tensor([torch.ones(2)])}
    told = plain({"sparse": sparse, "weight": torch.nn.Parameter(sparse)} | odd, dropped := [], "state")
    tensors = [f"state.{key} (a tensor that is {what})" for key, what in (("rows", torch.sparse_csr), ("none", "meta"), ("many", "nested"))]
    assert dropped == tensors
    native.save(tmp_path / "last", {}, copy.deepcopy(told), World)
    back = native.read_meta(tmp_path / "last")
    assert [*back] == ["sparse", "weight"]
    assert all(type(value) is torch.Tensor and torch.equal(value.to_dense(), torch.eye(3)) for value in back.values())


def test_a_sequence_that_would_lack_an_item_is_left_out_whole_and_named() -> None:
    dropped: list[str] = []
    assert plain({"a": [1, len, 3], "b": [{"c": 1, "d": len}]}, dropped, "state") == {"b": [{"c": 1}]}
    assert [place.partition(" ")[0] for place in dropped] == ["state.a[1]", "state.b[0].d"]
