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
from lightning_par.checkpoint import open_checkpoint
from lightning_par.strategy.weight_averaging import CURRENT
from tests.checkpoint.fits import QUIET
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
    module.load_state_dict(open_checkpoint(tmp_path / "last").meta[CURRENT])
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
