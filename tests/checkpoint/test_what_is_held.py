"""What a checkpoint takes of a module and gives back to it, whatever the module keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, convert
from lightning_par.checkpoint import CheckpointError
from tests.checkpoint.fits import QUIET
from tests.harness import run_world


class Base(L.LightningModule):
    """Trains on single numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.line = nn.Linear(1, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.line(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(
    module: L.LightningModule, steps: int, *, dp: int = 1, resume: Path | None = None, save: Path | None = None, **layout: Any
) -> L.Trainer:
    strategy = HybridParallelStrategy(dp=dp, zero_options={"min_unit_mb": 0}, **layout)
    trainer = L.Trainer(devices=dp, strategy=strategy, max_steps=steps, **QUIET | {"gradient_clip_val": None})
    trainer.fit(module, DataLoader(torch.arange(16.0).view(-1, 1) / 16, batch_size=2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


class Transposed(Base):
    """Weights and buffers in memory formats of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.register_buffer("mask", torch.randn(3, 4).t())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        image = batch.view(-1, 1, 1, 1).expand(-1, 3, 3, 3)
        return self.conv(image).pow(2).mean() + (self.turned * self.line(batch).mean()).pow(2).mean()


def _resume_transposed(folder: Path) -> None:
    first, again = Transposed(0), Transposed(1)
    saved = trained(first, 2, save=folder / "last")
    convert(folder / "last", folder / "last.ckpt", "ckpt")
    for path in (folder / "last", folder / "last.ckpt"):
        again = Transposed(1)
        resumed = trained(again, 2, resume=path)
        for name, value in first.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
            assert again.state_dict()[name].stride() == value.stride(), name
        for mine, theirs in zip(first.parameters(), again.parameters(), strict=True):
            for key, value in saved.optimizers[0].state[mine].items():
                assert torch.equal(resumed.optimizers[0].state[theirs][key], value), key
    straight = Transposed(0)
    trained(straight, 4)
    trained(again := Transposed(1), 4, resume=folder / "last")
    for name, value in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_K1_tensors_of_any_memory_format_are_saved_and_loaded(tmp_path: Path) -> None:
    run_world(_resume_transposed, 1, tmp_path)


class Counts(nn.Module):
    """Keeps what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"rows": 0, "last": torch.zeros(1)}

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen = {"rows": self.seen["rows"] + len(rows), "last": rows[-1].detach()}
        return rows

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Counting(Base):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.counts = Counts()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.counts(batch), batch_idx)


class Keeping(Counting):
    """And what only its own state dict tells."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return super().state_dict(*args, **options) | {"hidden": torch.ones(1)}


def _count(folder: Path) -> None:
    trained(Counting(0), 2, save=folder / "last")
    convert(folder / "last", folder / "last.ckpt", "ckpt")
    plain = Counting(1)
    plain.load_state_dict(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    read = Counting.load_from_checkpoint(folder / "last", seed=1, weights_only=True)
    resumed = [Counting(1), Counting(1)]
    for module, path in zip(resumed, (folder / "last", folder / "last.ckpt"), strict=True):
        trained(module, 2, resume=path)
    for module in (plain, read, *resumed):
        assert module.counts.seen["rows"] == 4
        assert module.counts.seen["last"].item() == 3 / 16
    with pytest.warns(UserWarning, match=r"not saved in .*: model\.hidden \(neither parameter nor buffer"):
        trained(Keeping(0), 2, save=folder / "keeping")
    trained(Base(0), 2, save=folder / "without")
    with pytest.warns(UserWarning, match=r"has no model\.counts\._extra_state"):
        trained(Counting(0), 2, resume=folder / "without")
    with pytest.raises(CheckpointError, match=r"that the model has not: model\.counts\._extra_state"):
        trained(Base(0), 2, resume=folder / "last")


def test_K2_what_modules_keep_besides_tensors_is_saved_and_loaded_or_named(tmp_path: Path) -> None:
    run_world(_count, 1, tmp_path)
