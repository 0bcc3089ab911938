"""Asynchronous saving: what was there when save returned is what is written, and everybody waits who must."""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_par import HybridParallelStrategy, ParallelPrecision
from lightning_par.checkpoint import CheckpointError, Shard, is_native, native, read_meta
from lightning_par.checkpoint.copies import Copies, HostCopies
from lightning_par.checkpoint.savers import Background
from lightning_par.comm import Group, Mesh
from lightning_par.layout import ParallelLayout
from lightning_par.strategy import saving
from tests.checkpoint.fits import QUIET, STEPS, Net, SaveAt, assert_equal, ending, fit_world, world_size
from tests.checkpoint.test_trainer import Worsens
from tests.harness import WorldError, run_world
from tests.harness.models import token_loader

ZERO1: dict[str, Any] = {"dp": 2, "zero": 1}


class Do(L.Callback):
    """Calls ``action(trainer)`` after each step."""

    def __init__(self, action: Callable[[L.Trainer], object]) -> None:
        self.action = action

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.action(trainer)


def _trainer(layout: dict[str, Any], callbacks: list[Any], steps: int, **options: Any) -> L.Trainer:
    L.seed_everything(3, verbose=False)
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **({"async_save": True} | layout))
    has_files = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    settings = QUIET | {"enable_checkpointing": has_files, "max_steps": steps, "devices": world_size(layout)} | options
    return L.Trainer(strategy=strategy, callbacks=callbacks, **settings)


def _run(layout: dict[str, Any], callbacks: list[Any], steps: int, module: Net | None = None, **options: Any) -> tuple[L.Trainer, Net]:
    trainer, module = _trainer(layout, callbacks, steps, **options), module or Net(layers=2, dropout=0.0 if "cp" in layout else 0.1)
    loader = token_loader(4, rows=12, **trainer.strategy.distributed_sampler_kwargs)
    trainer.fit(module, loader, loader if isinstance(module, Worsens) else None)
    return trainer, module


@contextmanager
def _writing(before: Callable[[Path], object]) -> Iterator[None]:
    """Call ``before(partial folder)`` in this rank, whenever it is about to write its part."""
    write = native._write

    def seam(partial: Path, *rest: Any) -> native.Part:
        before(partial)
        return write(partial, *rest)

    native._write = seam
    try:
        yield
    finally:
        native._write = write


# --- what is written


def _save_while_training_goes_on(layout: dict[str, Any], folder: Path, options: dict[str, Any]) -> tuple[int, bool]:
    """Save after step 2, write after step 5: the step at which it is written, and whether it was there before."""
    if "stochastic" in options:
        options = {"plugins": [ParallelPrecision("bf16-true", master_weights=False, stochastic_rounding=True)]}
    opened, written, early = threading.Event(), [], []

    def step(trainer: L.Trainer) -> None:
        if trainer.global_step == 5:
            early.append(folder.exists())
            written.append(trainer.global_step)
            opened.set()

    with _writing(lambda _: opened.wait(30)):
        _run(layout, [SaveAt(folder, 2), Do(step)], 6, **options)
    return written[0], early[0]


def _save_at_once(layout: dict[str, Any], folder: Path, options: dict[str, Any]) -> None:
    if "stochastic" in options:
        options = {"plugins": [ParallelPrecision("bf16-true", master_weights=False, stochastic_rounding=True)]}
    _run(layout | {"async_save": False}, [SaveAt(folder, 2)], 6, **options)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param(ZERO1, {}, id="dp2 zero1", marks=pytest.mark.slow),
        pytest.param({"dp": 2}, {"stochastic": True}, id="dp2 stochastic rounding", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "zero": 3}, {}, id="dp2 zero3", marks=pytest.mark.slow),
        pytest.param({"pp": 2}, {"precision": "16-mixed"}, id="pp2 scaled", marks=pytest.mark.slow),
        pytest.param({"tp": 2}, {}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"dp": 1}, {}, id="one rank"),
    ],
)
def test_what_is_written_later_is_to_the_bit_what_a_save_at_once_writes(layout: Any, options: Any, tmp_path: Path) -> None:
    size = world_size(layout)
    assert run_world(_save_while_training_goes_on, size, layout, tmp_path / "later", options) == [(5, False)] * size
    run_world(_save_at_once, size, layout, tmp_path / "now", options)
    now, later = (json.loads((tmp_path / name / native.SUMS).read_text()) for name in ("now", "later"))
    assert now.keys() == later.keys()
    assert [now[name] for name in now if name.endswith("distcp")] == [later[name] for name in now if name.endswith("distcp")]
    assert read_meta(tmp_path / "now") == read_meta(tmp_path / "later")
    native.check(tmp_path / "later")


def _resume(folder: Path) -> Any:
    trainer = _trainer(ZERO1, [], 2 * STEPS)
    module = Net()
    trainer.fit(module, token_loader(4, rows=12, **trainer.strategy.distributed_sampler_kwargs), ckpt_path=folder)
    return ending(trainer, module)


@pytest.mark.slow
def test_P21_a_run_resumed_from_it_is_the_straight_run_bit_for_bit(tmp_path: Path) -> None:
    straight = fit_world(ZERO1, 2 * STEPS)
    fit_world(ZERO1 | {"async_save": True}, STEPS, save=tmp_path / "last")
    resumed = run_world(_resume, 2, tmp_path / "last")
    assert resumed[0].losses == straight[0].losses[STEPS:]
    assert_equal(resumed[0].weights, straight[0].weights)
    assert_equal(resumed[0].moments, straight[0].moments)


def _copy_twice() -> tuple[bool, list[float]]:
    data, copies = torch.ones(3), HostCopies()
    shards = {"mine": Shard.whole(data, writes=True), "another rank's": Shard.whole(data, writes=False)}
    first = copies.take(shards).shards
    data += 1
    taken = first["mine"].data.tolist()
    second = copies.take(shards).shards
    assert list(first) == ["mine"]
    return first["mine"].data.data_ptr() == second["mine"].data.data_ptr(), taken + second["mine"].data.tolist()


def test_copies_are_of_their_moment_and_take_the_same_memory_each_time() -> None:
    assert _copy_twice() == (True, [1.0] * 3 + [2.0] * 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_of_cuda_tensors_are_pinned_and_ordered_with_the_stream() -> None:
    data, copies = torch.ones(2**24, device="cuda"), HostCopies()
    taken = copies.take({"mine": Shard.whole(data, writes=True)})
    data.zero_()  # behind the copy, which is still on its way
    taken.wait()
    assert taken.shards["mine"].data.is_pinned()
    assert taken.shards["mine"].data.min() == 1


# --- who waits


def _save_each_step(folder: Path) -> tuple[list[int], int, bool]:
    """How many saves were under way at each moment, by name of the folder that was written; and on which groups the thread spoke."""
    under_way, most, foreign = [0], [0], []
    save, gather = native.save_awaited, Group.gather_objects

    def counted(*arguments: Any) -> None:
        under_way[0] += 1
        most.append(under_way[0])
        time.sleep(0.05)
        save(*arguments)
        under_way[0] -= 1

    def watched(group: Group, value: Any) -> list[Any]:
        if threading.current_thread() is not threading.main_thread():
            foreign.append(group.handle)
        return gather(group, value)

    native.save_awaited, Group.gather_objects = counted, watched
    trainer, _ = _run(ZERO1, [Do(lambda trainer: trainer.save_checkpoint(folder / f"{trainer.global_step}"))], 4)
    mesh = trainer.strategy.mesh
    training = [group.handle for group in vars(mesh).values() if isinstance(group, Group)]
    assert foreign
    return most, len([handle for handle in foreign if any(handle is other for other in training)]), is_native(folder / "4")


def test_one_save_is_under_way_at_most_and_its_thread_has_a_process_group_of_its_own(tmp_path: Path) -> None:
    for most, foreign, complete in run_world(_save_each_step, 2, tmp_path):
        assert max(most) == 1
        assert len(most) == 5
        assert foreign == 0
        assert complete, "the end of the fit waits"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3", "4"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def _save_after_the_fit(folder: Path) -> tuple[bool, bool, bool]:
    with _writing(lambda _: time.sleep(0.3)):
        trainer, _ = _run(ZERO1, [], 1)
        trainer.save_checkpoint(folder / "after")
        there = is_native(folder / "after")
        waited = []

        def step(trainer: L.Trainer) -> None:
            trainer.save_checkpoint(folder / "read")
            trainer.strategy._fits = lambda _: False  # what is read now is not to be gone on from
            trainer.strategy.load_checkpoint(folder / "read")
            del trainer.strategy._fits
            trainer.save_checkpoint(folder / "gone")
            trainer.strategy.remove_checkpoint(folder / "gone")
            trainer.strategy.wait_for_checkpoint()
            trainer.strategy.barrier()  # rank 0 deletes
            waited.append((folder / "gone").exists())
            trainer.save_checkpoint(folder / "hpc_ckpt_1.ckpt")
            waited.append(is_native(folder / "hpc_ckpt_1.ckpt"))

        _run(ZERO1, [Do(step)], 1)
    return there, *waited


def test_reading_deleting_giving_the_job_back_and_saving_after_the_fit_wait(tmp_path: Path) -> None:
    assert run_world(_save_after_the_fit, 2, tmp_path) == [(True, False, True)] * 2


class Fails(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.trainer.global_step == 2:
            raise ValueError("the user's own error")


def _fail_while_saving(folder: Path, broken: bool) -> list[str]:
    def slow(_: Path) -> None:
        time.sleep(0.3)
        if broken:
            raise OSError(28, "No space left on device")

    with _writing(slow), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="the user's own error"):
            _run(ZERO1, [SaveAt(folder, 1)], 3, Fails(layers=2))
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("broken", [False, True])
def test_an_exception_waits_for_the_save_under_way_and_is_not_replaced_by_its_failure(broken: bool, tmp_path: Path) -> None:
    told = run_world(_fail_while_saving, 2, tmp_path / "saved", broken)
    assert is_native(tmp_path / "saved") != broken
    for warned in told:
        assert any("rank 1: OSError: [Errno 28] No space left on device" in warning for warning in warned) == broken


# --- what fails


def _fail_to_write(folder: Path, failing: int, saves: int, steps: int) -> tuple[str, int]:
    """Rank 1 cannot write its part of save ``failing``."""
    done: list[int] = []

    def broken(partial: Path) -> None:
        done.append(1)
        if len(done) == failing and torch.distributed.get_rank() == 1:
            raise OSError(28, "No space left on device")

    def step(trainer: L.Trainer) -> None:
        reached.append(trainer.global_step)
        if trainer.global_step <= saves:
            trainer.save_checkpoint(folder / f"{trainer.global_step}")

    reached: list[int] = []
    with _writing(broken), pytest.raises(CheckpointError) as error:
        _run(ZERO1, [Do(step)], steps)
    return str(error.value), reached[-1]


@pytest.mark.parametrize(("saves", "surfaces"), [(3, 3), (2, 5)], ids=["the next save", "the end of the fit"])
def test_K12_a_failure_surfaces_on_every_rank_with_rank_path_and_cause(saves: int, surfaces: int, tmp_path: Path) -> None:
    for message, step in run_world(_fail_to_write, 2, tmp_path, 2, saves, 5):
        assert f"saving checkpoint {tmp_path / '2'} failed" in message
        assert "rank 1: OSError: [Errno 28] No space left on device" in message
        assert step == surfaces
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def _fail_to_copy(folder: Path, moment: str) -> str:
    """Rank 1 has no memory for its copies: told when they are taken, or by the device while they are awaited."""
    mesh = Mesh.build(ParallelLayout(dp=2))
    saver, rank = Background(mesh.world), mesh.rank

    def broken(*_: Any) -> Any:
        raise MemoryError("no pinned memory is left")

    if rank == 1:
        setattr(*{"take": (HostCopies, "take"), "wait": (Copies, "wait")}[moment], broken)
    saver.save(folder, {f"{rank}": Shard.whole(torch.ones(3), writes=True)}, {})
    with pytest.raises(CheckpointError) as error:
        saver.wait()
    saver.close()
    return str(error.value)


@pytest.mark.parametrize("moment", ["take", "wait"])
def test_K12_copies_that_fail_on_one_rank_raise_on_all_at_once(moment: str, tmp_path: Path) -> None:
    for message in run_world(_fail_to_copy, 2, tmp_path / "last", moment):
        assert message == f"saving checkpoint {tmp_path / 'last'} failed:\n  - rank 1: MemoryError: no pinned memory is left"
    assert not [*tmp_path.iterdir()]


def _hang_while_writing(folder: Path) -> tuple[str, bool]:
    """Rank 1 does not write until rank 0 has given up, or a minute has passed."""
    given_up = folder / "given up"

    def hang(_: Path) -> None:
        deadline = time.monotonic() + 60
        while torch.distributed.get_rank() == 1 and not given_up.exists() and time.monotonic() < deadline:
            time.sleep(0.05)

    with _writing(hang), pytest.raises(CheckpointError) as error:
        _run(ZERO1 | {"timeout": timedelta(seconds=3)}, [SaveAt(folder / "saved", 1)], 2)
    if torch.distributed.get_rank() == 0:
        given_up.touch()
    return str(error.value), given_up.exists()


def test_a_rank_that_hangs_while_it_writes_is_waited_for_no_longer_than_the_timeout(tmp_path: Path) -> None:
    for message, given_up in run_world(_hang_while_writing, 2, tmp_path):
        assert f"checkpoint {tmp_path / 'saved'} is not saved: another rank is gone, or slower than the timeout" in message
        assert given_up
    assert not is_native(tmp_path / "saved")


def _save_on_rank_0_only(folder: Path) -> None:
    saving.PATIENCE = saving.timedelta(seconds=1)
    trainer, _ = _run(ZERO1, [], 1)
    if trainer.is_global_zero:
        with pytest.raises(CheckpointError, match=r"ranks \[1\] have not come .* must be called on all ranks"):
            trainer.save_checkpoint(folder)


def test_K17_saving_on_rank_0_only_is_told(tmp_path: Path) -> None:
    run_world(_save_on_rank_0_only, 2, tmp_path / "last")


# --- ModelCheckpoint


def _keep(folder: Path, async_save: bool, names: dict[str, Any]) -> tuple[list[str], str, str]:
    keep = ModelCheckpoint(folder, monitor="val_loss", **names)
    with _writing(lambda _: time.sleep(0.1)):
        _run(ZERO1 | {"async_save": async_save}, [keep], -1, Worsens(layers=2, dropout=0.0), max_epochs=4)
    assert "file_exists" not in vars(keep)
    return [Path(path).name for path in keep.best_k_models], Path(keep.best_model_path).name, Path(keep.last_model_path).name


NAMES: dict[str, dict[str, Any]] = {
    "top 2 and last": {"filename": "{epoch}", "save_top_k": 2, "save_last": True},
    "one name, so versions": {"filename": "same", "save_top_k": 3},
    "top 1": {"filename": "{epoch}", "save_top_k": 1},
    "all": {"filename": "{epoch}", "save_top_k": -1, "save_last": True},
}


@pytest.mark.parametrize(
    "names", [pytest.param(NAMES[key], id=key, marks=pytest.mark.slow if key != "top 2 and last" else ()) for key in NAMES]
)
def test_K16_model_checkpoint_keeps_the_same_folders_as_with_saves_at_once(names: dict[str, Any], tmp_path: Path) -> None:
    kept = {mode: run_world(_keep, 2, tmp_path / str(mode), mode, names) for mode in (False, True)}
    assert kept[True] == kept[False]
    assert kept[True][0] == kept[True][1]
    folders = {mode: sorted(path.name for path in (tmp_path / str(mode)).iterdir()) for mode in kept}
    assert folders[True] == folders[False]
    for name in folders[True]:
        native.check(tmp_path / "True" / name)
        assert read_meta(tmp_path / "True" / name)["epoch"] == read_meta(tmp_path / "False" / name)["epoch"]


def _keep_one(folder: Path, failing: int) -> str:
    done: list[int] = []

    def broken(partial: Path) -> None:
        done.append(1)
        if len(done) == failing:
            raise OSError(28, "No space left on device")

    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=1)
    with _writing(broken), pytest.raises(CheckpointError) as error:
        _run(ZERO1, [keep], 6)
    return str(error.value)


def test_K12_the_previous_is_deleted_only_after_the_next_is_complete(tmp_path: Path) -> None:
    for message in run_world(_keep_one, 2, tmp_path, 3):
        assert "step=3.ckpt failed" in message
    assert [path.name for path in tmp_path.iterdir()] == ["step=2.ckpt"]
    native.check(tmp_path / "step=2.ckpt")


def test_a_link_to_the_last_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=r"async_save=True with ModelCheckpoint\(save_last='link'\).*use save_last=True"):
        run_world(_run_linked, 1, tmp_path)


def _run_linked(folder: Path) -> None:
    _run({"dp": 1}, [ModelCheckpoint(folder, save_last="link")], 1)


@pytest.mark.parametrize("given", ["yes", 1, None])
def test_only_true_and_false_are_taken(given: Any) -> None:
    with pytest.raises(TypeError, match=r"async_save=.*: give True or False"):
        HybridParallelStrategy(async_save=given)
