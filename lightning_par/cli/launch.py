"""Starts the ranks of a job, or joins those that torchrun or SLURM started.

Note [who composes the config]
Hydra composes the config in one process only: the parent, which then starts every rank through torch's elastic agent, or rank 0
where ranks are there already (RANK is set). All others are handed the finished `Job`: from the parent as an argument, from rank 0
through the store where ranks meet. So a job has one output folder and one config, and interpolations such as ${now:} have one value.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging.config
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import lightning_par
from lightning_par.cli.check import check_layout, check_strategy, check_world, local_world_size
from lightning_par.layout import LayoutError

if TYPE_CHECKING:
    from lightning_par.comm.rendezvous import Bulletin

CONF = Path(lightning_par.__file__).parent / "conf"
PRELOADED = ["lightning_par.cli.train", "lightning_par.recipes.gpt", "lightning_par.recipes.text", "lightning_par.callbacks"]
STOP_SECONDS = 5  # that ranks get to end by themselves after one of them has failed


@dataclass(frozen=True)
class Job:
    """What a rank needs: plain containers only, every interpolation resolved."""

    config: dict[str, Any]
    logging: dict[str, Any]
    launcher: int | None = None  # the process that started the ranks, if we did: they do not outlive it


def run() -> None:
    """The command `train`, with its overrides in `sys.argv`. Modules in the folder where it is started can be named in the config."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if not started_from_outside(os.environ):
        _preload()
        _hydra_app(_start_ranks)
        return
    _export_slurm_ranks()
    from lightning_par.comm.rendezvous import Bulletin

    bulletin = Bulletin()
    _lead(bulletin) if bulletin.rank == 0 else _follow(bulletin)


def started_from_outside(environment: Mapping[str, str]) -> bool:
    return "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def _hydra_app(task: Any) -> None:
    def job(config: DictConfig) -> Any:
        return task(_job(config))

    hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")(job)()


def _job(config: DictConfig) -> Job:
    """Check and resolve a composed config; what is wrong with it ends the program with one message."""
    if config.ckpt_path is not None:
        config.ckpt_path = hydra.utils.to_absolute_path(config.ckpt_path)
        if not Path(config.ckpt_path).exists():
            sys.exit(f"ckpt_path={config.ckpt_path}: there is no such checkpoint")
    try:
        if "RANK" in os.environ:
            check_world(config.trainer)
        check_layout(config) if config.trainer.strategy is None else check_strategy(config)
    except LayoutError as error:
        sys.exit(f"lightning-par train: {error}")
    resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return Job(resolved, OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True))


# ---- we start the ranks


def _preload() -> None:
    """Ranks are forked from a server that has everything imported; it starts importing while Hydra composes."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    multiprocessing.forkserver.ensure_running()


def _start_ranks(job: Job) -> dict[str, float]:
    """Run the job on fresh ranks and return rank 0's metrics. A rank that fails ends the job and the program."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    trainer = OmegaConf.create(job.config["trainer"])
    if trainer.num_nodes > 1:
        sys.exit(f"trainer.num_nodes={trainer.num_nodes}: start this command on every node with torchrun or srun, it will join")
    logging.disable(logging.CRITICAL)  # the agent's own words about a failed rank: the rank has said it better
    try:
        with TemporaryDirectory(prefix="lightning_par_") as scratch:  # the agent would leave one of its own
            launch = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=local_world_size(trainer),
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                start_method="forkserver",
                shutdown_timeout=STOP_SECONDS,
                logs_specs=DefaultLogsSpecs(scratch),
            )
            return elastic_launch(launch, run_rank)(replace(job, launcher=os.getpid()))[0]
    except ChildFailedError as error:
        obituary = _obituary(job, error.failures)
    finally:
        logging.disable(logging.NOTSET)
    sys.exit(obituary)


def _obituary(job: Job, failures: Mapping[int, Any]) -> str:
    """Ranks that end by an error of their own leave with 1 and have said why; any other code means that they could not."""
    said = ["the job has failed"]
    silent = {rank: failure.exitcode for rank, failure in sorted(failures.items()) if failure.exitcode not in (1, -signal.SIGTERM)}
    said += [f"rank {rank} died without a word, with exit code {code}" for rank, code in silent.items()]
    if any(code < 0 for code in silent.values()):
        said.append("a negative code is a signal; -9 is often the system running out of memory")
    if _error_file(job).exists():
        said.append(f"the first error stands above and in {_error_file(job)}")
    return "lightning-par train: " + "; ".join(said)


# ---- somebody else started them


def _export_slurm_ranks() -> None:
    """Give SLURM's ranks the names that torch knows."""
    if "RANK" in os.environ:
        return
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    slurm = SLURMEnvironment()
    os.environ.update(
        RANK=str(slurm.global_rank()),
        LOCAL_RANK=str(slurm.local_rank()),
        WORLD_SIZE=str(slurm.world_size()),
        MASTER_ADDR=slurm.main_address,
        MASTER_PORT=str(slurm.main_port),
    )


def _lead(bulletin: Bulletin) -> None:
    """Rank 0 composes each job, hands it to the others and runs it; an empty job ends the others, whatever happened here."""
    numbers = itertools.count()

    def share(job: Job) -> dict[str, float]:
        bulletin.post(f"job/{next(numbers)}", json.dumps(asdict(job)))
        return run_rank(job)

    try:
        _hydra_app(share)
    finally:
        bulletin.post(f"job/{next(numbers)}", "")


def _follow(bulletin: Bulletin) -> None:
    for number in itertools.count():
        message = bulletin.read(f"job/{number}")
        if not message:
            return
        run_rank(Job(**json.loads(message)))


# ---- on each rank


def run_rank(job: Job) -> dict[str, float]:
    """One rank's share of a job, in a process whose environment names its rank."""
    if job.launcher is not None:
        threading.Thread(target=_end_with, args=(job.launcher,), daemon=True).start()
    _set_threads()
    _set_logging(job.logging)
    with _first_error_speaks(_error_file(job)):
        from lightning_par.cli.train import train

        metrics, _ = train(OmegaConf.create(job.config))
    return metrics


def _end_with(launcher: int) -> None:
    """End this rank if the process that started it is killed: nobody would stop it then."""
    while Path(f"/proc/{launcher}").exists() or not Path("/proc").exists():
        time.sleep(2)
    os._exit(1)


def _set_threads() -> None:
    """Share the cores among the node's ranks, unless OMP_NUM_THREADS says how."""
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def _set_logging(config: dict[str, Any]) -> None:
    """The job's logging, each line led by the rank."""
    for formatter in config.get("formatters", {}).values():
        formatter["format"] = f"[rank {os.environ['RANK']}]{formatter['format']}"
    logging.config.dictConfig(config)


def _error_file(job: Job) -> Path:
    return Path(job.config["paths"]["run"]) / "error.txt"


@contextlib.contextmanager
def _first_error_speaks(record: Path) -> Iterator[None]:
    """The first rank to fail prints its traceback; the others, which fail because of it, one line. All leave at once.

    Who makes the file `record` is the first. Leaving skips the interpreter's shutdown, which could wait for ranks that are gone, and
    comes a moment later, so that a rank which died without a word is the first that the agent finds missing.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # torch's checkpoint errors are no Exceptions
        rank = os.environ["RANK"]
        try:
            with record.open("x") as file:
                file.write(f"rank {rank} failed:\n{traceback.format_exc()}")
            sys.stderr.write(f"\n{record.read_text()}")
        except FileExistsError:
            sys.stderr.write(f"rank {rank} ended too: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(1)
        os._exit(1)
