"""The command as a user runs it: processes, folders, messages, exit codes."""

import re
import subprocess

import pytest
import yaml

from tests.cli.conftest import TINY

FAILING = """
import os
from lightning_par.recipes.gpt import GPTModule

class Failing(GPTModule):
    def training_step(self, batch, batch_idx):
        if batch_idx == 1 and self.global_rank == 1:
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

    again = lightning_par("train", "trainer.devices=2", *TINY, "trainer.max_steps=5", f"ckpt_path={folder}/last")
    assert again.code == 0, again.output
    assert "Trained to step 5" in again.output


def test_ranks_started_by_torchrun_are_joined_and_share_one_folder(lightning_par, tmp_path):
    done = lightning_par("train", "trainer.devices=2", "parallel.tp=2", *TINY, ranks=2)
    assert done.code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1


def test_torchrun_with_another_number_of_ranks_is_refused(lightning_par):
    done = lightning_par("train", "trainer.devices=3", *TINY, ranks=2)
    assert done.code != 0
    assert "WORLD_SIZE=2 ranks were started, but trainer.devices=3" in done.output


def test_h3_w5_each_job_of_a_multirun_has_its_own_overrides_folder_and_run(lightning_par, tmp_path):
    done = lightning_par("train", "-m", "seed=1,2", "trainer.devices=2", "hydra.sweep.dir=sweep", *TINY)
    assert done.code == 0, done.output
    for job, seed in enumerate((1, 2)):
        folder = tmp_path / "sweep" / str(job)
        assert yaml.safe_load((folder / ".hydra" / "config.yaml").read_text())["seed"] == seed
        assert len(list(folder.glob("wandb/offline-run-*"))) == 1
        assert (folder / "last").exists()


def test_h5_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(lightning_par, tmp_path):
    config = tmp_path / "here" / ".hydra" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("seed: 1\n")
    done = lightning_par("train", "hydra.run.dir=here", *TINY)
    assert done.code != 0
    assert "hydra.run.dir=here holds a run already" in done.output
    assert config.read_text() == "seed: 1\n"


@pytest.mark.parametrize("ranks", [None, 2], ids=["started", "joined"])
def test_l11_a_failing_rank_ends_the_job_with_its_own_traceback(lightning_par, tmp_path, ranks):
    (tmp_path / "failing.py").write_text(FAILING)
    done = lightning_par("train", "trainer.devices=2", "model._target_=failing.Failing", *TINY, ranks=ranks, FAIL="raise")
    assert done.code != 0
    assert done.seconds < 30
    first = done.output.index("Traceback")
    assert "rank 1 failed:" in done.output[:first]
    assert "the model of rank 1 is broken" in done.output[first : done.output.index("rank 0")]
    assert_no_process_left(tmp_path)


def test_l11_a_rank_that_dies_without_a_word_is_named(lightning_par, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    done = lightning_par("train", "trainer.devices=2", "model._target_=failing.Failing", *TINY, FAIL="die")
    assert done.code != 0
    assert done.seconds < 30
    assert "rank 1 died without a word, with exit code 7" in done.output
    assert_no_process_left(tmp_path)


def assert_no_process_left(folder):
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(folder) not in processes


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


def test_an_impossible_layout_is_refused_in_one_message_before_any_rank_starts(lightning_par, tmp_path):
    done = lightning_par("train", "trainer.devices=4", "parallel.tp=3", "parallel.pp=5")
    assert done.code != 0
    for part in ("for 4 reasons", "world size 4", "pp=5", "4 attention heads", "2 key-value heads"):
        assert part in done.output
    assert "Traceback" not in done.output


def test_unknown_commands_keys_and_checkpoints_are_named(lightning_par):
    assert "there is no command 'verify'; choose one of: train" in lightning_par("verify").output
    assert "ckpt_path=" in (missing := lightning_par("train", "ckpt_path=nowhere")).output
    assert missing.code != 0
    assert "modle" in lightning_par("train", "modle=gpt").output
    assert lightning_par("--help").code == 0
