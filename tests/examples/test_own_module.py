import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "own_module.py"


@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]], ids=["python", "torchrun"]
)
@pytest.mark.slow
def test_a_users_own_module_trains_from_a_plain_script(launcher, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT)],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(SCRIPT.parents[1]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^train_loss (\S+)", done.stdout, flags=re.MULTILINE)
    assert float(loss) < 1.0
