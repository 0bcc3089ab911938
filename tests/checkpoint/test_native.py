"""The folder itself: complete or not there, whatever interrupts its writing; what does not fit is named."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.checkpoint import (
    CheckpointError,
    Shard,
    convert,
    files,
    index,
    is_native,
    native,
    read_index,
    read_meta,
    read_tensors,
    save,
)
from lightning_par.checkpoint.files import held, is_held
from lightning_par.checkpoint.index import IndexReader
from lightning_par.checkpoint.whole import open_native
from lightning_par.comm import Group, Mesh
from lightning_par.comm.trace import Trace
from lightning_par.layout import ParallelLayout, ShardSpec, Span, split
from tests.checkpoint.fits import fit, fit_world
from tests.harness import WorldError, run_world


def _world() -> Any:
    return Mesh.build(ParallelLayout(dp=torch.distributed.get_world_size())).world


def _rows(index: int, size: int, value: float) -> Shard:
    """This rank's rows of a [5, 3] tensor filled with ``value``: one row each, the last rank the rest."""
    spec = ShardSpec.whole(torch.empty(5, 3))
    span = Span(index, index + 1 if index < size - 1 else 5)
    return Shard(spec.narrow(0, (span,)), torch.full((span.size * 3,), value))


def _save(folder: Path, value: float = 1.0) -> None:
    world = _world()
    save(folder, {"model.weight": _rows(world.index, world.size, value)}, {"value": value}, world)


def _read(folder: Path) -> torch.Tensor:
    whole = Shard.whole(torch.zeros(5, 3), writes=False)
    read_tensors(folder, {"model.weight": whole})
    return whole.data


def _assert_holds(folder: Path, value: float) -> None:
    assert is_native(folder)
    assert read_meta(folder) == {"value": value}
    torch.testing.assert_close(_read(folder), torch.full((5, 3), value), rtol=0, atol=0)


def test_rank_shards_come_back_as_one_tensor(tmp_path: Path) -> None:
    run_world(_save, 3, tmp_path / "last")
    _assert_holds(tmp_path / "last", 1.0)
    assert read_index(tmp_path / "last") == {"model.weight": (torch.Size([5, 3]), torch.float32)}
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def test_a_new_save_replaces_the_old_one(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        run_world(_save, 2, tmp_path / "last", value)
    _assert_holds(tmp_path / "last", 2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def _save_but_one_rank_cannot_write(folder: Path, broken: int) -> str:
    world = _world()
    shard = _rows(world.index, world.size, 2.0)
    if world.index == broken:
        shard = _Unreadable(shard.spec, shard.data)
    with pytest.raises(CheckpointError) as error:
        save(folder, {"model.weight": shard}, {"value": 2.0}, world)
    return str(error.value)


class _Unreadable(Shard):
    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("broken", [0, 1])
def test_K12_a_write_that_fails_on_one_rank_raises_on_all_and_leaves_the_previous(tmp_path: Path, broken: int) -> None:
    run_world(_save, 2, tmp_path / "last")
    for message in run_world(_save_but_one_rank_cannot_write, 2, tmp_path / "last", broken):
        assert f"rank {broken}: OSError: [Errno 28] No space left on device" in message
    _assert_holds(tmp_path / "last", 1.0)
    run_world(_save, 2, tmp_path / "last", 3.0)  # over the stale last.partial
    _assert_holds(tmp_path / "last", 3.0)


@pytest.mark.parametrize("moment", ["_begun", "_complete", "rename"])
def test_K12_a_process_killed_in_the_middle_of_a_save_leaves_the_previous(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "last"
    run_world(_save, 1, folder)
    with pytest.raises(WorldError, match="died with exit code 9"):
        run_world(_die_at, 1, folder, moment)
    _assert_holds(folder, 1.0)
    assert not is_native(tmp_path / "last.partial")
    run_world(_save, 1, folder, 3.0)
    _assert_holds(folder, 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def _die_at(folder: Path, moment: str) -> None:
    def die(*_: Any) -> None:
        os._exit(9)

    if moment == "rename":  # the old folder is out of the way, the new one not yet in place
        rename = Path.rename
        Path.rename = lambda path, target: die() if path.name.endswith(native.PARTIAL) else rename(path, target)
    else:
        setattr(native, moment, die)
    _save(folder, 2.0)


def test_K12_a_partial_folder_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "last")
    shutil.copytree(tmp_path / "last", tmp_path / "next.partial")
    assert not is_native(tmp_path / "next.partial")
    assert not is_native(tmp_path / "next")
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        read_meta(tmp_path / "next")


@pytest.mark.parametrize("missing", ["meta.pt", ".metadata"])
def test_a_folder_without_its_marks_is_no_checkpoint(tmp_path: Path, missing: str) -> None:
    run_world(_save, 1, tmp_path / "last")
    (tmp_path / "last" / missing).unlink()
    assert not is_native(tmp_path / "last")


def test_K13_a_file_in_place_of_the_folder_raises_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "last").write_text("a file")
    with pytest.raises(WorldError, match=r"(?s)rank 0 ---.*last is a file.*rank 1 ---.*last is a file"):
        run_world(_save, 2, tmp_path / "last")


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").write_text("a file")
    with pytest.raises(WorldError, match=r"(?s)rank 0 ---.*data holds files that are none of ours.*rank 1 ---.*holds files"):
        run_world(_save, 2, tmp_path / "data")
    assert (tmp_path / "data" / "precious").read_text() == "a file"


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_told(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "last")
    source = open_native(tmp_path / "last")
    source.fill({"model.weight": (whole := Shard.whole(torch.zeros(5, 3), writes=False))})
    run_world(_save, 1, tmp_path / "last", 2.0)
    for read in (lambda: source.fill({"model.weight": whole}), lambda: source.read("model.weight")):
        with pytest.raises(CheckpointError, match="last was replaced by another while it was read"):
            read()


def test_files_of_others_in_a_checkpoint_outlive_it(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    run_world(_save, 1, folder)
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "download.partial").mkdir()
    run_world(_save, 1, folder, 2.0)
    _assert_holds(folder, 2.0)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (tmp_path / "download.partial").is_dir()
    native.remove(folder)
    assert not is_native(folder)
    assert {file.name for file in folder.iterdir()} == {"notes.txt", native.SUMS}
    run_world(_save, 1, folder, 3.0)
    _assert_holds(folder, 3.0)
    assert (folder / "notes.txt").read_text() == "mine"


def test_files_of_others_meet_others_of_their_name_after_a_crash(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    run_world(_save, 1, folder)
    (folder / "notes.txt").write_text("older")
    (folder / "logs").mkdir()
    folder.rename(tmp_path / "last.replaced")
    run_world(_save, 1, tmp_path / "elsewhere" / "new", 3.0)
    (tmp_path / "elsewhere" / "new").rename(folder)  # as when a process dies right here
    (folder / "notes.txt").write_text("newer")
    (folder / "logs").mkdir()
    run_world(_save, 1, tmp_path / "other")
    _assert_holds(folder, 3.0)
    assert not (tmp_path / "last.replaced").exists()
    assert (folder / "notes.txt").read_text() == "newer"
    assert (folder / "notes.txt.1").read_text() == "older"
    assert (folder / "logs.1").is_dir()


@pytest.mark.parametrize("ending", [native.PARTIAL, native.REPLACED])
def test_names_of_folders_that_are_cleaned_up_are_refused(ending: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"x\{ending}: names that end with .* choose another name"):
        save(tmp_path / f"x{ending}", {}, {}, Group("world", trace=Trace()))
    assert not [*tmp_path.iterdir()]


def test_K13_an_empty_folder_and_a_link_give_way(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "old")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("old")
    (tmp_path / "nowhere").symlink_to("gone")
    for name in ("empty", "link", "nowhere"):
        run_world(_save, 2, tmp_path / name, 2.0)
        _assert_holds(tmp_path / name, 2.0)
    _assert_holds(tmp_path / "old", 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link", "nowhere", "old"]


def test_K7_missing_tensors_and_other_shapes_are_all_named(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "last")
    wanted = {name: Shard.whole(torch.zeros(4, 3), writes=False) for name in ("model.weight", "model.bias", "optimizer.0.weight.exp_avg")}
    with pytest.raises(CheckpointError) as error:
        read_tensors(tmp_path / "last", wanted)
    assert "model.bias is missing" in str(error.value)
    assert "optimizer.0.weight.exp_avg is missing" in str(error.value)
    assert "model.weight has shape (5, 3), but the model needs (4, 3)" in str(error.value)


def _save_scalars_and_flags(folder: Path) -> None:
    world = _world()
    tensors = {
        "step": Shard.whole(torch.tensor(7.0), writes=world.index == 0),
        "flags": Shard.whole(torch.tensor([True, False, True]), writes=world.index == 1),
        "empty": Shard.whole(torch.zeros(0, 8), writes=world.index == 0),
        "half": Shard.whole(torch.full((3,), 0.1, dtype=torch.bfloat16), writes=world.index == 0),
    }
    save(folder, tensors, {}, world)


def test_Z7_scalars_flags_empty_and_low_precision_tensors_come_back(tmp_path: Path) -> None:
    run_world(_save_scalars_and_flags, 2, tmp_path / "last")
    read = {
        "step": Shard.whole(torch.tensor(0.0), writes=False),
        "flags": Shard.whole(torch.zeros(3, dtype=torch.bool), writes=False),
        "empty": Shard.whole(torch.zeros(0, 8), writes=False),
        "half": Shard.whole(torch.zeros(3, dtype=torch.bfloat16), writes=False),
    }
    read_tensors(tmp_path / "last", read)
    assert read["step"].data == 7.0
    assert read["flags"].data.tolist() == [True, False, True]
    assert torch.equal(read["half"].data, torch.full((3,), 0.1, dtype=torch.bfloat16))


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "meta.pt", ".metadata"])
@pytest.mark.parametrize("how", ["cut", "gone"])
def test_damage_is_named(tmp_path: Path, damaged: str, how: str) -> None:
    folder = tmp_path / "last"
    run_world(_save, 1, folder)
    file = folder / damaged
    if how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.unlink()
    with pytest.raises(CheckpointError, match=r"last is (damaged or incomplete|not a complete checkpoint)"):
        _assert_holds(folder, 1.0) if is_native(folder) else read_meta(folder)


FILES = ["__0_0.distcp", "__1_0.distcp", "meta.pt", ".metadata"]


def test_every_file_is_known_by_its_sum(tmp_path: Path) -> None:
    run_world(_save, 2, tmp_path / "last")
    assert sorted(json.loads((tmp_path / "last/sums.json").read_text())) == sorted(FILES)
    assert {path.name for path in (tmp_path / "last").iterdir()} == {*FILES, "sums.json"}
    native.check(tmp_path / "last")


@pytest.mark.parametrize("damaged", FILES)
@pytest.mark.parametrize("how", ["a bit", "cut", "gone"])
def test_damage_is_found_and_the_file_is_named(tmp_path: Path, damaged: str, how: str) -> None:
    folder = tmp_path / "last"
    run_world(_save, 2, folder)
    file = folder / damaged
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data if how == "a bit" else data[:-3])
    with pytest.raises(CheckpointError, match=rf"last is not a complete|{damaged} (is missing|has .* bytes, but|holds other bytes)"):
        all(native.check(folder, index=index, ranks=3) is None for index in range(3))


def _resume(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        fit({"dp": 2}, 2, resume=folder)
    return str(error.value)


def test_a_flipped_bit_stops_all_ranks_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "last"
    fit_world({"dp": 2}, 1, save=folder)
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    for message in run_world(_resume, 2, folder):
        assert "__0_0.distcp holds other bytes than were written" in message
    with pytest.raises(CheckpointError, match="holds other bytes"):
        convert(folder, tmp_path / "out", "ckpt")


def test_K20_the_index_is_read_without_running_what_is_in_it(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "last")
    ran = tmp_path / "ran"
    (tmp_path / "last" / ".metadata").write_bytes(pickle.dumps(_Runs(f"touch {ran}")))
    for read in (read_index, _read, lambda folder: convert(folder, tmp_path / "out", "ckpt")):
        with pytest.raises(CheckpointError, match=r"names (posix|nt)\.system, which no index is made of.*refused"):
            read(tmp_path / "last")
    assert not ran.exists()


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def _save_layers(folder: Path) -> None:
    """Rows in every dtype that torch knows to save, so that the index names them all."""
    world = _world()
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
    save(folder, {f"{dtype}": Shard.whole(torch.ones(3).to(dtype), writes=world.index == 0) for dtype in dtypes}, {}, world)


def test_K20_every_file_is_plain_data(tmp_path: Path) -> None:
    """Tensors lie in the .distcp files one behind the other, each as torch.save wrote it."""
    run_world(_save_layers, 1, tmp_path / "last")
    files = {path.name for path in (tmp_path / "last").iterdir()}
    assert files == {"__0_0.distcp", ".metadata", "meta.pt", "sums.json"}
    assert torch.load(tmp_path / "last/meta.pt", weights_only=True) == {}
    assert json.loads((tmp_path / "last/sums.json").read_text())
    index = IndexReader(tmp_path / "last").read_metadata()  # reads nothing but the names of an index
    data = (tmp_path / "last/__0_0.distcp").read_bytes()
    for where in index.storage_data.values():
        tensor = torch.load(io.BytesIO(data[where.offset : where.offset + where.length]), weights_only=True)
        assert tensor.double().tolist() == [1.0] * 3
    assert {f"{dtype}" for _, dtype in read_index(tmp_path / "last").values()} == set(read_index(tmp_path / "last"))


def test_a_folder_without_its_sums_is_damaged(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "last")
    (tmp_path / "last/sums.json").unlink()
    with pytest.raises(CheckpointError, match=r"sums\.json is missing"):
        native.check(tmp_path / "last")


def test_what_a_crash_left_is_cleaned_up_by_the_next_save_to_any_name(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "old")
    run_world(_save, 1, tmp_path / "lost")
    (tmp_path / "lost").rename(tmp_path / "lost.replaced")
    shutil.copytree(tmp_path / "old", tmp_path / "old.replaced")
    for name in ("other.partial", "old.replaced.partial"):
        shutil.copytree(tmp_path / "old", tmp_path / name)
    (tmp_path / "other.partial" / ".metadata").rename(tmp_path / "other.partial" / ".metadata.tmp")
    run_world(_save, 1, tmp_path / "next", 2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost", "next", "old"]
    for name, value in (("lost", 1.0), ("next", 2.0), ("old", 1.0)):
        _assert_holds(tmp_path / name, value)


def test_partial_folders_of_a_living_run_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "movie.partial").mkdir()
    (tmp_path / "movie.partial" / "frames").write_text("not ours")
    (tmp_path / "another.partial").mkdir()
    with held(tmp_path / "another.partial"):
        run_world(_save, 2, tmp_path / "last")
        with pytest.raises(
            WorldError, match=r"(?s)rank 0 ---.*is being written by another run.*rank 1 ---.*is being written by another run"
        ):
            run_world(_save, 2, tmp_path / "another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another.partial", "last", "movie.partial"]
    with pytest.raises(WorldError, match="holds files that are none of ours"):
        run_world(_save, 2, tmp_path / "movie")
    run_world(_save, 2, tmp_path / "another")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "last", "movie.partial"]


def test_a_folder_is_held_though_somebody_just_asks_whether_it_is(tmp_path: Path) -> None:
    asking = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_EX)
    done = threading.Timer(0.2, os.close, (asking,))
    done.start()
    with held(tmp_path):
        done.join()
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def test_a_folder_that_another_took_the_name_of_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, folder = files._lock, tmp_path / "folder"

    def late(handle: int, kind: int) -> bool:
        if folder.exists() and not (tmp_path / "moved").exists():
            folder.rename(tmp_path / "moved")
            folder.mkdir()
        return lock(handle, kind)

    monkeypatch.setattr(files, "_lock", late)
    with held(folder, make=True) as hold:
        assert hold is not None
        assert hold.is_called(folder)
        assert not hold.is_called(tmp_path / "moved")
        assert is_held(folder)
        assert not is_held(tmp_path / "moved")
        with held(folder, patience=0) as second:
            assert second is None, "no other thread has it either"
    assert [path.name for path in tmp_path.iterdir()] == ["moved"]


def test_a_process_that_is_forked_does_not_hold_what_its_parent_holds(tmp_path: Path) -> None:
    with held(tmp_path) as hold:
        assert hold is not None
        child = os.fork()
        if not child:
            os._exit(hold.is_called(tmp_path) or os.path.exists(f"/proc/self/fd/{hold.handle}"))
        assert os.waitpid(child, 0)[1] == 0
        assert is_held(tmp_path)
    assert not is_held(tmp_path)


def _save_alone(folder: Path, value: float) -> None:
    """By one process, without a process group."""
    tensors = {f"model.{place}": Shard.whole(torch.full((50,), value), writes=True) for place in range(3)}
    save(folder, tensors, {"value": value}, Group("world", trace=Trace()))


def _value(folder: Path) -> float:
    """Of the checkpoint, all of which must be of one save."""
    source = open_native(folder)
    source.check()
    values = {source.meta["value"], *(float(entry.read()[0]) for entry in source.entries.values())}
    assert len(values) == 1, "a mixture"
    return values.pop()


@pytest.mark.parametrize("moment", ["_write", "_complete", "_retire"])
def test_a_run_that_comes_while_another_saves_to_its_name_is_refused(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at the end, when what is being written has its name already and the old one is deleted."""
    folder, come, go, action = tmp_path / "last", threading.Event(), threading.Event(), getattr(native, moment)
    _save_alone(folder, 1.0)

    def slow(*arguments: Any) -> Any:
        come.set()
        go.wait(20)
        return action(*arguments)

    monkeypatch.setattr(native, moment, slow)
    first = threading.Thread(target=_save_alone, args=(folder, 2.0))
    first.start()
    assert come.wait(20)
    monkeypatch.setattr(native, moment, action)
    monkeypatch.setattr(files, "PATIENCE", 0.1)
    with pytest.raises(CheckpointError, match=r"last\.partial is being written by another run"):
        _save_alone(folder, 3.0)
    with pytest.raises(CheckpointError, match="last is being written by another run: it is not deleted"):
        native.remove(folder)
    _save_alone(tmp_path / "other", 4.0)  # which tidies up
    native.recover(tmp_path)
    go.set()
    first.join()
    assert (_value(folder), _value(tmp_path / "other")) == (2.0, 4.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "other"]


def _save_or_read_for_a_while(folder: Path) -> list[str]:
    """Two runs save to one name, a third to another one beside it; the others read, look for what a crash left, and delete."""
    files.PATIENCE, told, end = 0.05, [], time.monotonic() + 3
    rank, number = torch.distributed.get_rank(), 0
    while time.monotonic() < end:
        number += 1
        try:
            if rank < 3:
                _save_alone(folder / ("other" if rank == 2 else "last"), float(3 * number + rank))
            elif rank == 3:
                _value(folder / "last")
            else:
                native.recover(folder)
                native.remove(folder / "other")
        except CheckpointError as error:
            told.append(f"{error}")
    return told


def test_runs_on_one_name_leave_each_others_files_and_readers_are_told_the_truth(tmp_path: Path) -> None:
    _save_alone(tmp_path / "last", 1.0)
    for told in run_world(_save_or_read_for_a_while, 5, tmp_path):
        assert [message for message in told if not re.search("(being written|was replaced) by another", message)] == []
    _save_alone(tmp_path / "other", 1.0)
    assert _value(tmp_path / "last") > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "other"]


def test_a_folder_that_goes_while_a_save_looks_at_it_is_none_that_would_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, look = tmp_path / "last", native._is_whole
    _save_alone(folder, 1.0)

    def deletes(looked_at: Path) -> bool:
        if looked_at == folder and folder.exists():
            shutil.rmtree(folder)
        return look(looked_at)

    monkeypatch.setattr(native, "_is_whole", deletes)
    _save_alone(folder, 2.0)
    monkeypatch.undo()
    assert _value(folder) == 2.0


def _replace(folder: Path) -> None:
    _save_alone(folder, 2.0)


def _begin_to_replace(folder: Path) -> None:
    folder.rename(folder.with_name("last.replaced"))


READS: dict[str, tuple[Callable[[Path], object], str]] = {
    "check": (native.check, "_sum"),
    "open": (open_native, "_index_of"),
    "meta": (read_meta, "_damage_is_named"),
    "index": (read_index, "_index_of"),
    "tensors": (lambda folder: read_tensors(folder, {"model.0": Shard.whole(torch.zeros(50), writes=False)}), "_damage_is_named"),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_replace, "last was replaced by another while it was read: read it again"),
        (_begin_to_replace, "last was replaced by another while it was read: read it again"),
        (native.remove, "last was deleted while it was read"),
    ],
)
def test_what_happens_to_a_checkpoint_while_it_is_read_is_told(
    read: str, change: Callable[[Path], None], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_alone(tmp_path / "last", 1.0)
    reading, seam = READS[read]
    inner = getattr(native, seam)

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(native, seam, inner)
        change(tmp_path / "last")
        return inner(*arguments)

    monkeypatch.setattr(native, seam, late)
    with pytest.raises(CheckpointError, match=told):
        reading(tmp_path / "last")


def test_an_opened_checkpoint_that_was_replaced_is_not_checked_in_place_of_the_new(tmp_path: Path) -> None:
    _save_alone(tmp_path / "last", 1.0)
    source = open_native(tmp_path / "last")
    _save_alone(tmp_path / "last", 2.0)
    (tmp_path / "last" / "meta.pt").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="was replaced by another while it was read"):
        source.check()
    native.remove(tmp_path / "last")
    for read in (source.check, lambda: source.read("model.0")):
        with pytest.raises(CheckpointError, match="was deleted while it was read"):
            read()


def _rewrite_index(folder: Path, file: str, summed: bool = True) -> None:
    """Let the index name ``file`` for all tensors, and the sums be those of the index."""
    index = IndexReader(folder).read_metadata()
    for where in index.storage_data.values():
        where.relative_path = file
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    sums = json.loads((folder / "sums.json").read_text()) | {".metadata": native._sum(folder / ".metadata")}
    if summed and (folder / file).is_file():
        sums[file] = native._sum(folder / file)
    (folder / "sums.json").write_text(json.dumps(sums))


@pytest.mark.parametrize("file", ["../secret/__0_0.distcp", "{}/secret/__0_0.distcp", "meta.pt", "..", "", "__0_0.distcp/../x"])
def test_an_index_that_leads_out_of_its_folder_is_refused(file: str, tmp_path: Path) -> None:
    for name in ("last", "secret"):
        _save_alone(tmp_path / name, 1.0)
    _rewrite_index(tmp_path / "last", file.format(tmp_path))
    for read in (read_index, open_native, native.check, lambda folder: convert(folder, tmp_path / "out", "ckpt")):
        with pytest.raises(
            CheckpointError, match=r"last (cannot be read: \.metadata|is damaged: sums\.json) names .* no file of a checkpoint"
        ):
            read(tmp_path / "last")


def test_every_file_that_is_read_has_its_sum(tmp_path: Path) -> None:
    _save_alone(tmp_path / "last", 1.0)
    shutil.copyfile(tmp_path / "last/__0_0.distcp", tmp_path / "last/__7_0.distcp")
    _rewrite_index(tmp_path / "last", "__7_0.distcp", summed=False)
    with pytest.raises(CheckpointError, match=r"__7_0\.distcp is in its index, but not in sums\.json"):
        native.check(tmp_path / "last")
    (tmp_path / "last/sums.json").write_text(json.dumps({"../secret/meta.pt": [1, 2], ".metadata": [1, 2]}))
    with pytest.raises(CheckpointError, match=r"meta\.pt is not in sums\.json; sums\.json names '\.\./secret/meta\.pt', which is no file"):
        native.check(tmp_path / "last")


def test_an_opened_checkpoint_reads_its_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"model.{place}": Shard.whole(torch.full((2,), place), writes=True) for place in range(5)}
    save(tmp_path / "last", tensors, {}, Group("world", trace=Trace()))
    source, read = open_native(tmp_path / "last"), []
    load = index._Unpickler.load
    monkeypatch.setattr(index._Unpickler, "load", lambda unpickler: (read.append(1), load(unpickler))[1])
    assert [source.read(name).tolist() for name in tensors] == [[place] * 2 for place in range(5)]
    assert len(read) == 1


def test_a_deletion_that_is_cut_short_leaves_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    run_world(_save, 1, tmp_path / "last")
    run_world(_save, 1, tmp_path / "other")
    with pytest.raises(WorldError, match="died with exit code 9"):
        run_world(_die_while_deleting, 1, tmp_path / "last")
    assert not (tmp_path / "last").exists()
    assert {path.suffix for path in tmp_path.iterdir()} == {".partial", ""}
    native.remove(tmp_path / "other")
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    _save_alone(tmp_path / "next", 1.0)
    assert [path.name for path in tmp_path.iterdir()] == ["next"]


def _die_while_deleting(folder: Path) -> None:
    unlink, done = os.unlink, []

    def once(*args: Any, **options: Any) -> None:
        if done:
            os._exit(9)
        done.append(unlink(*args, **options))

    os.unlink = once
    native.remove(folder)


def _save_to_storage_of_ones_own(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        _save(folder / f"{torch.distributed.get_rank()}" / "last")
    return str(error.value)


def test_storage_that_ranks_do_not_share_is_told_and_nothing_is_complete(tmp_path: Path) -> None:
    for message in run_world(_save_to_storage_of_ones_own, 2, tmp_path):
        assert "__1_0.distcp (it is rank 1's): not in" in message
        assert "all ranks must write to storage that they share" in message
    assert not is_native(tmp_path / "0/last")


def _save_a_large_state(folder: Path) -> int:
    world = _world()
    state = {f"model.{i}": torch.randn(300, 301) for i in range(4)} | {"step": torch.tensor(3.0)}
    spans = split(300 * 301, world.size)
    shards = {
        name: Shard(ShardSpec.whole(value).flat(spans[world.index]), value.view(-1)[spans[world.index].start : spans[world.index].stop])
        for name, value in state.items()
        if value.dim()
    } | {"step": Shard.whole(state["step"], writes=world.index == 0)}
    save(folder, shards, {"names": list(state)}, world)
    return sum(value.nbytes for value in state.values())


def test_a_checkpoint_takes_the_bytes_of_the_state_and_hardly_more(tmp_path: Path) -> None:
    state = run_world(_save_a_large_state, 3, tmp_path / "last")[0]
    written = sum(path.stat().st_size for path in (tmp_path / "last").iterdir())
    assert state < written <= 1.02 * state
