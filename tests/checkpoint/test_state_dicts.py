"""Modules whose state dict names other things than the module has, or fewer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_par import DeepSpeedTarget, convert
from lightning_par.checkpoint import CheckpointError, open_checkpoint
from lightning_par.checkpoint.source import MODULE, Contents, Entry, Source
from lightning_par.strategy.folders import read_run, read_whole
from tests.checkpoint.test_what_is_held import Base, Editing, trained
from tests.harness import run_world


class Dropping(Base):
    """A hook leaves the teacher out."""

    def __init__(self, seed: int, frozen: bool = True) -> None:
        super().__init__(seed)
        self.teacher = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
        self.teacher.requires_grad_(not frozen)
        self.register_state_dict_post_hook(_drop)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.line(batch) - self.teacher(batch)).square().mean()


def _drop(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in [*state]:
        if name.startswith(f"{prefix}teacher"):
            del state[name]


class Filtering(Dropping):
    """Its optimizer has the others only."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.line.parameters(), lr=1e-2)


class Overriding(Dropping):
    """Its own state dict does."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._state_dict_hooks.clear()

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict(*args, **options).items() if "teacher" not in name}


class Splitting(Base):
    """Tells a weight in two parts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.register_state_dict_post_hook(_split)


def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    whole = state.pop(f"{prefix}line.weight")
    state[f"{prefix}line.up"], state[f"{prefix}line.down"] = whole[:1], whole[1:]


class Plain(Base):
    """Two layers, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        for place, layer in enumerate(self.layers):
            layer.register_buffer("seen", torch.full((2,), float(place)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = self.line(batch)
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()


class Shifted(Plain):
    """The same with one in front: its hooks keep to the numbers that there were."""

    def __init__(self, seed: int, frozen: bool = False) -> None:
        super().__init__(seed)
        self.layers.insert(0, nn.Identity())
        self.layers[1].requires_grad_(not frozen)
        self.register_state_dict_post_hook(_shift_out)
        self.register_load_state_dict_pre_hook(_shift_in)


def _shift_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    _shift(state, {"layers.1": "layers.0", "layers.2": "layers.1"})


def _shift_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    _shift(state, {"layers.0": "layers.1", "layers.1": "layers.2"})


def _shift(state: dict[str, Any], numbers: dict[str, str]) -> None:
    shifted = {numbers.get(name[:8], name[:8]) + name[8:]: value for name, value in state.items()}
    state.clear()
    state.update(shifted)


MODULES = {
    "dropped and trained": lambda seed: Dropping(seed, False),
    "shifted and frozen": lambda seed: Shifted(seed, True),
    "dropped": Dropping,
    "not in the optimizer": Filtering,
    "overridden": Overriding,
    "split": Splitting,
    "shifted": Shifted,
}
FORMATS = {
    "ckpt": ("ckpt", None),
    "zero2": ("deepspeed", DeepSpeedTarget(2, 2)),
    "zero3": ("deepspeed", DeepSpeedTarget(3, 2)),
    "universal": ("universal", None),
}


def _everything(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in (*module.named_parameters(), *module.named_buffers())}


def _same(module: nn.Module, wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, wanted[name]) for name, value in _everything(module).items())


def _go_on(folder: Path, what: str, sources: tuple[str, ...]) -> None:
    warnings.simplefilter("ignore")
    make = MODULES[what]
    straight, first = make(0), make(0)
    trained(straight, 4, dp=2, zero=2)
    trained(first, 2, dp=2, zero=2, save=folder / "native")
    if torch.distributed.get_rank() == 0:
        for name, (format, target) in FORMATS.items():
            convert(folder / "native", folder / name, format, target=target)
            convert(folder / name, folder / f"{name} back")
        again = make(1)
        again.load_state_dict(torch.load(folder / "ckpt", weights_only=True)["state_dict"], strict=what != "split")
        assert _same(again, _everything(first))
    torch.distributed.barrier()
    for name in sources:
        again = make(1)
        trained(again, 4, dp=2, zero=2, resume=folder / name)
        assert _same(again, _everything(straight)), name


@pytest.mark.parametrize("what", ["dropped and trained", "shifted and frozen"])
def test_what_a_state_dict_leaves_out_tells_in_parts_or_shifts_is_saved_converted_and_loaded(what: str, tmp_path: Path) -> None:
    run_world(_go_on, 2, tmp_path, what, ("native", "zero2 back"))


@pytest.mark.slow
@pytest.mark.parametrize("what", MODULES)
def test_so_it_is_from_every_format(what: str, tmp_path: Path) -> None:
    run_world(_go_on, 2, tmp_path, what, ("native", *FORMATS, *(f"{name} back" for name in FORMATS)))


def _single(module: nn.Module, path: Path) -> None:
    """As plain Lightning writes it, after a step."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    module.training_step(torch.ones(2, 1), 0).backward()
    optimizer.step()
    told = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 0, "global_step": 1}
    torch.save(told | {"lr_schedulers": [], "pytorch-lightning_version": "2.5.0"}, path)


def _load_keys(folder: Path) -> None:
    warnings.simplefilter("ignore")
    module = Shifted(0)
    _single(module, folder / "single")
    moments = torch.load(folder / "single", weights_only=True)["optimizer_states"][0]["state"]
    trainer = trained(again := Shifted(1), 1, resume=folder / "single")
    assert _same(again, _everything(module))
    for place, param in enumerate(again.parameters()):
        assert torch.equal(trainer.optimizers[0].state[param]["exp_avg"], moments[place]["exp_avg"]), place
    saved = trained(earlier := Plain(0), 2, save=folder / "native")
    resumed = trained(again := Shifted(1), 2, resume=folder / "native")
    for mine, theirs in zip(earlier.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(saved.optimizers[0].state[mine]["exp_avg"], resumed.optimizers[0].state[theirs]["exp_avg"])
    assert [layer.seen[0].item() for layer in again.layers[1:]] == [0.0, 1.0]
    told = torch.load(folder / "single", weights_only=True)
    told["state_dict"]["layers.2.weight"] = torch.ones(2, 2)
    torch.save(told, folder / "both")
    with pytest.raises(CheckpointError, match=r"holds layers\.2\.weight, and under such names the model's state_dict has other weights"):
        trained(Shifted(1), 1, resume=folder / "both")


def test_checkpoints_with_the_keys_of_a_state_dict_go_into_a_module_whose_hooks_shift_them(tmp_path: Path) -> None:
    run_world(_load_keys, 1, tmp_path)


def _spare(folder: Path) -> None:
    module = Dropping(0)
    _single(module, folder / "single")
    again = Dropping(1)
    made = again.teacher[0].weight.detach().clone()
    with pytest.warns(
        UserWarning, match=r"has no .*model\.teacher\.0\.weight.*, and the module's state_dict has not either: left as it is"
    ):
        trained(again, 1, resume=folder / "single")
    assert torch.equal(again.line.weight, module.line.weight)
    assert torch.equal(again.teacher[0].weight, made)


def test_what_neither_the_state_dict_nor_the_file_has_stays_as_it_is(tmp_path: Path) -> None:
    run_world(_spare, 1, tmp_path)


class Forgetting(Editing):
    """Has a frozen weight and a buffer besides; the buffer is none any more when it is saved."""

    def __init__(self, lost: str) -> None:
        super().__init__(lambda weights: weights.pop(lost, None))
        self.fixed = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("passing", torch.ones(2))

    def on_train_end(self) -> None:
        self.passing = None


def _forget(folder: Path) -> None:
    for name in ("line.bias", "fixed"):
        trained(Forgetting(name), 1, save=folder / name)


def test_a_checkpoint_that_lacks_weights_is_read_and_converted_or_what_it_lacks_is_named(tmp_path: Path) -> None:
    run_world(_forget, 1, tmp_path)
    for lost in ("line.bias", "fixed"):
        held = {"line.weight", "line.bias", "fixed"} - {lost}
        convert(tmp_path / lost, tmp_path / f"{lost}.ckpt", "ckpt")
        for state_dict in (
            torch.load(tmp_path / f"{lost}.ckpt", weights_only=True)["state_dict"],
            read_run(tmp_path / lost)["state_dict"],
            read_whole(tmp_path / lost)["state_dict"],
        ):
            assert state_dict.keys() == held
        convert(tmp_path / f"{lost}.ckpt", tmp_path / f"{lost}.back")
        assert open_checkpoint(tmp_path / f"{lost}.back").entries.keys() == open_checkpoint(tmp_path / lost).entries.keys()
    for format in ("deepspeed", "universal"):
        with pytest.raises(CheckpointError, match=r"line\.bias is in the optimizer, but has no value"):
            convert(tmp_path / "line.bias", tmp_path / "out", format)
        with pytest.warns(UserWarning, match=r"^fixed, passing: not in .*fixed, so not in what is written either"):
            convert(tmp_path / "fixed", tmp_path / format, format)


def test_weights_whose_names_hooks_gave_to_others_are_told_by_name() -> None:
    entries = {f"model.{name}": Entry.of(torch.ones(1)) for name in ("a", "b", "c")}
    assert Contents.of(Source(Path("x"), "made", {MODULE: {"aliases": {"a": "a"}}}, entries)).aliases == {"a": "a", "b": "b", "c": "c"}
    with pytest.raises(CheckpointError, match=r"no name of their own in its state dict: a \(a there is b\)"):
        Contents.of(Source(Path("x"), "made", {MODULE: {"aliases": {"a": "b", "c": "c"}}}, entries))
