"""Files of a pipeline, made by hand in the format of the real engine's (``test_pipelines`` holds them against those)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_par import convert
from lightning_par.checkpoint import CheckpointError, open_checkpoint
from lightning_par.checkpoint.deepspeed import open_deepspeed, write_deepspeed
from lightning_par.checkpoint.deepspeed.write import DTYPES, Target
from lightning_par.checkpoint.files import load, save
from lightning_par.checkpoint.source import LAYERS, MODULE, OPTIMIZERS, Entry, Joining, Source

STAGES = [["tied_modules.e.weight", "1.weight", "1.bias"], ["3.weight", "3.bias", "tied_modules.e.weight"]]
SHAPES = {"tied_modules.e.weight": (11, 5), "1.weight": (7, 5), "1.bias": (7,), "3.weight": (5, 7), "3.bias": (5,)}
PLACES = {"tied_modules.e": "embed", "1": "layers.0", "3": "layers.1"}
TOLD = ["embed", "layers.*", "head"]


def _values() -> dict[str, dict[str, Tensor]]:
    """Of each parameter its master and moments."""
    generator = torch.Generator().manual_seed(3)
    return {name: {key: torch.randn(shape, generator=generator) for key in ("", "exp_avg", "exp_avg_sq")} for name, shape in SHAPES.items()}


def _stage(names: list[str]) -> Source:
    values = _values()
    entries = {f"model.{name}": Entry.of(values[name][""]) for name in names}
    entries |= {f"optimizer.0.{name}.{key}": Entry.of(values[name][key]) for name in names for key in ("exp_avg", "exp_avg_sq")}
    entries |= {f"optimizer.0.{name}.step": Entry.of(torch.tensor(4.0)) for name in names}
    groups = [{"params": [n for n in names if n.endswith(end)], "lr": lr} for end, lr in (("weight", 0.5), ("bias", 0.25))]
    told = {"aliases": {name: name for name in names}, "buffers": [], "frozen": []}
    return Source(Path("stage"), "made by hand", {OPTIMIZERS: [{"groups": groups, "scalars": {}}], MODULE: told, "global_step": 4}, entries)


def write_pipeline(folder: Path, ranks: int, dtype: str = "fp32", *, twice: bool = True) -> None:
    """``twice``: the tied layer is used alike in both its places, so that both have a file."""
    (folder / "tag").mkdir(parents=True)
    for stage, names in enumerate(STAGES):
        write_deepspeed(_stage(names), folder / f"{stage}", Target(1, ranks, dtype))
        for file in (folder / f"{stage}/global_step4").iterdir():
            if file.name.endswith("model_states.pt"):
                told = {key: value for key, value in load(file).items() if key not in ("lightning_par", "universal_checkpoint_info")}
                told |= {"module": None, "mp_world_size": 2, "buffer_names": ["3.shift"] if stage else [], "frozen_param_shapes": None}
                save(told | {"shared_params": {}, "note": "the user's"}, file)
            file.rename(folder / "tag" / file.name.replace("mp_rank_00", f"mp_rank_{stage:02d}"))
    values = {name: value[""].to(DTYPES[dtype]) for name, value in _values().items()}
    layers = {
        0: {"weight": values["tied_modules.e.weight"]},
        1: {"weight": values["1.weight"], "bias": values["1.bias"]},
        3: {"weight": values["3.weight"], "bias": values["3.bias"], "fixed": torch.ones(3), "shift": torch.tensor([5])},
        4: {"weight": values["tied_modules.e.weight"].clone()},
    }
    for place, layer in layers.items():
        if place != 4 or twice:
            save(layer, folder / "tag" / f"layer_{place:02d}-model_states.pt")


@pytest.mark.parametrize(("ranks", "dtype"), [(1, "fp32"), (3, "bf16")])
@pytest.mark.parametrize("twice", [True, False])
def test_stages_and_layers_become_one_module(ranks: int, dtype: str, twice: bool, tmp_path: Path) -> None:
    write_pipeline(tmp_path, ranks, dtype, twice=twice)
    got = open_checkpoint(tmp_path / "tag", Joining(layers=TOLD if twice else TOLD[:2]))
    for name, values in _values().items():
        place, _, member = name.rpartition(".")
        ours = f"{PLACES[place]}.{member}"
        assert torch.equal(got.read(f"model.{ours}"), values[""])
        assert torch.equal(got.read(f"optimizer.0.{ours}.exp_avg"), values["exp_avg"])
        assert torch.equal(got.read(f"optimizer.0.{ours}.exp_avg_sq"), values["exp_avg_sq"])
    told = got.meta[MODULE]
    assert told["aliases"].get("head.weight") == ("embed.weight" if twice else None)
    assert (told["buffers"], told["frozen"]) == (["layers.1.shift"], ["layers.1.fixed"])
    assert [group["params"] for group in got.meta[OPTIMIZERS][0]["groups"]] == [
        ["embed.weight", "layers.0.weight", "layers.1.weight"],
        ["layers.0.bias", "layers.1.bias"],
    ]
    assert (got.meta["note"], got.meta["global_step"]) == ("the user's", 4)


@pytest.mark.parametrize("format", ["native", "ckpt", "deepspeed", "universal"])
def test_a_pipeline_goes_to_any_format(format: str, tmp_path: Path) -> None:
    write_pipeline(tmp_path, 2)
    convert(tmp_path / "tag", tmp_path / "out", format)
    got, wanted = open_checkpoint(tmp_path / "out"), open_deepspeed(tmp_path / "tag")
    assert got.entries.keys() == wanted.entries.keys()
    assert all(torch.equal(got.read(name), wanted.read(name)) for name in wanted.entries)
    assert got.meta[MODULE] == wanted.meta[MODULE]
    assert got.meta[MODULE][LAYERS] == ["0", "1", "3", "4"]
    assert got.meta[OPTIMIZERS] == wanted.meta[OPTIMIZERS]


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    write_pipeline(tmp_path, 2)
    (tmp_path / "tag/layer_03-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"trains the layers 3 of a pipeline, but has no file of them"):
        open_deepspeed(tmp_path / "tag")
    (tmp_path / "tag/zero_pp_rank_1_mp_rank_01_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"2 data ranks wrote it, but 1 optimizer files are there"):
        open_deepspeed(tmp_path / "tag")
    (tmp_path / "tag/mp_rank_01_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"holds no file like mp_rank_01_model_states\.pt"):
        open_deepspeed(tmp_path / "tag")


def test_layers_of_two_tensor_ranks_are_joined_by_the_names_of_the_module(tmp_path: Path) -> None:
    """Model ranks go by stage, then by tensor rank."""
    write_pipeline(tmp_path / "a", 1)
    write_pipeline(tmp_path / "b", 1)
    (tmp_path / "tag").mkdir()
    for tensor, one in enumerate("ab"):
        for file in (tmp_path / one / "tag").iterdir():
            name = file.name.replace("-model_states", f"-model_{tensor:02d}-model_states") if file.name.startswith("layer") else file.name
            name = re.sub(r"mp_rank_(\d+)", lambda found, tensor=tensor: f"mp_rank_{2 * int(found[1]) + tensor:02d}", name)
            told = load(file) if name.startswith("mp_rank") else None
            file.rename(tmp_path / "tag" / name)
            if told is not None:
                save(told | {"mp_world_size": 4}, tmp_path / "tag" / name)
    plan = {"layers.0": "colwise", "layers.1.weight": 1, "embed": "embedding_rowwise"}
    got = open_checkpoint(tmp_path / "tag", Joining(layers=TOLD, tp_plan=plan))
    values = _values()
    assert torch.equal(got.read("model.layers.0.weight"), torch.cat([values["1.weight"][""]] * 2))
    assert torch.equal(got.read("optimizer.0.layers.1.weight.exp_avg"), torch.cat([values["3.weight"]["exp_avg"]] * 2, 1))
    assert torch.equal(got.read("optimizer.0.embed.weight.exp_avg"), torch.cat([values["tied_modules.e.weight"]["exp_avg"]] * 2))
    assert torch.equal(got.read("model.layers.1.bias"), values["3.bias"][""])
    assert got.facts["tensor_ranks"] == 2
    (tmp_path / "tag/layer_01-model_01-model_states.pt").unlink()
    with pytest.raises(CheckpointError, match="not every tensor rank has a file of every layer"):
        open_checkpoint(tmp_path / "tag", Joining(layers=TOLD, tp_plan=plan))
