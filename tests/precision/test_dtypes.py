"""A11: for each precision, the dtype of everything is as the table in ParallelPrecision says, under every layout."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy, ParallelPrecision
from lightning_par.checkpoint import read_index
from tests.harness import run_world
from tests.harness.models import QUIET, TinyGPT, token_loader

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
TABLE = {  # weights, compute, gradients of backward, published, added up, on the wire, masters, optimizer state, checkpoint
    "32-true": (F32, F32, F32, F32, F32, F32, F32, F32, F32),
    "64-true": (F64, F64, F64, F64, F64, F64, F64, F64, F64),
    "bf16-mixed": (F32, BF16, F32, F32, F32, F32, F32, F32, F32),
    "16-mixed": (F32, F16, F32, F32, F32, F32, F32, F32, F32),
    "bf16-true": (BF16, BF16, BF16, F32, F32, F32, F32, F32, F32),
    "16-true": (F16, F16, F16, F32, F32, F32, F32, F32, F32),
}
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "dp2 zero1": {"dp": 2, "zero": 1},
    "dp2 zero2": {"dp": 2, "zero": 2},
    "dp2 zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
}


class Watch(TinyGPT):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        layers = [module for name, module in self.named_modules() if name.endswith("q_proj")]  # of a pipeline's other stages, too
        handles = [layer.register_forward_hook(lambda module, args, output: self.seen.add(output.dtype)) for layer in layers]
        for layer in layers:
            layer.weight.register_hook(lambda grad: self.came.add(grad.dtype))
        try:
            return super().training_step(batch, batch_idx)
        finally:
            for handle in handles:
                handle.remove()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients = {p.grad.dtype for p in held if p.grad is not None}


def _fit(precision: str, layout: dict[str, int], folder: Any) -> dict[str, set[torch.dtype]]:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), precision=precision, max_steps=1, **QUIET)
    assert type(trainer.strategy.precision_plugin) is ParallelPrecision
    assert trainer.precision == precision
    module = Watch(layers=2)
    module.seen, module.came = set(), set()
    trainer.fit(module, token_loader(4, **trainer.strategy.distributed_sampler_kwargs))
    trainer.save_checkpoint(folder)
    optimizer, data_parallel = trainer.optimizers[0], trainer.strategy.data_parallel
    return {
        "weights": {p.dtype for p in module.parameters()},
        "compute": module.seen,
        "backward": module.came,
        "gradients": module.gradients,
        "sums": {bucket.grad_dtype for bucket in data_parallel.reduced} or module.gradients,
        "wire": {bucket.reduce_dtype for bucket in data_parallel.reduced} or module.gradients,
        "masters": {p.dtype for group in optimizer.param_groups for p in group["params"]},
        "optimizer": {value.dtype for entry in optimizer.state.values() for value in entry.values() if value.dim()},
        "checkpoint": {dtype for name, (_, dtype) in read_index(folder).items() if name.startswith("model.")},
    }


@pytest.mark.parametrize("layout", [name if "zero3" in name else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
@pytest.mark.parametrize("precision", TABLE)
def test_A11_dtypes_are_as_documented(precision: str, layout: str, tmp_path: Any) -> None:
    kinds = ("weights", "compute", "backward", "gradients", "sums", "wire", "masters", "optimizer", "checkpoint")
    for seen in run_world(_fit, 2, precision, LAYOUTS[layout], tmp_path / "last"):
        assert seen == {kind: {dtype} for kind, dtype in zip(kinds, TABLE[precision], strict=True)}


def _pure(layout: dict[str, int], folder: Any) -> dict[str, Any]:
    precision = ParallelPrecision("bf16-true", master_weights=False, stochastic_rounding=True)
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), plugins=[precision], max_steps=2, **QUIET)
    module = Watch(layers=2)
    module.seen, module.came = set(), set()
    trainer.fit(module, token_loader(4, **trainer.strategy.distributed_sampler_kwargs))
    trainer.save_checkpoint(folder)
    shards = [p for group in trainer.optimizers[0].param_groups for p in group["params"]]
    return {
        "kept": sum(p.untyped_storage().nbytes() for p in shards if p.dtype == F32),
        "gradients": module.gradients,
        "checkpoint": {dtype for name, (_, dtype) in read_index(folder).items() if name.startswith("model.")},
    }


@pytest.mark.parametrize("layout", ["dp2", "dp2 zero2", "dp2 zero3"])
def test_without_masters_no_float32_copy_is_kept_and_none_is_saved(layout: str, tmp_path: Any) -> None:
    for told in run_world(_pure, 2, LAYOUTS[layout], tmp_path / "last"):
        assert told == {"kept": 0, "gradients": {F32}, "checkpoint": {BF16}}


class Normed(TinyGPT):
    """Notes what its norms compute in, and what comes out of them."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        norms = [module for module in self.modules() if type(module).__name__ == "RMSNorm"]
        handles = [norm.register_forward_hook(lambda norm, args, out: self.seen.add((norm.weight.dtype, out.dtype))) for norm in norms]
        loss = super().training_step(batch, batch_idx)
        for handle in handles:
            handle.remove()
        return loss


def _exempt(layout: dict[str, int], names: list[str]) -> tuple[set, dict[str, torch.dtype], float]:
    precision = ParallelPrecision("bf16-true", float32_modules=names)
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), plugins=[precision], max_steps=2, **QUIET)
    module = Normed(layers=2)
    module.seen = set()
    trainer.fit(module, token_loader(4, **trainer.strategy.distributed_sampler_kwargs))
    return module.seen, {name: p.dtype for name, p in module.named_parameters()}, trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("layout", ["dp2 zero1", "tp2"])
def test_modules_that_the_user_names_stay_in_float32(layout: str) -> None:
    for names in (["RMSNorm"], ["*norm"]):
        for seen, dtypes, loss in run_world(_exempt, 2, LAYOUTS[layout], names):
            assert seen == {(F32, BF16)}, "weights stay, outputs go on in bfloat16"
            assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {BF16}
            assert loss == pytest.approx(3.6, abs=0.3)


def _unknown() -> None:
    precision = ParallelPrecision("bf16-true", float32_modules=["LayerNorm"])
    trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(), plugins=[precision], max_steps=1, **QUIET)
    with pytest.raises(ValueError, match="float32_modules names LayerNorm, but the module has no submodule or class of that name"):
        trainer.fit(TinyGPT(layers=2), token_loader(4))


def test_a_name_that_is_no_module_is_refused() -> None:
    run_world(_unknown, 1)


def _rotary() -> torch.dtype:
    module = torch.nn.Module()
    module.rotary = torch.nn.Module()
    module.rotary.register_buffer("inv_freq", torch.rand(3), persistent=False)
    module.linear = torch.nn.Linear(2, 2)
    ParallelPrecision("bf16-true").convert_module(module)
    assert module.linear.weight.dtype == BF16
    return module.rotary.inv_freq.dtype


def test_rotary_frequencies_keep_their_precision() -> None:
    assert _rotary() == F32


@pytest.mark.parametrize("precision", ["8-true", "transformer-engine", "int8"])
def test_an_unsupported_precision_is_refused_with_the_choices(precision: str) -> None:
    with pytest.raises(ValueError, match=r"choose one of .*bf16-mixed"):
        ParallelPrecision(precision)


def test_the_plugin_may_be_given_itself() -> None:
    plugin = ParallelPrecision("bf16-mixed")
    trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(), plugins=[plugin], **QUIET)
    assert trainer.strategy.precision_plugin is plugin


def _losses(precision: str, layout: dict[str, int]) -> float:
    trainer = L.Trainer(devices=2, strategy=HybridParallelStrategy(**layout), precision=precision, max_steps=2, **QUIET)
    place = trainer.strategy.distributed_sampler_kwargs
    trainer.fit(TinyGPT(layers=2), token_loader(4, **place))
    return trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("layout", ["dp2 zero1", *(pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS if n != "dp2 zero1")])
def test_G2_half_precision_trains_close_to_float32(layout: str, precision: str) -> None:
    (exact, _), (half, _) = (run_world(_losses, 2, name, LAYOUTS[layout]) for name in ("32-true", precision))
    assert half != exact
    assert half == pytest.approx(exact, rel=0.01)
