"""What leaves a sharded run, the whole state dict and the checkpoint, is the live model: every name, trained values, ties."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_par import HybridParallelStrategy, full_parameters
from lightning_par.recipes.gpt import GPT, GPTConfig
from tests.checkpoint.fits import SaveAt, assert_equal
from tests.harness import run_world
from tests.harness.models import TinyGPT, token_loader

STAGES = (1, 2, 3)
LOADER = partial(token_loader, 12, length=16, vocab=32, ignore=False)  # two batches an epoch
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "precision": "64-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
TIED = ("model.embed.weight", "model.head.weight")

State = dict[str, Tensor]


class Tied(TinyGPT):
    """A tied decoder; before it, the first of all parameters, a table of the same shape that is tied to nothing."""

    tie = True

    def __init__(self, seed: int = 1) -> None:
        L.LightningModule.__init__(self)
        torch.manual_seed(seed)
        self.optimizer, self.lr = "adamw", 1e-2
        self.first = nn.Embedding(32, 16)
        self.model = GPT(GPTConfig(vocab_size=32, hidden=16, layers=4, heads=4, tie_embeddings=self.tie))
        self.live: State = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(**batch).loss + self.first(batch["input_ids"]).square().mean()

    def on_train_end(self) -> None:
        with full_parameters(self):
            self.live = {name: value.clone() for name, value in self.state_dict().items()}


class Grouped(Tied):
    """Three groups of parameters in turn, with rates and decays of their own."""

    tie = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = list(self.parameters())
        settings = [(1e-2, 0.1), (3e-3, 0.0), (3e-2, 0.2)]
        groups = [{"params": params[place::3], "lr": lr, "weight_decay": decay} for place, (lr, decay) in enumerate(settings)]
        return torch.optim.AdamW(groups)


@cache
def _alone(module: type[Tied], steps: int) -> State:
    """The weights of plain Lightning in one process."""
    built = module()
    L.Trainer(devices=1, max_steps=steps, **QUIET).fit(built, LOADER())
    return built.live


def _fit_stages(module: type[Tied], steps: int, save: Path | None = None, resume: Path | None = None) -> dict[int, tuple[State, State]]:
    """By stage: the export (rank 0's) and this rank's live weights; checkpoints are in folders named after the stage."""
    told = {}
    for stage in STAGES:
        strategy = HybridParallelStrategy(dp=2, zero=stage, zero_options={"min_unit_mb": 0})
        callbacks = [SaveAt(save / f"{stage}", steps)] if save else []
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=steps, callbacks=callbacks, **QUIET)
        built = module()
        trainer.fit(built, LOADER(**strategy.distributed_sampler_kwargs), ckpt_path=resume / f"{stage}" if resume else None)
        told[stage] = strategy.full_state_dict() or {}, built.live
    return told


def _assert_export_is_live(ranks: list[dict[int, tuple[State, State]]], wanted: State) -> None:
    for stage in STAGES:
        export = ranks[0][stage][0]
        assert list(export) == list(wanted), f"stage {stage}"
        for rank in ranks:
            assert_equal(export, rank[stage][1])
        for name, value in wanted.items():
            torch.testing.assert_close(
                export[name], value, rtol=1e-10, atol=1e-10, msg=lambda t, where=f"stage {stage} {name}": f"{where}: {t}"
            )


def _load_stages(folder: Path) -> dict[int, State]:
    """Into a module that was initialized otherwise."""
    told = {}
    for stage in STAGES:
        strategy = HybridParallelStrategy(dp=2, zero=stage, zero_options={"min_unit_mb": 0})
        trainer = L.Trainer(devices=2, strategy=strategy, **QUIET)
        module = Tied(seed=2)
        trainer.validate(module, LOADER(), ckpt_path=folder / f"{stage}", verbose=False)
        assert module.model.head.weight is module.model.embed.weight
        assert module.first.weight is not module.model.embed.weight
        told[stage] = strategy.full_state_dict() or {}
    return told


def test_Z1_tied_weights_are_exported_under_both_names_with_trained_values(tmp_path: Path) -> None:
    ranks = run_world(_fit_stages, 2, Tied, 2, tmp_path)
    initial = Tied().double().state_dict()
    assert set(TIED) < set(initial)
    assert next(iter(initial)) == "first.weight"
    assert initial["first.weight"].shape == initial[TIED[0]].shape
    _assert_export_is_live(ranks, _alone(Tied, 2))
    loaded = run_world(_load_stages, 2, tmp_path)[0]
    for stage in STAGES:
        export = ranks[0][stage][0]
        embed, head = (export[name] for name in TIED)
        assert torch.equal(embed, head)
        for name in ("first.weight", *TIED):
            assert not torch.isclose(export[name], initial[name]).any(), f"stage {stage}: {name} is trained everywhere"
        assert not torch.isclose(embed, export["first.weight"]).any()
        assert_equal(loaded[stage], export)


@pytest.mark.slow
def test_Z4_parameter_groups_are_exported_as_they_live_and_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    saved = run_world(_fit_stages, 2, Grouped, 2, tmp_path)
    straight = run_world(_fit_stages, 2, Grouped, 4)
    resumed = run_world(_fit_stages, 2, Grouped, 4, None, tmp_path)
    _assert_export_is_live(saved, _alone(Grouped, 2))
    _assert_export_is_live(straight, _alone(Grouped, 4))
    _assert_export_is_live(resumed, _alone(Grouped, 4))
    for stage in STAGES:
        assert_equal(resumed[0][stage][0], straight[0][stage][0])
