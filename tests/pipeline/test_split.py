"""Where everything lives, and what a rank's module looks like after the cut. No process: a group is only its size and index here."""

from __future__ import annotations

from collections import OrderedDict
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par.layout import Span
from lightning_par.pipeline import PipelineError, place, spread
from lightning_par.pipeline.split import Placement, cut, find_layers
from lightning_par.pipeline.unknown import Unknown


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])  # a list in every layer is no layer list

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class LikeLlama(nn.Module):
    """Names and order of a transformers Llama: rotary angles after the layers, without parameters; the head outside."""

    def __init__(self, layers: int = 5, tie: bool = False) -> None:
        super().__init__()
        self.metric = nn.Identity()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(7, 4)
        self.model.layers = nn.ModuleList([Block() for _ in range(layers)])
        self.model.norm = nn.LayerNorm(4)
        self.model.rotary_emb = nn.Identity()
        self.lm_head = nn.Linear(4, 7, bias=False)
        if tie:
            self.lm_head.weight = self.model.embed_tokens.weight


class LikeNanoGPT(nn.Module):
    """A ModuleDict on the way, and parameters that hang on it."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.extra = nn.ModuleList([nn.Embedding(2, 4), nn.Dropout(), nn.LayerNorm(4)])
        parts = {
            "wte": nn.Embedding(7, 4),
            "wpe": nn.Embedding(9, 4),
            "drop": nn.Dropout(),
            "h": nn.ModuleList(Block() for _ in range(layers)),
        }
        self.transformer = nn.ModuleDict(parts | {"ln_f": nn.LayerNorm(4)})
        self.head = nn.Linear(4, 7)


def test_modules_before_the_layers_go_first_and_those_after_go_last() -> None:
    placement = place(LikeLlama(), 2)
    assert placement.layers == "model.layers"
    assert placement.before == ("model.embed_tokens",)
    assert placement.after == ("model.norm", "lm_head")
    placement = place(LikeNanoGPT(), 2)
    assert placement.layers == "transformer.h"
    assert placement.before == ("extra.0", "extra.2", "transformer.wte", "transformer.wpe")
    assert placement.after == ("transformer.ln_f", "head")
    assert list(placement.stages_of("scale")) == [0, 1]
    assert str(place(LikeLlama(), 2)) == "stage 0: model.embed_tokens, model.layers.0..2\nstage 1: model.layers.3..4, model.norm, lm_head"


@pytest.mark.parametrize("layers", [5, 6, 7])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2])
def test_P1_P2_every_layer_lives_on_one_stage_under_its_global_name(layers: int, ranks: int, chunks: int) -> None:
    if ranks * chunks > layers:
        with pytest.raises(PipelineError, match=f"model.layers has {layers} layers, too few for {ranks * chunks} pipeline stages"):
            place(LikeLlama(layers), ranks * chunks)
        return
    found: list[str] = []
    whole = {name for name, _ in LikeLlama(layers).named_parameters()}
    for index in range(ranks):
        model = LikeLlama(layers)
        for i, block in enumerate(model.model.layers):
            nn.init.constant_(block.linear.weight, i)
        cut(model, place(model, ranks * chunks), range(index, ranks * chunks, ranks))
        for name, parameter in model.named_parameters():
            if name.endswith("linear.weight"):
                assert (parameter == int(name.split(".")[2])).all()
        found += [name for name, _ in model.named_parameters()]
    assert sorted(found) == sorted(whole)


def test_what_is_absent_holds_no_memory_and_no_state() -> None:
    model = LikeLlama()
    cut(model, place(model, 2), [1])
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
    assert not any(name.startswith("model.embed_tokens") for name in model.state_dict())
    assert model.model.embed_tokens._stands_for.weight.is_meta
    assert model.model.embed_tokens.embedding_dim == 4
    for weight in (model.model.embed_tokens.weight, model.model.layers[0].linear.weight):
        assert isinstance(weight, Unknown)
        assert weight.untyped_storage().nbytes() == weight.element_size()
    model.load_state_dict(model.state_dict())


def test_a_tie_stays_a_tie_where_both_ends_are() -> None:
    model = LikeLlama(tie=True)
    cut(model, place(model, 3), range(3))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model = LikeLlama(tie=True)
    weight = model.lm_head.weight
    cut(model, place(model, 2), [1])
    assert model.lm_head.weight is weight
    assert not weight.is_meta


def test_layers_are_balanced_with_what_stands_before_and_after() -> None:
    assert spread([1] * 6, 3) == [Span(0, 2), Span(2, 4), Span(4, 6)]
    assert spread([1] * 7, 3) == [Span(0, 2), Span(2, 4), Span(4, 7)]
    assert spread([1] * 7, 2, first=1) == [Span(0, 3), Span(3, 7)]
    assert spread([1] * 7, 3, last=2) == [Span(0, 3), Span(3, 6), Span(6, 7)]
    assert spread([1, 1, 1, 9], 2) == [Span(0, 3), Span(3, 4)]
    assert spread([1] * 3, 3, first=99, last=99) == [Span(0, 1), Span(1, 2), Span(2, 3)]


@pytest.mark.parametrize("stages", range(1, 8))
def test_spreading_is_the_best_of_all_cuts(stages: int) -> None:
    costs = [3, 1, 4, 1, 5, 9, 2]
    spans = spread(costs, stages, first=2, last=6)

    def dearest(cuts: tuple[int, ...]) -> int:
        edges = (0, *cuts, len(costs))
        sums = [sum(costs[a:b]) for a, b in pairwise(edges)]
        sums[0] += 2
        sums[-1] += 6
        return max(sums)

    assert dearest(tuple(span.stop for span in spans[:-1])) == min(map(dearest, combinations(range(1, len(costs)), stages - 1)))


def test_layers_are_spread_by_parameters_by_multiplications_or_by_hand() -> None:
    model = LikeLlama(tie=True)
    model.model.embed_tokens = nn.Embedding(20, 4)  # many parameters, no multiplication

    def sizes(**options: Any) -> list[int]:
        return [span.size for span in place(model, 2, **options).spans]

    assert sizes() == [2, 3]
    assert sizes(balance="flops") == [3, 2]
    assert sizes(balance=(4, 1)) == [4, 1]


@pytest.mark.parametrize("counts", [(2, 2), (5,), (2, 2, 1)])
def test_P1_a_layer_that_no_stage_gets_is_an_error(counts: tuple[int, ...]) -> None:
    with pytest.raises(PipelineError, match=r"model.layers has 5 layers for 2 stages: place each layer once"):
        place(LikeLlama(), 2, balance=counts)


class Named(nn.Module):
    """A Sequential with names, and another beside it."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.body = nn.Sequential(OrderedDict({f"block{i}": Block() for i in range(blocks)}))
        self.top = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.body[1:](self.body[0](self.stem(x))))


def test_a_sequential_is_a_layer_list_whose_members_keep_their_names() -> None:
    model = Named()
    placement = place(model, 2)
    assert str(placement) == "stage 0: stem, body.block0\nstage 1: body.block1..block2, top"
    assert list(placement.stages_of("body.block2.linear.bias")) == [1]
    names = {name for name, _ in model.named_parameters() if name.startswith(("body.block1", "body.block2", "top"))}
    cut(model, placement, [1])
    assert {name for name, _ in model.named_parameters()} == names
    assert isinstance(model.body[1:], nn.Sequential)


def test_without_a_list_of_like_blocks_the_biggest_sequential_is_spread() -> None:
    mlp = nn.ModuleDict({"net": nn.Sequential(nn.Flatten(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))})
    assert str(place(mlp, 2)) == "stage 0: net.0..1\nstage 1: net.2..5"
    assert [len(list(place(mlp, 3).stages_of(f"net.{i}.weight"))) for i in (1, 3, 5)] == [1, 1, 1]


def test_a_module_that_cannot_be_split_says_why_and_how_to_name_the_layers() -> None:
    with pytest.raises(PipelineError, match=r"Linear has no nn\.ModuleList of like blocks and no nn\.Sequential.*pipeline_layers = "):
        find_layers(nn.Linear(2, 2))
    two = nn.ModuleDict({"encoder": nn.ModuleList([Block(), Block()]), "decoder": nn.ModuleList([Block(), Block()])})
    with pytest.raises(PipelineError, match=r"several layer lists.*encoder \(2 layers.*decoder \(2 layers.*pipeline_layers = "):
        find_layers(two)
    assert find_layers(two, "decoder") == "decoder"
    with pytest.raises(PipelineError, match=r"'decoders' is not an nn\.ModuleList or nn\.Sequential of ModuleDict; there are: encoder"):
        find_layers(two, "decoders")


class Halving(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Backwards(nn.ModuleList):
    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


def hooked(*layers: nn.Module) -> nn.Sequential:
    chain = nn.Sequential(*layers)
    chain.register_forward_hook(lambda module, args, output: output / 2)
    return chain


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Halving, r"net is a Halving with forward of its own.*a plain nn\.Sequential"),
        (lambda *layers: Backwards(layers), r"net is a Backwards with __iter__ of its own.*a plain nn\.ModuleList"),
        (hooked, r"net is a Sequential with forward hooks of its own.*pipeline_layers"),
    ],
)
def test_a_list_that_does_more_than_run_its_layers_is_refused(kind: Any, reason: str) -> None:
    with pytest.raises(PipelineError, match=reason):
        place(nn.ModuleDict({"net": kind(*[nn.Linear(2, 2) for _ in range(4)])}), 2)


def test_a_module_names_its_layer_list() -> None:
    two = nn.ModuleDict({"encoder": nn.ModuleList([Block(), Block()]), "decoder": nn.ModuleList([Block(), nn.Linear(4, 4)])})
    two.pipeline_layers = "decoder"
    assert find_layers(two) == "decoder"
    assert find_layers(nn.ModuleDict({"model": two})) == "model.decoder", "a name is one within the module that gives it"
    two.pipeline_layers = "encoders"
    with pytest.raises(PipelineError, match="'encoders' is not"):
        find_layers(two)


def test_a_placement_is_plain_data() -> None:
    placement = Placement("h", ("0", "1", "2"), (Span(0, 2), Span(2, 3)), ("embed",), ("head",))
    assert [list(placement.stages_of(name)) for name in ("h.1.weight", "h.2.a.b", "embed.weight", "head.bias", "scale")] == [
        [0],
        [1],
        [0],
        [1],
        [0, 1],
    ]


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([(0, 2), (3, 4)], r"h\.2 on none"),
        ([(0, 3), (2, 4)], r"h\.2 on \[0, 1\]"),
        ([(0, 2), (2, 2), (2, 4)], "nothing on 1"),
        ([(2, 4), (0, 2)], r"h\.2 behind a later stage"),
    ],
)
def test_P1_each_layer_stands_on_exactly_one_stage(spans: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(PipelineError, match=f"each layer must stand on exactly one stage, in the model's order; but there is .*{reason}"):
        Placement("h", ("0", "1", "2", "3"), tuple(Span(*span) for span in spans), (), ())


@pytest.mark.parametrize("how", ["in place", "wrapped", "its forward"])
def test_a_model_that_was_compiled_as_a_whole_is_refused(how: str) -> None:
    model = nn.Module()
    model.net = nn.Module()
    model.net.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    if how == "in place":
        model.net.compile(backend="eager")
    elif how == "wrapped":
        model.net = torch.compile(model.net, backend="eager")
    else:
        model.forward = torch.compile(model.forward, backend="eager")
    name = {"in place": "net", "wrapped": "net", "its forward": "Module"}[how]
    with pytest.raises(PipelineError, match=rf"{name} was compiled as a whole.*: layer\.compile\(\)"):
        place(model, 2)
