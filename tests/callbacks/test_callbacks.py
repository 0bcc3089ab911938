import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_par import DynamicLossScale, HybridParallelStrategy, ParallelPrecision
from lightning_par.callbacks import HeldOutLoss, LossScaleMonitor, SaveLast, Throughput
from lightning_par.checkpoint import open_checkpoint
from lightning_par.recipes.gpt import GPTModule
from tests.harness import run_world


def fit(tmp_path, callbacks, max_steps=7, **options):
    rows = torch.arange(32 * 8).reshape(32, 8) % 256
    loader = DataLoader([{"input_ids": row, "labels": row} for row in rows], batch_size=4)
    trainer = L.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        callbacks=callbacks,
        logger=CSVLogger(tmp_path),
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(GPTModule({"hidden": 8, "layers": 1, "heads": 2, "ffn": 8}), loader, loader)
    return trainer


def test_throughput_counts_the_tokens_of_all_steps_but_the_first(tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("lightning_par.callbacks.throughput.time.perf_counter", lambda: next(clock))
    throughput = Throughput()
    trainer = fit(tmp_path, [throughput], limit_val_batches=0)
    assert throughput.mean == 4 * 8  # tokens a step, at one tick of the clock a step
    trainer.logger.save()
    assert "tokens_per_s" in (tmp_path / "lightning_logs/version_0/metrics.csv").read_text()


def test_the_held_out_loss_is_kept_at_the_start_and_at_the_end(tmp_path):
    watcher = HeldOutLoss()
    trainer = fit(tmp_path, [watcher], max_steps=16, num_sanity_val_steps=-1)
    assert watcher.first == pytest.approx(5.55, abs=0.1)  # ln 256
    assert watcher.last == float(trainer.callback_metrics["val_loss"])
    assert watcher.last < watcher.first
    assert watcher.last_step == 16


def test_a_partial_sanity_check_is_not_taken_for_the_held_out_loss(tmp_path):
    watcher = HeldOutLoss()
    fit(tmp_path, [watcher], num_sanity_val_steps=1)
    assert watcher.first is None


def test_the_last_state_is_saved_under_one_name_whatever_the_interval(tmp_path):
    steps = []
    trainer = fit(tmp_path, [SaveLast(tmp_path / "last", every_n_steps=3), Saves(steps)])
    assert steps == [3, 6, 7]
    assert torch.load(tmp_path / "last", weights_only=True)["global_step"] == trainer.global_step == 7


class Saves(L.Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.steps.append(trainer.global_step)


def _watched(tmp_path, plugin):
    fit(tmp_path, [LossScaleMonitor()], strategy=HybridParallelStrategy(), devices=1, plugins=[plugin], limit_val_batches=0)
    return (tmp_path / "lightning_logs/version_0/metrics.csv").read_text().splitlines()


@pytest.mark.slow
def test_the_loss_scale_its_hysteresis_and_skipped_steps_are_logged(tmp_path):
    rule = DynamicLossScale("megatron", initial=64.0, growth_interval=4)
    header, *rows = run_world(_watched, 1, tmp_path / "scaled", ParallelPrecision("16-mixed", loss_scale=rule))[0]
    last = dict(zip(header.split(","), rows[-1].split(","), strict=True))
    assert float(last["loss_scale"]) == 128.0
    assert float(last["loss_scale_hysteresis"]) == 2.0
    assert float(last["skipped_steps"]) == 0.0
    header, *_ = run_world(_watched, 1, tmp_path / "plain", ParallelPrecision("32-true"))[0]
    assert "loss_scale" not in header


def test_the_last_state_has_the_weights_that_are_trained_beside_their_averages(tmp_path):
    fit(tmp_path, [EMAWeightAveraging(decay=0.5), SaveLast(tmp_path / "last")])
    source = open_checkpoint(tmp_path / "last")
    names = [name.removeprefix("current.") for name in source.current]
    assert names
    assert not any(torch.equal(source.entries[f"current.{name}"].read(), source.entries[f"model.{name}"].read()) for name in names)
