"""`lightning-par convert` and `inspect`, in this process."""

from __future__ import annotations

import pytest
import torch

from lightning_par import DeepSpeedTarget
from lightning_par.checkpoint import open_checkpoint
from lightning_par.checkpoint.whole import write_native
from tests.checkpoint.deepspeed.test_tensor_ranks import fused, write_two_ranks
from tests.checkpoint.synthetic import assert_same, synthetic


@pytest.fixture
def command(in_process, tmp_path):
    """Its folder has the checkpoint `last`."""
    write_native(synthetic(), tmp_path / "last")
    return in_process


def test_convert_takes_hydra_overrides_and_says_what_it_did(command, tmp_path):
    said = command("convert", "src=last", "dst=out", "format=deepspeed", "parallel.zero=3", "parallel.dp=2")
    assert "23 tensors" in said
    assert "from native folder: written to out and compared" in said
    assert len(list((tmp_path / "out" / "global_step4").glob("*optim_states.pt"))) == 2
    command("convert", "src=out", "dst=back", "format=native")
    assert_same(open_checkpoint(tmp_path / "back"), synthetic())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "last", "out"]


def test_convert_joins_tensor_ranks_by_a_plan_on_the_command_line(command, tmp_path):
    write_two_ranks(fused(), tmp_path / "two", DeepSpeedTarget(2, 1))
    plan = "tp_plan={embed: embedding_rowwise, up: colwise, deep.weight: {dim: 0, parts: 3}}"
    command("convert", "src=two/tag", "dst=joined", "format=native", plan)
    joined, source = open_checkpoint(tmp_path / "joined"), fused()
    assert all(torch.equal(joined.read(name), source.read(name)) for name in joined.entries)
    assert "does not tell how they cut the parameters" in command("convert", "src=two/tag", "dst=out", "format=native")
    assert "last holds whole parameters" in command("convert", "src=last", "dst=out", "format=ckpt", plan)
    assert "is no checkpoint of a pipeline" in command("convert", "src=last", "dst=out", "format=ckpt", "layers=[embed,layers.*]")
    assert "does not tell how they cut the parameters" in command("inspect", "two/tag")


def test_convert_leaves_the_optimizer_out_and_takes_numbers_for_names(command, tmp_path):
    assert "7 tensors" in command("convert", "src=last", "dst=12", "format=native", "optimizer=false")
    assert not open_checkpoint(tmp_path / "12").meta["optimizer_states"]
    assert "7 tensors" in command("convert", "src=12", "dst=again.ckpt", "format=ckpt")


def test_convert_names_what_was_rounded(command):
    said = command("convert", "src=last", "dst=out", "format=deepspeed", "dtype=bf16")
    assert "1 of them rounded to the format's dtype: model.fixed" in said


def test_convert_refuses_in_one_line(command):
    assert "last is there already" in command("convert", "src=last", "dst=last", "format=ckpt")
    assert "dst missing\nusage: lightning-par convert src=PATH" in command("convert", "src=last", "format=ckpt")
    assert "format='zip': choose one of native" in command("convert", "src=last", "dst=out", "format=zip")
    assert "stage=5 must be 1, 2 or 3" in command("convert", "src=last", "dst=out", "format=deepspeed", "parallel.zero=5")
    assert "sub_group_size=0 must be" in command("convert", "src=last", "dst=out", "format=deepspeed", "sub_group_size=0")
    assert "src missing" in command("convert", "src=null", "dst=out", "format=ckpt")
    assert "s3://bucket/out" in command("convert", "src=last", "dst='s3://bucket/out'", "format=ckpt")
    assert "optimizer='no'" in command("convert", "src=last", "dst=out", "format=ckpt", "optimizer='no'")
    assert "there is no parallel.tp; choose of src, dst, " in command("convert", "src=last", "dst=out", "format=ckpt", "parallel.tp=2")
    assert "usage: lightning-par convert" in command("convert", "src=last", "dst=out", "format=ckpt", "tp_plan={a")
    assert "optimizer: true # take the optimizers' state along" in command("convert", "--help")
    assert "gone is not there" in command("convert", "src=gone", "dst=out", "format=ckpt")
    assert "last, out: every argument is KEY=VALUE\nusage: lightning-par convert src=" in command("convert", "last", "out", "format=ckpt")
    said = command("convert", "src=last", "dst=last/meta.pt/out", "format=ckpt")
    assert "out is inside last" in said
    command("convert", "src=last", "dst=file", "format=ckpt")
    assert "file is no folder that one can make or write to (FileExistsError" in command("convert", "src=last", "dst=file/x", "format=ckpt")
    assert "x cannot be written, since /dev/null is no folder" in command("convert", "src=last", "dst=/dev/null/x", "format=native")
    assert "/proc/x is no folder that one can make" in command("convert", "src=last", "dst=/proc/x/y", "format=ckpt")
    assert "dtype=bf16: format=ckpt has no ranks, and keeps" in command("convert", "src=last", "dst=out", "format=ckpt", "dtype=bf16")


def test_an_interrupted_conversion_leaves_a_line_and_nothing_else(command, tmp_path, monkeypatch):
    def interrupted(source):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_par.checkpoint.source.Source.check", interrupted)
    monkeypatch.setattr("lightning_par.checkpoint.whole.NativeSource.check", interrupted)
    assert command("convert", "src=last", "dst=out", "format=ckpt") == "130"
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


@pytest.mark.parametrize("format", ["native", "ckpt", "deepspeed", "universal"])
def test_inspect_tells_what_is_in_any_format(command, format):
    command("convert", "src=last", "dst=out", f"format={format}")
    said = command("inspect", "out", "--tensors")
    for part in ("7 tensors, 118 elements, float32, int64", "fixed", "head.weight", "weight_decay=0.5", "global step", "[3, 2, 2] float32"):
        assert part in said, said


def test_inspect_refuses_in_one_line(command):
    assert command("inspect") == "usage: lightning-par inspect PATH [--tensors]"
    assert "gone is not there" in command("inspect", "gone")
    assert "passwd is no checkpoint of a known format" in command("inspect", "/etc/passwd")
