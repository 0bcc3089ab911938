"""Loss scaling under the Trainer: what is skipped, where, in which order, and what is remembered."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import DynamicLossScale, HybridParallelStrategy, ParallelPrecision, StaticLossScale
from tests.checkpoint.fits import SaveAt
from tests.harness import run_world
from tests.harness.models import QUIET, TinyGPT, token_loader

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
}


class Scripted(TinyGPT):
    """Rank 1 finds an infinity in one element of one gradient, at the steps of ``script``."""

    def __init__(self, script: frozenset[int], share: float = 1.0) -> None:
        super().__init__(layers=3)
        self.script, self.share, self.seen = script, share, []
        self.taken = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.share

    def on_after_backward(self) -> None:
        strategy = self.trainer.strategy
        if self.trainer.global_step in self.script and strategy.global_rank == 1:
            params = [p for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
            next(p.grad for p in params if p.grad is not None and p.grad.numel()).view(-1)[-1] = math.inf

    def on_train_batch_end(self, *_: Any) -> None:
        scale = self.trainer.precision_plugin.scale
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.seen.append((scale.scale, scale.good, scale.left, scale.skipped, rate))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: setattr(self, "taken", self.taken + 1))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _trainer(layout: dict[str, int], steps: int, precision: ParallelPrecision, **options: Any) -> L.Trainer:
    strategy = HybridParallelStrategy(zero_options={"min_unit_mb": 0}, **layout)
    return L.Trainer(devices=2, strategy=strategy, plugins=[precision], max_steps=steps, **QUIET, **options)


def _scripted(layout: dict[str, int], script: frozenset[int], steps: int, rule: DynamicLossScale, **files: Any) -> dict[str, Any]:
    callbacks = [SaveAt(files["save"], steps)] if "save" in files else []
    trainer = _trainer(layout, steps, ParallelPrecision("16-mixed", loss_scale=rule), callbacks=callbacks)
    module = Scripted(script, files.get("share", 1.0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = token_loader(4, rows=20, **trainer.strategy.distributed_sampler_kwargs)
        trainer.fit(module, loader, ckpt_path=files.get("resume"))
    return {
        "seen": module.seen,
        "taken": module.taken,
        "weights": trainer.strategy.full_state_dict(),
        "warnings": [str(warning.message) for warning in told if "lr_scheduler.step()" in str(warning.message)],
        "global_step": trainer.global_step,
    }


@pytest.mark.parametrize("layout", [pytest.param(n, marks=pytest.mark.slow) if n in ("zero1", "zero2", "dp2") else n for n in LAYOUTS])
def test_A1_A9_an_infinity_on_one_rank_skips_the_step_and_the_schedule_on_all(layout: str) -> None:
    small = {"share": 2.0**-10}  # so that nothing overflows but by the script
    ranks = run_world(_files, 2, LAYOUTS[layout], frozenset({0, 1, 2}), 6, DynamicLossScale(initial=2.0**24), small)
    for told in ranks:
        assert told["taken"] == 3
        assert [row[0] for row in told["seen"]] == [2.0**23, 2.0**22, 2.0**21, 2.0**21, 2.0**21, 2.0**21]
        assert [row[3] for row in told["seen"]] == [1, 2, 3, 3, 3, 3]
        assert [row[4] for row in told["seen"]] == [0.01, 0.01, 0.01, 0.005, 0.0025, 0.00125]
        assert told["global_step"] == 6, "Lightning counts every step"
        assert not told["warnings"]
    if layout == "zero1":
        clean = run_world(_scripted, 2, LAYOUTS[layout], frozenset(), 3, DynamicLossScale())
        assert [row[4] for row in clean[0]["seen"]] == [0.005, 0.0025, 0.00125]


RULES = {
    "torch": DynamicLossScale(growth_interval=4),
    "megatron": DynamicLossScale("megatron", initial=65536.0, growth_interval=4),
    "deepspeed": DynamicLossScale("deepspeed", initial=65536.0, growth_interval=4),
}


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        ("zero1", "megatron"),
        ("pp2", "deepspeed"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("dp2", "torch"), ("tp2", "megatron"), ("cp2", "torch"))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("zero2", "deepspeed"), ("zero3", "megatron"))),
    ],
)
def test_A3_a_resumed_run_goes_on_with_the_same_scale_counts_rate_and_weights(layout: str, rule: str, tmp_path: Path) -> None:
    script, scale = frozenset({2, 6, 7}), RULES[rule]
    straight = run_world(_scripted, 2, LAYOUTS[layout], script, 10, scale)
    first = run_world(_files, 2, LAYOUTS[layout], script, 5, scale, {"save": tmp_path / "half"})
    second = run_world(_files, 2, LAYOUTS[layout], script, 10, scale, {"resume": tmp_path / "half"})
    for whole, early, late in zip(straight, first, second, strict=True):
        assert whole["seen"] == early["seen"] + late["seen"]
    for name, value in straight[0]["weights"].items():
        assert torch.equal(value, second[0]["weights"][name]), name


def _files(layout: dict[str, int], script: frozenset[int], steps: int, rule: DynamicLossScale, files: dict[str, Any]) -> dict[str, Any]:
    return _scripted(layout, script, steps, rule, **files)


def _always(layout: dict[str, int]) -> tuple[list[tuple], str]:
    rule = DynamicLossScale("megatron", initial=16.0, minimum=1.0, hysteresis=2, growth_interval=1000)
    trainer = _trainer(layout, 10, ParallelPrecision("16-mixed", loss_scale=rule))
    module = Scripted(frozenset(range(10)))
    with pytest.raises(RuntimeError, match="loss scale at its minimum") as caught:
        trainer.fit(module, token_loader(4, **trainer.strategy.distributed_sampler_kwargs))
    return [row[:3] for row in module.seen], str(caught.value)


@pytest.mark.parametrize("layout", [n if n in ("zero1", "pp2") else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS])
def test_A4_at_the_minimum_the_error_names_the_parameter_and_its_rank(layout: str) -> None:
    for seen, text in run_world(_always, 2, LAYOUTS[layout]):
        assert [scale for scale, *_ in seen] == [16, 8, 4, 2, 1], "one spends the hysteresis, four halve, the sixth raises"
        assert [left for _, _, left in seen][:2] == [1, 0]
        assert "model." in text
        assert text.endswith("on rank 1")


class Given(L.LightningModule):
    """A weight whose gradient is ``grad``."""

    def __init__(self, grad: Tensor, *, manual: bool = False, clip: int = 0, optimizer: Callable[..., Any] = torch.optim.SGD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros_like(grad))
        self.register_buffer("target", grad.clone())
        self.automatic_optimization, self.clips, self.make, self.norms = not manual, clip, optimizer, []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = (self.weight.float() * self.target.float()).sum()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        for _ in range(self.clips):
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        return None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.trainer.strategy.grad_norm(optimizer).item())

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), lr=1.0)


def _update(precision: ParallelPrecision, module: Callable[[], Given], zero: int, **options: Any) -> tuple[Tensor, list[float]]:
    trainer = _trainer({"zero": zero}, options.pop("steps", 1), precision, **options)
    built = module()
    trainer.fit(built, DataLoader(torch.zeros(8, 1), batch_size=1))
    whole = trainer.strategy.full_state_dict()
    return (whole["weight"].float() if whole else torch.empty(0)), built.norms


GRAD = torch.tensor([0.3, -0.4, 0.0])  # of norm 0.5


def _orders() -> None:
    scaled = lambda: ParallelPrecision("16-mixed", loss_scale=StaticLossScale(2.0**16))  # noqa: E731
    for zero in (0, 1, 2):
        small, norms = _update(scaled(), lambda: Given(GRAD), zero, gradient_clip_val=1.0)
        assert norms == [pytest.approx(0.5)], "A14"
        big, _ = _update(scaled(), lambda: Given(8 * GRAD), zero, gradient_clip_val=1.0)
        manual, _ = _update(scaled(), lambda: Given(GRAD * 8, manual=True, clip=1), zero)
        twice, _ = _update(scaled(), lambda: Given(GRAD * 8, manual=True, clip=2), zero)
        automatic, _ = _update(scaled(), lambda: Given(GRAD * 8), zero, gradient_clip_val=0.5)
        if small.numel():
            torch.testing.assert_close(-small, GRAD)
            torch.testing.assert_close(-big, 8 * GRAD / 4, rtol=1e-5, atol=1e-5)
            assert torch.equal(manual, automatic)
            torch.testing.assert_close(twice, manual)


def test_A5_A6_A14_gradients_are_unscaled_once_before_hooks_and_clipping_in_every_loop() -> None:
    run_world(_orders, 2)


class Norms(TinyGPT):
    """What the hook before the optimizer's step sees of the gradient."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.norms: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(self.trainer.strategy.grad_norm(optimizer).item())


def _clipped(layout: dict[str, int], scale: float | None, clip: float) -> tuple[list[float], dict[str, Tensor] | None]:
    """One step of plain SGD, so that the update is the clipped gradient."""
    name = "32-true" if scale is None else "16-mixed"
    precision = ParallelPrecision(name, loss_scale=None if scale is None else StaticLossScale(scale))
    trainer, module = _trainer(layout, 1, precision, gradient_clip_val=clip), Norms()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    trainer.fit(module, token_loader(4, **trainer.strategy.distributed_sampler_kwargs))
    after = trainer.strategy.full_state_dict()
    return module.norms, None if after is None else {key: (before[key] - after[key]).float() for key in before}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_A5_A14_hooks_see_and_clipping_clips_the_norm_of_float32_under_every_layout(layout: str) -> None:
    for clip, is_clipped in ((0.05, True), (100.0, False)):
        (norms, exact), _ = run_world(_clipped, 2, LAYOUTS[layout], None, clip)
        for scale in (1024.0, 2.0**16):
            (seen, update), _ = run_world(_clipped, 2, LAYOUTS[layout], scale, clip)
            assert seen == pytest.approx(norms, rel=5e-3)
            length = math.sqrt(sum(value.square().sum().item() for value in update.values()))
            assert length == pytest.approx(clip if is_clipped else norms[0], rel=0.01)
            away = math.sqrt(sum((update[name] - exact[name]).square().sum().item() for name in exact))
            assert away < 0.02 * length, "the update is that of float32"


class Two(L.LightningModule):
    """Two optimizers, each with its own backward, one of which has an overflow."""

    def __init__(self, bad: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization, self.bad = False, bad
        self.parts = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.scales: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for which, optimizer in enumerate(self.optimizers()):
            optimizer.zero_grad()
            loss = self.parts[which](self.parts[0](batch)).square().sum()  # the first part has gradients of both losses
            self.manual_backward(loss * math.inf if self.bad and (batch_idx, which) == (1, 0) else loss)
            optimizer.step()
            self.scales.append(self.trainer.precision_plugin.loss_scale)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.parts]


def _two(zero: int, precision: ParallelPrecision, bad: bool) -> tuple[dict[str, Tensor] | None, list[float]]:
    trainer = _trainer({"zero": zero}, 8, precision)
    module = Two(bad)
    rank = trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, DataLoader(torch.arange(36.0).view(12, 3).chunk(2)[rank] / 36, batch_size=1))
    return trainer.strategy.full_state_dict(), module.scales


def _twos() -> None:
    for zero in (0, 1, 2):
        exact, _ = _two(zero, ParallelPrecision("32-true"), False)
        rule = DynamicLossScale(initial=1024.0, growth_interval=3)
        scaled, _ = _two(zero, ParallelPrecision("16-mixed", loss_scale=rule), False)
        _, scales = _two(zero, ParallelPrecision("16-mixed", loss_scale=rule), True)
        assert scales[:6] == [1024, 1024, 512, 512, 512, 1024], "one scale, which every step moves"
        for name, value in (exact or {}).items():
            torch.testing.assert_close(scaled[name], value, rtol=2e-3, atol=2e-3)


def test_two_optimizers_share_one_scale_and_their_gradients_are_right() -> None:
    run_world(_twos, 2)


def _fused() -> None:
    for zero in (0, 1, 2):
        updates = []
        for fused in (False, True):
            make = lambda params, lr, fused=fused: torch.optim.AdamW(params, lr=1e-2, fused=fused)  # noqa: E731
            precision = ParallelPrecision("16-mixed", loss_scale=StaticLossScale(1024.0))
            updates.append(_update(precision, lambda make=make: Given(GRAD, optimizer=make), zero, steps=3, gradient_clip_val=0.1)[0])
        torch.testing.assert_close(*updates)


def test_A7_optimizers_that_could_unscale_themselves_are_not_unscaled_twice() -> None:
    run_world(_fused, 2)


def _user_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    theirs = L.Trainer(devices=1, strategy=HybridParallelStrategy(), plugins=[MixedPrecision("16-mixed", "cpu", scaler)], **QUIET)
    assert theirs.precision_plugin.loss_scale == 4.0
    for name in ("16-mixed", "16-true"):
        trainer = L.Trainer(
            devices=1, strategy=HybridParallelStrategy(), plugins=[ParallelPrecision(name, loss_scale=scaler)], max_steps=2, **QUIET
        )
        trainer.fit(TinyGPT(layers=2), token_loader(4))
        assert trainer.precision_plugin.loss_scale == 16.0, "doubled after each of two good steps"


def test_A12_a_scaler_of_ones_own_is_used() -> None:
    run_world(_user_scaler, 1)


def _bf16_norms(precision: str, accumulate: int) -> list[float]:
    class Norms(TinyGPT):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(self.trainer.strategy.grad_norm(optimizer).item())

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (0.0 if batch_idx >= 4 * accumulate else 1.0)

    norms: list[float] = []
    trainer = L.Trainer(
        devices=2,
        strategy=HybridParallelStrategy(),
        precision=precision,
        max_steps=5,
        accumulate_grad_batches=accumulate,
        **QUIET,
    )
    trainer.fit(Norms(layers=2), token_loader(4, rows=96, **trainer.strategy.distributed_sampler_kwargs))
    assert trainer.precision_plugin.loss_scale == 1.0
    return norms


@pytest.mark.parametrize("accumulate", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_Z19_bfloat16_has_no_loss_scale_and_no_gradient_is_left_over(accumulate: int) -> None:
    exact = run_world(_bf16_norms, 2, "32-true", accumulate)[0]
    for precision in ("bf16-mixed", "bf16-true"):
        norms = run_world(_bf16_norms, 2, precision, accumulate)[0]
        assert norms[:1] == pytest.approx(exact[:1], rel=0.01)
        assert norms == pytest.approx(exact, rel=0.05)
        assert norms[-1] == 0.0, "a gradient of zero is no error"


def _overflows_for_real() -> tuple[float, int, list[float]]:
    trainer = L.Trainer(
        devices=2,
        strategy=HybridParallelStrategy(zero=2),
        plugins=[ParallelPrecision("16-true", loss_scale=DynamicLossScale(initial=2.0**30))],
        max_steps=30,
        **QUIET,
    )
    module = Scripted(frozenset())
    trainer.fit(module, token_loader(4, rows=24, **trainer.strategy.distributed_sampler_kwargs))
    scale = trainer.precision_plugin.scale
    return scale.scale, scale.skipped, [row[0] for row in module.seen]


def test_a_scale_that_is_too_high_comes_down_until_steps_are_taken() -> None:
    results = run_world(_overflows_for_real, 2)
    assert results[0] == results[1]
    scale, skipped, _ = results[0]
    assert scale == 2.0 ** (30 - skipped)
    assert 5 < skipped < 28


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"precision": "bf16-mixed", "loss_scale": 8.0}, "loss_scale is for 16-mixed and 16-true"),
        ({"precision": "16-true", "master_weights": False}, "master_weights=False is for bf16-true"),
        ({"precision": "bf16-true", "stochastic_rounding": True}, "with master_weights=False"),
        ({"precision": "32-true", "float32_modules": ["norm"], "loss_scale": 2.0}, "loss_scale is for.*float32_modules is for"),
    ],
)
def test_options_that_do_not_go_together_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ParallelPrecision(**arguments)


def test_A10_no_masters_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="smaller than about 1/512 of its weight is lost"):
        ParallelPrecision("bf16-true", master_weights=False)


def _lbfgs() -> None:
    precision = ParallelPrecision("16-mixed")
    with pytest.raises(ValueError, match="LBFGS evaluates the loss several times"):
        _update(precision, lambda: Given(GRAD, optimizer=lambda params, lr: torch.optim.LBFGS(params)), 0)


def test_an_optimizer_that_cannot_be_scaled_is_refused() -> None:
    run_world(_lbfgs, 2)


class Rows(L.LightningModule):
    """A few matrices, some of them in half precision, trained on rows of numbers."""

    def __init__(self, *, skip: int = -1, look: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.skip, self.look, self.widened = skip, look, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.look:
            shards = [p for group in self.trainer.optimizers[0].param_groups for p in group["params"]]
            self.widened.append(sum(p.untyped_storage().nbytes() for p in shards))
        for layer in self.layers:
            batch = batch + torch.tanh(layer(batch))
        return None if batch_idx == self.skip else batch.float().square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for layer in self.layers:
            batch = batch + layer(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _numbers(rows: int = 8, replicas: int = 2, rank: int = 0) -> DataLoader:
    data = torch.randn(rows, 6, generator=torch.Generator().manual_seed(6))
    return DataLoader(data[rank::replicas], batch_size=1)


PURE = {"master_weights": False, "stochastic_rounding": True}


def _rows(zero: int, precision: ParallelPrecision, *, steps: int = 4, devices: int = 2, **options: Any) -> tuple[L.Trainer, Rows]:
    files = {name: options.pop(name, None) for name in ("save", "resume")}
    module = options.pop("module", None) or Rows()
    callbacks = [*options.pop("callbacks", []), *([SaveAt(files["save"], steps)] if files["save"] else [])]
    strategy = HybridParallelStrategy(zero=zero, zero_options={"min_unit_mb": 0})
    trainer = L.Trainer(devices=devices, strategy=strategy, plugins=[precision], max_steps=steps, callbacks=callbacks, **QUIET, **options)
    rank = trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, _numbers(replicas=devices, rank=rank), ckpt_path=files["resume"])
    return trainer, module


def _whole(trainer: L.Trainer) -> dict[str, Tensor]:
    return trainer.strategy.full_state_dict() or {}


def _resumes_rounding(folder: Path) -> None:
    for zero in (0, 2, 3):
        straight, _ = _rows(zero, ParallelPrecision("bf16-true", **PURE), steps=8)
        _rows(zero, ParallelPrecision("bf16-true", **PURE), save=folder / f"{zero}")
        resumed, _ = _rows(zero, ParallelPrecision("bf16-true", **PURE), steps=8, resume=folder / f"{zero}")
        theirs = _whole(resumed)
        assert all(torch.equal(value, theirs[name]) for name, value in _whole(straight).items()), f"zero={zero}"


@pytest.mark.filterwarnings("ignore")
def test_a_run_without_masters_resumes_bit_for_bit(tmp_path: Path) -> None:
    run_world(_resumes_rounding, 2, tmp_path)


def _looks() -> None:
    for zero in (0, 2, 3):
        _, module = _rows(zero, ParallelPrecision("bf16-true", **PURE), module=Rows(look=True))
        assert module.widened == [0] * 4, "no float32 values while forward and backward run"


def test_without_masters_spans_are_wide_in_the_optimizers_step_only() -> None:
    run_world(_looks, 2)


def _nan_and_clipping() -> str:
    class Bad(Rows):
        def on_after_backward(self) -> None:
            if self.trainer.strategy.global_rank == 1:
                params = [p for group in self.trainer.optimizers[0].param_groups for p in group["params"] if p.grad is not None]
                params[-1].grad.view(-1)[-1] = math.nan
                self.bad = self.trainer.strategy.data_parallel.held(params[-1])[0]

    precision = ParallelPrecision("16-mixed", loss_scale=DynamicLossScale("megatron", initial=1.0, hysteresis=1))
    module = Bad()
    with pytest.raises(RuntimeError, match="Not finite is the gradient of") as caught:
        _rows(1, precision, module=module, gradient_clip_val=1.0)
    return str(caught.value) + f"|{getattr(module, 'bad', '')}"


def test_A4_a_nan_is_named_although_clipping_spreads_it() -> None:
    texts = run_world(_nan_and_clipping, 2)
    bad = texts[1].split("|")[1]
    assert all(text.split("|")[0].endswith(f"gradient of {bad} on rank 1") for text in texts)


def _two_trainers() -> None:
    module = Rows()
    for _ in range(2):
        _rows(1, ParallelPrecision("bf16-true", float32_modules=["layers.1"]), module=module)
    assert module.layers[1].weight.dtype == torch.float32


def test_a_module_with_float32_parts_may_be_fitted_again() -> None:
    run_world(_two_trainers, 2)


def _embeds() -> None:
    class Embeds(Rows):
        def __init__(self, tie: bool) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
            if tie:
                self.head.weight = self.embed.weight

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            h = self.embed(torch.arange(5, device=batch.device))
            assert h.dtype == torch.bfloat16
            return self.head(self.layers[0](h)).float().square().mean()

    _rows(0, ParallelPrecision("bf16-true", float32_modules=["Embedding"]), module=Embeds(tie=False))
    with pytest.raises(ValueError, match=r"tied to head\.weight, which is not named"):
        _rows(0, ParallelPrecision("bf16-true", float32_modules=["Embedding"]), module=Embeds(tie=True))


def test_float32_parts_may_take_integers_and_ties_are_told() -> None:
    run_world(_embeds, 2)


def _no_lbfgs() -> None:
    precision = ParallelPrecision("bf16-true")
    with pytest.raises(ValueError, match="a step is one evaluation: use 32-true"):
        _update(precision, lambda: Given(GRAD, optimizer=lambda params, lr: torch.optim.LBFGS(params)), 0)


def test_lbfgs_is_refused_where_weights_follow_masters() -> None:
    run_world(_no_lbfgs, 2)


def _scales(folder: Path) -> list[float]:
    _rows(0, ParallelPrecision("16-mixed", loss_scale=DynamicLossScale(initial=1024.0)), save=folder)
    rules = (StaticLossScale(8.0), DynamicLossScale("megatron", initial=4.0, hysteresis=3), DynamicLossScale(initial=2.0))
    scales = []
    for rule in rules:
        precision = ParallelPrecision("16-mixed", loss_scale=rule)
        _rows(0, precision, steps=5, resume=folder)
        scales += [precision.scale.scale, precision.scale.left, precision.scale.steps]
    return scales


def test_a_resumed_run_keeps_its_own_rule(tmp_path: Path) -> None:
    for scales in run_world(_scales, 2, tmp_path / "last"):
        assert scales == [8.0, 1, 5, 1024.0, 3, 5, 1024.0, 1, 5]


def _again(zero: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    straight, _ = _rows(zero, ParallelPrecision("bf16-true"), steps=8)
    trainer, module = _rows(zero, ParallelPrecision("bf16-true"), steps=4)
    trainer.fit_loop.epoch_loop.max_steps = 8
    rank = trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, _numbers(rank=rank))
    return _whole(straight), _whole(trainer)


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_a_second_fit_goes_on_with_exact_masters(zero: int) -> None:
    straight, again = run_world(_again, 2, zero)[0]
    assert straight["layers.0.weight"].dtype == torch.float32
    for name, value in straight.items():
        torch.testing.assert_close(again[name], value, rtol=0, atol=1e-7)


def _half_a_window() -> None:
    weights = []
    for strategy in (HybridParallelStrategy(), "auto"):
        module, plugin = Rows(skip=1), [ParallelPrecision("bf16-true")] if strategy != "auto" else None
        before = module.layers[0].weight.detach().clone()
        options = {"plugins": plugin} if plugin else {"precision": "bf16-true"}
        trainer = L.Trainer(devices=1, strategy=strategy, max_steps=1, accumulate_grad_batches=2, limit_train_batches=2, **QUIET, **options)
        trainer.fit(module, _numbers(replicas=1))
        weights.append((module.layers[0].weight.detach().float() - before).abs().max().item())
    ours, lightnings = weights
    assert ours == pytest.approx(lightnings, rel=0.3)
    assert ours > 0


def test_a_batch_that_is_skipped_at_the_end_of_an_accumulation_loses_no_gradient() -> None:
    run_world(_half_a_window, 1)


def _sharded_before() -> None:
    _, module = _rows(3, ParallelPrecision("32-true"))
    with pytest.raises(RuntimeError, match=r"still sharded by an earlier fit with zero=3\. Go on with the Trainer that did it"):
        _rows(0, ParallelPrecision("32-true"), module=module)


def test_a_module_that_another_trainer_sharded_is_refused_with_the_way_out() -> None:
    run_world(_sharded_before, 2)


@pytest.mark.parametrize("given", [{}, "apex", True, 1e39])
def test_a_loss_scale_that_is_none_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ValueError, match=r"loss_scale=|rule=|scale="):
        ParallelPrecision("16-true", loss_scale=given)
    with pytest.raises(ValueError, match="must be a list of names"):
        ParallelPrecision("bf16-true", float32_modules="norm")
    assert ParallelPrecision("16-true", loss_scale=torch.amp.GradScaler("cpu", enabled=False)).loss_scale == 1.0
