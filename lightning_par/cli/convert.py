"""`lightning-par convert`: a checkpoint in another format."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_par.checkpoint import WRITERS, CheckpointError, Report, Target, convert

DEFAULTS = Path(__file__).with_suffix(".yaml")
USAGE = f"usage: lightning-par convert src=PATH dst=PATH format={'|'.join(WRITERS)}"


def run() -> None:
    """The command `convert`, with its overrides in `sys.argv`."""
    arguments = sys.argv[1:]
    if {"-h", "--help"} & {*arguments}:
        print(f"{USAGE}\n\n{DEFAULTS.read_text()}", end="")
        return
    try:
        told = _told(arguments)
        target = Target(told["parallel"]["zero"], told["parallel"]["dp"], told["dtype"], told["sub_group_size"])
        with Bars() as bars:
            options = {key: told[key] for key in ("optimizer", "layers", "tp_plan")}
            report = convert(str(told["src"]), str(told["dst"]), told["format"], target=target, progress=bars, **options)
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"lightning-par convert: {error}")
    except KeyboardInterrupt:
        print("lightning-par convert: interrupted, and nothing is written", file=sys.stderr)
        sys.exit(130)
    print(closing(report, told["dst"]))


def _told(arguments: list[str]) -> dict[str, Any]:
    """The defaults with ``arguments`` in Hydra's grammar. Not by Hydra itself: of its configs, some are called as keys here are.

    Raises:
        ValueError: an argument is none, or src, dst or format is missing.
    """
    if strays := [argument for argument in arguments if "=" not in argument]:
        raise ValueError(f"{', '.join(strays)}: every argument is KEY=VALUE\n{USAGE}")
    config = OmegaConf.load(DEFAULTS)
    keys = [*config, *(f"parallel.{key}" for key in config.parallel)]
    try:
        for override in OverridesParser.create().parse_overrides(arguments):
            if override.key_or_group not in keys:
                raise ValueError(f"there is no {override.key_or_group}; choose of {', '.join(keys)}\n{USAGE}")
            OmegaConf.update(config, override.key_or_group, override.value())
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{error}\n{USAGE}") from error
    if missing := [key for key in ("src", "dst", "format") if OmegaConf.is_missing(config, key) or config[key] is None]:
        raise ValueError(f"{', '.join(missing)} missing\n{USAGE}")
    told: dict[str, Any] = OmegaConf.to_container(config, resolve=True)
    return told


def closing(report: Report, dst: str) -> str:
    some = ", ".join(report.rounded[:3]) + ", ..." * (len(report.rounded) > 3)
    rounded = f", {len(report.rounded)} of them rounded to the format's dtype: {some}" if report.rounded else ""
    return f"{report.tensors} tensors, {report.elements:,} elements, from {report.source}: written to {dst} and compared{rounded}"


class Bars(Progress):
    """One bar for what is written, one for what is compared."""

    def __init__(self) -> None:
        super().__init__(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())

    def begin(self, total: int) -> None:
        self._bars = {compared: self.add_task(what, total=total) for compared, what in ((False, "written"), (True, "compared"))}

    def advance(self, amount: int, *, compared: bool) -> None:
        super().advance(self._bars[compared], amount)
