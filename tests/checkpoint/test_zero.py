"""Checkpoints of sharded runs: state finds its elements whatever the padding was, and loading what was saved changes nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import Shard, read_index, read_meta, read_tensors
from tests.checkpoint.fits import QUIET, STEPS, Net, assert_equal, fit_world, moments
from tests.harness import run_world
from tests.harness.models import token_loader

REST = (1, 2, 3)
CASES = [(stage, rest) for stage in (1, 2, 3) for rest in REST]


class Odd(nn.Module):
    """24 + ``rest`` elements in four parameters; no two of them have the same gradient."""

    def __init__(self, rest: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(5, 3))
        self.third, self.fourth = nn.Parameter(torch.randn(1)), nn.Parameter(torch.randn(1 + rest))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.cat([param.flatten() for param in self.parameters()])
        return torch.sin(x * flat * torch.arange(1, len(flat) + 1)).sum(1).mean()


class OddModule(L.LightningModule):
    def __init__(self, rest: int) -> None:
        super().__init__()
        self.net = Odd(rest)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit_odd(rest: int, strategy: Any, devices: int, resume: Path | None = None) -> tuple[L.Trainer, OddModule]:
    """Two steps over eight samples, or none from a checkpoint after them."""
    x = torch.rand(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(devices=devices, strategy=strategy, max_steps=2, precision="64-true", **(QUIET | {"gradient_clip_val": None}))
    module = OddModule(rest)
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=4 // devices), ckpt_path=resume)
    return trainer, module


@cache
def _moments_alone(rest: int) -> dict[str, Tensor]:
    """Plain Lightning's, in one process, under our names."""
    trainer, module = _fit_odd(rest, "auto", 1)
    state = trainer.optimizers[0].state
    return {f"optimizer.0.{name}.{key}": value for name, param in module.named_parameters() for key, value in state[param].items()}


def _moments_of_all(world: int, save: Path | None = None, resume: Path | None = None) -> dict[tuple[int, int], dict[str, Tensor]]:
    told = {}
    for stage, rest in CASES:
        folder = f"{stage} {rest}"
        strategy = HybridParallelStrategy(dp=world, zero=stage)
        trainer, _ = _fit_odd(rest, strategy, world, resume / folder if resume else None)
        if save:
            trainer.save_checkpoint(save / folder)
        told[stage, rest] = moments(trainer)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_Z6_moments_find_their_elements_whatever_the_padding(world: int, tmp_path: Path) -> None:
    """Saved by 2 and by 4 ranks, whose flat buckets end in different paddings, and read by 4, 2 and 1."""
    saved = run_world(_moments_of_all, world, world, tmp_path)[0]
    for stage, rest in CASES:
        assert sum(param.numel() for param in Odd(rest).parameters()) % (2 * world) == rest
        wanted = _moments_alone(rest)
        assert saved[stage, rest].keys() == wanted.keys()
        for name, value in wanted.items():
            torch.testing.assert_close(saved[stage, rest][name], value, rtol=1e-10, atol=1e-10)
    for other in (4, 2, 1):
        loaded = run_world(_moments_of_all, other, other, None, tmp_path)[0]
        for case in CASES:
            assert_equal(loaded[case], saved[case])


def _contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint. The unset spare number of Python's generator is NaN: zero here."""
    shards = {name: Shard.whole(torch.empty(shape, dtype=dtype), writes=False) for name, (shape, dtype) in read_index(folder).items()}
    read_tensors(folder, shards)
    return {name: shard.data.nan_to_num() for name, shard in shards.items()}


def _load_and_save(source: Path) -> None:
    """Load, save, save again, load again, save. What a new iterator draws is drawn from the dataloader's own generator."""
    strategy = HybridParallelStrategy(dp=2, zero=3, zero_options={"min_unit_mb": 0})
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=STEPS, **QUIET)
    module, loader = Net(), token_loader(4, rows=12, **strategy.distributed_sampler_kwargs)
    loader.generator = torch.Generator()
    trainer.fit(module, loader, ckpt_path=source)
    trainer.save_checkpoint(source.with_name("once"))
    trainer.save_checkpoint(source.with_name("twice"))
    trainer.fit(module, loader, ckpt_path=source)
    trainer.save_checkpoint(source.with_name("loaded again"))
    assert trainer.global_step == STEPS


def test_Z17_loading_and_saving_without_a_step_changes_no_tensor(tmp_path: Path) -> None:
    fit_world({"dp": 2, "zero": 3}, STEPS, save=tmp_path / "first")
    run_world(_load_and_save, 2, tmp_path / "first")
    wanted, meta = _contents(tmp_path / "first"), read_meta(tmp_path / "first")
    assert {name.split(".")[0] for name in wanted} == {"model", "optimizer", "rng"}
    for name in ("once", "twice", "loaded again"):
        assert_equal(_contents(tmp_path / name), wanted)
        again = read_meta(tmp_path / name)
        assert again.keys() == meta.keys()
        for key in ("global_step", "epoch", "optimizer_states", "lr_schedulers", "layout"):
            assert again[key] == meta[key], f"{name}: {key}"
