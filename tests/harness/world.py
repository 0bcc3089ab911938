"""Run a function on N gloo ranks, and bring every rank's result or traceback back.

Ranks are forked from one server that has imported everything already, so a world starts in a fraction of a second, and each test gets
a fresh one. What a rank needs must be importable: ``fn`` is a module-level function of a test module, its arguments are pickled.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRELOAD = [
    "pytest",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "lightning.pytorch",
    "lightning_par",
    "tests.harness.world",
]

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class WorldError(AssertionError):
    """One or more ranks failed; the message holds every failed rank's traceback, and the stack of those that hang."""


def run_world(fn: Callable[..., Any], size: int, *args: Any, timeout: float = 60.0, grace: float = 2.0) -> list[Any]:
    """Call ``fn(*args)`` on ``size`` fresh ranks with a default gloo group; the results, by rank.

    A rank that fails gives the others ``grace`` seconds to end on their own (they usually wait for it in a collective).
    """
    with tempfile.TemporaryDirectory(prefix="world-") as folder, _server_path():
        pipes: list[Connection] = []
        ranks = []
        try:
            for rank in range(size):
                ours, theirs = _context.Pipe(duplex=False)
                worker = _context.Process(target=_rank_main, args=(rank, size, folder, theirs, fn, args), daemon=True)
                worker.start()
                theirs.close()
                pipes.append(ours)
                ranks.append(worker)
            return _collect(pipes, ranks, Path(folder), timeout, grace)
        finally:
            for worker in ranks:
                worker.kill()
                worker.join()


@contextmanager
def _server_path() -> Iterator[None]:
    """Python 3.11's forkserver finds its preloads only through PYTHONPATH, so that is set while it may be started."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([before] if before else [])])
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _collect(pipes: list[Connection], ranks: list[Any], folder: Path, timeout: float, grace: float) -> list[Any]:
    deadline = time.monotonic() + timeout
    pending, results, errors = dict(enumerate(pipes)), {}, {}
    while pending:
        ready = wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [r for r, pipe in pending.items() if pipe in ready]:
            try:
                ok, value = pickle.loads(pending.pop(rank).recv_bytes())
            except EOFError:
                ranks[rank].join(1)
                ok, value = False, f"died with exit code {ranks[rank].exitcode}"
            (results if ok else errors)[rank] = value
        if errors:
            deadline = min(deadline, time.monotonic() + grace)
    for rank in pending:
        errors[rank] = "no answer; stack:\n" + _stack_of(ranks[rank], folder / f"{rank}.stack")
    if errors:
        raise WorldError("".join(f"\n--- rank {rank} ---\n{text}" for rank, text in sorted(errors.items())))
    return [results[rank] for rank in range(len(pipes))]


def _stack_of(worker: Any, path: Path) -> str:
    with suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGUSR1)
        time.sleep(0.3)
    return path.read_text() if path.exists() else "(none)"


def _rank_main(rank: int, size: int, folder: str, pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with open(f"{folder}/{rank}.stack", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_WORLD_SIZE=str(size),
            GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT="0",
            TORCHELASTIC_RUN_ID="test",
            GLOO_SOCKET_IFNAME="lo",
        )
        import torch
        import torch.distributed as dist

        from lightning_par.pipeline import sums

        sums.LARGE = 1  # the small models of tests do what large ones do
        torch.set_num_threads(1)
        torch.manual_seed(0)
        try:
            dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(f"{folder}/store", size))
            answer = True, fn(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            pipe.send_bytes(pickle.dumps(answer))  # by value: torch's own reduction shares memory with a process that ends here
        except Exception:
            pipe.send_bytes(pickle.dumps((False, f"the result cannot be pickled:\n{traceback.format_exc()}")))
        os._exit(0)  # skip gloo's teardown and the interpreter's exit: 10 ms a rank
