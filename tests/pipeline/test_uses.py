"""Which modules come before the layers and which after: seen in a dry run, said by the user, or as they are registered. No process."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.pipeline import NumbersError, PipelineError, StageExit, Uses, dry_run, place
from lightning_par.pipeline.aside import aside, lent
from lightning_par.pipeline.split import cut
from lightning_par.recipes.gpt import GPT, GPTConfig
from tests.pipeline.models import through_the_stages
from tests.pipeline.parity import tokens

WIDTH = 4


class Net(nn.Module):
    """Modules registered in another order than that of their use, and some used in odd ways."""

    def __init__(self, *, tie: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH)  # after
        self.head = nn.Linear(WIDTH, 7, bias=False)  # after
        self.gain = nn.Linear(WIDTH, WIDTH)  # in every layer
        self.spare = nn.Linear(WIDTH, WIDTH)  # never
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scale = nn.Linear(1, WIDTH)  # before and after
        self.embed = nn.Embedding(7, WIDTH)  # before
        self.probe = nn.Parameter(torch.ones(WIDTH))
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        one = torch.ones(1, dtype=self.probe.dtype)
        x = self.embed(ids) * self.scale(one)
        for layer in self.layers:
            x = layer(x + self.gain.bias)
        return F.cross_entropy(self.head(self.norm(x) * self.scale(one)).flatten(0, 1), labels.flatten())


BATCH = (torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]]))


@pytest.mark.parametrize("tie", [False, True])
def test_modules_go_where_they_are_used_whatever_the_order_of_registration(tie: bool) -> None:
    model = Net(tie=tie)
    uses = dry_run(model, "layers", lambda batch: model(*batch), BATCH)
    assert uses.before == {"embed.weight", "scale.weight", "scale.bias", "gain.bias"}
    assert uses.after == {"norm.weight", "norm.bias", "head.weight", "scale.weight", "scale.bias"}
    assert uses.inside == {"gain.bias"} | {f"layers.{i}.{kind}" for i in range(4) for kind in ("weight", "bias")}
    placement = place(model, 4, uses=uses)
    assert placement.before == ("spare", "scale", "embed"), "what is not used stays where it is registered"
    assert placement.after == ("norm", "head", "scale")
    stages = {name: list(placement.stages_of(name)) for name in ("scale.weight", "gain.bias", "probe", "norm.bias", "spare.bias")}
    assert stages == {"scale.weight": [0, 3], "gain.bias": [0, 1, 2, 3], "probe": [0, 1, 2, 3], "norm.bias": [3], "spare.bias": [0]}


def test_a_dry_run_leaves_the_model_alone() -> None:
    model = Net(tie=True)
    before = {name: (id(param), param.clone(), param.requires_grad) for name, param in model.named_parameters()}
    dry_run(model, "layers", lambda batch: model(*batch), BATCH)
    assert model.head.weight is model.embed.weight
    for name, param in model.named_parameters():
        assert (id(param), param.requires_grad) == (before[name][0], before[name][2])
        assert torch.equal(param, before[name][1])
        assert param.grad is None
    assert [type(layer) for layer in model.layers] == [nn.Linear] * 4


def test_a_dry_run_writes_to_no_tensor() -> None:
    model = Net()
    model.total = total = torch.ones(WIDTH)

    def step(batch: Any) -> Tensor:
        model.total[0] = 5
        model.total[1:].mul_(2)
        model.total += 1
        torch.neg(model.total, out=model.total)
        return model(*batch) + model.total.sum()

    dry_run(model, "layers", step, BATCH)
    assert model.total is total
    assert total.tolist() == [1] * WIDTH


def test_a_head_that_is_the_embedding_itself_keeps_it_at_both_ends() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, WIDTH)
            self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])

        def forward(self, ids: Tensor) -> Tensor:
            return F.linear(self.layers(self.embed(ids)), self.embed.weight).sum()

    model = Functional()
    placement = place(model, 3, uses=dry_run(model, "layers", model, BATCH[0]))
    assert list(placement.stages_of("embed.weight")) == [0, 2]


@pytest.mark.parametrize("wrap", [False, True])
def test_a_dry_run_sees_through_checkpointing_and_frozen_modules(wrap: bool) -> None:
    model = GPT(GPTConfig(vocab_size=37, hidden=8, layers=3, heads=2, kv_heads=1, ffn=8))
    model.embed.requires_grad_(False)
    forwards = [layer.forward for layer in model.layers]
    for layer, forward in zip(model.layers, forwards, strict=True) if wrap else ():
        layer.forward = lambda *args, run=forward: checkpoint(run, *args, use_reentrant=False)
    uses = dry_run(model, "layers", lambda batch: model(**batch).loss, tokens(2, 5))
    assert place(model, 2, uses=uses).before == ("embed",)
    assert place(model, 2, uses=uses).after == ("norm", "head")


def test_a_step_that_needs_numbers_raises_and_leaves_the_model_alone() -> None:
    model = Net()
    with pytest.raises(RuntimeError):
        dry_run(model, "layers", lambda batch: model(*batch).item(), BATCH)
    assert model(*BATCH).isfinite()


class Block(nn.Linear):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return torch.tanh(super().forward(sum(others, x)))


class Looped(nn.Module):
    """Runs its layers in a loop that is given."""

    def __init__(self, loop: Callable[[nn.ModuleList, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.shift, self.loop = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), loop
        self.layers, self.head = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(6)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.loop(self.layers, self.embed(x), self.shift(x))).sum()


def mirrored(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for i, layer in enumerate(layers):
        x = layer(x) if i < 3 else layer(x, kept.pop())
        kept += [x] * (i < 3)
    return x


def collected(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    return sum([x := layer(x) for layer in layers])


def conditioned(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    first = x
    for layer in layers:
        x = layer(x, shift, first)
    return x + first + shift


@pytest.mark.parametrize(
    ("loop", "balance", "reason"),
    [
        (mirrored, (3, 3), r"layers\.0 is used again at layers\.5, but a pipeline stage begins between them, at layers\.3.*layers\.2 ret"),
        (collected, (4, 2), r"layers\.0 is used again after the layers.*begins between them, at layers\.4"),
        (mirrored, (1, 5), None),
        (mirrored, (5, 1), r"layers\.0 is used again at layers\.5"),
        (collected, (1, 5), None),
        (conditioned, (3, 3), None),
    ],
)
def test_an_output_used_a_second_time_is_refused_where_a_stage_begins_in_between(loop: Any, balance: Any, reason: str | None) -> None:
    model, x = Looped(loop), torch.randn(2, WIDTH)
    uses = dry_run(model, "layers", model, x)
    if reason is None:
        with torch.no_grad():
            assert torch.equal(through_the_stages(model, x, place(model, 2, balance=balance, uses=uses)), model(x))
    else:
        with pytest.raises(PipelineError, match=reason):
            place(model, 2, balance=balance, uses=uses)


class Leaving(Block):
    """Leaves something behind."""

    left, kept = 0.0, None

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        self.left = x.square().mean()
        if self.kept == []:
            self.kept.append(x.detach())
        return super().forward(x, *others)


def left_by(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    return run(layers, x) + layers[1].left


def hooked(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda layer, args, output: kept.append(output)) for layer in layers[:3]]
    x = run(layers, x)
    for hook in hooks:
        hook.remove()
    return x + kept[1]


def penalized(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    return run(layers, x) + layers[1].weight.norm()


def in_parts(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    return run([*layers[:1], partial(F.linear, weight=layers[1].weight), *layers[2:]], x)


def scaled(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    return run(layers, x * layers[1].bias)


def shared(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for i, layer in enumerate(layers):
        layer.kept = kept if i == 1 else None
        x = layer(x, *(kept if i == 2 else ()))
    return x


def chosen(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    mask, place, level = (x > 0).to(x.dtype), shift.argmax(-1, keepdim=True), x.detach().mean()
    for layer in layers:
        x = layer(x, mask * level, place)
    return x * (place > 1)


def measured(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    seen = torch.zeros_like(x)
    for layer in layers:
        x, seen = layer(x, seen)
    return x + seen


class Measuring(Block):
    """Carries a number without a graph with the hidden state."""

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), seen + x.detach().square()


@pytest.mark.parametrize(("loop", "kind"), [(chosen, Block), (measured, Measuring)])
def test_what_has_no_gradient_is_right_on_every_stage_that_uses_it(loop: Any, kind: type[Block]) -> None:
    torch.manual_seed(0)
    model, x = Looped(loop), torch.randn(5, WIDTH)
    model.layers = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(6))
    placement = place(model, 3, uses=dry_run(model, "layers", model, x))
    assert (placement.before == ("embed", "shift")) == (loop is measured)
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, placement), model(x))


def written(write: Callable[[Tensor], Any], mask: Tensor) -> Tensor:
    """Zeros, after that."""
    write(zeros := torch.zeros(mask.shape, dtype=mask.dtype))
    return zeros


def after_view_of_numpy(mask: Tensor) -> Tensor:
    zeros = torch.from_numpy(np.zeros(mask.shape, dtype=np.float32))
    zeros[:, :3].copy_(mask[:, :3])
    return zeros


MASKS = {
    "written into a slice": lambda mask: written(lambda x: x[:, :3].copy_(mask[:, :3]), mask),
    "written into a view": lambda mask: written(lambda x: x.view(-1).copy_(mask.view(-1)), mask),
    "written into a row": lambda mask: written(lambda x: x[0].copy_(mask[0]), mask),
    "written into a chunk": lambda mask: written(lambda x: x.chunk(2, -1)[0].add_(mask[:, :2]), mask),
    "set as data": lambda mask: written(lambda x: setattr(x, "data", mask), mask),
    "compiled": torch.compile(lambda mask: (mask > 0).to(mask.dtype), backend="eager"),
    "a parameter": lambda mask: nn.Parameter(mask, requires_grad=False),
    "written into what NumPy made": lambda mask: after_view_of_numpy(mask),
    "on a device": lambda mask: mask.to("cpu") + torch.zeros(WIDTH, device=torch.device("cpu")),
    "new_tensor": lambda mask: mask.new_tensor(mask.clone()),
    "full": lambda mask: torch.full((WIDTH,), mask.mean()),
    "full_like": lambda mask: torch.full_like(mask, fill_value=mask.mean()),
    "new_full": lambda mask: mask.new_full((WIDTH,), mask.mean()),
}


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("make", MASKS.values(), ids=list(MASKS))
def test_what_is_without_a_gradient_is_followed_through_memory(make: Callable[[Tensor], Tensor]) -> None:
    def loop(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
        mask = make((shift > 0).to(x.dtype))
        for layer in layers:
            x = layer(x, mask)
        return x

    torch.manual_seed(0)
    model, x = Looped(loop), torch.randn(5, WIDTH)
    placement = place(model, 3, uses=dry_run(model, "layers", model, x))
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, placement), model(x))


def branched(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    factor = 2.0 if x.mean() > -9 else 3.0
    return run(layers, x + shift) * factor


def repeated(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    count = torch.repeat_interleave(x[:2, 0], (x[:2, 0] < 9).long())
    return run(layers, x + shift) * len(count)


@pytest.mark.parametrize("loop", [branched, repeated])
def test_a_module_of_whose_output_the_step_wants_numbers_is_on_every_stage(loop: Any) -> None:
    torch.manual_seed(0)
    model, x = Looped(loop), torch.randn(5, WIDTH)
    with pytest.raises(NumbersError) as error:
        dry_run(model, "layers", model, x)
    placement = place(model, 3, uses=error.value.uses)
    assert (placement.before, placement.after) == (("shift",), ("head",))
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, placement), model(x))


def run(layers: Iterable[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("loop", "place_of", "wrong", "right"),
    [
        (left_by, "after the layers", (2, 4), (1, 5)),
        (shared, r"at layers\.2", (2, 4), (3, 3)),
        (hooked, "after the layers", (2, 4), (1, 5)),
        (penalized, "after the layers", (2, 4), (1, 5)),
        (in_parts, r"at layers\.2", (2, 4), (3, 3)),
        (scaled, "before the layers", (1, 5), (2, 4)),
    ],
)
def test_what_a_layer_leaves_behind_and_its_weights_are_refused_on_another_stage(loop: Any, place_of: str, wrong: Any, right: Any) -> None:
    model, x = Looped(loop), torch.randn(2, WIDTH)
    for layer in model.layers:
        layer.__class__ = Leaving
    uses = dry_run(model, "layers", model, x)
    with pytest.raises(PipelineError, match=rf"layers\.1 is used {place_of} by another way than the output of its call"):
        place(model, 2, balance=wrong, uses=uses)
    place(model, 2, balance=right, uses=uses)


def test_a_part_that_layers_share_is_no_use_of_one_by_another() -> None:
    model, x = Looped(lambda layers, x, shift: run(layers, x)), torch.randn(2, WIDTH)
    shared = nn.Linear(WIDTH, WIDTH)
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), shared) for _ in range(6))
    place(model, 3, uses=dry_run(model, "layers", model, x))


@dataclass
class State:
    x: Tensor


class Stateful(Block):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x))


def test_a_layer_that_returns_what_cannot_be_handed_on_is_refused_where_a_stage_ends() -> None:
    model, x = Looped(lambda layers, x, shift: run(layers, State(x)).x), torch.randn(2, WIDTH)
    model.layers = nn.ModuleList(Stateful(WIDTH, WIDTH) for _ in range(6))
    uses = dry_run(model, "layers", model, x)
    for told in (uses, None):
        with pytest.raises(PipelineError, match=r"returns a State, which cannot be handed to the next stage.*register_dataclass"):
            through_the_stages(model, x, place(model, 2, uses=told))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


class Guided(nn.Module):
    """Frozen modules before the layers: what they return is wanted for the loss, by every layer, or only by the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.text, self.picture, self.teacher = Tokens(), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.embed, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        labels = self.tokens(x)
        with torch.no_grad():
            text, picture, wanted = self.text(x), self.picture(x), self.teacher(x)
        x = self.embed(picture)
        for layer in self.layers:
            x = layer(x, text)
        return F.cross_entropy(self.head(x), labels) + F.mse_loss(x, wanted)


def test_what_frozen_modules_return_is_right_on_every_stage_that_uses_it() -> None:
    torch.manual_seed(0)
    model, x = Guided(), torch.randn(8, WIDTH)
    placement = place(model, 3, uses=dry_run(model, "layers", model, x))
    held = {name: list(placement.stages_of(f"{name}.weight")) for name in ("tokens.linear", "text", "picture", "teacher", "embed", "head")}
    assert held == {"tokens.linear": [0, 1, 2], "text": [0, 1, 2], "picture": [0], "teacher": [0, 2], "embed": [0], "head": [2]}
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, placement), model(x))


def test_the_user_says_otherwise() -> None:
    model = nn.ModuleDict({"net": Net()})
    model["net"].pipeline_after = ["norm", "head", "gain"]
    model["net"].pipeline_before = "gain"
    uses = Uses(after=frozenset({"net.embed.weight"}))
    placement = place(model, 2, uses=uses)
    assert placement.before == ("net.gain", "net.spare")
    assert placement.after == ("net.norm", "net.head", "net.gain", "net.scale", "net.embed")


def test_a_part_of_a_module_can_be_named() -> None:
    model = nn.ModuleDict(
        {"ends": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "h": nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])}
    )
    model.pipeline_layers, model.pipeline_after = "h", ["ends.1"]
    assert place(model, 3).before == ("ends.0",)
    assert place(model, 3).after == ("ends.1",)
    model.pipeline_after = ["ends"]
    assert place(model, 3).after == ("ends",)


@pytest.mark.parametrize("name", ["nrm", "layers", "layers.0", ""])
def test_names_that_are_no_modules_beside_the_layers_are_refused(name: str) -> None:
    model = Net()
    model.pipeline_after = [name]
    with pytest.raises(PipelineError, match=rf"pipeline_after of Net names '{name}'.*there are: norm, head, gain, spare, scale, embed"):
        place(model, 2)


class Busy(nn.Module):
    """Changes as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.counts, self.last, self.known = [], {"calls": 0}, None, {1}
        self.total, self.generator = torch.zeros(2), torch.Generator().manual_seed(3)
        self.inner = nn.BatchNorm1d(2)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.counts["calls"] += 1
        self.known.add(len(self.seen))
        self.last = self.new = "yes"
        self.total += x.sum(0)
        self.steps += 1
        self.eval()
        torch.randn(1, generator=self.generator)
        return self.inner.train()(x)


def _state(module: Busy) -> Any:
    attributes = {name: value for name, value in vars(module).items() if not name.startswith("_") and name not in ("total", "generator")}
    tensors = [module.total, *module.state_dict().values(), module.generator.get_state()]
    return attributes, module.inner.training, [tensor.tolist() for tensor in tensors]


def test_what_runs_aside_leaves_no_trace() -> None:
    import copy

    module = Busy()
    before, generator, steps = copy.deepcopy(_state(module)), module.generator, module.steps
    with aside(module), lent(list(module.modules()), torch.device("cpu")):
        module(torch.randn(3, 2))
        assert _state(module) != before
    assert _state(module) == before
    assert module.generator is generator
    assert module.steps is steps
    with pytest.raises(RuntimeError), aside(module):
        module(torch.randn(3, 4))
    assert module.seen == []


def masked(ids: Tensor, mask: Tensor) -> Tensor:
    """Asks for numbers of the batch in many ways; where one is wrong, something is used that is not there."""
    length = int(mask.sum(-1).max())
    ids, mask = ids[:, :length], mask[:, :length]
    positions = torch.arange(length, device=ids.device)
    counts = torch.zeros(8, dtype=torch.long, device=ids.device)
    counts[2:4] += len(mask.nonzero())
    counts.view(2, 4)[0, 3].mul_(2)
    assert counts.tolist() == [0, 0, 7, 14, 0, 0, 0, 0]
    assert (positions == length - 1).any()
    assert 5 in ids
    assert 6 not in ids
    assert not torch.equal(ids[0], ids[1])
    if mask.all() or bool((positions.float().mean() < 0).item()):
        raise AssertionError("the mask hides something")
    return ids * mask


def test_a_dry_run_knows_the_numbers_of_the_batch() -> None:
    model, seen = Net(), []
    ids = torch.tensor([[1, 5, 2, 0, 0], [1, 5, 2, 4, 0]])
    mask = (ids > 0).long()
    given = ids.clone(), mask.clone()

    def step(batch: Any) -> Tensor:
        seen.append(masked(*batch))
        return model(seen[-1], seen[-1])

    uses = dry_run(model, "layers", step, (ids, mask))
    assert seen[0].shape == (2, 4)
    assert seen[0].is_meta
    assert "embed.weight" in uses.before
    assert torch.equal(ids, given[0])
    assert torch.equal(mask, given[1])


@dataclass(frozen=True)
class Pair:
    x: Tensor
    labels: dict[str, Tensor]


class Encoding(UserDict):
    @property
    def x(self) -> Tensor:
        return self["x"]

    @property
    def labels(self) -> dict[str, Tensor]:
        return self["labels"]


@pytest.mark.parametrize("kind", [Pair, Encoding])
def test_a_dry_run_knows_the_numbers_of_batches_of_any_kind(kind: Any) -> None:
    seen, model = [], Looped(lambda layers, x, shift: run(layers, x))

    def step(batch: Any) -> Tensor:
        (one,) = batch
        seen.append((type(one), one.x.is_meta, one.labels["y"].is_meta, int(one.labels["y"].max())))
        return model(one.x[:, :WIDTH])

    batch = kind(x=torch.ones(3, WIDTH), labels={"y": torch.tensor([1, 4, 2])})
    uses = dry_run(model, "layers", step, [batch])
    assert "embed.weight" in uses.before
    assert seen == [(kind, True, True, 4)]
    assert batch.labels["y"].tolist() == [1, 4, 2]


class Written(torch.autograd.Function):
    """Adds in place, out of sight of the functions that torch runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        with torch._C.DisableTorchFunction():
            return x.add_(value)


def after(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    """What it is when that has been done to it."""
    write(x)
    return x


def after_view(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    view = x[:2]
    write(x)
    return view


def in_inference_mode(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    with torch.inference_mode():
        return after(x.clone(), write)


RANDOM = {
    "rand": lambda x: torch.rand(3),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "poisson": torch.poisson,
    "binomial": lambda x: torch.binomial(x, x / 4),  # not there on the meta device
    "gumbel_softmax": F.gumbel_softmax,
    "dropout1d": lambda x: F.dropout1d(x[None]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "Dropout": nn.Dropout(),
    "dropout in place": lambda x: after(x, lambda x: F.dropout(x, inplace=True)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x[None, None]] * 3, dropout_p=0.5),
    "compiled": torch.compile(torch.rand_like, backend="eager"),
    "uniform_": lambda x: after(x, lambda x: x.uniform_()),
    "rand of aten": lambda x: torch.ops.aten.rand_like.default(x),
    "of a legacy constructor": lambda x: x + torch.Tensor(3).uniform_(),
    "a generator": lambda x: torch.rand(3, generator=torch.Generator().manual_seed(1)),
}

UNWRITTEN = {
    "empty": lambda x: torch.empty(3),
    "empty_like": torch.empty_like,
    "empty_strided": lambda x: torch.empty_strided((3,), (1,)),
    "new_empty": lambda x: x.new_empty(3),
    "new": lambda x: x.new(3),
    "resize_": lambda x: x.resize_(6),
}

WRITTEN = {
    "add_": lambda x, value: after(x, lambda x: x.add_(value)),
    "setitem": lambda x, value: after_view(x, lambda x: x.__setitem__(0, value[0])),
    "data": lambda x, value: after(x, lambda x: setattr(x, "data", value.clone())),
    "data twice": lambda x, value: after(x, lambda x: [setattr(x, "data", value.clone()) for _ in range(5)]),
    "data of a view": lambda x, value: after(x, lambda x: x.data.add_(value)),
    "set_": lambda x, value: after(x, lambda x: x.set_(value.clone())),
    "copy_": lambda x, value: after_view(x, lambda x: x.copy_(value)),
    "index_put_": lambda x, value: after_view(x, lambda x: x.index_put_((torch.tensor([0]),), value[:1])),
    "foreach": lambda x, value: after_view(x, lambda x: torch._foreach_add_([x], [value])),
    "out": lambda x, value: after_view(x, lambda x: torch.neg(value, out=x)),
    "autograd.Function": lambda x, value: after_view(x, lambda x: Written.apply(x, value)),
    "vmap": lambda x, value: after(x, lambda x: torch.vmap(torch.Tensor.add_)(x, value)),
    "split in place": lambda x, value: after(x, lambda x: x.tensor_split(torch.tensor([1]))[0].add_(value[:1])),
    "inference mode": lambda x, value: in_inference_mode(x, lambda x: torch._foreach_add_([x], [value])),
}


def answer(ask: Callable[[Tensor, Net], Any]) -> Any:
    """What a dry run is told when it asks for that."""
    model, answers = Net(), []

    def step(x: Tensor) -> Tensor:
        answers.append(ask(x, model))
        return model(x[None].long(), x[None].long())

    dry_run(model, "layers", step, torch.tensor([1.0, 2.0, 3.0]))
    return answers[0]


@pytest.mark.parametrize("compute", [*RANDOM.values(), *UNWRITTEN.values()], ids=[*RANDOM, *UNWRITTEN])
def test_a_dry_run_does_not_know_what_is_random_and_draws_nothing(compute: Any) -> None:
    Net()  # sets the seed
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError):
        answer(lambda x, model: compute(x).sum().item())
    assert torch.equal(before, torch.get_rng_state())


def test_a_dry_run_leaves_generators_as_they_are() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    answer(lambda x, model: torch.poisson(x, generator=generator))
    assert torch.equal(before, generator.get_state())


@pytest.mark.parametrize("write", WRITTEN.values(), ids=list(WRITTEN))
def test_a_dry_run_does_not_know_what_is_computed_from_parameters(write: Any) -> None:
    with pytest.raises(RuntimeError, match=r"numbers|meta"):
        answer(lambda x, model: write(x, model.probe[:3].detach()).sum().item())


@pytest.mark.parametrize("name", sorted(WRITTEN.keys() - {"set_", "autograd.Function", "vmap"}))
def test_a_dry_run_knows_what_was_written_from_what_it_knows(name: str) -> None:
    value = torch.tensor([4.0, 6.0, 8.0])
    expected = WRITTEN[name](torch.tensor([1.0, 2.0, 3.0]), value).sum().item()
    assert answer(lambda x, model: WRITTEN[name](x, torch.tensor([4.0, 6.0, 8.0])).sum().item()) == expected


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: F.dropout(x, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: torch.empty(0),
        lambda x: torch.add(x, 1, out=torch.empty(0)),
    ],
)
def test_a_dry_run_knows_what_could_be_random_and_is_not(compute: Any) -> None:
    assert answer(lambda x, model: compute(x).tolist()) == compute(torch.tensor([1.0, 2.0, 3.0])).tolist()


LARGE = 2**20 + 1


def test_a_dry_run_knows_large_tensors_of_whole_numbers_and_of_the_batch_but_computes_none_of_floating_ones() -> None:
    assert answer(lambda x, model: torch.ones(LARGE, dtype=torch.long).sum().item()) == LARGE
    assert answer(lambda x, model: x[:1].expand(LARGE).view(-1)[-1].item()) == 1
    with pytest.raises(RuntimeError):
        answer(lambda x, model: (x[:1].expand(LARGE) + 1).sum().item())


CPU, CONSTANT = torch.device("cpu"), torch.tensor([3.0, 2.0, 1.0])


def constant_that_changes(x: Tensor) -> list[float]:
    constant = torch.from_numpy(np.ones(3))
    before = x + constant
    constant[1:].add_(1)
    with torch._C.DisableTorchFunction():
        changed = CONSTANT.clone()
    between = x + changed
    with torch._C.DisableTorchFunction():
        changed.add_(1)  # out of sight
    return (before + constant + between + changed).tolist()


FROM_ELSEWHERE = {
    "device=": lambda x: x + torch.ones(3, device=CPU),
    "device= by name": lambda x: x + torch.ones(3, device="cpu"),
    "to": lambda x: x.to(CPU),
    "to by name": lambda x: x.to("cpu", torch.float64),
    "to device=": lambda x: x.to(device="cpu"),
    "cpu": lambda x: x.cpu() + (x.cpu().mul_(0)),
    "a constant": lambda x: x * CONSTANT,
    "a part of a constant": lambda x: x * CONSTANT[1:2],
    "an index": lambda x: CONSTANT[x.long() - 1],
    "from_numpy": lambda x: x + torch.from_numpy(np.arange(3)),
    "a constant to a device": lambda x: CONSTANT.to(CPU) + x,
    "a constant as a tensor": lambda x: torch.as_tensor(CONSTANT) + x,
    "of a legacy constructor": lambda x: x[torch.LongTensor([1])],
}


@pytest.mark.parametrize("compute", FROM_ELSEWHERE.values(), ids=list(FROM_ELSEWHERE))
def test_a_dry_run_takes_devices_for_its_own_and_constants_in(compute: Callable[[Tensor], Tensor]) -> None:
    expected = compute(torch.tensor([1.0, 2.0, 3.0])).tolist()
    assert answer(lambda x, model: compute(x * model.probe[:3].detach()).shape) == (len(expected),)
    assert answer(lambda x, model: (x.mean() + compute(x)).tolist()) == [2 + number for number in expected]


def test_a_dry_run_sees_constants_change() -> None:
    expected = constant_that_changes(torch.tensor([1.0, 2.0, 3.0]))
    assert answer(lambda x, model: constant_that_changes(x)) == expected


def test_a_dry_run_does_not_know_what_is_written_into_constants() -> None:
    constant = torch.ones(5)
    with pytest.raises(NumbersError):
        answer(lambda x, model: [constant[1:4].copy_(model.probe[:3].detach()), constant.sum().item()])
    assert constant.tolist() == [1] * 5


class Attending(Block):
    """Returns weights with the hidden state, as attention layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, y.softmax(-1)


def unused(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)[0]
    return x + shift


def collected(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    everything = []
    for layer in layers:
        x, weights = layer(x)
        everything.append(weights)
    return x + sum(everything)


def looked_at(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    largest = 0.0
    for layer in layers:
        x, weights = layer(x)
        largest = torch.maximum(weights.detach().max(), torch.as_tensor(largest, dtype=x.dtype))
    return x * largest


def stored(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    layers.kept = []
    for layer in layers:
        x, weights = layer(x)
        layers.kept.append(weights)
    return x


def noted(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    notes = [x.detach()]
    for layer in layers:
        x = layer(x)[0]
        notes.append(x.detach())
    return x + shift


@pytest.mark.parametrize("loop", [unused, noted, stored])
def test_what_layers_return_and_nobody_uses_stays_where_it_is(loop: Any) -> None:
    torch.manual_seed(0)
    model, x = Looped(loop), torch.randn(5, WIDTH)
    model.layers = nn.ModuleList(Attending(WIDTH, WIDTH) for _ in range(6))
    uses = dry_run(model, "layers", model, x)
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, place(model, 3, uses=uses), uses=uses), model(x))
    layers = cut(copy.deepcopy(model), place(model, 3), [0])
    with layers.active(0), pytest.raises(StageExit) as caught:
        loop(layers, x, x)
    assert [type(form).__name__ for form in caught.value.forms[max(caught.value.forms)]] == ["TensorForm", "Withheld"]
    assert caught.value.output[1] is None


@pytest.mark.parametrize("loop", [collected, looked_at])
def test_what_layers_return_and_somebody_uses_is_refused(loop: Any) -> None:
    model, x = Looped(loop), torch.randn(5, WIDTH)
    model.layers = nn.ModuleList(Attending(WIDTH, WIDTH) for _ in range(6))
    with pytest.raises(PipelineError, match=r"the output of layers\.0 is used again (after the layers|at layers\.4)"):
        place(model, 3, uses=dry_run(model, "layers", model, x))
    with pytest.raises(PipelineError, match=r"the result needs what layers\.\d returned"), torch.no_grad():
        through_the_stages(model, x, place(model, 3))


class Gated(Block):
    """Returns as many tensors as there are modes: what is in one place is another thing in evaluation."""

    def forward(self, x: Tensor, gate: Tensor | None) -> tuple[Tensor, ...]:
        y = super().forward(x if gate is None else x * gate)
        return (y, y.softmax(-1), y.sigmoid()) if self.training else (y, y.sigmoid())


def gated(layers: nn.ModuleList, x: Tensor, shift: Tensor) -> Tensor:
    gate = None
    for layer in layers:
        x, *_, gate = layer(x, gate)
    return x + gate


@pytest.mark.parametrize("training", [True, False])
def test_how_much_layers_return_may_depend_on_the_mode(training: bool) -> None:
    model, x = Looped(gated), torch.randn(5, WIDTH)
    model.layers = nn.ModuleList(Gated(WIDTH, WIDTH) for _ in range(6))
    model.train(training)
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, place(model, 3)), model(x))


@torch.jit.script
def _positive(x: Tensor) -> Tensor:
    return x.detach() > 0


class Masked(nn.Module):
    """A mask of what comes before the layers, made where no function of torch is seen."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.make, self.embed, self.head = make, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(Block(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("one", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mask = self.make(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(torch.where(mask, x, 0.5 * x) * self.one)


@pytest.mark.parametrize(
    "make", [lambda x: _positive(x), torch.vmap(lambda row: row.detach() > 0), lambda x: torch.vmap(torch.signbit)(x).logical_not_()]
)
def test_a_mask_that_is_made_out_of_sight_comes_from_the_modules_before_the_layers(make: Callable[[Tensor], Tensor]) -> None:
    model, x = Masked(make), torch.randn(5, WIDTH)
    uses = dry_run(model, "layers", model, x)
    placement = place(model, 2, uses=uses)
    assert (placement.before, placement.after) == (("embed",), ("embed", "head"))
    with torch.no_grad():
        assert torch.equal(through_the_stages(model, x, placement, uses=uses), model(x))
