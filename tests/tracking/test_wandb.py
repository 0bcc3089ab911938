import json
import subprocess
import sys

import pytest

from lightning_par.tracking.wandb import NoExperiment, WandbTracker

RUN = """
import json, sys
from lightning_par.tracking.wandb import WandbTracker
folder, jobs = sys.argv[1], json.loads(sys.argv[2])
for job in jobs:
    tracker = WandbTracker(project="test", save_dir=folder, config=job)
    seen = dict(tracker.experiment.config)
    tracker.log_metrics({"loss": 1.0}, step=0)
    tracker.close()
    print("CONFIG " + json.dumps(seen))
"""


def run_jobs(folder, jobs, **environment):
    """Each job's tracker in one fresh process; returns the config each run held at its start."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", RUN, str(folder), json.dumps(jobs)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line.removeprefix("CONFIG ")) for line in done.stdout.splitlines() if line.startswith("CONFIG ")]


@pytest.mark.slow
def test_w4_w5_each_job_of_a_process_is_a_run_of_its_own_with_its_config_from_the_start(tmp_path):
    jobs = [{"seed": 1, "parallel": {"tp": 2}}, {"seed": 2, "parallel": {"tp": 1}}]
    assert run_jobs(tmp_path, jobs) == jobs
    runs = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(runs) == 2
    assert all(next(run.glob("*.wandb")).stat().st_size > 0 for run in runs)


@pytest.mark.slow
def test_w1_other_ranks_than_0_start_no_run(tmp_path):
    assert run_jobs(tmp_path, [{"seed": 1}], RANK="1", LOCAL_RANK="1") == [{}]
    assert not list(tmp_path.glob("wandb/*run-*"))


def test_w2_the_experiment_of_other_ranks_takes_any_use_without_effect(tmp_path, monkeypatch):
    monkeypatch.setattr("lightning_par.tracking.wandb.rank_zero_only.rank", 1)
    experiment = WandbTracker(project="test", save_dir=tmp_path).experiment
    assert isinstance(experiment, NoExperiment)
    experiment.config.update({"a": 1})
    experiment.config["a"] = 1
    experiment.name = "x"
    experiment[0].log({"loss": 1.0}, step=3).anything.at_all()
    assert not experiment
    assert list(experiment.history()) == []


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
