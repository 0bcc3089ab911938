"""What a step logs is the number that one process would log, on every rank and under every layout."""

from __future__ import annotations

import csv
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightning_par import HybridParallelStrategy
from tests.harness import WorldError, run_world
from tests.harness.models import TinyGPT, token_loader

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "microbatches": 3},
    "cp2": {"cp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "dp2 pp2": {"dp": 2, "pp": 2},
}
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
}


def _loader(rows: int, batch: int, **place: int) -> Any:
    """``ignore`` is off: with unequally many labels replicas average plainly, as DDP does, and one process does not."""
    loader = token_loader(batch, rows=rows, **place)
    loader.dataset.labels = loader.dataset.ids.clone()
    return loader


class Net(TinyGPT):
    """Logs in every way: per step, per epoch, with each reduction, with a shorter last batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        ids = batch["input_ids"].double()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("low", ids.min(), on_step=True, on_epoch=True, reduce_fx="min")
        self.log("high", ids.max(), on_step=True, on_epoch=True, reduce_fx=torch.max)
        self.log("samples", float(len(ids)), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log_dict({"twice": 2 * loss, "constant": 3.5}, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True)


def _fit(strategy: Any, devices: int, logger: Any = False) -> dict[str, dict[str, float]]:
    trainer = L.Trainer(devices=devices, strategy=strategy, max_epochs=2, logger=logger, **QUIET)
    place = trainer.strategy.distributed_sampler_kwargs if isinstance(trainer.strategy, HybridParallelStrategy) else {}
    validation = [_loader(6, 4, **place), _loader(10, 4, **place)]
    trainer.fit(Net(layers=2), _loader(10, 4, **place), validation)
    seen = {"callbacks": trainer.callback_metrics, "progress bar": trainer.progress_bar_metrics, "logged": trainer.logged_metrics}
    return {kind: {name: float(value) for name, value in metrics.items()} for kind, metrics in seen.items()}


def _fit_rank(layout: dict[str, Any], devices: int) -> dict[str, dict[str, float]]:
    return _fit(HybridParallelStrategy(**layout), devices)


@cache
def _reference() -> dict[str, dict[str, float]]:
    return _fit("auto", 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_T19_T20_L9_L10_N3_P20_every_logged_number_is_that_of_one_process_on_every_rank(name: str) -> None:
    layout = LAYOUTS[name]
    size = 4 if name in ("tp2 cp2", "dp2 pp2") else 2
    wanted = _reference()
    assert {"loss_epoch", "low_step", "samples_epoch", "val_loss/dataloader_idx_1"} <= wanted["callbacks"].keys()
    for seen in run_world(_fit_rank, size, layout, size):
        for kind, metrics in wanted.items():
            assert seen[kind] == pytest.approx(metrics, rel=1e-6), kind


def _fit_with_csv(folder: Path) -> float:
    _fit(HybridParallelStrategy(pp=2), 2, logger=CSVLogger(folder, name="run", version="0"))
    return _reference()["callbacks"]["loss_step"]


def test_P19_the_loggers_file_has_the_loss_under_a_pipeline(tmp_path: Path) -> None:
    wanted = run_world(_fit_with_csv, 2, tmp_path)[0]
    with (tmp_path / "run" / "0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss_step"]]
    assert len(rows) == 6
    assert float(rows[-1]["loss_step"]) == pytest.approx(wanted, rel=1e-6)
    assert len(list(tmp_path.rglob("metrics.csv"))) == 1


def _warnings_of_a_fit() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(HybridParallelStrategy(dp=2), 2)
    return [str(warning.message) for warning in caught]


def test_nobody_is_told_to_synchronize_what_is_the_same_everywhere() -> None:
    for told in run_world(_warnings_of_a_fit, 2):
        assert not [message for message in told if "sync_dist" in message]


class OwnNames(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log(f"loss_of_{self.global_rank}", loss)
        return loss


def _log_own_names() -> None:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(), max_steps=2, logger=False, **QUIET)
    trainer.fit(OwnNames(layers=2), _loader(8, 4))


def test_ranks_that_log_different_names_hear_of_it() -> None:
    with pytest.raises(WorldError, match=r"(?s)different names.*'loss_of_0'.*different names.*'loss_of_1'"):
        run_world(_log_own_names, 2)


class OneRankOnly(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        if self.global_rank == 0:
            self.log("mine", loss, rank_zero_only=True)
        return loss


def _log_on_rank_0() -> bool:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(), max_steps=2, logger=False, **QUIET)
    trainer.fit(OneRankOnly(layers=2), _loader(8, 4))
    return "mine" in trainer.callback_metrics


def test_rank_zero_only_stays_on_rank_0() -> None:
    assert run_world(_log_on_rank_0, 2) == [True, False]


class Diverging(Net):
    """The monitored value falls on one rank and rises on the other; their mean rises from epoch 2 on."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        epoch = self.current_epoch
        self.log("watched", float(-epoch if self.global_rank == 0 else epoch + (0 if epoch < 2 else 10 * epoch)))


def _stop_early() -> tuple[int, int]:
    stop = EarlyStopping("watched", patience=1)
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(), max_epochs=9, logger=False, callbacks=[stop], **QUIET)
    trainer.fit(Diverging(layers=2), _loader(8, 4, num_replicas=2), _loader(4, 4))
    return trainer.global_step, stop.stopped_epoch


def test_L1_early_stopping_takes_one_decision_for_all() -> None:
    first, second = run_world(_stop_early, 2)
    assert first == second
    assert 0 < first[1] < 8


def _reduce() -> dict[str, Any]:
    strategy = HybridParallelStrategy(dp=2)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, logger=False, **QUIET)
    trainer.fit(Net(layers=2), _loader(4, 4))
    mine = torch.tensor(5 if strategy.global_rank == 0 else 4)
    ops = {op: strategy.reduce(mine, reduce_op=op).item() for op in ("mean", "sum", "min", "max")}
    return ops | {
        "input": mine.item(),
        "ones": strategy.reduce(torch.ones(4)).tolist(),
        "any": strategy.reduce_boolean_decision(strategy.global_rank == 1, all=False),
        "all": strategy.reduce_boolean_decision(strategy.global_rank == 1),
    }


def test_G1_G3_reduce_means_what_it_says_also_of_integers() -> None:
    for rank, seen in enumerate(run_world(_reduce, 2)):
        assert seen == {
            "mean": 4.5, "sum": 9, "min": 4, "max": 5, "input": 5 - rank, "ones": [1.0] * 4, "any": True, "all": False,
        }  # fmt: skip


class TooMany(Net):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        for place in range(200):
            self.log(f"value_{place}", loss + place)
        return loss


def _log_200() -> list[float]:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(), max_steps=1, logger=False, **QUIET)
    trainer.fit(TooMany(layers=2), _loader(4, 4, num_replicas=2))
    return [trainer.callback_metrics[f"value_{place}"].item() for place in range(200)]


def test_a_step_may_log_hundreds_of_values() -> None:
    first, second = run_world(_log_200, 2)
    assert first == second
    assert first[199] - first[0] == pytest.approx(199, abs=1e-5)
