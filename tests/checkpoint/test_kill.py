"""Killed ranks, full disks, read-only folders, damaged files: the last complete checkpoint is found and loads, and damage is named."""

from __future__ import annotations

import ctypes
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint import filesystem

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import CheckpointError, native, read_meta
from tests.checkpoint.fits import QUIET, Net, State, assert_equal, ending
from tests.harness import WorldError, run_world
from tests.harness.models import token_loader

STEPS = 5
TIMEOUT = 20
"""Seconds: how long a rank may wait for another, and so the most that one may hang."""
FILES = ["__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata", "sums.json"]
DAMAGE = [(file, how) for file in FILES for how in ("gone", "cut", "a bit")]


class Moments(L.Callback):
    """Counts what this process does to the files of checkpoints, and its training steps; it is killed right before number ``last``.

    Boxes of a file that was not closed are partly in the process's own buffer, and die with it: such a file is cut short.
    """

    def __init__(self, folder: Path, last: int | None) -> None:
        self.folder, self.last, self.count = f"{folder}{os.sep}", last, 0
        sys.addaudithook(self._audited)
        write_item, fsync = filesystem._write_item, os.fsync
        filesystem._write_item = lambda *rest: (self._passed(), write_item(*rest))[1]
        os.fsync = lambda handle: (self._passed(), fsync(handle))[1]

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        deletes = event in ("os.remove", "os.rmdir")  # by name in an open folder, as shutil.rmtree does it
        if deletes or (event in ("open", "os.rename", "os.mkdir") and str(arguments[0]).startswith(self.folder)):
            self._passed()

    def _passed(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_start(self, *_: Any) -> None:
        self._passed()

    def on_train_batch_end(self, *_: Any) -> None:
        self._passed()


@dataclass
class Ended:
    state: State = field(default_factory=State)
    begun: int = 0
    moments: int = 0


class Small(Net):
    begun = 0

    def __init__(self) -> None:
        super().__init__(layers=1)

    def on_train_start(self) -> None:
        self.begun = self.trainer.global_step


def _train(folder: Path, async_save: bool, killed: tuple[int, int] | None = None, resume: str | None = None) -> Ended:
    """Train to the last step and save at each, under its own name and as last.ckpt, of which the former is deleted again."""
    rank = torch.distributed.get_rank()
    moments = Moments(folder, killed[1] if killed is not None and killed[0] == rank else None)
    keep = _Noted(folder, "{step}", every_n_train_steps=1, save_top_k=1, save_last=True)
    strategy = HybridParallelStrategy(dp=2, zero=1, async_save=async_save, timeout=timedelta(seconds=TIMEOUT))
    settings = QUIET | {"enable_checkpointing": True}
    trainer = L.Trainer(devices=2, strategy=strategy, callbacks=[moments, keep], max_steps=STEPS, **settings)
    module = Small()
    loader = token_loader(4, rows=4, **strategy.distributed_sampler_kwargs)  # an epoch is a step
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, loader, ckpt_path=resume)
    return Ended(ending(trainer, module), module.begun, moments.count)


class _Noted(ModelCheckpoint):
    """Notes the step whose save, as last, has returned."""

    def _save_last_checkpoint(self, trainer: L.Trainer, monitor_candidates: Any) -> None:
        super()._save_last_checkpoint(trainer, monitor_candidates)
        if trainer.is_global_zero:
            note = Path(f"{self.dirpath}.returned.new")
            note.write_text(f"{trainer.global_step}")
            note.rename(f"{self.dirpath}.returned")  # the other thread may end the process at any moment


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[Ended]]:
    """The run that nobody kills; by async_save."""
    return {mode: run_world(_train, 2, tmp_path_factory.mktemp("straight") / "saved", mode) for mode in (False, True)}


PLACES = [(random.Random(seed).randrange(2), random.Random(seed + 1000).random()) for seed in range(20)]
"""Of 20 kills: the rank, and when, as a part of all the moments that it has."""


SLOW, LONG = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("number", [pytest.param(i, marks=() if i == 0 else SLOW if i < 6 else LONG) for i in range(20)])
@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "async"])
def test_K12_a_rank_killed_at_any_moment_leaves_the_last_complete_checkpoint(
    number: int, async_save: bool, straight: dict[bool, list[Ended]], tmp_path: Path
) -> None:
    folder, (rank, part) = tmp_path / "saved", PLACES[number]
    moment = 1 + int(part * straight[async_save][rank].moments)
    with pytest.raises(WorldError, match=rf"rank {rank} ---\ndied with exit code -9") as error:
        run_world(_train, 2, folder, async_save, (rank, moment), timeout=2 * TIMEOUT, grace=TIMEOUT + 5)
    assert "no answer" not in str(error.value), "the other rank ends too"
    note = tmp_path / "saved.returned"
    returned = int(note.read_text()) if note.exists() else 0
    complete = max(0, returned - async_save)  # the save before has been waited for
    resumed = run_world(_train, 2, folder, async_save, None, "last")
    assert complete <= resumed[0].begun <= returned + 1, "found by name, and none that is older"
    assert_equal(resumed[0].state.weights, straight[async_save][0].state.weights)
    assert_equal(resumed[0].state.moments, straight[async_save][0].state.moments)
    for path in folder.glob("*.ckpt"):
        native.check(path)
    if resumed[0].begun < STEPS:  # else nothing was saved any more
        assert {path.suffix for path in folder.iterdir()} == {".ckpt"}, "what the kill left is cleaned up"


def _interrupted_between_renames(folder: Path) -> None:
    rename = Path.rename
    Path.rename = lambda path, target: (
        os._exit(9) if path.name == "last.ckpt.partial" and (folder / "last.ckpt.replaced").exists() else rename(path, target)
    )
    _train(folder, False)


def test_last_is_found_when_it_was_just_being_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with pytest.raises(WorldError, match="died with exit code 9"):
        run_world(_interrupted_between_renames, 2, folder)
    assert not (folder / "last.ckpt").exists()
    assert run_world(_train, 2, folder, False, None, "last")[0].begun == 1
    assert not list(folder.glob("*.replaced"))


# --- the disk


@contextmanager
def _small_disk(folder: Path, size: int) -> Iterator[None]:
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("a small disk is a tmpfs, which only root may mount")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def _save_twice(folder: Path, async_save: bool, limit: int | None) -> str:
    """The second save does not fit on the disk, or is more than rank 1 may write into a file."""
    strategy = HybridParallelStrategy(dp=2, zero=1, async_save=async_save, timeout=timedelta(seconds=TIMEOUT))
    trainer = L.Trainer(devices=2, strategy=strategy, callbacks=[_SaveEach(folder, limit)], max_steps=3, **QUIET)
    with pytest.raises(CheckpointError) as error:
        trainer.fit(Small(), token_loader(4, rows=12, **strategy.distributed_sampler_kwargs))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return str(error.value)


class _SaveEach(L.Callback):
    def __init__(self, folder: Path, limit: int | None) -> None:
        self.folder, self.limit = folder, limit

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self.limit is not None and trainer.global_step == 2 and trainer.global_rank == 1:
            trainer.strategy.wait_for_checkpoint()
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.RLIM_INFINITY))
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}")


def _assert_the_first_is_left(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["1"], "what was written of the second is gone"
    native.check(folder / "1")
    assert read_meta(folder / "1")["global_step"] == 1


@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "async"])
def test_K12_a_full_disk_is_told_and_leaves_the_previous(async_save: bool, tmp_path: Path) -> None:
    with _small_disk(tmp_path / "disk", 300_000):
        for message in run_world(_save_twice, 2, tmp_path / "disk", async_save, None):
            assert f"saving checkpoint {tmp_path / 'disk' / '2'} failed" in message
            assert "No space left on device" in message
        _assert_the_first_is_left(tmp_path / "disk")


@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "async"])
def test_K12_a_file_that_gets_too_large_is_told_and_leaves_the_previous(async_save: bool, tmp_path: Path) -> None:
    for message in run_world(_save_twice, 2, tmp_path, async_save, 20_000):
        assert f"saving checkpoint {tmp_path / '2'} failed" in message
        assert "rank 1: OSError: [Errno 27] File too large" in message
        assert "rank 0:" not in message
    _assert_the_first_is_left(tmp_path)


def _without_privileges(effective: int = 1 << 1 | 1 << 2) -> None:
    """Let even root obey the modes of files: drop CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (linux/capability.h)."""
    libc, header, data = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~effective
    assert libc.capset(header, data) == 0


def _save_to_a_read_only_place(folder: Path, async_save: bool) -> str:
    _without_privileges()
    strategy = HybridParallelStrategy(dp=2, zero=1, async_save=async_save, timeout=timedelta(seconds=TIMEOUT))
    trainer = L.Trainer(devices=2, strategy=strategy, callbacks=[_SaveEach(folder, None)], max_steps=2, **QUIET)
    with pytest.raises(CheckpointError) as error:
        trainer.fit(Small(), token_loader(4, rows=12, **strategy.distributed_sampler_kwargs))
    return str(error.value)


@pytest.mark.skipif(sys.platform != "linux", reason="privileges are dropped as Linux knows them")
@pytest.mark.parametrize("async_save", [False, True], ids=["at once", "async"])
def test_K13_a_read_only_place_raises_on_every_rank(async_save: bool, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        for message in run_world(_save_to_a_read_only_place, 2, tmp_path, async_save):
            assert f"saving checkpoint {tmp_path / '1'} failed" in message
            assert "rank 0: PermissionError" in message
        assert not list(tmp_path.iterdir())
    finally:
        tmp_path.chmod(0o700)


# --- damage


def _load_what_is_damaged(folder: Path) -> dict[tuple[str, str], str]:
    """What each kind of damage of each file is answered with."""
    _save_once(folder)
    told = {}
    for file, how in DAMAGE:
        damaged = folder.with_name(f"{file} {how}")
        if torch.distributed.get_rank() == 0:
            shutil.copytree(folder, damaged)
            _damage(damaged / file, how)
        torch.distributed.barrier()
        strategy = HybridParallelStrategy(dp=2, zero=1, timeout=timedelta(seconds=TIMEOUT))
        trainer = L.Trainer(devices=2, strategy=strategy, max_steps=9, **QUIET)
        with pytest.raises(CheckpointError) as error:
            trainer.fit(Small(), token_loader(4, rows=4, **strategy.distributed_sampler_kwargs), ckpt_path=damaged)
        told[file, how] = str(error.value)
    return told


def _damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 8
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data if how == "a bit" else data[:-3])


def test_damage_of_any_file_stops_all_ranks_and_is_named(tmp_path: Path) -> None:
    words = {"gone": "is missing", "cut": "has", "a bit": "holds other bytes"}
    for told in run_world(_load_what_is_damaged, 2, tmp_path / "last.ckpt"):
        assert list(told) == DAMAGE
        for (file, how), message in told.items():
            assert f"{tmp_path}/{file} {how}" in message, "the folder is named"
            if file.endswith("distcp"):
                assert f"{file} {words[how]}" in message
                assert f"rank {file[2]}'s" in message


def _save_once(folder: Path) -> None:
    strategy = HybridParallelStrategy(dp=2, zero=1)
    trainer = L.Trainer(devices=2, strategy=strategy, max_steps=1, **QUIET)
    trainer.fit(Small(), token_loader(4, rows=4, **strategy.distributed_sampler_kwargs))
    trainer.save_checkpoint(folder)
