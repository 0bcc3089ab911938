"""`lightning-par convert`: a checkpoint in another format."""

from __future__ import annotations

import logging
import sys
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_par.checkpoint import WRITERS, CheckpointError, Report, Target, convert
from lightning_par.cli.launch import CONF

USAGE = f"usage: lightning-par convert src=PATH dst=PATH format={'|'.join(WRITERS)}"


def run() -> None:
    """The command `convert`, with its overrides in `sys.argv`."""
    arguments = sys.argv[1:]
    if strays := [argument for argument in arguments if "=" not in argument and not any(a.startswith("-") for a in arguments)]:
        sys.exit(f"lightning-par convert: {', '.join(strays)}: every argument is KEY=VALUE\n{USAGE}")
    hydra.main(version_base="1.3", config_path=str(CONF), config_name="convert")(_convert)()


def _convert(config: DictConfig) -> None:
    logging.captureWarnings(False)
    try:
        told: dict[str, Any] = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        target = Target(told["parallel"]["zero"], told["parallel"]["dp"], told["dtype"], told["sub_group_size"])
        with Bars() as bars:
            options = {key: told[key] for key in ("optimizer", "layers", "tp_plan")}
            report = convert(told["src"], told["dst"], told["format"], target=target, progress=bars, **options)
    except MissingMandatoryValue as error:
        sys.exit(f"lightning-par convert: {error.full_key} is missing\n{USAGE}")
    except (CheckpointError, ValueError) as error:
        sys.exit(f"lightning-par convert: {error}")
    print(closing(report, told["dst"]))


def closing(report: Report, dst: str) -> str:
    rounded = f", {len(report.rounded)} of them rounded to the format's dtype: {', '.join(report.rounded)}" if report.rounded else ""
    return f"{report.tensors} tensors, {report.elements:,} elements, from {report.source}: written to {dst} and compared{rounded}"


class Bars(Progress):
    """One bar for what is written, one for what is compared."""

    def __init__(self) -> None:
        super().__init__(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())

    def begin(self, total: int) -> None:
        self._bars = {compared: self.add_task(what, total=total) for compared, what in ((False, "written"), (True, "compared"))}

    def advance(self, amount: int, *, compared: bool) -> None:
        super().advance(self._bars[compared], amount)
