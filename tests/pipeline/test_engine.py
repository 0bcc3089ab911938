"""Pipelines on real ranks against one process, in float64."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_par.comm import Group, Lanes
from lightning_par.pipeline import Pipeline, PipelineError, engine, simulate, sums, training_plan
from lightning_par.pipeline.inbox import Inbox
from tests.harness import WorldError, run_world
from tests.pipeline.models import gpt
from tests.pipeline.parity import VOCAB, Batch, Step, Twin, cut, pp_group, tokens


def _changing_shapes() -> None:
    group = pp_group(2)
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zbv", 2)):
        twin = Twin(gpt(), group, schedule, chunks)
        twin.train_step(tokens(4, 9), 2)
        twin.evaluate(tokens(6, 11), 3)
        twin.train_step(tokens(4, 5), 4)
        twin.train_step(tokens(7, 9), 3)  # pieces of 3, 2 and 2 rows
        twin.model.eval()
        twin.evaluate(tokens(1, 9), 1)
        twin.model.train()
        twin.train_step(tokens(4, 9), 2)


def test_P5_P6_shapes_may_change_between_steps_and_between_train_and_eval() -> None:
    run_world(_changing_shapes, 2)


class Perceptron(nn.Module):
    """A plain Sequential, called whole."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        hidden = [module for _ in range(4) for module in (nn.Linear(7, 7), nn.Dropout(0.0), nn.ReLU(inplace=True))]
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), *hidden, nn.Linear(7, 3))

    def forward(self, x: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.net(x * scale[:, None]), target)


def _perceptron(size: int) -> None:
    group = pp_group(size)
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)):
        twin = Twin(Perceptron().double(), group, schedule, chunks, call=call)
        assert set(twin.pipeline.names) <= {name for name, _ in twin.whole.named_parameters()}
        for microbatches in (1, 3, 7):
            twin.train_step(samples(7), microbatches)
        twin.evaluate(samples(3), 2)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sequential_needs_no_loop_and_no_name(size: int) -> None:
    run_world(_perceptron, size, size)


class Classifier(nn.Module):
    """Layers that take a keyword and return a tuple, worked on in place; an odd tensor, an integer one and None at the boundary."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pos = nn.Parameter(torch.randn(width))  # hangs on the root: every stage has it
        self.enter = nn.Sequential(nn.Linear(5, width), nn.LayerNorm(width))
        self.blocks = nn.ModuleList([ClassifierBlock(width) for _ in range(5)])
        self.leave = nn.Linear(width, 3)

    def forward(self, x: Tensor, target: Tensor, *, scale: Tensor) -> Tensor:
        x = self.enter(x) + self.pos
        carried, count = None, torch.zeros(len(x), dtype=torch.long)
        for i, block in enumerate(self.blocks):
            x, (carried, count, _) = block(x, carried, count, scale=scale, shift=float(i))
        assert (count == len(self.blocks)).all()
        return nn.functional.cross_entropy(self.leave(x * self.pos) + carried, target)


class ClassifierBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, carried: Tensor | None, count: Tensor, *, scale: Tensor, shift: float) -> Any:
        x += torch.tanh(self.linear(x * 0.5)) * scale[:, None] + shift
        new = x.mean(-1, keepdim=True)
        return x, (new if carried is None else carried + new, count + 1, None)


def samples(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    real = {key: torch.randn(*shape, generator=generator, dtype=torch.float64) for key, shape in {"x": (rows, 5), "scale": (rows,)}.items()}
    return real | {"target": torch.randint(0, 3, (rows,), generator=generator)}


def call(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch)


def _classifier(size: int) -> None:
    group = pp_group(size)
    for schedule in ("gpipe", "1f1b", "zb_h1"):
        twin = Twin(Classifier().double(), group, schedule, call=call)
        assert twin.pipeline.tied == {"pos": tuple(range(size))}
        for microbatches in (1, 3, 4):
            twin.train_step(samples(7), microbatches)
        twin.evaluate(samples(3), 2)


@pytest.mark.parametrize("size", [2, 3])
def test_P13_keywords_tuples_and_several_tensors_at_the_boundary(size: int) -> None:
    run_world(_classifier, size, size)


class Sideways(nn.Module):
    """Goes on with its memory in another order, which ``view`` needs; layers see images with channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert x.is_contiguous(memory_format=torch.channels_last)
        y = torch.tanh(self.conv(x))
        return y, y.permute(2, 0, 3, 1)[:, :, :, :2]  # the second has holes


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 1)
        self.layers = nn.ModuleList(Sideways() for _ in range(4))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.stem(x).contiguous(memory_format=torch.channels_last)
        for layer in self.layers:
            x, side = layer(x)
            x = x.permute(0, 2, 3, 1).view(len(x), -1, 3).permute(0, 2, 1).view(x.shape) if x.shape[2] > 1 else x
            x = x.contiguous(memory_format=torch.channels_last) + side.mean((0, 2, 3)).view(-1, 1, 1, 1)
        return F.cross_entropy(self.head(x.mean((2, 3))), target)


def images(rows: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return {
        "x": torch.randn(rows, 2, 5, 4, generator=generator, dtype=torch.float64),
        "target": torch.randint(0, 3, (rows,), generator=generator),
    }


def _sideways() -> None:
    for schedule in ("1f1b", "zb_h1"):
        twin = Twin(Images().double(), pp_group(2), schedule, call=call)
        for microbatches in (1, 3):
            twin.train_step(images(7), microbatches)
        twin.evaluate(images(3), 2)


def test_memory_in_another_order_stays_so_at_the_boundary() -> None:
    run_world(_sideways, 2)


class Turned(nn.Linear):
    def forward(self, z: Tensor) -> Tensor:
        return z + torch.complex(super().forward(z.imag).tanh(), z.real)


class Waves(nn.Module):
    """The hidden state is complex, and so is a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.enter = nn.Linear(5, 6, dtype=torch.float64)
        real = [Turned(6, 6, dtype=torch.float64) for _ in range(3)]
        self.layers = nn.Sequential(*real, nn.Linear(6, 6, dtype=torch.complex128))
        self.leave = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: Tensor, target: Tensor, scale: Tensor) -> Tensor:
        z = self.enter(x)
        return nn.functional.cross_entropy(self.leave(self.layers(torch.complex(z, z * scale[:, None])).abs()), target)


def _waves() -> None:
    group = pp_group(2)
    for schedule in ("1f1b", "zb_h1"):
        twin = Twin(Waves(), group, schedule, layers="layers", call=call)
        twin.train_step(samples(7), 3)
        twin.evaluate(samples(3), 2)


def test_P13_complex_activations_have_gradients_across_stages() -> None:
    run_world(_waves, 2)


def _frozen(schedule: str) -> None:
    group = pp_group(2)
    for frozen in ("embed.", "layers.", "head."):
        model = gpt(tie=frozen == "embed.")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        Twin(model, group, schedule).train_step(tokens(4, 9), 3)
    model = gpt()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("layers.5", "layers.6", "norm", "head")))  # nothing to train on stage 0
    twin = Twin(model, group, schedule)
    twin.train_step(tokens(4, 9), 3)
    for whole in (twin.whole, twin.model):
        whole.requires_grad_(True)  # thawed in mid-training, with the same shapes
    twin.train_step(tokens(4, 9), 3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_P10_P11_frozen_stages_and_frozen_ties_train_the_rest(schedule: str) -> None:
    run_world(_frozen, 2, schedule)


class Watched(nn.Module):
    """Counts the graphs of its layers that are alive."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList([WatchedLayer() for _ in range(layers)])
        self.head = nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class WatchedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.alive: list[weakref.ref] = []
        self.peak = 0

    def forward(self, x: Tensor) -> Tensor:
        mark = Mark()
        self.alive = [ref for ref in self.alive if ref() is not None] + [weakref.ref(mark)]
        self.peak = max(self.peak, len(self.alive))
        return torch.tanh(self.linear(Marked.apply(x, mark)))


class Mark:
    """Lives as long as the graph that holds it."""


class Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mark: Mark) -> Tensor:
        ctx.mark = mark
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _alive(size: int, schedule: str, microbatches: int) -> int:
    model = Watched(size)
    pipeline = Pipeline.split(model, pp_group(size), schedule)
    step = Step(model, cut(tokens(2 * microbatches, 5), microbatches), call)
    gc.disable()
    pipeline.forward_backward(step, step.signatures)
    layer = next(layer for layer in model.layers if next(layer.parameters(), None) is not None)
    assert all(ref() is None for ref in layer.alive)
    return layer.peak


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_activations_live_as_long_as_the_simulator_says(schedule: str) -> None:
    assert run_world(_alive, 3, 3, schedule, 5) == simulate(training_plan(schedule, 3, 1, 5)).peak_live


def _order(schedule: str) -> str:
    model = Watched(2)
    pipeline = Pipeline.split(model, pp_group(2), schedule)
    step = Step(model, cut(tokens(6, 5), 3), call)
    seen: list[str] = []
    layer = next(layer for layer in model.layers if next(layer.parameters(), None) is not None)
    layer.linear.weight.register_post_accumulate_grad_hook(lambda _: seen.append("W"))

    def forward(microbatch: int) -> Tensor:
        seen.append("F")
        return step(microbatch)

    pipeline.forward_backward(forward, step.signatures)
    return "".join(seen)


def test_gradients_of_weights_wait_for_their_place_in_the_schedule() -> None:
    assert run_world(_order, 2, "1f1b") == ["FFWFWW", "FWFWFW"]
    assert run_world(_order, 2, "zb_h1") == ["FFWFWW", "FFWFWW"]


def _hasty() -> str:
    model, seen = gpt(2), list[str]()
    pipeline = Pipeline.split(model, pp_group(2), "1f1b")
    step = Step(model, cut(tokens(8, 5), 4), lambda model, piece: model(**piece).loss)

    def noted(kind: str, real: Any) -> Any:
        return lambda *args, **options: (seen.append(kind), real(*args, **options))[1]

    with (
        patch.object(sums, "LARGE", 1),
        patch.object(sums._Use, "_sum", noted("w", sums._Use._sum)),
        patch.object(Lanes, "send", noted("S", Lanes.send)),
    ):
        pipeline.forward_backward(step, step.signatures)
    return "".join(seen)


def test_after_the_last_forward_gradients_are_sent_before_sums_are_made() -> None:
    """The last stage has no send but those; its first micro-batch has nothing to add to."""
    assert re.fullmatch("S(w+S){2}Sw+", run_world(_hasty, 2)[1])


def _sent() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    group = pp_group(2)
    model = gpt()
    pipeline = Pipeline.split(model, group, "1f1b")
    step = Step(model, cut(tokens(4, 9), 2), lambda model, batch: model(**batch).loss)
    counts = []
    for _ in range(2):
        with group.trace.recording() as sent:
            pipeline.forward_backward(step, step.signatures)
        counts.append([(call.op, call.elements) for call in sent])
    return counts[0], counts[1]


def test_in_the_steady_state_nothing_but_activations_and_gradients_is_sent() -> None:
    (first, second), (_, back) = run_world(_sent, 2)
    assert second == [("send", 2 * 9 * 24)] * 2
    assert len(first) == len(second) + 2  # one form, as a length and its bytes: both pieces have one shape
    assert back == [("send", 2 * 9 * 24)] * 2


def _raises(where: str) -> None:
    group = pp_group(2)
    model = gpt()
    pipeline = Pipeline.split(model, group, "1f1b")

    def forward(microbatch: int) -> Tensor:
        if where == "step" and group.index == 1 and microbatch == 1:
            raise LookupError("no such row")
        loss = model(**tokens(2, 5)).loss
        if where == "backward" and group.index == 1:
            loss.register_hook(lambda grad: 1 / 0)
        return loss

    pipeline.forward_backward(forward, ["same"] * 3)


@pytest.mark.parametrize(("where", "reason"), [("step", "LookupError: no such row"), ("backward", "ZeroDivisionError")])
def test_what_the_step_raises_comes_out_unchanged(where: str, reason: str) -> None:
    with pytest.raises(WorldError, match=f"(?s)rank 1 .*{reason}"):
        run_world(_raises, 2, where, grace=0.3)


def _alone(forward: Any, signatures: list[str], chunks: int = 2) -> None:
    model = gpt(layers=2)
    pipeline = Pipeline.split(model, Group("pp"), "interleaved_1f1b", chunks)
    pipeline.forward_backward(lambda m: forward(model, m), signatures)


def test_a_step_that_swallows_the_exit_or_skips_the_layers_is_refused() -> None:
    def bare(model: nn.Module, microbatch: int) -> Tensor:
        try:
            return model(**tokens(2, 5)).loss
        except BaseException:
            return torch.zeros(())

    with pytest.raises(PipelineError, match="came to its end on stage 0 of 2"):
        _alone(bare, ["same"])
    with pytest.raises(PipelineError, match="must return its loss, a tensor of one element; it returned None"):
        _alone(lambda model, m: None, ["same"], chunks=1)


def test_messages_arrive_where_it_was_said_whatever_parameters_a_stage_has() -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Linear(3, 3), nn.Tanh())})
    asked: list[torch.device] = []
    with patch.object(engine, "Inbox", lambda lanes, device, *others: asked.append(device) or Inbox(lanes, device, *others)):
        for device in (torch.device("meta"), None):
            pipeline = Pipeline.split(copy.deepcopy(model), Group("pp"), "gpipe", layers="layers", device=device)
            pipeline.forward_backward(lambda m, part=pipeline.module: part["layers"](torch.ones(1, 3)).sum(), ["same"])
    assert [device.type for device in asked] == ["meta", "cpu"]


def test_a_signature_that_hides_another_shape_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"layer 0 of layers returned float64\[2, 6, 24\] where it returned float64\[2, 5, 24\]"):
        _alone(lambda model, m: model(**tokens(2, 5 + m)).loss, ["same", "same"])


class Telling(nn.Module):
    """May return a number of Python's with the hidden state, another for each micro-batch."""

    def __init__(self, tells: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.tells = nn.Linear(8, 8), tells

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        y = torch.tanh(self.linear(x))
        return y, float(y.detach().mean()) if self.tells else 0.5


class Told(nn.Module):
    """``needed``: the numbers get into the loss."""

    def __init__(self, tell: tuple[bool, ...], needed: bool) -> None:
        super().__init__()
        self.embed, self.needed = nn.Embedding(VOCAB, 8), needed
        self.layers = nn.ModuleList(map(Telling, tell))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, total = self.embed(input_ids), 0.0
        for layer in self.layers:
            x, number = layer(x)
            total = total + number
        return x.mean() + total if self.needed else x.mean()


def _told(tell: tuple[bool, ...], needed: bool) -> None:
    model = Told(tell, needed)
    pipeline = Pipeline.split(model, pp_group(2), "1f1b", balance=(2, 2))
    step = Step(model, cut(tokens(8, 5), 4), call)
    pipeline.forward_backward(step, step.signatures)


def test_numbers_that_layers_return_may_change_where_nobody_needs_them_elsewhere() -> None:
    run_world(_told, 2, (True, False, True, True), False)
    with pytest.raises(WorldError, match=r"the loss needs what layers\.0 returned, which is on another pipeline stage"):
        run_world(_told, 2, (True, False, True, True), True)
    with pytest.raises(WorldError, match=r"layer 1 of layers returned \(.*\) where it returned .* before"):
        run_world(_told, 2, (False, True, False, False), False)


class HandsOn(nn.Module):
    """Gives the embedding to every layer: no other stage has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.layers = nn.ModuleList([nn.Bilinear(8, 8, 8) for _ in range(2)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = embedded = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, embedded)
        return x.mean()


def _hands_on() -> None:
    model = HandsOn()
    pipeline = Pipeline.split(model, pp_group(2), "1f1b")
    step = Step(model, [tokens(2, 5)], call)
    pipeline.forward_backward(step, step.signatures)


def test_a_layer_that_reads_the_first_stage_is_refused_with_the_name_of_what_it_reads() -> None:
    with pytest.raises(WorldError, match=r"layers\.1, a layer of this stage, needs what embed returns"):
        run_world(_hands_on, 2)


def _dtypes() -> None:
    group = pp_group(2)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        twin = Twin(gpt().to(dtype), group, "1f1b")
        twin.train_step(tokens(4, 9), 2, tolerance)
        twin = Twin(gpt(), group, "1f1b")
        for model in (twin.whole, twin.model):
            model.to(dtype)  # after the split, as a precision plugin may
        twin.train_step(tokens(4, 9), 2, tolerance)


def test_activations_travel_in_the_dtype_of_the_model() -> None:
    run_world(_dtypes, 2)


def _heard(quiet: dict[str, Any]) -> tuple[int, int]:
    twin = Twin(gpt(), pp_group(2), "1f1b")
    weights = [param for name, param in twin.model.named_parameters() if name.endswith("proj.weight")]
    norms = [param for param in twin.model.parameters() if param.dim() == 1]
    heard: list[nn.Parameter] = []
    for param in (weights[0], norms[0]):
        param.register_post_accumulate_grad_hook(heard.append)
    batch = tokens(5, 9)
    twin.whole(**batch).loss.backward()
    step = Step(twin.model, cut(batch, 5), twin.call)
    twin.pipeline.forward_backward(step, step.signatures, **quiet)
    twin.check_gradients(1e-10)
    return sum(param is weights[0] for param in heard), sum(param is norms[0] for param in heard)


def _who_hears() -> None:
    assert _heard({}) == (5, 5), "hooks of users hear of every micro-batch"
    assert _heard({"quiet": lambda param: True}) == (1, 5), "the first gradient of a weight, and all of a norm, come from autograd"


def test_gradients_of_weights_are_added_up_by_products_where_no_hook_wants_to_know() -> None:
    run_world(_who_hears, 2)
