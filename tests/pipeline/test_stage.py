"""The unmodified forward: every way to run a loop over the layers, one stage after the other in one process."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.pipeline import PipelineError, StageExit, dry_run, place
from lightning_par.pipeline.split import cut
from lightning_par.pipeline.stage import Arrived, BeforeLayers
from lightning_par.pipeline.torch_functions import tensors_in
from lightning_par.pipeline.unknown import Unknown
from tests.pipeline.models import through_the_stages as through

Loop = Callable[[nn.ModuleList, Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.kind = "odd" if index % 2 else "even"
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return x + torch.tanh(self.linear(x)) + shift


class PairLayer(Layer):
    """Returns the hidden state and something to hand to the next layer."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, dict[str, Any]]:
        hidden = super().forward(x)
        return hidden, {"bias": hidden * 2 if bias is None else bias + 1, "none": None}


class AuxLayer(Layer):
    """Returns the hidden state and an auxiliary loss; layers of the kind ``silent`` return None for it."""

    silent: str | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden = super().forward(x)
        return hidden, None if self.kind == self.silent else hidden.square().mean()


class OddAuxLayer(AuxLayer):
    silent = "even"


class EvenAuxLayer(AuxLayer):
    silent = "odd"


class TotalLayer(Layer):
    """Carries the sum of auxiliary losses."""

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden = super().forward(x)
        return hidden, total + hidden.square().mean(), None


class Model(nn.Module):
    def __init__(self, loop: Loop, layer: type[Layer] = Layer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loop = loop
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList([layer(i) for i in range(5)])
        self.head = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.loop(self.layers, self.embed(ids)))


def over(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def numbered(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x, shift=i / 7)
    return x


def sliced(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers[: len(layers)]:
        x = layer(x)
    return x


def indexed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i in range(len(layers)):
        x = layers[i](x)
    return layers[-1].linear.weight.new_zeros(()) + x


def listed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in list(layers):
        x = layer(x)
    return x


def by_kind(layers: nn.ModuleList, x: Tensor) -> Tensor:
    shifts = {"odd": 1.0, "even": 0.5}
    for layer in layers:
        x = layer(x, shift=shifts[layer.kind])
    return x


def changed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = layer(x) * (i + 2)
    return x


def changed_in_place(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x).mul_(2)
    return x


def carrying(layers: nn.ModuleList, x: Tensor) -> Tensor:
    bias = None
    for layer in layers:
        out = layer(x, bias)
        x, bias = out[0], out[1]["bias"]
    return x + bias


def catching(layers: nn.ModuleList, x: Tensor) -> Tensor:
    try:
        return over(layers, x)
    except Exception:
        return x


def checkpointed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def through_the_stages(model: nn.Module, ids: Tensor, ranks: int = 3, *, stages: int = 3) -> Tensor:
    return through(model, ids, place(model, stages), ranks)


def called(layers: nn.Sequential, x: Tensor) -> Tensor:
    return layers(x)


def called_in_parts(layers: nn.Sequential, x: Tensor) -> Tensor:
    return layers[2:](layers[:2](x))


@pytest.mark.parametrize("loop", [called, called_in_parts, over, indexed])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (3, 3), (2, 4), (1, 5)])
def test_a_sequential_may_be_called_whole_or_in_parts(loop: Loop, ranks: int, stages: int) -> None:
    model, ids = Model(loop), torch.tensor([[1, 5, 8]])
    model.layers = nn.Sequential(*model.layers)
    assert torch.equal(through_the_stages(model, ids, ranks, stages=stages), model(ids))


@pytest.mark.parametrize("loop", [over, numbered, sliced, indexed, listed, by_kind, changed, catching, checkpointed])
@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (3, 3), (2, 4), (1, 5)])
def test_P9_any_loop_over_the_layers_sees_global_places(loop: Loop, ranks: int, stages: int) -> None:
    model, ids = Model(loop), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids, ranks, stages=stages), model(ids))


def test_a_loop_may_change_outputs_in_place_where_that_is_not_done_twice() -> None:
    model, ids = Model(changed_in_place), torch.tensor([[1, 5, 8]])
    with pytest.raises(PipelineError, match=r"the step changes in place what layers\.0 returned.*x = x \+ y"):
        through_the_stages(model, ids)
    assert torch.equal(through_the_stages(model, ids, stages=1), model(ids))
    with torch.inference_mode():
        assert torch.equal(through_the_stages(model, ids), model(ids))


def test_layers_may_return_tuples_and_hand_several_tensors_on() -> None:
    model, ids = Model(carrying, PairLayer), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def totalling(layers: nn.ModuleList, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for layer in layers:
        x, total, _ = layer(x, total)
    return x + total


def test_a_loss_of_every_layer_may_travel_with_the_hidden_state() -> None:
    model, ids = Model(totalling, TotalLayer), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def summed_aside(layers: nn.ModuleList, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for layer in layers:
        x, aux = layer(x)
        total = total if aux is None else total + aux
    return x + total


def last_of_all(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept = []
    for layer in layers:
        x, aux = layer(x)
        kept.append((layer.kind, aux is None, str(aux)))
    return x + aux


def counts_of_none(layers: nn.ModuleList, x: Tensor) -> Tensor:
    none = 0
    for layer in layers:
        x, aux = layer(x)
        none += aux is None
    return x + none


@pytest.mark.parametrize("kind", [AuxLayer, EvenAuxLayer])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_early_layers_return_besides_the_hidden_state_does_not_get_into_the_result(kind: type[Layer], ranks: int) -> None:
    model, ids = Model(summed_aside, kind), torch.tensor([[1, 5, 8]])
    with pytest.raises(PipelineError, match=r"the result needs what layers\.\d returned.*x, total = layer\(x, total\).*pp=1"):
        through_the_stages(model, ids, ranks, stages=2)
    assert torch.equal(through_the_stages(model, ids, 1, stages=1), model(ids))


@pytest.mark.parametrize(("loop", "kind"), [(last_of_all, AuxLayer), (counts_of_none, EvenAuxLayer), (counts_of_none, OddAuxLayer)])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_layers_may_return_more_than_goes_on_each_in_a_form_of_its_own(loop: Loop, kind: type[Layer], stages: int) -> None:
    model, ids = Model(loop, kind), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids, stages, stages=stages), model(ids))


class Scaled(Layer):
    """Takes and returns a tensor that the loop changes on the way."""

    def forward(self, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(x) * scale, scale + 1, x.mean()


def rescaled(layers: nn.ModuleList, x: Tensor) -> Tensor:
    scale = torch.ones(())
    for layer in layers:
        x, scale, _ = layer(x, scale * 2)
    return x


class Keeping(Layer):
    """Writes into a list, or a tensor, that it is given."""

    def forward(self, x: Tensor, kept: Any) -> Tensor:
        y = super().forward(x)
        if isinstance(kept, Tensor):
            kept.add_(y.detach().mean())
        else:
            kept.append(y.mean())
        return y


def kept_in_a_list(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept: list[Tensor] = []
    for layer in layers:
        x = layer(x, kept)
    return x + sum(kept)


def kept_in_a_tensor(layers: nn.ModuleList, x: Tensor) -> Tensor:
    kept = torch.zeros(())
    for layer in layers:
        x = layer(x, kept)
    return x + kept


@pytest.mark.parametrize(("loop", "kind"), [(kept_in_a_list, "list"), (kept_in_a_tensor, "Tensor")])
def test_a_layer_that_writes_into_what_it_is_given_is_refused(loop: Loop, kind: str) -> None:
    model, ids = Model(loop, Keeping), torch.tensor([[1, 5, 8]])
    with pytest.raises(PipelineError, match=rf"layers\.0 writes into a {kind} that the step gives it"):
        through_the_stages(model, ids)
    assert torch.equal(through_the_stages(model, ids, stages=1), model(ids))


class DictLayer(Layer):
    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        state["x"] = super().forward(state["x"])
        state["seen"] = state["x"].mean()
        return state


def edited(layers: nn.ModuleList, x: Tensor) -> Tensor:
    state = {"x": x}
    for layer in layers:
        state = layer(state)
        state["x"] = state["x"] * 1.5
        state.pop("seen")
    return state["x"]


def test_a_loop_may_edit_the_containers_that_layers_return() -> None:
    model, ids = Model(edited, DictLayer), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def hooked(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
    return x


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_a_hook_on_an_output_works_on_one_stage(stages: int) -> None:
    one, other, ids = Model(hooked), Model(hooked), torch.tensor([[1, 5, 8]])
    one(ids).sum().backward()
    placement, arrived, ends = place(other, stages), Arrived(), list[tuple[list[Tensor], list[Tensor]]]()
    layers = cut(other, placement, range(stages))
    for stage in range(stages):
        with layers.active(stage, arrived):
            try:
                other(ids).sum().backward()
            except StageExit as stop:
                (sent,) = tensors_in(stop.output)
                entry = sent.detach().requires_grad_()
                ends.append((sent, entry))
                arrived = Arrived([entry.view_as(entry)], stop.forms)
    for sent, entry in reversed(ends):
        sent.backward(entry.grad)
    for (name, parameter), again in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(again.grad, parameter.grad, msg=name)


@pytest.mark.parametrize("fullgraph", [False, True])
def test_functions_between_layers_may_be_compiled(fullgraph: bool) -> None:
    doubled = torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=fullgraph)

    def over_compiled(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = doubled(layer(doubled(x)))
        return x

    model, ids = Model(over_compiled), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def skipping(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        x = x if i == 2 else layer(x)
    return x


def test_a_loop_may_leave_out_a_layer() -> None:
    model, ids = Model(skipping), torch.tensor([[1, 5, 8]])
    assert torch.equal(through(model, ids, place(model, 2, balance=(4, 1))), model(ids))


class Noting(nn.Embedding):
    def forward(self, ids: Tensor, notes: dict[str, Tensor]) -> Tensor:
        x = super().forward(ids) + torch.ones(4)
        notes["mean"] = x.mean()
        return x


class Noted(Model):
    def forward(self, ids: Tensor) -> Tensor:
        notes: dict[str, Tensor] = {}
        x = over(self.layers, self.embed(ids, notes))
        return x + notes.get("mean", 0.0)


def test_a_module_before_the_layers_that_writes_into_what_it_is_given_is_refused() -> None:
    model, ids = Noted(over), torch.tensor([[1, 5, 8]])
    model.embed = Noting(9, 4)
    with pytest.raises(PipelineError, match="embed, which stands on the first pipeline stage, writes into a dict that it is given"):
        through_the_stages(model, ids)


def test_a_loop_may_change_what_it_carries_between_layers() -> None:
    model, ids = Model(rescaled, Scaled), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def by_class(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x, shift=0.5 if isinstance(layer, Layer) and not layer.training else 0.0)
    return x


def test_a_loop_sees_the_class_and_the_mode_of_the_layers_it_runs() -> None:
    model, ids = Model(by_class).eval(), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def only_of_its_class(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers.children():
        if isinstance(layer, Layer) and isinstance(layer.linear, nn.Linear):
            x = layer.forward(x)
    return x


def heated(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        layer.linear.heat, layer.heat, layer.gone = 1.0, 0.5 * i, None
        del layer.gone
        layer.eval()
    for layer in layers:
        x = layer(x, shift=layer.heat)
    assert not any(layer.training or hasattr(layer, "gone") for layer in layers)
    return x * sum(layer.heat + layer.linear.heat for layer in layers)


class HeatedLayer(Layer):
    heat = 0.0

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return super().forward(x, shift) * (self.heat + self.linear.heat) + (1.0 if self.training else 0.0)


@pytest.mark.parametrize(("loop", "kind"), [(only_of_its_class, Layer), (heated, HeatedLayer)])
@pytest.mark.parametrize("ranks", [2, 1])
def test_what_a_step_does_with_layers_besides_calling_them_reaches_them_on_every_stage(loop: Loop, kind: type[Layer], ranks: int) -> None:
    model, ids = Model(loop, kind), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids, ranks, stages=2), model(ids))


def added_outside(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer(x)
    return x


def reentrant(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def in_parts(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = x + layer.linear(x)
    return x


def penalized(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return over(layers, x) + sum(layer.linear.weight.square().sum() for layer in layers)


class LeavingLayer(Layer):
    """Leaves numbers without a graph on itself and on a module in it."""

    seen = 0.0

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        self.seen = self.linear.seen = x.detach().mean()
        return super().forward(x, shift)


def read(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return over(layers, x) + sum(layer.seen for layer in layers)


def read_within(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return over(layers, x) + sum(layer.linear.seen for layer in layers)


def collecting(layers: nn.ModuleList, x: Tensor) -> Tensor:
    states = []
    for layer in layers:
        x = layer(x)
        states.append(x)
    return x + states[1]


def test_outputs_of_earlier_layers_are_unknown_and_not_taken_for_others() -> None:
    """Where no dry run has seen it; within a stage, and from the last layer of the one before, they are there."""
    model, ids = Model(collecting), torch.tensor([[1, 5, 8]])
    with pytest.raises(PipelineError, match=r"the result needs what layers\.1 returned"):
        through_the_stages(model, ids, 5, stages=5)
    with pytest.raises(PipelineError, match=r"what layers\.1 returned gets into the loss past the layers behind it"):
        through_the_stages(model, ids, 2, stages=2)
    uses = dry_run(model, "layers", model, ids)
    assert torch.equal(through(model, ids, place(model, 2, uses=uses), uses=uses), model(ids))


class Penalized(Model):
    """Whose step goes through all parameters, those of other stages included."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + sum(parameter.square().sum() for parameter in self.parameters())


class PenalizedModules(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + sum(part.weight.norm() for part in self.modules() if isinstance(part, nn.Linear))


class PenalizedBefore(Model):
    """Whose step goes through the parameters of a module before the layers."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + sum(parameter.square().sum() for parameter in self.embed.parameters())


class Stated(Model):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * len(self.state_dict())


class Asking(Model):
    """Whose step asks for all parameters and modules, and for how many there are."""

    def forward(self, ids: Tensor) -> Tensor:
        first = next(self.parameters())
        assert (first.dtype, first.device) == (torch.get_default_dtype(), torch.device("cpu"))
        size = sum(parameter.numel() for name, parameter in self.named_parameters())
        return super().forward(ids) * size * len([*self.modules()]) * len([part for part in self.modules() if isinstance(part, Layer)])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Penalized, r"the result needs (embed|layers\.0\.linear)\.weight"),
        (PenalizedModules, r"the result needs layers\.0\.linear\.weight, .*weight_decay"),
        (PenalizedBefore, r"the result needs embed\.weight"),
        (Stated, r"the state_dict\(\) that the step asks for needs layers,"),
    ],
)
def test_a_step_that_goes_through_weights_of_other_stages_is_refused(kind: type[Model], reason: str) -> None:
    with pytest.raises(PipelineError, match=reason):
        through_the_stages(kind(over), torch.tensor([[1, 5, 8]]))


class Routed(Layer):
    """Leaves a loss of its own in a list of everybody's."""

    aside: ClassVar[list[Tensor]] = []

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        self.aside.append(self.linear(x.detach()).square().mean())
        return super().forward(x, shift)


class RoutedBeforeWeights(Routed):
    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        self.aside.append(x.square().mean())
        return Layer.forward(self, x, shift)


class Routing(Model):
    def forward(self, ids: Tensor) -> Tensor:
        Routed.aside.clear()
        return super().forward(ids) + sum(Routed.aside)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Routed, r"layers\.3 is used after the layers by another way .*router logits, an auxiliary loss"),
        (RoutedBeforeWeights, r"what layers\.[23] returned gets into the loss past the layers behind it.*router logits, an auxiliary loss"),
    ],
)
def test_what_layers_leave_in_lists_of_others_is_found_where_no_dry_run_has_seen_it(kind: type[Layer], reason: str) -> None:
    model, ids = Routing(over, kind), torch.tensor([[1, 5, 8]])
    with pytest.raises(PipelineError, match=reason):
        through_the_stages(model, ids)
    with pytest.raises(PipelineError, match=r"layers\.\d (is used after|.* again after) the layers"):
        place(model, 3, uses=dry_run(model, "layers", model, ids))


def test_a_step_finds_all_modules_and_parameters() -> None:
    model, ids = Asking(over), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def twice(layers: nn.ModuleList, x: Tensor) -> Tensor:
    return over(layers, over(layers, x))


def backwards(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in reversed(layers):
        x = layer(x)
    return x


@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (in_parts, r"the step calls layers\.1\.linear by itself.*call layers whole"),
        (read, r"layers\.0\.seen is read, which layers\.0 sets as it runs.*carry what else is needed"),
        (read_within, r"layers\.0\.linear\.seen is read, which layers\.0 sets"),
        (penalized, r"the result needs layers\.0\.linear\.weight, which is on another pipeline stage.*weight_decay"),
        (added_outside, r"layers\.1, a layer of this stage, needs what embed returns, which is on another pipeline stage"),
        (reentrant, r"checkpoint activations with use_reentrant=False"),
        (twice, "runs layers twice for one micro-batch"),
        (backwards, r"calls layers\.4 before layers\.0"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_loop_that_a_pipeline_cannot_follow_is_refused_by_name(loop: Loop, reason: str) -> None:
    with pytest.raises(PipelineError, match=reason):
        through_the_stages(Model(loop, LeavingLayer), torch.tensor([[1, 5, 8]]))


@pytest.mark.parametrize("loop", [read, read_within])
def test_what_layers_leave_on_themselves_may_be_read_where_they_all_are(loop: Loop) -> None:
    model, ids = Model(loop, LeavingLayer), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids, stages=1), model(ids))
    with pytest.raises(PipelineError, match=r"layers\.0\.(linear\.)?seen is read"):
        through(model, ids, place(model, 3), uses=dry_run(model, "layers", model, ids))


def part_of(model: nn.Module, index: int, ranks: int = 2) -> nn.Module:
    cut(model, place(model, ranks), [index])
    return model


def test_what_reads_an_absent_embedding_gets_what_is_unknown_never_a_plausible_number() -> None:
    embedded = part_of(Model(over), 1).embed(torch.zeros(2, 3, dtype=torch.long))
    assert embedded.shape == (2, 3, 4)
    assert embedded.as_subclass(Tensor).isnan().all(), "where torch is made to forget"
    with pytest.raises(PipelineError, match=r"needs what embed returns.*pipeline_after = \['embed'\]"):
        bool(embedded.isnan().all())


class Opening(nn.Module):
    """An embedding of several parts, used in every way but called as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.gain = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Parameter(torch.ones(4))

    def encode(self, ids: Tensor) -> tuple[Tensor, int]:
        return self.words(ids) * self.gain, 2

    def codes(self, ids: Tensor) -> Tensor:
        return self.words(ids).argmax(-1)


class Opened(nn.Module):
    def __init__(self, *, coded: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.position, self.coded = Opening(), nn.Embedding(9, 4), coded
        self.token, self.layers = nn.Parameter(torch.ones(4)), nn.ModuleList([Layer(i) for i in range(5)])

    def forward(self, ids: Tensor) -> Tensor:
        ids = ids.to(self.position.weight.device)
        x, factor = self.embed.encode(ids)
        x = x * factor + self.position.weight[: ids.shape[1]] + self.embed.places.weight[1] + self.embed.gain
        x = x + self.embed.words(ids)
        if self.coded:
            x = x + self.embed.codes(ids)[..., None]
        position = self.position(ids)
        position += 1
        position[:, 0] = self.token
        return over(self.layers, x + position)


def test_modules_before_the_layers_may_be_read_in_parts_and_worked_on_in_place() -> None:
    model, ids = Opened(), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


class Counted(nn.Linear):
    runs = 0

    def forward(self, x: Tensor, *, scale: Any = 1, draws: bool = False) -> dict[str, Any]:
        Counted.runs += 1
        return {"y": super().forward(x) * (torch.rand(()).item() if draws else 1), "scale": scale}


def test_a_stand_in_computes_its_shapes_once_for_what_looks_alike() -> None:
    stand_in, x, before = BeforeLayers(Counted(4, 3), "counted", part_of(Model(over), 1).layers), torch.ones(2, 4), Counted.runs
    calls: list[tuple[int, Callable[[], Any]]] = [
        (1, lambda: stand_in(x)),
        (0, lambda: stand_in(x + 1)),
        (1, lambda: stand_in(torch.ones(3, 4))),
        (1, lambda: stand_in(x, scale=2)),
        (1, lambda: stand_in(x, scale=2.0)),
        (1, lambda: stand_in(x, scale=object())),
        (1, lambda: stand_in(x, scale=object())),
        (1, lambda: stand_in(x, draws=True)),
        (1, lambda: stand_in(x, draws=True)),
        (1, lambda: stand_in.eval()(x)),
        (0, lambda: stand_in(x)),
        (1, lambda: stand_in.double()(x.double())),
        (0, lambda: stand_in(x.double())),
    ]
    for number, (runs, call) in enumerate(calls):
        output = call()
        assert Counted.runs == before + runs, number
        assert isinstance(output["y"].add_(1.0), Unknown)
        before = Counted.runs
    assert stand_in(x.double())["y"].dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert stand_in(x.double())["scale"] == 1
        assert Counted.runs == before + 1


def test_whole_numbers_of_a_module_that_is_elsewhere_are_unknown_as_others() -> None:
    model, ids = Opened(coded=True), torch.tensor([[1, 5, 8]])
    assert torch.equal(through_the_stages(model, ids), model(ids))


def test_a_stand_in_follows_the_module_to_another_dtype() -> None:
    model = part_of(Model(over), 1).to(torch.bfloat16)
    assert model.embed(torch.zeros(1, 2, dtype=torch.long)).dtype == torch.bfloat16
    model.double().eval()
    assert model.embed(torch.zeros(1, 2, dtype=torch.long)).dtype == torch.float64
    assert not model.embed.training


def test_weights_that_are_elsewhere_tell_their_shape_but_no_number() -> None:
    model = part_of(Model(over), 0)
    weights = [
        ("head.weight", model.head.weight, r"pipeline_before and pipeline_after = \['head'\]"),
        ("layers.4.linear.weight", model.layers[4].linear.weight, "full_state_dict"),
    ]
    for name, weight, advice in weights:
        assert isinstance(weight, nn.Parameter)
        assert (len(weight.shape), weight.dtype, weight.requires_grad) == (2, torch.float32, True)
        assert (weight.is_leaf, weight.device.type, weight.layout, weight.grad) == (True, "cpu", torch.strided, None)
        assert name in repr(weight)
        for number in (weight.norm(), weight.data.T.sum(), weight.mT[0, 0]):
            with pytest.raises(PipelineError, match=rf"a number.* needs {name}, which is on another pipeline stage.*{advice}"):
                number.item()


def test_weights_that_are_elsewhere_are_not_set() -> None:
    weight = part_of(Model(over), 0).head.weight
    for write in (lambda: weight.data.mul_(2), lambda: weight.detach().zero_(), lambda: setattr(weight, "data", torch.zeros(3, 4))):
        with pytest.raises(PipelineError, match=r"writes to a weight, and that needs head\.weight, which is on another pipeline stage"):
            write()
    weight.grad, weight.requires_grad = None, False
    assert not weight.requires_grad


def test_coming_to_a_module_of_the_last_stage_is_an_error_with_its_name() -> None:
    with pytest.raises(PipelineError, match=r"head lives on the last pipeline stage.*register it before them"):
        part_of(Model(over), 0).head(torch.zeros(4))


def test_layers_of_other_ranks_can_be_walked_but_not_run_outside_a_step() -> None:
    model = part_of(Model(over), 0)
    assert len(model.layers) == 5
    assert [len(list(layer.parameters())) for layer in model.layers] == [2, 2, 0, 0, 0]
    assert model.layers[3].kind == "odd"
    assert model.layers[-1].kind == "even"
    with pytest.raises(IndexError):
        model.layers[5]
    with pytest.raises(PipelineError, match=r"layers\.3 is on another pipeline rank"):
        model.layers[3](torch.zeros(4))
    copy.deepcopy(model)


def test_what_shows_a_layer_is_made_once_and_follows_its_mode_and_who_takes_its_place() -> None:
    model = part_of(Model(over), 0)
    with model.layers.active(0):
        first = model.layers[0]
    model.eval()
    again = copy.deepcopy(model)
    with model.layers.active(0):
        assert model.layers[0] is first
        assert not first.training
        assert isinstance(first, Layer)
    model.layers.add_module("0", Layer(0))
    with model.layers.active(0):
        assert model.layers[0].linear is model.layers._modules["0"].linear is not first.linear
    with again.layers.active(0):
        assert again.layers[0].linear is again.layers._modules["0"].linear is not first.linear


def test_the_list_is_ready_again_after_any_exception() -> None:
    model, ids = part_of(Model(over), 0), torch.tensor([[1]])
    with pytest.raises(ZeroDivisionError), model.layers.active(0):
        1 / 0  # noqa: B018
    with pytest.raises(StageExit), model.layers.active(0):
        model(ids)
    with pytest.raises(PipelineError, match="inside another"), model.layers.active(0), model.layers.active(0):
        pass
    with pytest.raises(StageExit), model.layers.active(0):
        model(ids)


def test_leaving_a_stage_keeps_nothing_of_the_unwound_frames() -> None:
    seen: list[weakref.ref] = []

    def watched(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for layer in layers:
            x = layer(x)
            local = torch.zeros(3)
            seen.append(weakref.ref(local))
        return x

    model = part_of(Model(watched), 0)
    gc.disable()
    try:
        with model.layers.active(0):
            try:
                model(torch.tensor([[1]]))
            except StageExit as stop:
                output = stop.output
        assert output.shape == (1, 1, 4)
        assert all(ref() is None for ref in seen)
    finally:
        gc.enable()
