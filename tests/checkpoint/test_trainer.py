"""Checkpoints through the Trainer: ModelCheckpoint, resuming what does not fit, and ranks that are not where they should be."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import CheckpointError, is_native, read_meta
from lightning_par.strategy import saving
from tests.checkpoint.fits import LAYOUTS, QUIET, STEPS, Net, fit, fit_world, world_size
from tests.harness import WorldError, run_world
from tests.harness.models import token_loader


def _trainer(layout: dict[str, int], callbacks: Any = None, **options: Any) -> L.Trainer:
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    settings = QUIET | {"enable_checkpointing": bool(callbacks)} | options
    return L.Trainer(devices=world_size(layout), strategy=strategy, callbacks=callbacks, **settings)


def _loader(trainer: L.Trainer) -> Any:
    return token_loader(4, rows=12, **trainer.strategy.distributed_sampler_kwargs)


class Worsens(Net):
    """Validation falls for two epochs, then rises, so that the best checkpoint is not the last; rank 1 is always late."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", 0 * self.model(**batch).loss + abs(self.current_epoch - 1))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.2 * self.global_rank)


def _fit_with_model_checkpoint(layout: dict[str, int], folder: Path) -> tuple[str, str, float]:
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = _trainer(layout, [keep], max_epochs=4)
    module = Worsens(dropout=0.0)
    trainer.fit(module, _loader(trainer), _loader(trainer))
    validated = trainer.validate(module, _loader(trainer), ckpt_path="best", verbose=False)
    return keep.best_model_path, keep.last_model_path, validated[0]["val_loss"]


@pytest.mark.parametrize("name", ["dp2 zero1", "pp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_K16_model_checkpoint_keeps_the_best_folders_and_the_last(name: str, tmp_path: Path) -> None:
    first, second = run_world(_fit_with_model_checkpoint, 2, LAYOUTS[name], tmp_path)
    assert first == second
    assert Path(first[0]).name == "epoch=1.ckpt"
    assert {path.name for path in tmp_path.iterdir()} in (
        {"epoch=1.ckpt", "epoch=0.ckpt", "last.ckpt"},
        {"epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"},
    )
    assert all(is_native(path) for path in tmp_path.iterdir())
    assert read_meta(first[0])["epoch"] == 1


def _validate_without_optimizer(folder: Path, layout: dict[str, int]) -> float:
    trainer = _trainer(layout)
    module = WithoutOptimizer(dropout=0.0)
    return trainer.validate(module, _loader(trainer), ckpt_path=folder, verbose=False)[0]["val_loss"]


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> None:
        raise AssertionError("validation must not ask for an optimizer")


def test_K26_weights_load_without_an_optimizer_under_any_layout(tmp_path: Path) -> None:
    fit_world(LAYOUTS["dp2 zero1"], STEPS, save=tmp_path / "last")
    losses = [
        loss for name in ("tp2", "pp2", "cp2") for loss in run_world(_validate_without_optimizer, 2, tmp_path / "last", LAYOUTS[name])
    ]
    losses += run_world(_validate_without_optimizer, 1, tmp_path / "last", {"dp": 1})
    assert losses == pytest.approx([losses[0]] * 7, abs=1e-5)
    assert losses[0] < 3.6, "these are trained weights"


def _resume_with(layers: int, folder: Path, strict: bool) -> None:
    trainer = _trainer({"tp": 2}, max_steps=2 * STEPS)
    module = Net(layers=layers)
    module.strict_loading = strict
    trainer.validate(module, _loader(trainer), ckpt_path=folder, verbose=False)


def test_K19_strict_names_what_does_not_fit_and_not_strict_loads_the_rest(tmp_path: Path) -> None:
    fit_world(LAYOUTS["tp2"], STEPS, save=tmp_path / "last")
    with pytest.raises(WorldError, match=r"model\.model\.layers\.3\.attention\.q_proj\.weight is missing"):
        run_world(_resume_with, 2, 4, tmp_path / "last", True)
    with pytest.raises(WorldError, match=r"weights that the model has not: .*model\.model\.layers\.2\.attention\.q_proj\.weight"):
        run_world(_resume_with, 2, 2, tmp_path / "last", True)
    for layers in (2, 4):
        run_world(_resume_with, 2, layers, tmp_path / "last", False)


def _resume_what_only_rank_0_sees(folder: Path) -> str:
    mine = folder if torch.distributed.get_rank() == 0 else folder.with_name("elsewhere")
    with pytest.raises(CheckpointError) as error:
        fit({"dp": 2}, 2 * STEPS, resume=mine)
    return str(error.value)


def test_K15_a_checkpoint_that_one_rank_does_not_see_raises_on_all(tmp_path: Path) -> None:
    fit_world({"dp": 2}, STEPS, save=tmp_path / "last")
    for message in run_world(_resume_what_only_rank_0_sees, 2, tmp_path / "last"):
        assert "cannot be loaded, as ranks [1] see it" in message
        assert "elsewhere is not there" in message


def _save_on_rank_0_only(folder: Path) -> None:
    saving.PATIENCE = saving.timedelta(seconds=1)
    trainer = _trainer({"dp": 2}, max_steps=1)
    trainer.fit(Net(), _loader(trainer))
    if trainer.is_global_zero:
        with pytest.raises(CheckpointError, match=r"ranks \[1\] have not come .* must be called on all ranks"):
            trainer.save_checkpoint(folder)


def test_K17_saving_on_rank_0_only_is_told(tmp_path: Path) -> None:
    run_world(_save_on_rank_0_only, 2, tmp_path / "last")


class Fails(Net):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank in self.ranks:
            raise ValueError(f"the user's own error on rank {self.global_rank}")


def _fail(ranks: tuple[int, ...], callback: Any) -> list[str]:
    trainer = _trainer({"tp": 2}, [callback], max_steps=9)
    with warnings.catch_warnings(record=True) as told, pytest.raises((ValueError, RuntimeError)) as error:  # noqa: PT012
        warnings.simplefilter("always")
        trainer.fit(Fails(ranks), _loader(trainer))
    return [str(error.value), *(str(warning.message) for warning in told)]


def _callbacks(folder: Path) -> list[Any]:
    return [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, filename="failed", save_on_exception=True)]


@pytest.mark.parametrize("place", [0, 1], ids=["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_an_exception_on_all_ranks_is_followed_by_a_save(place: int, tmp_path: Path) -> None:
    for rank, told in enumerate(run_world(_fail, 2, (0, 1), _callbacks(tmp_path)[place])):
        assert told[0] == f"the user's own error on rank {rank}"
    (saved,) = tmp_path.iterdir()
    assert is_native(saved)


@pytest.mark.parametrize("place", [0, 1], ids=["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_L11_an_exception_on_one_rank_is_not_held_up_by_a_save(place: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(WorldError) as error:
        run_world(_fail_alone, 2, _callbacks(tmp_path)[place], timeout=40)
    assert time.monotonic() - begin < 35
    assert "rank 1 has failed alone with: the user's own error on rank 1" in str(error.value)
    assert "is not saved: an exception has ended the run on this rank" in str(error.value)
    assert not list(tmp_path.rglob("meta.pt"))


def _fail_alone(callback: Any) -> None:
    told = _fail((1,), callback)
    raise AssertionError(f"rank {torch.distributed.get_rank()} has failed alone with: {'; '.join(told)}")


def test_a_file_that_is_no_checkpoint_of_ours_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "weights.ckpt").write_bytes(b"something else")
    with pytest.raises(WorldError, match=r"weights\.ckpt' cannot be loaded.*is damaged, or no file of torch\.save"):
        fit_world({"dp": 2}, STEPS, resume=tmp_path / "weights.ckpt")


def test_K20_hyperparameters_of_any_class_are_saved_as_plain_data(tmp_path: Path) -> None:
    run_world(_fit_with_hparams, 1, tmp_path / "last")
    saved = torch.load(tmp_path / "last" / "meta.pt", weights_only=True)["hyper_parameters"]
    assert saved == {"betas": [0.9, 0.95], "name": "tiny", "path": "/data"}


def _fit_with_hparams(folder: Path) -> None:
    from omegaconf import OmegaConf

    trainer = _trainer({"dp": 1}, max_steps=1)
    module = Net()
    module.save_hyperparameters({**OmegaConf.create({"betas": [0.9, 0.95], "name": "tiny"}), "path": Path("/data")})
    trainer.fit(module, _loader(trainer))
    trainer.save_checkpoint(folder)
