"""Averages of weights beside checkpoints: kept, resumed from bit for bit, and what the checkpoint's weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, convert
from lightning_par.checkpoint import CURRENT_STATE, CheckpointError, open_checkpoint
from lightning_par.strategy.folders import read_run
from tests.checkpoint.fits import QUIET, SaveAt
from tests.checkpoint.test_what_is_held import Counts
from tests.harness import run_world


class Tied(L.LightningModule):
    """Two names for one weight, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.second(self.first(batch).tanh()).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.second(self.first(batch).tanh()).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def _data() -> DataLoader:
    return DataLoader(torch.randn(24, 5, generator=torch.Generator().manual_seed(2)), batch_size=2)


def _fit(layout: dict[str, Any], steps: int, save: Path | None = None, resume: Path | None = None) -> dict[str, Any]:
    precision = layout.pop("precision", "32-true")
    strategy = HybridParallelStrategy(dp=2, **layout) if layout else "auto"
    average, module = EMAWeightAveraging(decay=0.5), Tied(0 if resume is None else 1)
    how = QUIET | {"callbacks": [average], "precision": precision, "gradient_clip_val": None}
    trainer = L.Trainer(devices=2 if layout else 1, strategy=strategy, max_steps=steps, **how)

    class Saves(L.Callback):
        """At the last step, before the averages take the place of the weights."""

        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if save is not None and trainer.global_step == steps:
                trainer.save_checkpoint(save)

    trainer.callbacks.append(Saves())
    trainer.fit(module, _data(), _data(), ckpt_path=resume)
    averaged = {name: value.clone() for name, value in average._average_model.state_dict().items()}
    validated = trainer.validate(module, _data(), ckpt_path=save, verbose=False)[0]["val"] if save is not None else None
    return {"averaged": averaged, "validated": validated}


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"zero": 2}, marks=pytest.mark.slow),
        {"zero": 3},
        pytest.param({"zero": 2, "precision": "bf16-true"}, marks=pytest.mark.slow),
        pytest.param({"zero": 3, "precision": "bf16-true"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_averages_go_on_from_a_checkpoint(layout: dict[str, Any], tmp_path: Path) -> None:
    straight = run_world(_fit, 2, dict(layout), 6)[0]["averaged"]
    saved = run_world(_fit, 2, dict(layout), 3, tmp_path / "last")[0]
    convert(tmp_path / "last", tmp_path / "last.ckpt", "ckpt")
    for name in ("last", "last.ckpt"):
        resumed = run_world(_fit, 2, dict(layout), 6, None, tmp_path / name)[0]["averaged"]
        assert straight.keys() == resumed.keys()
        for key, value in straight.items():
            assert torch.equal(resumed[key], value), (name, key)
    read = Tied.load_from_checkpoint(tmp_path / "last", seed=3, weights_only=True)
    assert read.first.weight.equal(saved["averaged"]["module.first.weight"].float())
    module = Tied(0)
    module.load_state_dict(read_run(tmp_path / "last")[CURRENT_STATE])
    assert not module.first.weight.equal(read.first.weight)


@pytest.mark.slow
def test_plain_lightning_and_we_take_each_others_averages(tmp_path: Path) -> None:
    plain = _fit({}, 3, tmp_path / "plain.ckpt")
    resumed = run_world(_fit, 2, {"zero": 1}, 3, None, tmp_path / "plain.ckpt")[0]["averaged"]
    for key, value in plain["averaged"].items():
        assert torch.equal(resumed[key], value), key
    saved = run_world(_fit, 2, {"zero": 1}, 3, tmp_path / "ours")[0]
    back = _fit({}, 3, None, tmp_path / "ours")["averaged"]
    for key, value in saved["averaged"].items():
        assert torch.equal(back[key], value), key


class Counting(Tied):
    """With an extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.counts = Counts()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.counts(batch), batch_idx)


def _again(trainer: L.Trainer, module: L.LightningModule, steps: int) -> dict[str, Any]:
    trainer.fit_loop.epoch_loop.max_steps = steps
    trainer.fit(module, _data(), _data())
    return _averaged(trainer)


def _averaged(trainer: L.Trainer) -> dict[str, Any]:
    (average,) = (callback for callback in trainer.callbacks if isinstance(callback, EMAWeightAveraging))
    return {name: value.clone() for name, value in average._average_model.state_dict().items() if isinstance(value, Tensor)}


def _fit_twice(zero: int, folder: Path) -> list[dict[str, Any]]:
    """Averages of a first fit, of a second one of the same Trainer, and of one that goes on from a checkpoint after a validation."""
    trainer = _trainer([SaveAt(folder, 2)], dp=2, zero=zero)
    found = [_again(trainer, module := Counting(0), 3), _again(trainer, module, 5)]
    trainer, module = _trainer([], dp=2, zero=zero), Counting(1)
    trainer.validate(module, _data(), verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = 3
    trainer.fit(module, _data(), _data(), ckpt_path=folder)
    assert module.counts.seen["rows"] == 6
    return [*found, _averaged(trainer)]


def _fit_sharded_and_whole(folder: Path) -> list[list[dict[str, Any]]]:
    return [_fit_twice(zero, folder / f"{zero}") for zero in (3, 0)]


def _trainer(callbacks: list[L.Callback], *, average: bool = True, **layout: Any) -> L.Trainer:
    callbacks = [EMAWeightAveraging(decay=0.5)] * average + callbacks
    how = QUIET | {"callbacks": callbacks, "gradient_clip_val": None}
    return L.Trainer(devices=layout.get("dp", 1), strategy=HybridParallelStrategy(**layout), max_steps=3, **how)


def test_one_trainer_averages_in_several_fits_and_modules_have_their_extra_state(tmp_path: Path) -> None:
    sharded, whole = run_world(_fit_sharded_and_whole, 2, tmp_path)[0]
    for mine, theirs in zip(sharded, whole, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.allclose(value, mine[name]), name
    for name, value in sharded[0].items():
        assert torch.equal(sharded[2][name], value), name


class Changed(Tied):
    """Edits what it loads."""

    def __init__(self, edit: Any) -> None:
        super().__init__(1)
        self.edit = edit

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.edit(checkpoint)


class Renamed(Changed):
    """Calls the first layer the third."""

    def __init__(self, edit: Any) -> None:
        super().__init__(edit)
        self.third = self.first
        del self.first

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return self.second(self.third(batch).tanh()).square().mean()


class Shorter(Changed):
    """Has no buffer, and does not mind."""

    def __init__(self) -> None:
        super().__init__(lambda _: None)
        del self.seen
        self.strict_loading = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch).tanh()).square().mean()


class Start(L.Callback):
    """What training begins with."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.weights = {name: value.clone() for name, value in module.state_dict().items()}
        self.averages = _averaged(trainer) if len(trainer.callbacks) > 1 else {}


def _begin(module: L.LightningModule, path: Path, **options: Any) -> Start:
    start = Start()
    _trainer([start], **options).fit(module, _data(), ckpt_path=path)
    return start


def _nine(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["seen"] = torch.full((3,), 9.0)


def _rename(*keys: str) -> Any:
    def edit(checkpoint: dict[str, Any]) -> None:
        for key in keys:
            checkpoint[key] = {name.replace("first", "third"): weight for name, weight in checkpoint[key].items()}

    return edit


def _load_edited(folder: Path) -> None:
    _trainer([SaveAt(folder / "both", 2)]).fit(Tied(0), _data())
    _trainer([SaveAt(folder / "one", 2)], average=False).fit(Tied(0), _data())
    convert(folder / "both", folder / "both.ckpt", "ckpt")
    saved = torch.load(folder / "both.ckpt", weights_only=True)
    averages, current = saved["state_dict"], saved[CURRENT_STATE]
    assert not averages["first.weight"].equal(current["first.weight"])
    for path in (folder / "both", folder / "both.ckpt"):
        start = _begin(Changed(_nine), path)
        assert (start.weights["seen"].tolist(), start.averages["module.seen"].tolist()) == ([2.0] * 3, [9.0] * 3)
        assert start.weights["second.weight"].equal(current["first.weight"])
        with pytest.warns(UserWarning, match="training goes on from the averages"):
            start = _begin(Changed(_nine), path, average=False)
        assert start.weights["seen"].tolist() == [9.0] * 3
        assert start.weights["first.weight"].equal(averages["first.weight"])
        start = _begin(Renamed(_rename("state_dict", CURRENT_STATE)), path, restore_optimizer=False)
        assert start.weights["third.weight"].equal(current["first.weight"])
        assert start.averages["module.third.weight"].equal(averages["first.weight"])
        with pytest.raises(CheckpointError, match=rf"{CURRENT_STATE} of checkpoint .* holds weights that the model has not: model.first"):
            _begin(Renamed(_rename("state_dict")), path, restore_optimizer=False)
        assert _begin(Shorter(), path).weights["first.weight"].equal(current["first.weight"])
    assert _begin(Changed(_nine), folder / "one").averages["module.seen"].tolist() == [9.0] * 3
    start = _begin(Renamed(_rename("state_dict")), folder / "one", restore_optimizer=False)
    assert start.averages["module.third.weight"].equal(start.weights["second.weight"])


def test_hooks_edit_and_rename_averages_and_what_is_trained_as_in_lightning(tmp_path: Path) -> None:
    run_world(_load_edited, 1, tmp_path)


class Drops(L.Callback):
    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("first.bias")
        if trainer.global_rank == 0 and trainer.global_step > 2:
            checkpoint["state_dict"]["mine"] = torch.zeros(1)


def _save_less(folder: Path) -> list[str]:
    """A hook leaves a weight out; one rank's hook puts something strange in; a buffer goes."""
    trainer, module = _trainer([SaveAt(folder, 2)], dp=2), Tied(0)
    trainer.callbacks.insert(0, Drops())
    trainer.fit(module, _data())
    with pytest.raises(CheckpointError) as error:
        trainer.save_checkpoint(folder)
    module.seen = None
    told = trainer.strategy.full_state_dict()
    return [str(error.value), *sorted(told or ())]


def test_L11_what_hooks_leave_out_or_put_in_is_the_same_for_all_ranks(tmp_path: Path) -> None:
    first, second = run_world(_save_less, 2, tmp_path / "last")
    assert first[0] == second[0]
    assert "as ranks [0] see it: on_save_checkpoint has put mine (Tensor) into checkpoint['state_dict']" in first[0]
    assert first[1:] == ["first.bias", "first.weight", "second.weight"]
    entries = open_checkpoint(tmp_path / "last").entries
    assert "model.first.bias" in entries
    assert "current.first.bias" not in entries
