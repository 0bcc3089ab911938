"""fit, validate, test and predict in any order, in one process, with one strategy or with several."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.harness import WorldError, run_world
from tests.harness.models import TinyGPT, token_loader

LOADER = partial(token_loader, 6, rows=12)
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
LAYOUTS = [{"dp": 2}, {"dp": 2, "zero": 1}, {"tp": 2}, {"pp": 2}, {"cp": 2}]
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{axis}{degree}" for axis, degree in layout.items()))


class Net(TinyGPT):
    """Also tests and predicts; notes whether it is in training mode when it should be."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.training
        assert torch.is_grad_enabled()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert not self.training
        assert not torch.is_grad_enabled()
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits


def _tour(strategy: Any, devices: int) -> dict[str, Any]:
    """validate -> fit -> validate -> test -> fit on -> predict, with one Trainer and one module."""
    trainer = L.Trainer(devices=devices, strategy=strategy, max_epochs=1, **QUIET)
    module = Net(layers=2)
    is_ours = isinstance(trainer.strategy, HybridParallelStrategy)
    loader = LOADER(**(trainer.strategy.distributed_sampler_kwargs if is_ours else {}))
    seen = {"before": trainer.validate(module, loader, verbose=False)[0]["val_loss"]}
    trainer.fit(module, loader, loader)
    seen["after"] = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    seen["test"] = trainer.test(module, loader, verbose=False)[0]["test_loss"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader)
    seen["step"] = trainer.global_step
    seen["predicted"] = None if is_ours and trainer.strategy.layout.cp > 1 else trainer.predict(module, loader)
    seen["weights"] = trainer.strategy.full_state_dict() if is_ours else dict(module.state_dict())
    return seen


def _tour_rank(layout: dict[str, Any]) -> dict[str, Any]:
    return _tour(HybridParallelStrategy(**layout), 2)


@by_layout
def test_K23_entry_points_work_in_any_order_and_equal_one_process(layout: dict[str, Any]) -> None:
    wanted = _tour("auto", 1)
    ranks = run_world(_tour_rank, 2, layout)
    assert wanted["step"] == 4
    for seen in ranks:
        for key in ("before", "after", "test", "step"):
            assert seen[key] == pytest.approx(wanted[key], abs=1e-6), key
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(ranks[0]["weights"][name], value, rtol=1e-10, atol=1e-10)
    if layout.get("dp", 1) == 1 and "cp" not in layout:
        for seen in ranks:
            torch.testing.assert_close(seen["predicted"], wanted["predicted"], rtol=1e-10, atol=1e-10)


def test_K23_validate_needs_no_optimizer() -> None:
    run_world(_validate_without_optimizer, 2)


class NoOptimizer(TinyGPT):
    def configure_optimizers(self) -> None:
        raise AssertionError("validation must not ask for an optimizer")


def _validate_without_optimizer() -> None:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(tp=2), **QUIET)
    trainer.validate(NoOptimizer(layers=2), LOADER(), verbose=False)


def _two_trainers() -> list[list[float]]:
    losses = []
    for layout in ({"tp": 2}, {"pp": 2}):
        trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), max_steps=2, **QUIET)
        trainer.fit(Net(layers=2), LOADER())
        losses.append(trainer.callback_metrics["train_loss"].item())
    return losses


def test_two_trainers_one_after_the_other_each_with_its_own_module() -> None:
    for losses in run_world(_two_trainers, 2):
        assert losses[0] == pytest.approx(losses[1], abs=1e-10)


def _cut_twice(first: dict[str, Any], second: dict[str, Any]) -> None:
    module = Net(layers=2)
    for layout in (first, second):
        L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), max_steps=1, **QUIET).fit(module, LOADER())


@pytest.mark.parametrize(("first", "second"), [({"tp": 2}, {"pp": 2}), ({"pp": 2}, {"tp": 2}), ({"tp": 2}, {"tp": 2})])
def test_a_module_that_another_strategy_has_cut_is_refused_by_name(first: dict[str, int], second: dict[str, int]) -> None:
    with pytest.raises(WorldError, match=r"Net .*cut.* by another strategy"):
        run_world(_cut_twice, 2, first, second)


def _whole_module_goes_on() -> float:
    module = Net(layers=2)
    for layout in ({"dp": 2}, {"tp": 2}):
        trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), max_steps=1, **QUIET)
        trainer.fit(module, LOADER())
    return trainer.callback_metrics["train_loss"].item()


def test_a_module_that_a_strategy_left_whole_may_go_to_another() -> None:
    first, second = run_world(_whole_module_goes_on, 2)
    assert first == second


def _on_manual_optimization(layout: dict[str, Any]) -> None:
    module = Net(layers=2)
    module.automatic_optimization = False
    L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), max_steps=1, **QUIET).fit(module, LOADER())


def test_manual_optimization_under_a_pipeline_is_refused() -> None:
    with pytest.raises(WorldError, match="manual optimization with pp=2"):
        run_world(_on_manual_optimization, 2, {"pp": 2})


class _Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index))


class _Sees(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(2))
        self.seen: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.seen += [int(row[0]) for row in batch]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _samples() -> tuple[int, list[int]]:
    strategy = HybridParallelStrategy(dp=2, pp=2)
    module = _Sees()
    loader = torch.utils.data.DataLoader(_Rows(), batch_size=3, shuffle=True)
    L.Trainer(devices=4, strategy=strategy, max_epochs=1, **(QUIET | {"precision": "32-true"})).fit(module, loader)
    return strategy.distributed_sampler_kwargs["rank"], module.seen


def test_T18_ranks_of_a_replica_see_the_same_samples_and_replicas_share_the_epoch() -> None:
    by_replica: dict[int, list[list[int]]] = {0: [], 1: []}
    for replica, seen in run_world(_samples, 4):
        by_replica[replica].append(seen)
    for first, second in by_replica.values():
        assert first == second
    assert sorted(by_replica[0][0] + by_replica[1][0]) == list(range(14))
