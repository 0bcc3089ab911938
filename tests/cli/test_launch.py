"""The command as a user runs it: processes, folders, messages, exit codes."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.cli.conftest import TINY
from tests.harness.world import ROOT

FAILING = """
import os, time
from pathlib import Path
from lightning_par.recipes.gpt import GPTModule

class Failing(GPTModule):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
            Path("failed_at").write_text(str(time.time()))
            if os.environ["FAIL"] == "die":
                os._exit(7)
            raise RuntimeError("the model of rank 1 is broken")
        return super().training_step(batch, batch_idx)
"""


def run_folder(output):
    return re.search(r"run folder\s+(\S+)", output)[1]


def test_h1_w1_a_job_of_two_ranks_leaves_one_folder_one_config_one_run_one_csv_one_checkpoint(lightning_par, tmp_path):
    done = lightning_par("train", "trainer.devices=2", "parallel.dp=2", *TINY)
    assert done.code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert tmp_path / run_folder(done.output) == folder
    for pattern in (".hydra/config.yaml", "wandb/offline-run-*", "csv/metrics.csv", "last"):
        assert len(list(folder.glob(pattern))) == 1, pattern
    assert yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())["parallel"]["dp"] == 2
    assert "tokens/s" in done.output
    assert "before the first step" in done.output


@pytest.mark.slow
def test_a_job_goes_on_from_the_last_checkpoint_of_another(lightning_par, tmp_path):
    assert lightning_par("train", "trainer.devices=2", *TINY).code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    again = lightning_par("train", "trainer.devices=2", *TINY, "trainer.max_steps=5", f"ckpt_path={folder}/last")
    assert again.code == 0, again.output
    assert "Trained to step 5" in again.output


@pytest.mark.slow
def test_ranks_started_by_torchrun_are_joined_and_share_one_folder(lightning_par, tmp_path):
    done = lightning_par("train", "trainer.devices=2", "parallel.tp=2", *TINY, ranks=2)
    assert done.code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1


@pytest.mark.slow
def test_torchrun_with_another_number_of_ranks_is_refused(lightning_par):
    done = lightning_par("train", "trainer.devices=3", *TINY, ranks=2)
    assert done.code != 0
    assert "WORLD_SIZE=2 ranks were started, but trainer.devices=3" in done.output


@pytest.mark.slow
def test_h3_w5_each_job_of_a_multirun_has_its_own_overrides_folder_and_run(lightning_par, tmp_path):
    done = lightning_par("train", "-m", "seed=1,2", "trainer.devices=2", "hydra.sweep.dir=sweep", *TINY)
    assert done.code == 0, done.output
    for job, seed in enumerate((1, 2)):
        folder = tmp_path / "sweep" / str(job)
        assert yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())["seed"] == seed
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
        assert (folder / "last").exists()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(None, id="started"), pytest.param(2, id="joined")])
def test_l11_a_failing_rank_ends_the_job_with_its_own_traceback(lightning_par, tmp_path, ranks):
    (tmp_path / "failing.py").write_text(FAILING)
    done = lightning_par("train", "trainer.devices=2", "model._target_=failing.Failing", *TINY, ranks=ranks, FAIL="raise")
    assert done.code != 0
    assert done.ended - float((tmp_path / "failed_at").read_text()) < 15
    first = done.output.index("Traceback")
    assert "rank 1 failed:" in done.output[:first]
    assert "the model of rank 1 is broken" in done.output[first:].split("rank 0 ended too")[0]  # where rank 0 still gets to say so
    assert_no_process_left(tmp_path)


@pytest.mark.slow
def test_l11_a_rank_that_dies_without_a_word_is_named(lightning_par, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    done = lightning_par("train", "trainer.devices=2", "model._target_=failing.Failing", *TINY, FAIL="die")
    assert done.code != 0
    assert done.ended - float((tmp_path / "failed_at").read_text()) < 15
    assert "rank 1 died without a word, with exit code 7" in done.output
    assert_no_process_left(tmp_path)


def assert_no_process_left(folder):
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in processes


@pytest.mark.slow
def test_h7_each_rank_logs_to_the_job_log_with_its_number(lightning_par, tmp_path):
    (tmp_path / "logging_model.py").write_text(
        "import logging\nfrom lightning_par.recipes.gpt import GPTModule\n"
        "class Talks(GPTModule):\n    def on_fit_start(self):\n        logging.getLogger('mine').info('hello from %d', self.global_rank)\n"
    )
    done = lightning_par("train", "trainer.devices=2", "model._target_=logging_model.Talks", "logger=csv", *TINY)
    assert done.code == 0, done.output
    (log,) = (tmp_path / "runs").glob("*/train.log")
    for rank in (0, 1):
        assert re.search(rf"\[rank {rank}\].*hello from {rank}", log.read_text())


@pytest.mark.slow
def test_ranks_do_not_outlive_a_command_that_is_killed(tmp_path):
    settings = [*TINY, "trainer.devices=2", "trainer.max_steps=1000000", "trainer.val_check_interval=null", "logger=none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = subprocess.Popen([sys.executable, "-m", "lightning_par", "train", *settings], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 90
    while not list(tmp_path.glob("runs/*/.hydra")) and time.monotonic() < deadline:
        time.sleep(0.5)
    time.sleep(10)
    processes = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    ours = [pid for pid in processes if str(tmp_path) in _folder_of(pid) and pid != command.pid]
    assert ours, "the ranks have started"
    command.kill()
    command.wait()
    deadline = time.monotonic() + 15
    while any(str(tmp_path) in _folder_of(pid) for pid in ours) and time.monotonic() < deadline:
        time.sleep(0.5)
    left = [pid for pid in ours if str(tmp_path) in _folder_of(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def _folder_of(pid):
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


OWN = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch, _):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(x, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(16, 4), torch.zeros(16, 4)), 4)
"""


@pytest.mark.slow
def test_module_and_data_of_ones_own_are_found_in_the_folder_where_the_command_starts(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    for group, kind in (("model", "Net"), ("data", "Data")):
        (tmp_path / "cfg" / group).mkdir(parents=True)
        (tmp_path / "cfg" / group / "mine.yaml").write_text(f"_target_: mine.{kind}\n")
    script = Path(sys.executable).parent / "lightning-par"
    options = "model=mine data=mine logger=csv parallel.pp=2 trainer.devices=2 trainer.max_steps=3 trainer.accelerator=cpu"
    with TemporaryDirectory() as scratch:  # sockets in it must have short names
        done = subprocess.run(
            [script, "train", "--config-dir", "cfg", *options.split()],
            cwd=tmp_path,
            env=os.environ | {"TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        left = [*Path(scratch).glob("*elastic*"), *Path(scratch).glob("lightning_par*")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Trained to step 3." in done.stdout
    assert not left
