"""What has bitten users of other pipelines, under the Trainer: each as the same run in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_par import HybridParallelStrategy, convert
from tests.harness import WorldError, run_world
from tests.harness.models import QUIET, TinyGPT, Tokens, token_loader
from tests.harness.parity import Run, assert_same, fit, fit_world
from tests.pipeline.models import gpt
from tests.pipeline.parity import Twin, pp_group, tokens

ZBV = {"pp": 2, "schedule": "zbv", "chunks": 2}


class Numbered(TinyGPT):
    """The weights of layer i are i."""

    def __init__(self) -> None:
        super().__init__(layers=4, optimizer="sgd", lr=0.0)
        for i, layer in enumerate(self.model.layers):
            for parameter in layer.parameters():
                torch.nn.init.constant_(parameter, i)


def _save(folder: Path, layout: dict[str, Any]) -> None:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), max_steps=1, **QUIET)
    trainer.fit(Numbered(), token_loader(6))
    trainer.save_checkpoint(folder)


@pytest.mark.parametrize(
    "layout", [{"pp": 2}, {"pp": 2, "schedule": "interleaved_1f1b", "chunks": 2}, {"pp": 2, "schedule": "zbv", "chunks": 2}]
)
def test_P2_layers_keep_their_global_places_when_a_checkpoint_is_converted(layout: dict[str, Any], tmp_path: Path) -> None:
    run_world(_save, 2, tmp_path / "pp2", layout)
    convert(tmp_path / "pp2", tmp_path / "pp1.ckpt", "ckpt")
    state = torch.load(tmp_path / "pp1.ckpt", weights_only=True)["state_dict"]
    seen = {int(name.split(".")[2]): set(value.unique().tolist()) for name, value in state.items() if ".layers." in name}
    assert seen == {i: {float(i)} for i in range(4)}


def _splits(schedule: str, chunks: int) -> None:
    twin = Twin(gpt(layers=4), pp_group(2), schedule, chunks)
    for microbatches in (1, 2, 4, 8):
        twin.train_step(tokens(8, 5), microbatches)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_P3_any_split_of_one_batch_gives_the_same_gradients(schedule: str, chunks: int) -> None:
    run_world(_splits, 2, schedule, chunks)


def _ragged(num_replicas: int = 1, rank: int = 0) -> DataLoader:
    """A batch of 7 and a last one of 3."""
    return DataLoader(Subset(Tokens(10, 9, 37), range(10)), batch_size=7)


@pytest.mark.parametrize("microbatches", [3, 4])
def test_P5_uneven_micro_batches_and_a_short_last_batch(microbatches: int) -> None:
    module = partial(TinyGPT, layers=4)
    runs = fit_world(module, _ragged, {"pp": 2, "microbatches": microbatches}, 2, max_epochs=2, max_steps=4)
    assert_same(runs, fit(module, _ragged, max_epochs=2, max_steps=4))


class Predicting(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=4)
        self.validated: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_loss"].item())

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits


def _rows(rows: int, batch: int) -> DataLoader:
    return DataLoader(Tokens(rows, 9, 37), batch_size=batch)


def _all_sizes(strategy: Any, devices: int) -> tuple[list[float], list[Tensor]]:
    trainer = L.Trainer(devices=devices, strategy=strategy, precision="64-true", max_epochs=2, num_sanity_val_steps=0, **QUIET)
    module = Predicting()
    trainer.fit(module, _rows(8, 4), _rows(6, 6))
    return module.validated, trainer.predict(module, _rows(3, 1))


def _all_sizes_in_a_pipeline(layout: dict[str, Any]) -> tuple[list[float], list[Tensor]]:
    return _all_sizes(HybridParallelStrategy(**layout), 2)


@pytest.mark.parametrize("layout", [{"pp": 2, "microbatches": 3}, ZBV])
def test_P6_batches_may_have_another_size_in_validation_and_prediction(layout: dict[str, Any]) -> None:
    validated, predicted = _all_sizes("auto", 1)
    assert len(validated) == 2
    for mine, outputs in run_world(_all_sizes_in_a_pipeline, 2, layout):
        assert mine == pytest.approx(validated, rel=1e-6)
        torch.testing.assert_close(outputs, predicted, rtol=0, atol=1e-10)


class Partly(TinyGPT):
    """Only parameters whose names hold one of these words are trained."""

    def __init__(self, *trained: str, tie: bool = False, folder: Path | None = None) -> None:
        super().__init__(layers=4, tie=tie)
        self.folder = folder
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(any(word in name for word in trained))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)

    def on_train_end(self) -> None:
        if self.folder is not None:
            self.trainer.save_checkpoint(self.folder)


FIRST, LAST = ("embed", "layers.0", "layers.1"), ("layers.2", "layers.3", "norm", "head")


def _half(folder: Path, trained: tuple[str, ...], layout: dict[str, Any], devices: int) -> Run:
    module, loader = partial(Partly, *trained, folder=folder), partial(token_loader, 6, rows=18)
    return fit(module, loader, HybridParallelStrategy(**layout), devices=devices, precision="16-mixed")


@pytest.mark.parametrize("trained", [FIRST, LAST], ids=["stage 1 frozen", "stage 0 frozen"])
def test_P10_a_stage_with_nothing_to_train_joins_norm_overflow_and_saving(trained: tuple[str, ...], tmp_path: Path) -> None:
    (reference,) = run_world(_half, 1, tmp_path / "one", trained, {}, 1)
    runs = run_world(_half, 2, tmp_path / "two", trained, {"pp": 2, "microbatches": 1, "balance": (2, 2)}, 2)
    assert_same(runs, reference, tolerance=1e-5)
    assert min(reference.norms) > 0.5, "clipping is at work"
    assert (tmp_path / "two").is_dir()


def _all_frozen() -> None:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(pp=2), max_steps=1, **QUIET)
    trainer.fit(Partly(), token_loader(6))


def test_P10_a_model_with_nothing_to_train_at_all_is_refused_as_torch_does() -> None:
    with pytest.raises(WorldError, match="AdamW got an empty parameter list, on every pipeline stage"):
        run_world(_all_frozen, 2)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "zero": 1, "dp": 2}], ids=["pp2", "dp2 zero1"])
@pytest.mark.parametrize(
    "trained",
    [pytest.param(("layers", "norm"), id="P11 the tie is frozen"), pytest.param(("embed",), id="P15 only the tie has a gradient")],
)
def test_P11_P15_a_tied_weight_counts_once_or_not_at_all(trained: tuple[str, ...], layout: dict[str, Any]) -> None:
    module, loader = partial(Partly, *trained, tie=True), partial(token_loader, 12)
    runs = fit_world(module, loader, layout, 2 * layout.get("dp", 1))
    assert_same(runs, fit(module, loader))


class Watching(TinyGPT):
    """Sees that validation leaves no gradients."""

    def __init__(self) -> None:
        super().__init__(layers=4)

    def on_validation_start(self) -> None:
        self.before = [None if p.grad is None else p.grad.clone() for p in self.parameters()]

    def on_validation_end(self) -> None:
        after = [p.grad for p in self.parameters()]
        assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(self.before, after, strict=True))


@pytest.mark.parametrize("layout", [{"pp": 2, "microbatches": 5}, {"pp": 2, "schedule": "zb_h1", "zero": 2, "dp": 2, "microbatches": 3}])
def test_P19_P20_validation_between_steps_has_the_true_loss_and_changes_nothing(layout: dict[str, Any]) -> None:
    loader: Callable[..., Any] = partial(token_loader, 12)
    often = {"validation": loader, "val_check_interval": 1, "max_steps": 4, "max_epochs": 2}
    runs = fit_world(Watching, loader, layout, 2 * layout.get("dp", 1), **often)
    assert_same(runs, fit(Watching, loader, **often))
