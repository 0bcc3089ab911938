"""The folder itself: complete or not there, whatever interrupts its writing; what does not fit is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par.checkpoint import CheckpointError, Shard, convert, is_native, native, read_index, read_meta, read_tensors, save
from lightning_par.comm import Mesh
from lightning_par.layout import ParallelLayout, ShardSpec, Span
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


@pytest.mark.parametrize("moment", ["_begin", "_complete", "rename"])
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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_K13_a_read_only_place_raises_on_every_rank(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WorldError, match=r"(?s)rank 0 ---.*PermissionError.*rank 1 ---.*PermissionError"):
        run_world(_save, 2, tmp_path / "last")


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
