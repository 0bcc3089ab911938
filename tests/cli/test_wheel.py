import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.cli.conftest import TINY

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_wheel_alone_trains_from_an_empty_folder(lightning_par, tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}", str(ROOT)],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    packaged = {path.relative_to(tmp_path / "site" / "lightning_par") for path in (tmp_path / "site").rglob("*.yaml")}
    assert packaged == {Path("cli/convert.yaml"), *(path.relative_to(ROOT) for path in (ROOT / "conf").rglob("*.yaml"))}
    done = lightning_par("train", *TINY, PYTHONPATH=str(tmp_path / "site"))
    assert done.code == 0, done.output
    assert "Trained to step 3" in done.output
