"""What is found out before a module is cut: the order of use, and what layers cost. Training afterwards is as if nobody had looked."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)
from torchmetrics import MeanMetric

from lightning_par import HybridParallelStrategy
from lightning_par.strategy.rehearsal import NoSampleError, sample
from tests.harness import WorldError, run_world
from tests.harness.models import QUIET
from tests.harness.parity import assert_same, fit, fit_world

ROWS = TensorDataset(torch.arange(10.0)[:, None])


# --- a batch to try ------------------------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(10.0))


class Once(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        raise AssertionError("nothing must be taken from it")


class NoSize:
    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1]])


def _rows(batch: Any) -> list[float]:
    return batch[0].flatten().tolist()


class Endless(Dataset):
    """Any place has a sample: it has no length."""

    def __getitem__(self, place: int) -> int:
        return place


def test_a_batch_is_made_of_the_first_samples_whatever_the_sampler_says() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert _rows(sample(DataLoader(ROWS, batch_size=3, shuffle=True, generator=generator))) == [0, 1, 2]
    assert torch.equal(generator.get_state(), before)
    assert _rows(sample(DataLoader(ROWS, batch_size=30))) == list(range(10))
    assert _rows(sample(DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), 4, False)))) == [0, 1, 2, 3]
    assert sample(DataLoader(ROWS, batch_size=None))[0].tolist() == [0]
    assert sample(DataLoader(Stream(), batch_size=2)).tolist() == [0, 1]
    assert sample(DataLoader(Endless(), batch_size=2, sampler=[5, 6, 7])).tolist() == [0, 1]
    both = sample({"a": DataLoader(ROWS, batch_size=1), "b": [DataLoader(Stream(), batch_size=2)]})
    assert (_rows(both["a"]), both["b"][0].tolist()) == ([0], [0, 1])
    assert sample(range(5, 9)) == 5


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (None, "there is no dataloader"),
        (DataLoader(Once(), batch_size=2), "the Once can be read only once"),
        (Once(), "can be read only once"),
        (DataLoader(ROWS, batch_sampler=NoSize()), "the NoSize of the dataloader does not tell its batch_size"),
        (DataLoader(TensorDataset(torch.zeros(0))), "the dataset is empty"),
        ((range(0)), "the range is empty"),
        (CombinedLoader([DataLoader(ROWS)]), "a CombinedLoader"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_gives_no_batch_is_named(data: Any, reason: str) -> None:
    with pytest.raises(NoSampleError, match=reason):
        sample(data)


# --- layers weighed by time ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.dropout, self.seconds = nn.Linear(6, 6), nn.Dropout(0.2), seconds
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        time.sleep(self.seconds)
        return x + self.dropout(torch.tanh(self.linear(x)))


class Net(L.LightningModule):
    """Its first layer is slow; it draws random numbers, counts, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.layers = nn.ModuleList(Block(0.03 if i == 0 else 0.0) for i in range(5))
        self.head = nn.Linear(6, 3)
        self.metric, self.seen, self.count, self.hooks = MeanMetric(), [], 0, 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.count += 1
        self.seen.append(batch_idx)
        self.metric.update(x.sum())
        x = self.embed(x + 0.1 * torch.randn_like(x))
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = self.embed(batch[0])
        for layer in self.layers:
            x = layer(x)
        self.log("val_loss", F.cross_entropy(self.head(x), batch[1]))

    def train_dataloader(self) -> DataLoader:
        self.hooks += 1
        generator = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator))
        torch.randn(self.hooks)  # a hook that draws
        return DataLoader(data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert all(parameter.grad is None for parameter in self.parameters())
        return torch.optim.Adam(self.parameters(), lr=0.01)


def _train(balance: Any, options: dict[str, Any]) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    strategy = HybridParallelStrategy(pp=2, microbatches=2, balance=balance, **options)
    size = torch.distributed.get_world_size()
    trainer = L.Trainer(devices=size, strategy=strategy, max_epochs=1, num_sanity_val_steps=0, limit_val_batches=0, **QUIET)
    module = Net()
    trainer.fit(module)
    weights = strategy.full_state_dict() or {}
    return {
        "sizes": strategy._assembled.pipeline.placement.sizes,
        "weights": {name: weight.tolist() for name, weight in weights.items()},
        "buffers": {name: buffer.tolist() for name, buffer in module.named_buffers()},
        "counted": (module.count, module.seen, module.hooks, module.metric.update_count, module.metric.compute().item()),
        "draw": torch.randn(3).tolist(),
        "loss": trainer.callback_metrics["train_loss"].item(),
    }


@pytest.mark.parametrize("options", [{}, {"schedule": "zb_h1", "zero": 1}, {"zero": 3, "dp": 2}], ids=["1f1b", "zb_h1 zero1", "dp2 zero3"])
def test_a_cut_by_measured_time_trains_bit_for_bit_as_the_same_cut_by_hand(options: dict[str, Any]) -> None:
    size = 2 * options.get("dp", 1)
    profiled = run_world(_train, size, "profile", options)
    assert [run["sizes"] for run in profiled] == [(1, 4)] * size
    assert profiled == run_world(_train, size, (1, 4), options)
    assert profiled[0]["weights"]


def _evaluate() -> tuple[int, ...]:
    strategy = HybridParallelStrategy(pp=2, balance="profile")
    trainer = L.Trainer(devices=2, strategy=strategy, **QUIET)
    module = Net()
    trainer.validate(module, verbose=False)
    assert module.training
    return strategy._assembled.pipeline.placement.sizes


def test_evaluation_weighs_its_own_step() -> None:
    assert run_world(_evaluate, 2) == [(1, 4)] * 2


class FromOnce(Net):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Once(), batch_size=2)


class Failing(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        raise LookupError("no such row")


def _refused(kind: type[Net]) -> None:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(pp=2, balance="profile"), max_steps=1, **QUIET)
    trainer.fit(kind())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (
            FromOnce,
            r"balance=profile tries the step on a batch, but the Once can be read only once; balance by parameters, by flops or by hand",
        ),
        (Failing, r"(?s)LookupError: no such row.*as balance=profile tried the step to weigh the layers"),
    ],
)
def test_where_there_is_nothing_to_measure_it_is_said(kind: type[Net], reason: str) -> None:
    with pytest.raises(WorldError, match=reason):
        run_world(_refused, 2, kind)


# --- the order of use ----------------------------------------------------------------------------------------------------------------


class Disordered(L.LightningModule):
    """Registers its modules in another order than that of use, and uses some in several places."""

    def __init__(self, case: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.shift = nn.Linear(6, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.embed = nn.Linear(4, 6)
        if case == "said":
            self.pipeline_before, self.pipeline_after = ["embed"], ["norm", "head"]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x)
        if self.case in ("said", "unknown"):
            float(torch.rand(()))  # needs a number that no dry run has
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(self.norm(x)), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Carrying(nn.Module):
    """Takes the same at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + given


def rows(num_replicas: int = 1, rank: int = 0) -> DataLoader:
    x = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=6)


class Handed(Disordered):
    """Gives what the first stage computes to every layer, and past them to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Carrying() for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        x = first = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.shift(first))
        loss = F.cross_entropy(self.head(self.norm(x + first)), y)
        self.log("train_loss", loss)
        return loss


@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (partial(Disordered, ""), {"pp": 2}),
        (partial(Disordered, "said"), {"pp": 3}),
        (Handed, {"pp": 2, "schedule": "zbv", "chunks": 2, "zero": 1}),
        (Handed, {"pp": 3, "balance": "profile"}),
    ],
    ids=["seen", "said", "handed on", "handed on, weighed"],
)
def test_modules_stand_where_they_are_used(module: Any, layout: dict[str, Any]) -> None:
    assert_same(fit_world(module, rows, layout, layout["pp"], gradient_clip_val=None), fit(module, rows, gradient_clip_val=None))


class Aided(Disordered):
    """In training, a head of its own on what comes before the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.aid = nn.Linear(6, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + F.cross_entropy(self.aid(self.shift(self.embed(batch[0]))), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))


def _validated_first(layout: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    strategy = HybridParallelStrategy(**layout) if layout else "auto"
    trainer = L.Trainer(devices=2 if layout else 1, strategy=strategy, max_steps=2, precision="64-true", **QUIET)
    module = Aided()
    (before,) = trainer.validate(module, rows(), verbose=False)
    trainer.fit(module, rows())
    (after,) = trainer.validate(module, rows(), verbose=False)
    return [before["val_loss"], after["val_loss"]]


def test_a_module_that_was_cut_for_validation_can_be_trained() -> None:
    assert run_world(_validated_first, 2, {"pp": 2}) == [pytest.approx(_validated_first(None), abs=1e-9)] * 2


HOOKS: list[str] = []


class Shy(Disordered):
    """Its training step needs numbers, its validation step does not. It tells which of its dataloaders were asked for."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        float(self.embed(batch[0]).detach().sum())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        HOOKS.append("train")
        return rows()

    def val_dataloader(self) -> DataLoader:
        HOOKS.append("val")
        return rows()


class Said(Shy):
    """Neither of its steps runs without numbers."""

    def __init__(self) -> None:
        super().__init__("said")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return Disordered.training_step(self, batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


def _told(module: L.LightningModule, *data: Any) -> tuple[list[str], list[str], tuple[Any, ...]]:
    strategy = HybridParallelStrategy(pp=2)
    HOOKS.clear()
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, num_sanity_val_steps=0, limit_val_batches=0, **QUIET)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module.double(), *data)
    assert strategy._assembled.pipeline.device == strategy.root_device
    placement = strategy._assembled.pipeline.placement
    return [str(one.message) for one in told if "run dry" in str(one.message)], HOOKS, (placement.before, placement.after)


def test_a_step_that_cannot_run_dry_is_told_once_with_the_reason() -> None:
    (((told,), _, _), (nothing, _, _)) = run_world(_told, 2, Disordered("said"), rows())
    assert re.match(
        r"training_step could not be run dry \(RuntimeError: .*item.*stand .* as they are registered, or as pipeline_before", told
    )
    assert nothing == []


def test_where_another_step_could_be_run_dry_it_is_told_that_it_decides() -> None:
    ((told,), hooks, ends), _ = run_world(_told, 2, Shy())
    assert ends == (("shift",), ("norm", "head"))
    assert hooks.count("train") == 2, "the run itself asks once"
    assert "as validation_step uses them" in told


def test_each_source_of_batches_is_asked_once_however_many_steps_are_tried() -> None:
    (((told,), hooks, _), _) = run_world(_told, 2, Said())
    assert "as they are registered" in told
    assert hooks.count("train") == 2, "the run itself asks once"


def test_an_order_that_can_neither_be_seen_nor_was_said_is_refused_with_the_way_out() -> None:
    with pytest.raises(WorldError, match=r"self\.log\('train_loss', \.\.\.\) needs .*pipeline_after = \[|pipeline_before = \["):
        fit_world(partial(Disordered, "unknown"), rows, {"pp": 2}, 2, gradient_clip_val=None)


class Attending(nn.Module):
    """Returns weights with the hidden state, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x))
        return y, y.softmax(-1)


class Attended(Disordered):
    """Uses the weights in some steps only, in training when a number says so."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layers, self.where = nn.ModuleList(Attending() for _ in range(4)), where

    def _step(self, batch: list[Tensor], aside: bool) -> Tensor:
        x, weights = self.embed(batch[0]), []
        for layer in self.layers:
            x, w = layer(x)
            if self.training or aside:
                weights.append(w)
        loss = F.cross_entropy(self.head(self.norm(x)), batch[1])
        return loss + sum(w.square().mean() for w in weights if w is not None) if aside else loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self._step(batch, self.where == "later" and self.global_step > 0)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._step(batch, self.where == "validation" and not self.training))

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._step(batch, self.where == "test"))


def _fit_and_test(build: Any, pp: int = 2) -> float | str:
    """The loss that the test logged, or the error that came before it."""
    strategy = HybridParallelStrategy(pp=pp) if pp > 1 else "auto"
    trainer = L.Trainer(devices=pp, strategy=strategy, max_steps=2, precision="64-true", **QUIET)
    module = build()
    try:
        trainer.fit(module, rows(), rows())
        return trainer.test(module, rows(), verbose=False)[0]["test_loss"]
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("where", "refusal"),
    [
        ("later", "needs what layers.0 returned, which is on another pipeline stage"),
        ("test", "needs what layers.0 returned, which is on another pipeline stage"),
        ("validation", "the output of layers.0 is used again after the layers"),
    ],
)
def test_what_layers_return_besides_is_used_in_some_steps(where: str, refusal: str) -> None:
    """Never a wrong number: who uses what has stayed on another stage is told, wherever a dry run could not see it."""
    assert any(refusal in str(told) for told in run_world(_fit_and_test, 2, partial(Attended, where), timeout=60))


def test_what_layers_return_besides_and_nobody_uses_changes_nothing() -> None:
    build = partial(Attended, "nowhere")
    assert run_world(_fit_and_test, 2, build, timeout=60) == [pytest.approx(_fit_and_test(build, pp=1), abs=1e-9)] * 2


class Drawing(Dataset):
    """Adds noise that it draws itself, and counts."""

    def __init__(self, kind: str) -> None:
        make = {"torch": torch.Generator().manual_seed, "numpy": np.random.default_rng, "python": random.Random}[kind]
        self.kind, self.generator, self.count = kind, make(7), 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        self.count += 1
        draw = {"torch": lambda: torch.rand(1, generator=self.generator).item(), "numpy": lambda: self.generator.random()}
        noise = draw.get(self.kind, lambda: self.generator.random())()
        return torch.full((4,), noise + 0.01 * self.count, dtype=torch.float64), place % 2

    def collate(self, weight: float, samples: list[Any]) -> list[Tensor]:
        x, y = default_collate(samples)
        return [x * weight * (1 + 0.1 * self.count), y]


def drawn(kind: str, num_replicas: int = 1, rank: int = 0) -> DataLoader:
    data = Drawing(kind)
    return DataLoader(ConcatDataset([Subset(data, range(12))]), batch_size=6, collate_fn=partial(data.collate, 0.5))


@pytest.mark.parametrize("kind", ["torch", pytest.param("numpy", marks=pytest.mark.slow), pytest.param("python", marks=pytest.mark.slow)])
def test_data_that_draws_and_counts_is_as_if_nobody_had_looked(kind: str) -> None:
    data = partial(drawn, kind)
    assert_same(fit_world(Disordered, data, {"pp": 2}, 2, gradient_clip_val=None), fit(Disordered, data, gradient_clip_val=None))


class Ending(Disordered):
    """Ends the fit when it validates, which it does not."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.trainer.should_stop = True


class AskingForItsDtype(Disordered):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert self.dtype == torch.float64
        return super().training_step([batch[0].to(self.device, self.dtype), batch[1]], batch_idx)


@pytest.mark.parametrize("module", [Ending, AskingForItsDtype])
def test_trainer_and_module_are_as_in_one_process(module: Any) -> None:
    assert_same(fit_world(module, rows, {"pp": 2}, 2, gradient_clip_val=None), fit(module, rows, gradient_clip_val=None))


class Collected(Disordered):
    """Goes back to what an early layer returned, in some steps only: behind what a dry run saw."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def _step(self, batch: list[Tensor], back: bool) -> Tensor:
        x, states = self.embed(batch[0]), []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        return F.cross_entropy(self.head(self.norm(x + states[0] if back else x)), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, self.where == "later" and self.global_step > 0)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self._step(batch, self.where == "test"))


@pytest.mark.parametrize("where", ["later", "test"])
def test_early_outputs_that_are_used_in_some_steps_are_refused(where: str) -> None:
    told = run_world(_fit_and_test, 2, partial(Collected, where), timeout=60)
    assert any("needs what layers.0 returned, which is on another pipeline stage" in str(one) for one in told)
