"""Checkpoints through the Trainer: ModelCheckpoint, resuming what does not fit, and ranks that are not where they should be."""

from __future__ import annotations

import os
import re
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_par import HybridParallelStrategy, convert
from lightning_par.checkpoint import CheckpointError, is_native, open_checkpoint, read_meta
from lightning_par.checkpoint.source import state_entry
from lightning_par.layout import LayoutError
from lightning_par.strategy import saving
from tests.checkpoint.fits import LAYOUTS, QUIET, STEPS, Net, SaveAt, assert_equal, fit, fit_world, world_size
from tests.harness import WorldError, run_world
from tests.harness.models import token_loader


def _trainer(layout: dict[str, int], callbacks: Any = None, **options: Any) -> L.Trainer:
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    settings = QUIET | {"enable_checkpointing": bool(callbacks)} | options
    return L.Trainer(devices=world_size(layout), strategy=strategy, callbacks=callbacks, **settings)


def _loader(trainer: L.Trainer) -> Any:
    return token_loader(4, rows=12, **trainer.strategy.distributed_sampler_kwargs)


class Worsens(Net):
    """Validation falls for two epochs, then rises, so that the best checkpoint is not the last; rank 1 is always late."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", 0 * self.model(**batch).loss + abs(self.current_epoch - 1))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.2 * self.global_rank)


def _fit_with_model_checkpoint(layout: dict[str, int], folder: Path) -> tuple[str, str, float]:
    keep = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    trainer = _trainer(layout, [keep], max_epochs=4)
    module = Worsens(dropout=0.0)
    trainer.fit(module, _loader(trainer), _loader(trainer))
    validated = trainer.validate(module, _loader(trainer), ckpt_path="best", verbose=False)
    return keep.best_model_path, keep.last_model_path, validated[0]["val_loss"]


@pytest.mark.parametrize("name", ["dp2 zero1", "pp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_K16_model_checkpoint_keeps_the_best_folders_and_the_last(name: str, tmp_path: Path) -> None:
    first, second = run_world(_fit_with_model_checkpoint, 2, LAYOUTS[name], tmp_path)
    assert first == second
    assert Path(first[0]).name == "epoch=1.ckpt"
    assert {path.name for path in tmp_path.iterdir()} in (
        {"epoch=1.ckpt", "epoch=0.ckpt", "last.ckpt"},
        {"epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"},
    )
    assert all(is_native(path) for path in tmp_path.iterdir())
    assert read_meta(first[0])["epoch"] == 1


class WithoutOptimizer(Net):
    def configure_optimizers(self) -> None:
        raise AssertionError("only training asks for an optimizer")

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(batch["input_ids"]).logits


def _use_without_optimizer(folder: Path, layout: dict[str, int]) -> tuple[float, float, float]:
    """The losses of validate and test, and a number made of what predict gives for the first batch (under cp it is refused)."""
    trainer, module = _trainer(layout), WithoutOptimizer(dropout=0.0)
    (validated,) = trainer.validate(module, _loader(trainer), ckpt_path=folder, verbose=False)
    (tested,) = trainer.test(module, _loader(trainer), ckpt_path=folder, verbose=False)
    rows = token_loader(4, rows=4)
    predicted = 0.0 if "cp" in layout else trainer.predict(module, rows, ckpt_path=folder)[0].sin().sum().item()
    return validated["val_loss"], tested["test_loss"], predicted


def test_K26_weights_load_without_an_optimizer_under_any_layout(tmp_path: Path) -> None:
    fit_world({"dp": 2, "zero": 3}, STEPS, save=tmp_path / "last")
    (alone,) = run_world(_use_without_optimizer, 1, tmp_path / "last", {"dp": 1})
    assert alone[0] == pytest.approx(alone[1], abs=1e-6)
    assert alone[0] < 3.6, "these are trained weights"
    for name in ("tp2", "pp2", "cp2"):
        for told in run_world(_use_without_optimizer, 2, tmp_path / "last", LAYOUTS[name]):
            assert told[:2] == pytest.approx(alone[:2], abs=1e-5)
            assert told[2] == (0.0 if name == "cp2" else pytest.approx(alone[2], abs=1e-3))


def _resume_with(layers: int, folder: Path, strict: bool) -> None:
    trainer = _trainer({"tp": 2}, max_steps=2 * STEPS)
    module = Net(layers=layers)
    module.strict_loading = strict
    trainer.validate(module, _loader(trainer), ckpt_path=folder, verbose=False)


def test_K19_strict_names_what_does_not_fit_and_not_strict_loads_the_rest(tmp_path: Path) -> None:
    fit_world(LAYOUTS["tp2"], STEPS, save=tmp_path / "last")
    with pytest.raises(WorldError, match=r"model\.model\.layers\.3\.attention\.q_proj\.weight is missing"):
        run_world(_resume_with, 2, 4, tmp_path / "last", True)
    with pytest.raises(WorldError, match=r"weights that the model has not: .*model\.model\.layers\.2\.attention\.q_proj\.weight"):
        run_world(_resume_with, 2, 2, tmp_path / "last", True)
    for layers in (2, 4):
        for told in run_world(_told_while_resuming, 2, layers, tmp_path / "last"):
            lists = re.search(r"left as they are: (.*)\. In it, but not in the model: (.*)", told).groups()
            missing, unexpected = (set(re.findall(r"layers\.(\d)\.", found)) for found in lists)
            assert (missing, unexpected) == ((set(), {"2"}) if layers == 2 else ({"3"}, set()))


def _told_while_resuming(layers: int, folder: Path) -> str:
    """Rank 0 is told; the other says the same here."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _resume_with(layers, folder, False)
    messages = [str(warning.message) for warning in told if "was not loaded whole" in str(warning.message)]
    group: list[Any] = [None, None]
    torch.distributed.all_gather_object(group, messages)
    (message,) = group[0] + group[1]
    return message


def _resume_what_only_rank_0_sees(folder: Path) -> str:
    mine = folder if torch.distributed.get_rank() == 0 else folder.with_name("elsewhere")
    with pytest.raises(CheckpointError) as error:
        fit({"dp": 2}, 2 * STEPS, resume=mine)
    return str(error.value)


def test_K15_a_checkpoint_that_one_rank_does_not_see_raises_on_all(tmp_path: Path) -> None:
    fit_world({"dp": 2}, STEPS, save=tmp_path / "last")
    for message in run_world(_resume_what_only_rank_0_sees, 2, tmp_path / "last"):
        assert "cannot be loaded: as ranks [1] see it" in message
        assert "elsewhere is not there" in message


def _save_on_rank_0_only(folder: Path) -> None:
    saving.PATIENCE = saving.timedelta(seconds=1)
    trainer = _trainer({"dp": 2}, max_steps=1)
    trainer.fit(Net(), _loader(trainer))
    if trainer.is_global_zero:
        with pytest.raises(CheckpointError, match=r"ranks \[1\] have not come .* must be called on all ranks"):
            trainer.save_checkpoint(folder)


def test_K17_saving_on_rank_0_only_is_told(tmp_path: Path) -> None:
    run_world(_save_on_rank_0_only, 2, tmp_path / "last")


class Fails(Net):
    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__()
        self.ranks = ranks

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank in self.ranks:
            raise ValueError(f"the user's own error on rank {self.global_rank}")


def _fail(ranks: tuple[int, ...], callback: Any) -> list[str]:
    trainer = _trainer({"tp": 2}, [callback], max_steps=9)
    with warnings.catch_warnings(record=True) as told, pytest.raises((ValueError, RuntimeError)) as error:  # noqa: PT012
        warnings.simplefilter("always")
        trainer.fit(Fails(ranks), _loader(trainer))
    return [str(error.value), *(str(warning.message) for warning in told)]


def _callbacks(folder: Path) -> list[Any]:
    return [OnExceptionCheckpoint(folder), ModelCheckpoint(folder, filename="failed", save_on_exception=True)]


@pytest.mark.parametrize("place", [0, 1], ids=["OnExceptionCheckpoint", "ModelCheckpoint"])
def test_an_exception_on_all_ranks_is_followed_by_a_save(place: int, tmp_path: Path) -> None:
    for rank, told in enumerate(run_world(_fail, 2, (0, 1), _callbacks(tmp_path)[place])):
        assert told[0] == f"the user's own error on rank {rank}"
    (saved,) = tmp_path.iterdir()
    assert is_native(saved)


@pytest.mark.parametrize(
    "place", [pytest.param(0, id="OnExceptionCheckpoint", marks=pytest.mark.slow), pytest.param(1, id="ModelCheckpoint")]
)
def test_L11_an_exception_on_one_rank_is_not_held_up_by_a_save(place: int, tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(WorldError) as error:
        run_world(_fail_alone, 2, _callbacks(tmp_path)[place], timeout=40)
    assert time.monotonic() - begin < 35
    assert "rank 1 has failed alone with: the user's own error on rank 1" in str(error.value)
    assert "is not saved: an exception has ended the run on this rank" in str(error.value)
    assert not list(tmp_path.rglob("meta.pt"))


def _fail_alone(callback: Any) -> None:
    told = _fail((1,), callback)
    raise AssertionError(f"rank {torch.distributed.get_rank()} has failed alone with: {'; '.join(told)}")


def test_a_file_that_is_no_checkpoint_of_ours_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "weights.ckpt").write_bytes(b"something else")
    with pytest.raises(WorldError, match=r"weights\.ckpt' cannot be loaded.*is damaged, or no file of torch\.save"):
        fit_world({"dp": 2}, STEPS, resume=tmp_path / "weights.ckpt")


def test_K20_hyperparameters_of_any_class_are_saved_as_plain_data(tmp_path: Path) -> None:
    run_world(_fit_with_hparams, 1, tmp_path / "last")
    saved = torch.load(tmp_path / "last" / "meta.pt", weights_only=True)["hyper_parameters"]
    assert saved == {"betas": [0.9, 0.95], "name": "tiny", "path": "/data"}


def _fit_with_hparams(folder: Path) -> None:
    from omegaconf import OmegaConf

    trainer = _trainer({"dp": 1}, max_steps=1)
    module = Net()
    module.save_hyperparameters({**OmegaConf.create({"betas": [0.9, 0.95], "name": "tiny"}), "path": Path("/data")})
    trainer.fit(module, _loader(trainer))
    trainer.save_checkpoint(folder)


class WithHparams(Net):
    def __init__(self, layers: int = 3, tie: bool = False) -> None:
        super().__init__(layers=layers, tie=tie)
        self.save_hyperparameters()


def _fit_with_hparams_of_its_own(layout: dict[str, int], folder: Path) -> dict[str, Tensor]:
    trainer = _trainer(layout, max_steps=1)
    trainer.fit(WithHparams(layers=2, tie=True), _loader(trainer))
    trainer.save_checkpoint(folder)
    return trainer.strategy.full_state_dict() or {}


@pytest.mark.parametrize("kind", ["folder", pytest.param("file", marks=pytest.mark.slow)])
def test_K22_load_from_checkpoint_needs_no_strategy(kind: str, tmp_path: Path) -> None:
    """In a plain process: weights and ties of a run under tp2 pp2, and the module's own arguments; what does not fit is named."""
    weights = run_world(_fit_with_hparams_of_its_own, 4, LAYOUTS["tp2 pp2"], tmp_path / "folder")[0]
    convert(tmp_path / "folder", tmp_path / "file", "ckpt")
    module = WithHparams.load_from_checkpoint(tmp_path / kind, weights_only=True)
    assert_equal(WithHparams.load_from_checkpoint(f"file://{tmp_path / kind}", weights_only=True).state_dict(), module.state_dict())
    assert module.hparams == {"layers": 2, "tie": True}
    assert module.model.head.weight is module.model.embed.weight
    assert_equal(dict(module.state_dict()), weights)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*layers\.2\.attention"):
        WithHparams.load_from_checkpoint(tmp_path / kind, weights_only=True, layers=3)
    assert len(WithHparams.load_from_checkpoint(tmp_path / kind, weights_only=True, layers=3, strict=False).model.layers) == 3


def test_K22_what_is_no_checkpoint_or_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty is no checkpoint: give a complete folder"):
        Net.load_from_checkpoint(tmp_path / "empty")
    run_world(_fit_with_hparams_of_its_own, 1, {"dp": 1}, tmp_path / "last")
    data = tmp_path / "last" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"last is damaged: __0_0\.distcp has .* bytes"):
        WithHparams.load_from_checkpoint(tmp_path / "last")


def _save_weights_only(folder: Path) -> None:
    trainer = _trainer({"dp": 2}, max_steps=STEPS)
    trainer.fit(Net(), _loader(trainer))
    trainer.save_checkpoint(folder, weights_only=True)


def _resume_in_vain(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        fit({"dp": 2}, 2 * STEPS, resume=folder)
    return str(error.value)


def _waive(folder: Path) -> tuple[int, int, list[int]]:
    """Steps of the whole run, of this part of it, and those that the optimizer knows of."""
    trainer = _trainer({"dp": 2, "restore_optimizer": False}, max_steps=2 * STEPS)
    module = Net(dropout=0.0)
    trainer.fit(module, _loader(trainer), ckpt_path=folder)
    steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
    return trainer.global_step, len(module.losses), sorted(steps)


def test_the_state_of_optimizers_is_required_unless_it_is_waived(tmp_path: Path) -> None:
    run_world(_save_weights_only, 2, tmp_path / "weights")
    fit_world({"dp": 2}, STEPS, save=tmp_path / "all")
    for message in run_world(_resume_in_vain, 2, tmp_path / "weights"):
        assert "holds 0 optimizers, but configure_optimizers made 1" in message
        assert "restore_optimizer=False" in message
    for name in ("weights", "all"):
        assert run_world(_waive, 2, tmp_path / name) == [(2 * STEPS, STEPS, [STEPS])] * 2, "it began anew"


def _resume_told(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit({"dp": 1}, STEPS + 1, resume=folder)
    return [str(warning.message) for warning in told]


@pytest.mark.parametrize("lost", ["a moment", "all of a parameter"])
def test_K7_state_that_a_single_file_lacks_is_named(lost: str, tmp_path: Path) -> None:
    run_world(_fit_one_rank, 1, tmp_path / "last")
    convert(tmp_path / "last", tmp_path / "whole.ckpt", "ckpt")
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    state = saved["optimizer_states"][0]["state"]
    name = saved["lightning_par"]["names"][0][1]
    if lost == "a moment":
        del state[1]["exp_avg_sq"]
    else:
        del state[1]
    torch.save(saved, tmp_path / "less.ckpt")
    if lost == "a moment":
        with pytest.raises(WorldError, match=rf"less\.ckpt lacks optimizer\.0\.{name}\.exp_avg_sq"):
            run_world(_resume_told, 1, tmp_path / "less.ckpt")
    else:
        told = run_world(_resume_told, 1, tmp_path / "less.ckpt")[0]
        assert any(f"has no state of optimizer 0 for {name}: it begins anew" in message for message in told)


class Dotted(torch.optim.AdamW):
    """Keeps one thing more, under a key with dots."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                past = self.state[param].setdefault("past.of%2E.grad", torch.zeros_like(param))
                param.sub_(past.mul_(0.5).add_(param.grad), alpha=group["lr"])
        return loss


class Odd(Net):
    """A parameter without elements, names with a number sign, an optimizer whose state has keys with dots."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__(dropout=0.0)
        self.none, self.by_name = torch.nn.Parameter(torch.ones(0, 3)), torch.nn.ModuleDict({"c#": torch.nn.Linear(1, 1)})
        self.groups = groups
        self.add_module("#0", torch.nn.Linear(1, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return (
            super().training_step(batch, batch_idx)
            + self.none.sum()
            + 0.1 * self.get_submodule("#0")(self.by_name["c#"](torch.ones(1))).sum()
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = list(self.parameters())
        return Dotted([{"params": params[i :: self.groups]} for i in range(self.groups)], lr=0.01)


def _odd(layout: dict[str, int], steps: int, save: Path | None, resume: Path | None, groups: int = 2) -> dict[str, Tensor] | None:
    trainer = _trainer(layout, max_steps=steps)
    trainer.fit(Odd(groups), _loader(trainer), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return trainer.strategy.full_state_dict()


@pytest.mark.parametrize(
    "layout",
    [*(pytest.param({"dp": 2, **zero}, marks=pytest.mark.slow) for zero in ({}, {"zero": 1})), {"dp": 2, "zero": 2}],
    ids=["dp2", "dp2 zero1", "dp2 zero2"],
)
def test_K1_parameters_without_elements_names_with_number_signs_and_keys_with_dots(layout: dict[str, int], tmp_path: Path) -> None:
    straight = run_world(_odd, 2, layout, 4, None, None)[0]
    run_world(_odd, 2, layout, 2, tmp_path / "last", None)
    assert_equal(run_world(_odd, 2, layout, 4, None, tmp_path / "last")[0], straight)
    assert Odd.load_from_checkpoint(tmp_path / "last").none.shape == (0, 3)
    convert(tmp_path / "last", tmp_path / "whole.ckpt", "ckpt")
    assert_equal(run_world(_odd, 2, layout, 4, None, tmp_path / "whole.ckpt")[0], straight)
    convert(tmp_path / "last", tmp_path / "weights", optimizer=False)
    assert {"model.#0.weight", "model.#0.bias"} <= {*open_checkpoint(tmp_path / "weights").entries}
    if layout == {"dp": 2}:
        with pytest.raises(WorldError, match="the checkpoint has 2 param groups, but configure_optimizers made 3"):
            run_world(_odd, 2, layout, 4, None, tmp_path / "last", 3)


def _names_of_others() -> None:
    module = Net(dropout=0.0)
    module.register_parameter("#0", torch.nn.Parameter(torch.ones(1)))
    trainer = _trainer({"dp": 1}, max_steps=1)
    with pytest.raises(CheckpointError, match=r"calls parameters or buffers #0: .* call them otherwise"):
        trainer.fit(module, _loader(trainer))
    with pytest.raises(CheckpointError, match=r"optimizer 1 keeps state of a.weight under 3 \(of type int\), for which"):
        state_entry(1, "a.weight", 3)


def test_a_name_that_stands_for_a_number_and_a_key_that_is_none_are_refused() -> None:
    run_world(_names_of_others, 1)


class Strays(Net):
    """Two names of one buffer part in the first step, and another buffer is first filled there."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("same", self.seen)
        self.register_buffer("late", None)
        self.register_buffer("passing", None, persistent=False)

    def on_train_batch_end(self, *_: Any) -> None:
        self.same, self.late, self.passing = self.seen + 1, torch.ones(2), torch.ones(3)


def _save_strays(folder: Path) -> None:
    trainer = _trainer({"dp": 2}, max_steps=1)
    trainer.fit(Strays(), _loader(trainer))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.save_checkpoint(folder)
    told = [str(warning.message) for warning in caught if "not saved" in str(warning.message)]
    assert len(told) == (trainer.global_rank == 0)
    for message in told:
        assert "model.late (a buffer that was registered or first filled after the start)" in message
        assert "model.same (a buffer that was one with seen at the start)" in message
        assert "passing" not in message
    with pytest.raises(CheckpointError, match="s3://bucket/last is not saved"):
        trainer.save_checkpoint("s3://bucket/last")


def test_what_no_checkpoint_can_hold_is_told(tmp_path: Path) -> None:
    run_world(_save_strays, 2, tmp_path / "last")


def test_a_callback_that_saves_to_an_address_is_refused_before_anything_starts() -> None:
    trainer = _trainer({"dp": 2}, [ModelCheckpoint("memory://bucket/runs")], max_steps=1)
    with pytest.raises(LayoutError, match=r"memory://bucket/runs .*folders of a file system"):
        trainer.fit(Net(), _loader(trainer))


def _save_and_go_elsewhere(folder: Path) -> None:
    os.chdir(folder)
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(dp=2, async_save=True), max_steps=1, callbacks=[Leaves()], **QUIET)
    trainer.fit(Net(dropout=0.0), _loader(trainer))


class Leaves(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint("last")
        os.chdir("/")


def test_a_relative_path_is_that_of_the_moment_it_was_given(tmp_path: Path) -> None:
    run_world(_save_and_go_elsewhere, 2, tmp_path)
    assert is_native(tmp_path / "last")


def _train_in(precision: str, steps: int, folder: Path, resumes: bool) -> torch.dtype:
    trainer = _trainer({"dp": 2}, max_steps=steps, precision=precision)
    module = Net(dropout=0.0)
    trainer.fit(module, _loader(trainer), ckpt_path=folder if resumes else None)
    if not resumes:
        trainer.save_checkpoint(folder)
    return trainer.optimizers[0].state[next(iter(trainer.optimizers[0].state))]["exp_avg"].dtype


@pytest.mark.parametrize(("saved", "resumed"), [("64-true", "32-true"), ("32-true", "64-true")])
def test_moments_have_the_dtype_of_the_run_that_goes_on(saved: str, resumed: str, tmp_path: Path) -> None:
    run_world(_train_in, 2, saved, 2, tmp_path / "last", False)
    found = run_world(_train_in, 2, resumed, 3, tmp_path / "last", True)
    assert found == [torch.float32 if resumed == "32-true" else torch.float64] * 2


def _fit_one_rank(folder: Path) -> None:
    fit({"dp": 1}, STEPS, save=folder)


def _first_loss_as_nodes(folder: Path, nodes: int, precision: str) -> list[float]:
    """Four ranks as ``nodes`` nodes: a rank's place on its node is not its place in the world."""
    rank = torch.distributed.get_rank()
    devices = 4 // nodes
    os.environ |= {"LOCAL_RANK": str(rank % devices), "LOCAL_WORLD_SIZE": str(devices), "GROUP_RANK": str(rank // devices)}
    strategy = HybridParallelStrategy(dp=2, tp=2, zero=1)
    options = QUIET | {"precision": precision, "max_steps": STEPS + 1}
    trainer = L.Trainer(devices=devices, num_nodes=nodes, strategy=strategy, **options)
    module = Net(dropout=0.0)
    trainer.fit(module, _loader(trainer), ckpt_path=folder)
    assert (strategy.global_rank, strategy.local_rank) == (rank, rank % devices)
    return module.losses


@pytest.mark.slow
@pytest.mark.parametrize(("format", "precision", "tolerance"), [("native", "64-true", 1e-10), ("universal", "32-true", 1e-5)])
def test_K3_ranks_of_several_nodes_go_on_with_the_loss_of_the_straight_run(
    format: str, precision: str, tolerance: float, tmp_path: Path
) -> None:
    options = {"dropout": 0.0, "precision": precision}
    straight = fit_world({"dp": 2}, STEPS + 1, **options)[0]
    fit_world({"dp": 2}, STEPS, save=tmp_path / "native", **options)
    if format == "universal":
        convert(tmp_path / "native", tmp_path / "universal", "universal")
    for losses in run_world(_first_loss_as_nodes, 4, tmp_path / format, 2, precision):
        assert losses == pytest.approx(straight.losses[STEPS:], abs=tolerance)


def _draws_after(layout: dict[str, int], folder: Path) -> tuple[float, list[str]]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        end = fit(layout, STEPS, resume=folder)
    return end.draw, [str(warning.message) for warning in told if "another layout" in str(warning.message)]


@pytest.mark.slow
def test_K11_under_another_layout_random_numbers_go_on_from_those_of_a_rank_that_there_was(tmp_path: Path) -> None:
    """And that is told. Ranks of one tensor-parallel group share them; those that there were not before take them in turn."""
    run_world(_fit_seeded, 2, {"dp": 2}, tmp_path / "last")
    saved = [draw for draw, _ in run_world(_draws_after, 2, {"dp": 2}, tmp_path / "last")]
    assert saved[0] != saved[1]
    more = run_world(_draws_after, 3, {"dp": 3}, tmp_path / "last")
    assert [draw for draw, _ in more] == [saved[0], saved[1], saved[0]]
    shared = run_world(_draws_after, 2, {"tp": 2}, tmp_path / "last")
    assert [draw for draw, _ in shared] == [saved[0]] * 2
    assert "'dp': 2" in more[0][1][0]


class Seeds(L.Callback):
    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        torch.manual_seed(trainer.global_rank)


def _fit_seeded(layout: dict[str, int], folder: Path) -> None:
    trainer = _trainer(layout, [Seeds(), SaveAt(folder, STEPS)], max_steps=STEPS, enable_checkpointing=False)
    trainer.fit(Net(), _loader(trainer))
