"""A plain script with a LightningModule of the user's own: started by `python` and by `torchrun`, and what happens when a rank fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.strategy.scripts.user_script import train

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "scripts" / "user_script.py"
SECONDS_TO_END = 15 * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))  # more if other work shares the cores


@dataclass
class Job:
    """A started script."""

    process: subprocess.Popen[str]
    out: Path

    def wait(self, timeout: float = 120.0) -> tuple[int, str]:
        """Its exit code and all it printed."""
        try:
            output, _ = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
            self.process.kill()
            pytest.fail(f"the job hangs; it printed:\n{self.process.communicate()[0]}")
        return self.process.returncode, output

    @property
    def pids(self) -> list[int]:
        return [int(file.read_text()) for file in self.out.glob("pid*")]

    @property
    def seconds_since_fault(self) -> float | None:
        """None until it happens."""
        file = self.out / "fault"
        return time.time() - float(file.read_text()) if file.exists() and file.read_text() else None


def _start(out: Path, how: str, *, layout: str, devices: int, fault: str = "") -> Job:
    launcher = [sys.executable] if how == "python" else [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={devices}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}
    environment |= {"LAYOUT": layout, "DEVICES": str(devices), "FAULT": fault, "OUT": str(out)}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return Job(subprocess.Popen([*launcher, str(SCRIPT)], env=environment, cwd=out, **pipe), out)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _assert_all_gone(job: Job, ranks: int) -> None:
    assert len(job.pids) == ranks
    deadline = time.time() + 2
    while any(map(_is_running, job.pids)) and time.time() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in job.pids if _is_running(pid)], "processes are left"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights when Lightning alone trains the script's module in one process."""
    return train(tmp_path_factory.mktemp("reference"))[1].state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "torchrun"])
def test_a_users_script_trains_at_tp2_pp2_as_in_one_process(how: str, tmp_path: Path, reference: dict[str, torch.Tensor]) -> None:
    job = _start(tmp_path, how, layout="tp=2, pp=2", devices=4)
    code, output = job.wait()
    assert code == 0, output
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert list(weights) == list(reference)
    for name, value in reference.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-5)
    _assert_all_gone(job, 4)


@pytest.mark.parametrize(
    ("how", "layout", "fault"),
    [
        ("python", "pp=2", "train:1"),
        *(pytest.param("python", "tp=2", fault, marks=pytest.mark.slow) for fault in ("train:0", "validate:1", "save:0", "save:1")),
        *(pytest.param("torchrun", "tp=2", fault, marks=pytest.mark.slow) for fault in ("train:0", "train:1", "validate:0")),
        pytest.param("torchrun", "dp=2, zero=1", "train:1", marks=pytest.mark.slow),
    ],
)
def test_L11_a_rank_that_raises_ends_the_job_with_its_own_traceback_first(how: str, layout: str, fault: str, tmp_path: Path) -> None:
    job = _start(tmp_path, how, layout=layout, devices=2, fault=fault)
    code, output = job.wait()
    moment, rank = fault.split(":")
    errors = [line for line in output.splitlines() if "Error: " in line]
    assert code != 0
    assert errors[0].endswith(f"the user's own error in {moment} on rank {rank}"), output
    assert job.seconds_since_fault < SECONDS_TO_END
    _assert_all_gone(job, 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "torchrun"])
@pytest.mark.parametrize("rank", [0, 1])
def test_L11_a_rank_that_dies_without_a_word_ends_the_job(how: str, rank: int, tmp_path: Path) -> None:
    job = _start(tmp_path, how, layout="tp=2", devices=2, fault=f"exit:{rank}")
    code, _ = job.wait()
    assert code != 0
    assert job.seconds_since_fault < SECONDS_TO_END
    _assert_all_gone(job, 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["python", "torchrun"])
def test_L11_sigterm_to_rank_0_ends_all_ranks_after_the_step(how: str, tmp_path: Path) -> None:
    job = _start(tmp_path, how, layout="tp=2", devices=2, fault="sleep:0")
    while job.seconds_since_fault is None:
        assert job.process.poll() is None, job.wait()[1]
        time.sleep(0.1)
    os.kill(int((tmp_path / "pid0").read_text()), signal.SIGTERM)
    code, output = job.wait()
    assert code != 0
    assert "Traceback" not in output or how == "torchrun", output
    assert job.seconds_since_fault < SECONDS_TO_END
    _assert_all_gone(job, 2)


def test_an_impossible_layout_is_refused_before_any_other_process_starts(tmp_path: Path) -> None:
    job = _start(tmp_path, "python", layout="tp=3, pp=4", devices=4)
    code, output = job.wait()
    assert code != 0
    assert len(job.pids) == 1
    assert output.count("Traceback") == 1
    assert "world size 4" in output, output
