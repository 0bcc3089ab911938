import pytest
import torch
from hydra import compose, initialize_config_dir

from lightning_par.cli.launch import CONF
from lightning_par.cli.train import train
from tests.cli.conftest import TINY

PLAIN = ["trainer.strategy=auto", "callbacks.progress_bar.refresh_rate=0", "logger=csv", "+trainer.enable_model_summary=false"]


def run(folder, *overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", overrides=[f"paths.run={folder}", f"paths.cache={folder}", *TINY, *PLAIN, *overrides])
    return train(config)


def test_train_returns_metrics_and_objects_and_leaves_one_csv_and_one_checkpoint(tmp_path, capsys):
    metrics, objects = run(tmp_path)
    assert set(metrics) >= {"train_loss", "val_loss"}
    assert objects["trainer"].global_step == 3
    assert len(list(tmp_path.glob("**/metrics.csv"))) == 1
    assert (tmp_path / "last").exists()
    summary = capsys.readouterr().out
    for part in (str(tmp_path), "last", "metrics.csv", "tokens/s", "before the first step"):
        assert part in summary


def test_the_held_out_loss_in_the_summary_is_that_of_the_last_step(tmp_path):
    metrics, objects = run(tmp_path, "trainer.val_check_interval=2")
    trainer = objects["trainer"]
    (again,) = trainer.validate(objects["module"], datamodule=objects["datamodule"], verbose=False)
    assert metrics["val_loss"] == pytest.approx(again["val_loss"], rel=1e-6)


def test_a_resumed_run_ends_with_the_weights_and_the_learning_rate_of_the_straight_run(tmp_path):
    schedule = ["model.decay_steps=6", "model.warmup_steps=2", "trainer.val_check_interval=2"]
    _, straight = run(tmp_path / "straight", "trainer.max_steps=6", *schedule)
    run(tmp_path / "first", "trainer.max_steps=4", *schedule)
    _, resumed = run(tmp_path / "second", "trainer.max_steps=6", f"ckpt_path={tmp_path}/first/last", *schedule)
    lrs = [objects["trainer"].optimizers[0].param_groups[0]["lr"] for objects in (straight, resumed)]
    assert lrs[0] == lrs[1]
    for name, weight in straight["module"].state_dict().items():
        assert torch.equal(weight, resumed["module"].state_dict()[name]), name
