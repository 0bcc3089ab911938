"""Every format to every other and back without losing a bit; what is written is compared, and complete or not there."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_par import DeepSpeedTarget, convert
from lightning_par.checkpoint import (
    AVERAGING_STATE,
    CURRENT_STATE,
    DATA,
    CheckpointError,
    conversion,
    open_checkpoint,
    read_meta,
    summary,
)
from lightning_par.checkpoint.deepspeed.names import STUBS
from lightning_par.checkpoint.files import load
from lightning_par.checkpoint.source import OPTIMIZERS, Entry, Source, state_entry
from lightning_par.checkpoint.whole import write_native, write_single
from tests.checkpoint.synthetic import assert_same, averaged, synthetic

TARGETS = {
    "native": ("native", None),
    "ckpt": ("ckpt", None),
    "zero1": ("deepspeed", DeepSpeedTarget(1, 2)),
    "zero2": ("deepspeed", DeepSpeedTarget(2, 3)),
    "zero3": ("deepspeed", DeepSpeedTarget(3, 4, sub_group_size=20)),
    "universal": ("universal", None),
}


@pytest.fixture
def native(tmp_path: Path) -> Path:
    write_native(synthetic(), tmp_path / "native")
    return tmp_path / "native"


@pytest.mark.parametrize("first", [pytest.param(name, marks=() if name in ("ckpt", "zero3") else pytest.mark.slow) for name in TARGETS])
def test_K25_any_format_to_any_other_and_back_is_the_same_to_the_bit(first: str, native: Path, tmp_path: Path) -> None:
    report = convert(native, tmp_path / "first", TARGETS[first][0], target=TARGETS[first][1])
    assert (report.source, report.rounded) == ("native folder", ())
    for second, (format, target) in TARGETS.items():
        convert(tmp_path / "first", tmp_path / first / second, format, target=target)
        convert(tmp_path / first / second, tmp_path / first / f"{second} back", "native")
        assert_same(open_checkpoint(tmp_path / first / f"{second} back"), synthetic())


def test_averages_and_what_is_trained_go_to_any_format_and_on(tmp_path: Path) -> None:
    source = averaged(synthetic())
    write_native(source, tmp_path / "native")
    last = tmp_path / "native"
    for name in ("ckpt", "zero3", "universal", "zero1", "native"):
        convert(last, tmp_path / f"to {name}", TARGETS[name][0], target=TARGETS[name][1])
        last = tmp_path / f"to {name}"
        assert_same(open_checkpoint(last), source)
        assert dict(summary(open_checkpoint(last)))["averaged"]
    assert CURRENT_STATE not in read_meta(last)
    told = torch.load(tmp_path / "to ckpt", weights_only=True)
    assert told[CURRENT_STATE]["head.weight"].equal(2 * told["state_dict"]["head.weight"])
    files = sorted((tmp_path / "to zero3").rglob("*model_states.pt"))
    assert ["averages" in load(file, STUBS)["lightning_par"] for file in files] == [True, False, False, False]
    convert(last, tmp_path / "weights", optimizer=False)
    assert open_checkpoint(tmp_path / "weights").read("model.up.bias").equal(source.read("model.up.bias"))
    assert not open_checkpoint(tmp_path / "weights").current


@pytest.mark.parametrize("format", ["deepspeed", "universal"])
def test_averages_are_forgotten_when_deepspeed_has_trained_on(format: str, tmp_path: Path) -> None:
    source = averaged(synthetic(lightning_par_data={"replicas": 2}))
    write_native(source, tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "out", format)
    for file in (tmp_path / "out").rglob("*model_states.pt"):
        told = load(file, STUBS)
        torch.save(told | {"global_steps": told["global_steps"] + 5}, tmp_path / "new")
        (tmp_path / "new").replace(file)
    got = open_checkpoint(tmp_path / "out")
    assert not got.current
    for name in source.current:
        assert got.read(name.replace("current.", "model.")).equal(source.read(name))
    assert got.meta["global_step"] == 9
    assert got.meta["callbacks"] == {"other": {"best": 1.0}}
    assert not got.meta.keys() & {CURRENT_STATE, AVERAGING_STATE, DATA}


def test_plain_torch_loads_a_single_file_and_its_optimizer(native: Path, tmp_path: Path) -> None:
    convert(native, tmp_path / "last.ckpt", "ckpt")
    loaded, source = torch.load(tmp_path / "last.ckpt", weights_only=True), synthetic()
    assert list(loaded["state_dict"]) == list(source.meta["lightning_par_module"]["aliases"])
    assert loaded["state_dict"]["head.weight"].data_ptr() == loaded["state_dict"]["embed.weight"].data_ptr()
    assert (loaded["epoch"], loaded["lr_schedulers"]) == (2, [{"last_epoch": 4}])
    order = [name for group in source.meta[OPTIMIZERS][0]["groups"] for name in group["params"]]
    params = [torch.nn.Parameter(source.read(f"model.{name}").clone()) for name in order]
    optimizer = torch.optim.Adam([{"params": params[:3]}, {"params": params[3:]}])
    optimizer.load_state_dict(loaded["optimizer_states"][0])
    for name, param in zip(order, params, strict=True):
        if name != "fixed":
            assert torch.equal(optimizer.state[param]["exp_avg"], source.read(f"optimizer.0.{name}.exp_avg"))


def test_nothing_is_overwritten(native: Path, tmp_path: Path) -> None:
    for there in (native, tmp_path / "file"):
        there.touch()
        with pytest.raises(CheckpointError, match=f"{there.name} is there already"):
            convert(native, there, "ckpt")


def test_a_tensor_that_comes_out_wrong_is_named_and_nothing_is_left(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(source: Source, path: Path, _: Any) -> None:
        source.entries["model.up.weight"] = Entry.of(source.read("model.up.weight") + 1e-7)
        del source.entries["optimizer.0.up.bias.exp_avg"]
        write_native(source, path)

    monkeypatch.setitem(conversion.WRITERS, "native", careless)
    with pytest.raises(CheckpointError) as error:
        convert(native, tmp_path / "out")
    assert "model.up.weight differs" in str(error.value)
    assert "optimizer.0.up.bias.exp_avg is missing" in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_weights_alone(native: Path, tmp_path: Path) -> None:
    convert(native, tmp_path / "weights.ckpt", "ckpt", optimizer=False)
    got = open_checkpoint(tmp_path / "weights.ckpt")
    assert all(name.startswith("model.") for name in got.entries)
    assert got.meta[OPTIMIZERS] == []
    with pytest.raises(CheckpointError, match="nothing tells which parameters are trained"):
        convert(tmp_path / "weights.ckpt", tmp_path / "out", "deepspeed")


def _plain_checkpoint(path: Path, groups: list[list[str]], *sizes: int) -> torch.nn.Module:
    """As plain Lightning writes it: nothing in it is ours."""
    module = torch.nn.Sequential(*(torch.nn.Linear(i, o) for i, o in pairwise(sizes)))
    module.register_buffer("scale", torch.ones(77))
    params = dict(module.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [params[n] for n in g], "weight_decay": 0.1 * k} for k, g in enumerate(groups)])
    sum(param.square().sum() for param in params.values()).backward()
    optimizer.step()
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 1, "global_step": 1}, path)
    return module


ONE = [["0.weight", "0.bias", "1.weight", "1.bias"]]
TWO = [["0.weight", "1.weight"], ["0.bias", "1.bias"]]


@pytest.mark.parametrize("groups", [ONE, TWO, [["1.bias"], ["0.weight", "0.bias"], ["1.weight"]]], ids=["one group", "two", "three"])
def test_a_single_file_of_lightning_goes_anywhere_and_back_if_shapes_tell_whose_state_is_whose(
    groups: list[list[str]], tmp_path: Path
) -> None:
    module = _plain_checkpoint(tmp_path / "plain.ckpt", groups, 3, 5, 2)
    convert(tmp_path / "plain.ckpt", tmp_path / "out", "deepspeed", target=DeepSpeedTarget(3, 2))
    got = open_checkpoint(tmp_path / "out")
    for name, param in module.named_parameters():
        assert torch.equal(got.read(f"model.{name}"), param)
    assert [group["params"] for group in got.meta[OPTIMIZERS][0]["groups"]] == groups
    convert(tmp_path / "out", tmp_path / "back.ckpt", "ckpt")
    plain, back = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("plain", "back"))
    assert all(torch.equal(back["state_dict"][name], value) for name, value in plain["state_dict"].items())
    (was,), (now,) = plain["optimizer_states"], back["optimizer_states"]
    assert [group["params"] for group in now["param_groups"]] == [group["params"] for group in was["param_groups"]]
    assert [group["weight_decay"] for group in now["param_groups"]] == [group["weight_decay"] for group in was["param_groups"]]
    for number, state in was["state"].items():
        assert all(torch.equal(now["state"][number][key], value) for key, value in state.items()), number


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        ([["0.weight", "0.bias"], ["1.weight", "1.bias"]], (3, 3, 3)),  # the first weight has the shape of both groups' first
        ([["1.weight", "0.weight"], ["1.bias", "0.bias"]], (3, 5, 2)),  # not in the order of the module
        ([["1.weight"], ["1.bias"]], (3, 3, 3)),  # what is left out has the same shapes
    ],
    ids=["two groups fit", "another order", "some left out"],
)
def test_a_single_file_that_does_not_tell_is_refused_with_the_way_out(
    groups: list[list[str]], sizes: tuple[int, ...], tmp_path: Path
) -> None:
    _plain_checkpoint(tmp_path / "plain.ckpt", groups, *sizes)
    with pytest.raises(CheckpointError, match=r"shapes do not tell which is which.*trainer\.fit\(ckpt_path=.*optimizer=false"):
        convert(tmp_path / "plain.ckpt", tmp_path / "out")
    convert(tmp_path / "plain.ckpt", tmp_path / "out", optimizer=False)


@pytest.mark.parametrize(
    ("format", "target", "message"),
    [
        ("native", DeepSpeedTarget(dtype="bf16"), "dtype=bf16: format=native has no ranks, and keeps every tensor in its own dtype"),
        ("ckpt", DeepSpeedTarget(3, 4), "stage=3, ranks=4: format=ckpt has no ranks"),
        ("universal", DeepSpeedTarget(3, 4, "bf16"), "stage=3, ranks=4: format=universal is the same for any number of ranks"),
        ("hf", DeepSpeedTarget(2, 2), "ranks=2: format=hf is the same for any number of ranks"),
        ("deepspeed", {"stage": 2}, r"target=.* is a dict: give a DeepSpeedTarget, such as DeepSpeedTarget\(stage=2, ranks=1"),
    ],
)
def test_a_target_is_refused_where_a_format_does_not_read_it(format: str, target: Any, message: str, native: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        convert(native, tmp_path / "out", format, target=target)
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


@pytest.mark.parametrize(
    "content",
    [
        {"state_dict": None},
        {"state_dict": [torch.ones(2)]},
        {"state_dict": {"a": torch.ones(2)}, "optimizer_states": 3},
        {"state_dict": {"a": torch.ones(2)}, "optimizer_states": [{}]},
        {"state_dict": {"a": torch.ones(2)}, "lightning_par": 3},
        {"state_dict": {"a": torch.ones(2).to_sparse()}},
        {"state_dict": {"a": torch.ones(2, device="meta")}},
    ],
    ids=str,
)
def test_a_file_that_holds_other_things_than_a_checkpoint_is_named(content: dict[str, Any], tmp_path: Path) -> None:
    torch.save(content, tmp_path / "odd.ckpt")
    with pytest.raises(CheckpointError, match=r"odd\.ckpt (cannot be read as single|holds weights of kinds)"):
        open_checkpoint(tmp_path / "odd.ckpt")


def test_conjugate_tensors_are_converted(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, dtype=torch.complex64)
    torch.save({"state_dict": {"a": weight.conj()}}, tmp_path / "conjugate.ckpt")
    convert(tmp_path / "conjugate.ckpt", tmp_path / "out", optimizer=False)
    assert open_checkpoint(tmp_path / "out").read("model.a").equal(weight.conj())


def test_places_that_are_none_for_a_checkpoint_are_refused(native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, message in (("s3://bucket/x", "file system that all ranks see"), (".", "this process runs in"), ("..", "or is around it")):
        with pytest.raises(CheckpointError, match=message):
            convert(native, place)
    assert not (tmp_path / "s3:").exists()
    with pytest.raises(CheckpointError, match=r"optimizer='no': must be true or false"):
        convert(native, tmp_path / "out", optimizer="no")
    with pytest.raises(CheckpointError, match=r"format=\['ckpt'\]: choose one of"):
        convert(native, tmp_path / "out", ["ckpt"])


def test_a_name_that_is_none_for_a_folder_of_ours_is_refused_as_it_was_given(native: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"^{re.escape(str(tmp_path / 'made/out.partial'))}: names that end with"):
        convert(native, tmp_path / "made/out.partial")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]


def test_a_checkpoint_is_not_written_into_the_one_it_is_made_from_nor_around_it(native: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    (tmp_path / "link").symlink_to(native)
    for dst in (native / "out", native / "made/out", tmp_path / "link/out"):
        with pytest.raises(CheckpointError, match=rf"{dst} is inside .*native: a checkpoint is written beside"):
            convert(native, dst, "ckpt")
    with pytest.raises(CheckpointError, match=rf"native is inside {tmp_path}: a checkpoint is written beside"):
        convert(native, tmp_path, "ckpt")
    with pytest.raises(CheckpointError, match="native is there already"):
        convert(native, native)
    (tmp_path / "link").unlink()
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is no checkpoint: give"), (tmp_path / "gone", "is not there: give")):
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(path)
    for content in (b"root:x:0:0:root:/root:/bin/bash\n", b"", b"\x7fELF\x02", bytes(5)):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(CheckpointError, match="file is no checkpoint of a known format: it is damaged, or no file of"):
            open_checkpoint(tmp_path / "file")
    torch.save([1, 2], tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointError, match="holds a list, no checkpoint"):
        open_checkpoint(tmp_path / "old.ckpt")
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match="holds a list, no checkpoint"):
        open_checkpoint(tmp_path / "list.ckpt")
    with pytest.raises(CheckpointError, match="format='zip': choose one of native, ckpt, deepspeed, universal, hf"):
        convert(tmp_path / "list.ckpt", tmp_path / "out", "zip")


def _factored(path: Path) -> Source:
    """The checkpoint of an optimizer whose state has other shapes than the parameters: Adafactor and, in ``d``, LBFGS."""
    weights = {"a.weight": torch.randn(4, 3), "a.bias": torch.randn(4), "b.weight": torch.randn(1, 4)}
    entries = {f"model.{name}": Entry.of(value) for name, value in weights.items()}
    for name, value in weights.items():
        state = {"variance": value.square()} if value.dim() < 2 else {"row_var": value[:, :1], "col_var": value[:1]}
        entries |= {f"optimizer.0.{name}.{key}": Entry.of(moment.clone()) for key, moment in state.items()}
        entries[f"optimizer.0.{name}.step"] = Entry.of(torch.tensor(4.0))
    entries["optimizer.0.a.weight.d"] = Entry.of(torch.randn(20))
    entries[state_entry(0, "a.weight", "d.of%2E")] = Entry.of(torch.randn(20))
    meta = {OPTIMIZERS: [{"groups": [{"params": list(weights), "lr": 0.1}], "scalars": {}}], "global_step": 4}
    return Source(path, "made", meta, entries)


def test_state_of_any_shape_goes_to_single_files_and_back(tmp_path: Path) -> None:
    write_native(_factored(tmp_path), tmp_path / "native")
    convert(tmp_path / "native", tmp_path / "last.ckpt", "ckpt")
    convert(tmp_path / "last.ckpt", tmp_path / "back")
    wanted, plain = open_checkpoint(tmp_path / "native"), torch.load(tmp_path / "last.ckpt", weights_only=True)
    del plain["lightning_par"]
    assert {"d", "d.of%2E"} <= plain["optimizer_states"][0]["state"][0].keys()
    torch.save(plain, tmp_path / "plain.ckpt")  # as Lightning alone would have written it
    convert(tmp_path / "plain.ckpt", tmp_path / "from plain")
    for folder in ("back", "from plain"):
        got = open_checkpoint(tmp_path / folder)
        assert got.entries.keys() == wanted.entries.keys()
        assert all(torch.equal(got.read(name), wanted.read(name)) for name in wanted.entries)


@pytest.mark.parametrize("format", ["deepspeed", "universal"])
def test_deepspeed_refuses_state_in_another_shape_than_the_parameter(format: str, tmp_path: Path) -> None:
    write_native(_factored(tmp_path), tmp_path / "native")
    with pytest.raises(CheckpointError) as error:
        convert(tmp_path / "native", tmp_path / "out", format)
    for told in (
        "a.weight: its state row_var of optimizer 0 has shape (4, 1), but DeepSpeed has a place only for state in the shape of",
        "a.weight: its state col_var of optimizer 0 has shape (1, 3)",
        "a.weight: its state d of optimizer 0 has shape (20,)",
    ):
        assert told in str(error.value)
    assert "variance" not in str(error.value)
    assert not (tmp_path / "out").exists()


def _evil(path: Path, name: str = "b", key: str = "exp_avg", step: Any = 1) -> Path:
    """A file of plain Lightning whose parameter, key of optimizer state or step leads out of the folder that it is converted to."""
    state = {place: {"step": torch.tensor(1.0), key: torch.ones(2 + place)} for place in (0, 1)}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    weights = {"a": torch.ones(2), name: torch.ones(3)}
    torch.save({"state_dict": weights, "optimizer_states": [optimizer], "epoch": 0, "global_step": step}, path / "evil.ckpt")
    return path / "evil.ckpt"


@pytest.mark.parametrize("name", ["../../../x", "{}/x", "a/b", "..", ".", "", "a\\b", "n" * 300], ids=repr)
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    name = name.format(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"the parameter {re.escape(repr(name))} cannot be the name of a file or folder: .* no slash"
    ):
        convert(_evil(tmp_path, name), tmp_path / "out", "universal")
    assert [path.name for path in tmp_path.iterdir()] == ["evil.ckpt"]
    convert(tmp_path / "evil.ckpt", tmp_path / "native")  # names are no paths there
    assert torch.equal(open_checkpoint(tmp_path / "native").read(f"model.{name}"), torch.ones(3))


def test_keys_of_state_steps_and_tags_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    for format, options, message in (
        ("universal", {"key": "/tmp/x"}, "the optimizer's state '/tmp/x' cannot be the name"),
        ("universal", {"key": "fp32"}, "fp32 is the name of another file"),
        ("universal", {"name": "optimizer_state.pt"}, r"optimizer_state\.pt is the name of another file"),
        ("deepspeed", {"step": "/../../x"}, "the tag 'global_step/../../x' cannot be the name"),
    ):
        with pytest.raises(CheckpointError, match=message):
            convert(_evil(tmp_path, **options), tmp_path / "out", format)
        assert [path.name for path in tmp_path.iterdir()] == ["evil.ckpt"]


def test_a_universal_folder_does_not_read_outside_itself(native: Path, tmp_path: Path) -> None:
    convert(native, tmp_path / "out", "universal")
    for file in (tmp_path / "out/universal").glob("*model_states.pt"):
        told = torch.load(file, weights_only=False)
        told["param_shapes"][0]["../../../x"] = torch.Size([2])
        torch.save(told, file)
    with pytest.raises(CheckpointError, match=r"the parameter '../../../x' cannot be the name"):
        open_checkpoint(tmp_path / "out")
    (tmp_path / "out/latest_universal").write_text("..")
    with pytest.raises(CheckpointError, match=r"names the folder '..', which is not there"):
        open_checkpoint(tmp_path / "out")


LARGEST, COUNT = 12 * 2**20, 10  # bytes of the largest tensor, and how many there are: x 3 with the moments


def _big(path: Path) -> None:
    names = [f"layers.{place}.weight" for place in range(COUNT)]
    entries = {}
    for name in names:
        for entry in (f"model.{name}", f"current.{name}", f"optimizer.0.{name}.exp_avg", f"optimizer.0.{name}.exp_avg_sq"):
            entries[entry] = Entry((LARGEST // 4,), torch.float32, lambda: torch.ones(LARGEST // 4))
        entries[f"optimizer.0.{name}.step"] = Entry.of(torch.tensor(1.0))
    meta = {OPTIMIZERS: [{"groups": [{"params": names, "lr": 0.1}], "scalars": {}}], "global_step": 1}
    write_native(Source(path, "made", meta, entries), path)


MEASURE = """
import sys, threading, time
from pathlib import Path
from lightning_par import DeepSpeedTarget, convert

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

peak, before = [0], anonymous()
def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
convert(sys.argv[1], sys.argv[2], sys.argv[3], target=DeepSpeedTarget(2, 2) if sys.argv[3] == "deepspeed" else None)
print(peak[0] - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_stays_near_the_largest_tensor(tmp_path: Path) -> None:
    _big(tmp_path / "native")
    previous = tmp_path / "native"
    for format in ("deepspeed", "universal", "ckpt", "native"):
        command = [sys.executable, "-c", MEASURE, str(previous), str(tmp_path / f"to {format}"), format]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200)
        grown = int(done.stdout.split()[-1])
        assert grown < 2 * LARGEST + 96 * 2**20, f"{format} from {previous.name}: {grown / 2**20:.0f} MiB"
        previous = tmp_path / f"to {format}"


def test_numbered_state_of_another_shape_is_named(tmp_path: Path) -> None:
    _plain_checkpoint(tmp_path / "plain.ckpt", ONE, 3, 5, 2)
    with pytest.raises(CheckpointError, match=r"optimizer\.0\.1\.weight\.exp_avg has shape \(5, 3\) there, but 1\.weight has \(2, 5\)"):
        open_checkpoint(tmp_path / "plain.ckpt").named([["1.weight", "1.bias", "0.weight", "0.bias"]])
    write_single(synthetic(), tmp_path / "ours.ckpt")
    assert not open_checkpoint(tmp_path / "ours.ckpt").is_numbered


@pytest.mark.parametrize("name", ["ckpt", "zero1", "zero3", "universal"])
def test_K13_a_changed_bit_in_a_file_of_torch_is_found(name: str, native: Path, tmp_path: Path) -> None:
    convert(native, tmp_path / "other", TARGETS[name][0], target=TARGETS[name][1])
    open_checkpoint(tmp_path / "other").check()
    wanted = synthetic().read("model.embed.weight").numpy().tobytes()[:16]
    found = [file for file in [tmp_path / "other", *(tmp_path / "other").rglob("*.pt")] if file.is_file() and wanted in file.read_bytes()]
    data = bytearray(found[0].read_bytes())
    data[data.index(wanted) + 3] ^= 0x40
    found[0].write_bytes(data)
    source = open_checkpoint(tmp_path / "other")
    place = source.files.index(found[0])
    for index in range(2):  # ranks that share the work
        if index == place % 2:
            with pytest.raises(CheckpointError, match=rf"{found[0].name} holds other bytes than were written \(Bad CRC-32"):
                source.check(index=index, ranks=2)
        else:
            source.check(index=index, ranks=2)
    with pytest.raises(CheckpointError, match=r"is damaged: .* holds other bytes"):
        convert(tmp_path / "other", tmp_path / "again", "native")


def test_files_that_torch_wrote_without_checksums_load(native: Path, tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        convert(native, tmp_path / "last.ckpt", "ckpt")
    finally:
        torch.serialization.set_crc32_options(before)
    open_checkpoint(tmp_path / "last.ckpt").check()


def test_whatever_comes_up_while_it_is_written_is_told_with_the_checkpoint(
    native: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def careless(source: Source, path: Path, _: Any) -> None:
        source.read("model.no such weight")

    monkeypatch.setitem(conversion.WRITERS, "native", careless)
    with pytest.raises(CheckpointError, match=rf"{native} cannot be converted to format=native: KeyError: 'model.no such weight'"):
        convert(native, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["native"]
