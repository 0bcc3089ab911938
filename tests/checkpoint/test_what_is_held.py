"""What a checkpoint takes of a module and gives back to it, whatever the module keeps."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy, convert
from lightning_par.checkpoint import CheckpointError, open_checkpoint
from lightning_par.strategy import saving
from lightning_par.strategy.state import generators
from tests.checkpoint.fits import QUIET
from tests.harness import run_world


class Base(L.LightningModule):
    """Trains on single numbers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.line = nn.Linear(1, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.line(batch).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(
    module: L.LightningModule,
    steps: int,
    *,
    dp: int = 1,
    resume: Path | None = None,
    save: Path | None = None,
    callbacks: Any = None,
    **layout: Any,
) -> L.Trainer:
    strategy = HybridParallelStrategy(dp=dp, zero_options={"min_unit_mb": 0}, **layout)
    options = QUIET | {"gradient_clip_val": None, "callbacks": callbacks}
    trainer = L.Trainer(devices=dp, strategy=strategy, max_steps=steps, **options)
    trainer.fit(module, DataLoader(torch.arange(16.0).view(-1, 1) / 16, batch_size=2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer


class Transposed(Base):
    """Weights and buffers in memory formats of their own."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 2).t())
        self.register_buffer("mask", torch.randn(3, 4).t())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        image = batch.view(-1, 1, 1, 1).expand(-1, 3, 3, 3)
        return self.conv(image).pow(2).mean() + (self.turned * self.line(batch).mean()).pow(2).mean()


def _resume_transposed(folder: Path) -> None:
    first, again = Transposed(0), Transposed(1)
    saved = trained(first, 2, save=folder / "last")
    convert(folder / "last", folder / "last.ckpt", "ckpt")
    for path in (folder / "last", folder / "last.ckpt"):
        again = Transposed(1)
        resumed = trained(again, 2, resume=path)
        for name, value in first.state_dict().items():
            assert torch.equal(again.state_dict()[name], value), name
            assert again.state_dict()[name].stride() == value.stride(), name
        for mine, theirs in zip(first.parameters(), again.parameters(), strict=True):
            for key, value in saved.optimizers[0].state[mine].items():
                assert torch.equal(resumed.optimizers[0].state[theirs][key], value), key
    straight = Transposed(0)
    trained(straight, 4)
    trained(again := Transposed(1), 4, resume=folder / "last")
    for name, value in straight.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_K1_tensors_of_any_memory_format_are_saved_and_loaded(tmp_path: Path) -> None:
    run_world(_resume_transposed, 1, tmp_path)


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.line = nn.Linear(3, 3)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.line(x)


class Sharing(L.LightningModule):
    """All layers, on both stages of a pipeline, have one persistent buffer."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        shared = torch.full((3,), scale)
        self.layers = nn.ModuleList(Scaled(shared) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _share(layout: dict[str, int], scale: float, save: Path | None, resume: Path | None) -> tuple[dict[str, float], list[str]]:
    trainer = L.Trainer(strategy=HybridParallelStrategy(**layout), devices=2, max_steps=1 if save else 2, **QUIET)
    module, to_device = Sharing(scale), trainer.strategy.model_to_device

    def move() -> None:
        to_device()
        for layer in module.layers.children():  # as it is on a device
            layer.scale = layer.scale.clone()

    trainer.strategy.model_to_device = move
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(torch.ones(8, 3), batch_size=4), ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
    told = [str(warning.message) for warning in caught if "not saved" in str(warning.message)]
    return {name: buffer[0].item() for name, buffer in module.named_buffers(remove_duplicate=False)}, told


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=["pp2", "dp2"])
def test_K2_a_buffer_that_layers_share_is_that_of_the_checkpoint_on_every_stage(layout: dict[str, int], tmp_path: Path) -> None:
    assert [told for _, told in run_world(_share, 2, layout, 0.5, tmp_path / "last", None)] == [[], []]
    for buffers, _ in run_world(_share, 2, layout, 0.25, None, tmp_path / "last"):
        assert len(buffers) == 4 // layout.get("pp", 1)
        assert set(buffers.values()) == {0.5}


class Averaging(L.LightningModule):
    """Keeps averages of what comes out of its layers, which the last stage of a pipeline sees, and of what goes in: the first does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(3, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.register_buffer("out", torch.zeros(3))
        self.register_buffer("into", torch.zeros(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        self.into.mul_(0.5).add_(x.detach().mean(0))
        for layer in self.layers:
            x = layer(x)
        self.out.mul_(0.5).add_(x.detach().mean(0))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _average(layout: dict[str, Any], folder: Path) -> list[dict[str, Tensor] | None]:
    module = Averaging()
    trainer = L.Trainer(strategy=HybridParallelStrategy(**layout), devices=layout.get("pp", 1), max_steps=3, **QUIET)
    trainer.fit(module, DataLoader(torch.arange(24.0).view(8, 3) / 24, batch_size=4))
    trainer.save_checkpoint(folder)
    read = Averaging.load_from_checkpoint(folder, weights_only=True).state_dict()
    return [trainer.strategy.full_state_dict(), dict(read)]


@pytest.mark.parametrize(
    "layout",
    [{"pp": 2, "microbatches": 1}, pytest.param({"pp": 2, "microbatches": 1, "chunks": 2, "schedule": "zbv"}, marks=pytest.mark.slow)],
    ids=["pp2", "zbv"],
)
def test_K2_a_buffer_that_one_stage_changes_is_saved_by_that_stage(layout: dict[str, Any], tmp_path: Path) -> None:
    (straight, _), *_ = run_world(_average, 1, {}, tmp_path / "one")
    for full, read in run_world(_average, 2, layout, tmp_path / "two"):
        for name, value in straight.items():
            if name == "into" and "chunks" in layout:
                continue  # what comes before the layers runs once for each stage of a rank
            torch.testing.assert_close(read[name], value, rtol=1e-5, atol=1e-6)
            if full is not None:
                torch.testing.assert_close(full[name], value, rtol=1e-5, atol=1e-6)


class Renamed(Base):
    """Hooks give its weight and buffer other names in state dicts."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("seen", torch.zeros(2))
        self.register_state_dict_post_hook(_rename_out)
        self.register_load_state_dict_pre_hook(_rename_in)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1
        return (self.line(batch) * self.scale).pow(2).mean()


def _rename_out(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in ("scale", "seen"):
        state[f"{prefix}old_{name}"] = state.pop(prefix + name)


def _rename_in(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in ("scale", "seen"):
        state[prefix + name] = state.pop(f"{prefix}old_{name}")


def _resume_renamed(folder: Path) -> None:
    straight, first = Renamed(0), Renamed(0)
    wanted = trained(straight, 4, dp=2, zero=2).strategy.full_state_dict()
    trained(first, 2, dp=2, zero=2, save=folder / "last")
    if torch.distributed.get_rank() == 0:
        convert(folder / "last", folder / "last.ckpt", "ckpt")
        assert {"old_scale", "old_seen"} < torch.load(folder / "last.ckpt", weights_only=True)["state_dict"].keys()
        assert Renamed.load_from_checkpoint(folder / "last", seed=1, weights_only=True).scale.equal(
            Renamed.load_from_checkpoint(folder / "last.ckpt", seed=1, weights_only=True).scale
        )
    torch.distributed.barrier()
    for name in ("last", "last.ckpt"):
        found = trained(Renamed(1), 4, dp=2, zero=2, resume=folder / name).strategy.full_state_dict()
        assert wanted is None or all(torch.equal(found[key], value) for key, value in wanted.items())


def test_K1_a_module_whose_hooks_rename_weights_is_saved_and_loaded(tmp_path: Path) -> None:
    run_world(_resume_renamed, 2, tmp_path)


class Narrow(torch.optim.Optimizer):
    """Its state is narrower than the weights."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(mean=torch.zeros_like(param, dtype=torch.bfloat16), up=param.grad > 0)
                state["mean"].mul_(group["momentum"]).add_(param.grad.bfloat16())
                param.sub_(state["mean"].to(param.dtype) * torch.where(state["up"], 0.1, group["lr"]))
                state["up"] = param.grad > 0
        return loss


class WithNarrow(Base):
    def configure_optimizers(self) -> Any:
        return Narrow(self.parameters())


def _resume_narrow(folder: Path) -> None:
    wanted = trained(WithNarrow(0), 4, dp=2, zero=2).strategy.full_state_dict()
    trained(WithNarrow(0), 2, dp=2, zero=2, save=folder / "last")
    resumed = trained(WithNarrow(1), 4, dp=2, zero=2, resume=folder / "last")
    found = resumed.strategy.full_state_dict()
    assert wanted is None or all(torch.equal(found[key], value) for key, value in wanted.items())
    for state in resumed.optimizers[0].state.values():
        assert (state["mean"].dtype, state["up"].dtype) == (torch.bfloat16, torch.bool)


def test_K11_state_of_other_dtypes_than_the_weights_keeps_them(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_world(_resume_narrow, 2, tmp_path)


class Editing(Base):
    def __init__(self, edit: Any) -> None:
        super().__init__(0)
        self.edit = edit

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.edit(checkpoint["state_dict"])


def _clone(weights: dict[str, Any]) -> None:
    weights.update({name: weight.clone() for name, weight in weights.items()})


def _edit_what_is_saved(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"on_save_checkpoint has put ema \(Tensor\) into .*under a key of your own"):
        trained(Editing(lambda weights: weights.update(ema=torch.ones(3))), 1, save=folder / "last")
    with pytest.raises(AttributeError, match=r"a rank's shard: it can be left out of the checkpoint, but has no clone"):
        trained(Editing(_clone), 1, save=folder / "last")
    trained(Editing(lambda weights: weights.pop("line.bias")), 1, save=folder / "last")
    assert "model.line.bias" not in open_checkpoint(folder / "last").entries


def test_on_save_checkpoint_may_leave_weights_out_and_is_told_of_what_it_may_not(tmp_path: Path) -> None:
    run_world(_edit_what_is_saved, 1, tmp_path)


class Counts(nn.Module):
    """Keeps what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {"rows": 0, "last": torch.zeros(1)}

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.seen = {"rows": self.seen["rows"] + len(rows), "last": rows[-1].detach()}
        return rows

    def get_extra_state(self) -> dict[str, Any]:
        return self.seen

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.seen = state


class Counting(Base):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.counts = Counts()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.counts(batch), batch_idx)


class Keeping(Counting):
    """And what only its own state dict tells."""

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        return super().state_dict(*args, **options) | {"hidden": torch.ones(1)}


def _count(folder: Path) -> None:
    trained(Counting(0), 2, save=folder / "last")
    convert(folder / "last", folder / "last.ckpt", "ckpt")
    plain = Counting(1)
    plain.load_state_dict(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    read = Counting.load_from_checkpoint(folder / "last", seed=1, weights_only=True)
    resumed = [Counting(1), Counting(1)]
    for module, path in zip(resumed, (folder / "last", folder / "last.ckpt"), strict=True):
        trained(module, 2, resume=path)
    for module in (plain, read, *resumed):
        assert module.counts.seen["rows"] == 4
        assert module.counts.seen["last"].item() == 3 / 16
    with pytest.warns(UserWarning, match=r"not saved in .*: model\.hidden \(neither parameter nor buffer"):
        trained(Keeping(0), 2, save=folder / "keeping")
    trained(Base(0), 2, save=folder / "without")
    with pytest.warns(UserWarning, match=r"has no model\.counts\._extra_state"):
        trained(Counting(0), 2, resume=folder / "without")
    with pytest.raises(CheckpointError, match=r"that the model has not: model\.counts\._extra_state"):
        trained(Base(0), 2, resume=folder / "last")


def test_K2_what_modules_keep_besides_tensors_is_saved_and_loaded_or_named(tmp_path: Path) -> None:
    run_world(_count, 1, tmp_path)


class Freezing(Base):
    """Its optimizer has all parameters, or none of the second layer."""

    def __init__(self, seed: int, part: bool = False, momentum: float | None = None) -> None:
        super().__init__(seed)
        self.more, self.part, self.momentum = nn.Linear(2, 1), part, momentum

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.more(self.line(batch)).pow(2).mean()

    def configure_optimizers(self) -> Any:
        self.more.requires_grad_(not self.part)
        params = self.line.parameters() if self.part else self.parameters()
        return torch.optim.AdamW(params, lr=1e-2) if self.momentum is None else torch.optim.SGD(params, lr=1e-2, momentum=self.momentum)


def _emptied(path: Path) -> Path:
    """A copy as a single file, without the optimizer's state."""
    convert(path, path.with_suffix(".whole"), "ckpt")
    saved = torch.load(path.with_suffix(".whole"), weights_only=True)
    saved["optimizer_states"][0]["state"] = {}
    torch.save(saved, path.with_suffix(".ckpt"))
    return path.with_suffix(".ckpt")


def _resume_with_less(folder: Path) -> None:
    trained(Freezing(0, True), 2, save=folder / "part")
    with pytest.raises(CheckpointError, match=r"no optimizer group for more\.weight, more\.bias: .*restore_optimizer=False"):
        trained(Freezing(0), 3, resume=folder / "part")
    trained(Freezing(0), 3, resume=folder / "part", restore_optimizer=False)
    trained(Freezing(0, True), 3, resume=folder / "part")
    for name, momentum, kept in (("adam", None, True), ("moved", 0.9, True), ("plain", 0.0, False)):
        trained(Freezing(0, momentum=momentum), 2, save=folder / name)
        emptied = _emptied(folder / name)
        if kept:
            with pytest.raises(CheckpointError, match=r"saved after 2 steps, but has no state of any optimizer\..*restore_optimizer=False"):
                trained(Freezing(0, momentum=momentum), 3, resume=emptied)
        else:
            assert trained(Freezing(0, momentum=momentum), 3, resume=emptied).global_step == 3
    for saved, momentum in (("adam", 0.9), ("moved", None)):
        with pytest.raises(CheckpointError, match=r"state of an optimizer with (betas|momentum), and (SGD|AdamW) has no.*restore"):
            trained(Freezing(0, momentum=momentum), 3, resume=folder / saved)
    assert trained(Freezing(0, momentum=0.0), 3, resume=folder / "moved").optimizers[0].param_groups[0]["momentum"] == 0.9
    convert(folder / "adam", folder / "universal", "universal")
    for file in (folder / "universal").rglob("exp_avg*.pt"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has no state of any optimizer"):
        trained(Freezing(0), 3, resume=folder / "universal")


def test_K7_state_of_optimizers_that_is_not_there_is_named(tmp_path: Path) -> None:
    run_world(_resume_with_less, 1, tmp_path)


class Choosing(Base):
    def __init__(self, seed: int, optimizer: Any, **options: Any) -> None:
        super().__init__(seed)
        self.configure_optimizers = lambda: optimizer(self.parameters(), lr=1e-2, **options)


def _resume_with_another(folder: Path) -> None:
    adamw, sgd, adagrad = torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad
    for saved, options in ((adamw, {}), (sgd, {"momentum": 0.9}), (adagrad, {})):
        trained(Choosing(0, saved, **options), 2, save=folder / saved.__name__)
    for saved, other, options, lacks in (
        (adamw, torch.optim.NAdam, {}, "mu_product"),
        (adamw, torch.optim.Adamax, {}, "exp_inf"),
        (sgd, torch.optim.RMSprop, {"momentum": 0.9}, "square_avg"),
        (adagrad, adamw, {}, "exp_avg, exp_avg_sq"),
    ):
        with pytest.raises(CheckpointError, match=rf"of another optimizer: without {lacks} {other.__name__} cannot go on\. .*restore_opt"):
            trained(Choosing(0, other, **options), 3, resume=folder / saved.__name__)
    for saved, other in ((adamw, torch.optim.RAdam), (adagrad, adagrad)):
        assert trained(Choosing(0, other), 3, resume=folder / saved.__name__).global_step == 3


def test_K7_state_of_another_kind_of_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    run_world(_resume_with_another, 1, tmp_path)


class Odd(Base):
    """With weights and buffers of dtypes that few backends know."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        numbers = torch.randn(5).abs()
        self.turn = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        self.frozen = nn.Parameter(numbers.to(torch.float8_e4m3fn), requires_grad=False)
        for dtype in (torch.float8_e5m2, torch.uint16, torch.uint64, torch.int16, torch.complex128, torch.bool):
            self.register_buffer(str(dtype).partition(".")[2], (7 * numbers).to(dtype))

    def forward(self, batch: Tensor) -> Tensor:
        numbers = [getattr(self, name).abs() if "complex" in name else getattr(self, name).float() for name, _ in self.named_buffers()]
        return (self.line(batch) * self.turn.abs()).pow(2).mean() * (sum(numbers) + self.frozen.float()).mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(torch.ones_like(batch))  # of any size


def _train_odd(folder: Path, stages: tuple[int, ...]) -> list[dict[str, Any]]:
    fits = []
    for stage in stages:
        rank, dp = (0, 1) if len(stages) == 1 else (torch.distributed.get_rank(), 2)
        trainer = trained(Odd(rank), 2, dp=dp, zero=stage, save=folder / f"{dp}-{stage}")
        fits.append(trainer.strategy.full_state_dict())
        trainer = trained(Odd(5), 2, dp=dp, zero=stage, resume=folder / f"{dp}-{stage}")
        fits.append(trainer.strategy.full_state_dict())
    return [{name: [complex(number) for number in value.flatten().tolist()] for name, value in (fit or {}).items()} for fit in fits]


def test_K1_weights_and_buffers_of_any_dtype_on_several_ranks(tmp_path: Path) -> None:
    expected = run_world(_train_odd, 1, tmp_path, (0,))[0][0]
    for fit in run_world(_train_odd, 2, tmp_path, (0, 3))[0]:
        assert {name: pytest.approx(value, rel=1e-4) for name, value in expected.items()} == fit


class Early(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        trainer.save_checkpoint(self.folder)


def _save_in_setup(folder: Path) -> None:
    with pytest.raises(RuntimeError, match=r"from on_fit_start on: a callback's `setup` comes before"):
        trained(Base(0), 1, callbacks=[Early(folder / "early")])
    trainer = trained(Base(0), 1)
    trainer.callbacks.append(Early(folder / "early"))
    with pytest.raises(RuntimeError, match="comes before"):  # rather than save the module of the fit before
        trainer.fit(Base(0), DataLoader(torch.arange(2.0).view(-1, 1)))


def test_a_save_in_a_callbacks_setup_is_told_where_to_go(tmp_path: Path) -> None:
    run_world(_save_in_setup, 1, tmp_path)


class Moving(Base):
    """Knows weights under other names than the checkpoint, has one of its own choice, and no place for another."""

    def __init__(self, seed: int, edit: Any) -> None:
        super().__init__(seed)
        self.shift = nn.Parameter(torch.zeros(2))
        self.edit = edit

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.line(batch) + self.shift).pow(2).mean()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.edit(checkpoint["state_dict"])


class Earlier(Base):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.old, self.teacher = nn.Linear(1, 2), nn.Linear(5, 1)
        del self.line

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.old(batch).pow(2).mean() + 0 * self.teacher(batch.expand(-1, 5)).mean()


def _move(weights: dict[str, Tensor]) -> None:
    for name in [*weights]:
        weight = weights.pop(name)
        if name.startswith("old"):
            weights[name.replace("old", "line")] = weight
    weights["shift"] = torch.tensor([3.0, 4.0])


def _double(weights: dict[str, Tensor]) -> None:
    _move(weights)
    weights["line.weight"] = 2 * weights["line.weight"]


def _resume_moved(folder: Path) -> None:
    first = Earlier(0)
    trained(first, 2, dp=2, zero=3, save=folder / "last")
    if torch.distributed.get_rank() == 0:
        convert(folder / "last", folder / "last.ckpt", "ckpt")
    torch.distributed.barrier()
    layout: dict[str, Any] = {"dp": 2, "zero": 3, "restore_optimizer": False}
    for path in (folder / "last", folder / "last.ckpt"):
        module = Moving(1, _move)
        trainer = trained(module, 2, resume=path, **layout)
        found, saved = trainer.strategy.full_state_dict(), first.trainer.strategy.full_state_dict()
        if trainer.global_rank == 0:
            assert found["line.weight"].equal(saved["old.weight"])
            assert found["line.bias"].equal(saved["old.bias"])
            assert found["shift"].tolist() == [3.0, 4.0]
        with pytest.raises(CheckpointError, match=r"has put line\.weight into the state_dict of .*, computed from weights"):
            trained(Moving(1, _double), 2, resume=path, **layout)
        with pytest.raises(CheckpointError, match=r"weights that the model has not: .*teacher"):
            trained(Moving(1, lambda _: None), 2, resume=path, **layout)


def test_on_load_checkpoint_may_rename_weights_and_leave_them_out(tmp_path: Path) -> None:
    run_world(_resume_moved, 2, tmp_path)


class Longer(Base):
    def __init__(self, seed: int, more: bool) -> None:
        super().__init__(seed)
        if more:
            self.tail = nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.tail.sum() if hasattr(self, "tail") else loss


def _resume_longer(folder: Path) -> list[str]:
    told = []
    trained(Longer(0, False), 2, dp=2, zero=3, save=folder / "last")
    with pytest.raises(CheckpointError) as error:
        trained(Longer(0, True), 3, dp=2, zero=3, resume=folder / "last")
    told.append(str(error.value))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:  # noqa: PT012
        if torch.distributed.get_rank() == 1:
            patch.setattr(saving, "open_checkpoint", _forbidden)
        trained(Longer(0, False), 3, dp=2, zero=3, resume=folder / "last")
    return [*told, str(error.value)]


def _forbidden(_: Path) -> None:
    raise PermissionError("not for this rank")


def test_L11_what_one_rank_cannot_load_all_ranks_raise(tmp_path: Path) -> None:
    first, second = run_world(_resume_longer, 2, tmp_path)
    assert first == second
    assert "model.tail is missing" in first[0]
    assert "as ranks [1] see it" in first[1]
    assert "not for this rank" in first[1]


class Draws(L.Callback):
    """What random generators are at at each batch and at the end."""

    def __init__(self) -> None:
        self.at: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.at.append(generators())

    on_train_end = on_train_batch_start


def _resume_with_fewer_generators(folder: Path) -> None:
    torch.manual_seed(3)
    ends, starts = Draws(), Draws()
    trained(Base(0), 2, save=folder / "last", callbacks=[ends])
    convert(folder / "last", folder / "whole.ckpt", "ckpt")
    saved = torch.load(folder / "whole.ckpt", weights_only=True)
    for lost in ("numpy", "numpy_gauss"):
        del saved["lightning_par"]["rng"][f"rng.0.{lost}"]
    torch.save(saved, folder / "less.ckpt")
    torch.manual_seed(4)
    np.random.seed(4)
    random.seed(4)
    with pytest.warns(UserWarning, match="does not tell the states of random generators numpy, numpy_gauss: they start"):
        trained(Base(1), 3, resume=folder / "less.ckpt", callbacks=[starts])
    for name, value in ends.at[-1].items():
        assert name.endswith("gauss") or torch.equal(starts.at[0][name], value) == (name != "numpy"), name


def test_K10_random_generators_that_a_checkpoint_tells_go_on_without_those_it_does_not(tmp_path: Path) -> None:
    run_world(_resume_with_fewer_generators, 1, tmp_path)
