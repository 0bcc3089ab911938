import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from lightning_par.cli.main import main

TINY = [
    "model.config.hidden=16",
    "model.config.ffn=16",
    "model.config.layers=2",
    "model.config.heads=2",
    "data.sequence_length=16",
    "data.batch_size=4",
    "data.held_out_batches=2",
    "trainer.accelerator=cpu",
    "trainer.max_steps=3",
    "trainer.log_every_n_steps=1",
]


@dataclass
class Finished:
    code: int
    output: str  # stdout and stderr, as a terminal shows them
    ended: float  # time.time()


@pytest.fixture
def lightning_par(tmp_path):
    """Runs `python -m lightning_par ...` in an empty folder; under torchrun on `ranks` ranks where given."""

    def run(*arguments, ranks=None, timeout=120, **environment):
        module = ["-m", "lightning_par", *arguments]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        done = subprocess.run(
            [sys.executable, *(torchrun if ranks else []), *module],
            cwd=tmp_path,
            env={k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
            | {"WANDB_SILENT": "true", "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Finished(done.returncode, done.stdout, time.time())

    return run


@pytest.fixture
def in_process(monkeypatch, tmp_path, capsys):
    """Runs `lightning-par ...` in this process, in an empty folder; what it printed, or its exit message."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["lightning-par", *arguments])
        code = None
        try:
            main()
        except SystemExit as error:
            code = error.code
        return capsys.readouterr().out if code is None else str(code)

    return run
