"""ParallelPrecision: dtypes of weights and compute, loss scaling, and clipping over all ranks.

Note [A scaled step]
~~~~~~~~~~~~~~~~~~~~
``pre_backward`` multiplies the loss by the scale, and ``DataParallel`` divides the gradients by that same number as it takes them in: in
the pass over memory that makes the mean, before anything is published. So every hook and callback, clipping and manual code see
gradients of the loss itself; nothing can be unscaled twice or by another scale, with however many optimizers. Then, for each
optimizer's step: look for an infinity or NaN on every rank of every axis (one small reduction), hooks, clipping, read the
answer on the host (the only wait for the device), step or skip, next scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_par.numerics import DynamicLossScale, LossScale, MinimumReachedError, ScaleState, StaticLossScale, named_loss_scale
from lightning_par.zero import HALF, HalfWeights, ModelGradients, Overflow

PrecisionName = Literal["32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"]


@dataclass(frozen=True)
class Mode:
    """What a precision's name stands for: dtypes of weights (None: as built) and of autocast, and whether losses are scaled."""

    weights: torch.dtype | None = None
    autocast: torch.dtype | None = None
    scaled: bool = False


MODES: dict[str, Mode] = {
    "32-true": Mode(),
    "64-true": Mode(weights=torch.float64),
    "bf16-mixed": Mode(autocast=torch.bfloat16),
    "16-mixed": Mode(autocast=torch.float16, scaled=True),
    "bf16-true": Mode(weights=torch.bfloat16),
    "16-true": Mode(weights=torch.float16, scaled=True),
}


class ParallelPrecision(Precision):
    """Number formats of a run under ``HybridParallelStrategy``; ``Trainer(precision=...)`` alone gives the same plugin.

    ==========  ==========  ========  =================  ===================  =======  ===============  ==========
    precision   weights     compute   backward computes  gradients: add up,   masters  optimizer state  checkpoint
                                      gradients in       travel, published
    ==========  ==========  ========  =================  ===================  =======  ===============  ==========
    32-true     as built    as built  as weights         as weights           -        as weights       as weights
    64-true     float64     float64   float64            float64              -        float64          float64
    bf16-mixed  as built    bfloat16  as weights         as weights           -        as weights       as weights
    16-mixed    as built    float16   as weights         as weights           -        as weights       as weights
    bf16-true   bfloat16    bfloat16  bfloat16           float32              float32  float32          float32
    16-true     float16     float16   float16            float32              float32  float32          float32
    ==========  ==========  ========  =================  ===================  =======  ===============  ==========

    Weights that were built in half precision are treated as those of bf16-true and 16-true. All of it holds at every ZeRO stage;
    ``ZeroOptions(reduce_dtype=...)`` changes in which dtype gradients travel. With ``master_weights=False`` there are no masters and
    checkpoints hold bfloat16. 16-mixed and 16-true scale the loss; see Note [A scaled step]. Steps that overflow are skipped on all ranks,
    and LR schedulers with them; ``trainer.global_step`` counts every step, skipped or not, as Lightning does. Clipping is by the norm of
    the whole model's gradient, whatever the layout.

    Args:
        precision: one of the names above.
        loss_scale: of 16-mixed and 16-true: ``DynamicLossScale``, ``StaticLossScale``, a number, the name of a rule (``torch``,
            ``megatron``, ``deepspeed``), or a ``torch.amp.GradScaler``, whose numbers are taken over. Default: torch's rule.
        master_weights: of bf16-true: False keeps no float32 copy of the weights (4 bytes a parameter less). Small updates are then lost.
        stochastic_rounding: without masters: round weights by chance after each step, which keeps small updates on average.
        float32_modules: of bf16-true and 16-true: names of submodules (``*`` matches anything) or of classes that keep float32 weights and
            compute in float32: norms, routers, losses. Their floating inputs are widened, their outputs (but single numbers) narrowed.
            A weight that is tied to one outside is refused.

    Raises:
        ValueError: ``precision`` is none of these, or an option does not go with it.
    """

    def __init__(
        self,
        precision: PrecisionName = "32-true",
        *,
        loss_scale: LossScale | GradScaler | str | float | None = None,
        master_weights: bool = True,
        stochastic_rounding: bool = False,
        float32_modules: Sequence[str] = (),
    ) -> None:
        if precision not in get_args(PrecisionName):
            raise ValueError(f"precision={precision!r} is not supported here: choose one of {', '.join(get_args(PrecisionName))}")
        self.precision, self.mode = precision, MODES[precision]
        is_half = self.mode.weights in HALF
        faults = []
        if isinstance(float32_modules, str):
            faults.append(f"float32_modules={float32_modules!r} must be a list of names")
        if loss_scale is not None and not self.mode.scaled:
            faults.append(f"loss_scale is for 16-mixed and 16-true; precision={precision!r} needs none")
        if not master_weights and self.mode.weights != torch.bfloat16:
            faults.append(f"master_weights=False is for bf16-true, not for precision={precision!r}")
        if stochastic_rounding and (master_weights or self.mode.weights != torch.bfloat16):
            faults.append("stochastic_rounding=True is for bf16-true with master_weights=False")
        if float32_modules and not is_half:
            faults.append(f"float32_modules is for bf16-true and 16-true, not for precision={precision!r}")
        if faults:
            raise ValueError("; ".join(faults))
        self.rule = _rule(loss_scale) if self.mode.scaled else None
        self.scale: ScaleState | None = self.rule.start() if self.rule is not None else None
        self.half = HalfWeights(master_weights, stochastic_rounding)
        self.float32_modules = tuple(float32_modules)
        self.steps: dict[Optimizer, tuple[int, int]] = {}  # of each: all that were tried, and those that were not skipped
        self._device_type = "cpu"
        self._gradients: ModelGradients | None = None
        if not master_weights and not stochastic_rounding:
            rank_zero_warn(
                "bf16-true without master weights: bfloat16 keeps 8 bits, so an update smaller than about 1/512 of its weight is lost "
                "completely. Keep the masters, or pass stochastic_rounding=True"
            )

    @classmethod
    def of(cls, plugin: Precision, asked: object = None) -> ParallelPrecision:
        """Ours for the plugin that ``Trainer(precision=asked)`` made: Lightning has no 16-mixed on CPU, and would take bf16-mixed."""
        if isinstance(plugin, ParallelPrecision):
            return plugin
        if type(plugin) not in (Precision, DoublePrecision, MixedPrecision, HalfPrecision):
            raise TypeError(
                f"the precision plugin {type(plugin).__name__} cannot be used with this strategy, which has a plugin of its own: give "
                f"Trainer(precision=...) one of {', '.join(get_args(PrecisionName))}, or plugins=[a subclass of ParallelPrecision]"
            )
        name = "16-mixed" if str(asked) in ("16", "16-mixed") and plugin.precision == "bf16-mixed" else plugin.precision
        return cls(name, loss_scale=getattr(plugin, "scaler", None))

    def use(self, device: torch.device, gradients: ModelGradients | None) -> None:
        """Where autocast computes, and where clipping finds the gradients of all ranks (None before optimizers stand)."""
        self._device_type, self._gradients = device.type, gradients

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by; 1 where losses are not scaled."""
        return 1.0 if self.scale is None else self.scale.scale

    # --- dtypes ------------------------------------------------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        if self.mode.weights is None:
            return module
        exempt = _exempt(module, self.float32_modules)
        held = {id(tensor) for part in exempt for tensor in (*part.parameters(), *part.buffers())}
        kept = {id(buffer) for name, buffer in module.named_buffers() if name.endswith("inv_freq")}  # of rotary positions

        def convert(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or id(tensor) in kept:
                return tensor
            return tensor.float() if id(tensor) in held else tensor.to(self.mode.weights)

        module._apply(convert)
        for part in exempt:
            _compute_in_float32(part, self.mode.weights)
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        dtype = self.mode.weights
        if dtype is None:
            return data
        return apply_to_collection(data, Tensor, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    @override
    def tensor_init_context(self) -> AbstractContextManager:
        return nullcontext() if self.mode.weights is None else _default_dtype(self.mode.weights)

    @override
    def module_init_context(self) -> AbstractContextManager:
        return self.tensor_init_context()

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        dtype = self.mode.autocast
        autocast = nullcontext() if dtype is None else torch.autocast(self._device_type, dtype, cache_enabled=False)
        with self.tensor_init_context(), autocast:
            yield

    # --- the step ----------------------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:
        return super().pre_backward(self.scaled(tensor), module)

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the present scale, in float32 at least: the scale itself is more than float16 can hold."""
        if self.scale is None:
            return loss
        return (loss.float() if loss.dtype in HALF else loss) * self.scale.scale

    @override
    def optimizer_step(self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step, or skip on all ranks if the gradient overflowed on any. See Note [A scaled step]. All ranks call."""
        if self.scale is None and self.mode.weights not in HALF:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"LBFGS evaluates the loss several times in one step, but with precision={self.precision!r} a step is one evaluation: use "
                "32-true, 64-true or bf16-mixed"
            )
        result = closure()  # before the step: what it widens without masters is not needed here
        assert self._gradients is not None, "the strategy has not set up its optimizers yet"
        skips = result is None and model.automatic_optimization  # training_step skipped the batch
        if skips:
            self._gradients.data_parallel.finish()  # there may be gradients of the batches before it, in an accumulation
        if self.scale is None or skips:
            self._after_closure(model, optimizer)
            if self.scale is None:
                optimizer.step(**kwargs)
            return result
        overflow = self._gradients.overflowed(optimizer)
        self._after_closure(model, optimizer)
        if not self._advance(optimizer, overflow):
            optimizer.step(**kwargs)
        return result

    def _advance(self, optimizer: Optimizer, found: Overflow) -> bool:
        """The next scale; whether the step is skipped."""
        overflow = bool(found.anywhere.read())
        assert self.scale is not None
        assert self.rule is not None
        tried, taken = self.steps.get(optimizer, (0, 0))
        self.steps[optimizer] = (tried + 1, taken + (not overflow))
        before = self.scale
        try:
            self.scale = self.rule.after(before, overflow=overflow)
        except MinimumReachedError as error:
            raise RuntimeError(f"{error}. Not finite is the gradient of {'; '.join(found.names())}") from error
        if overflow:
            spends = isinstance(self.rule, DynamicLossScale) and self.scale.scale == before.scale
            spent = f", {max(0, self.scale.left - 1)} more may before it shrinks" if spends else ""
            rank_zero_info(f"a step was skipped, its gradient overflowed: loss scale {before.scale:g} -> {self.scale.scale:g}{spent}")
        return overflow

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self._gradients is not None, "the strategy has not set up its optimizers yet"
        self._gradients.clip_norm(optimizer, float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self._gradients is not None, "the strategy has not set up its optimizers yet"
        self._gradients.clip_value(optimizer, float(clip_val))

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {} if self.scale is None else {"rule": _rule_name(self.rule), **self.scale.state_dict()}
        steps = self._gradients.data_parallel.rounding_steps if self.half.stochastic_rounding and self._gradients is not None else 0
        return state | {"rounding_steps": steps} if steps else state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a saved scale. A static one stays as it is, and another rule starts from that scale with nothing counted."""
        if self._gradients is not None:
            self._gradients.data_parallel.rounding_steps = state_dict.get("rounding_steps", 0)
        if self.scale is None or "scale" not in state_dict:
            return
        saved = ScaleState(**{field: state_dict[field] for field in ScaleState.__dataclass_fields__ if field in state_dict})
        start, rule = self.rule.start(), _rule_name(self.rule)
        if state_dict.get("rule", rule) != rule:  # DeepSpeed's files do not tell theirs
            saved = replace(start, scale=saved.scale, steps=saved.steps, skipped=saved.skipped, last_overflow=saved.steps - 1)
        self.scale = saved if isinstance(self.rule, DynamicLossScale) else replace(saved, scale=start.scale)

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A file of Lightning's own has the state of torch's scaler."""
        theirs = checkpoint.get("MixedPrecision")
        if type(self).__qualname__ not in checkpoint and theirs and isinstance(self.rule, DynamicLossScale):
            self.scale = replace(self.rule.start(), scale=theirs["scale"], good=theirs["_growth_tracker"])


def _rule_name(rule: LossScale | None) -> str:
    return rule.rule if isinstance(rule, DynamicLossScale) else type(rule).__name__


def _rule(loss_scale: LossScale | GradScaler | str | float | None) -> LossScale:
    if loss_scale is None:
        return DynamicLossScale()
    if isinstance(loss_scale, GradScaler) and not loss_scale.is_enabled():
        return StaticLossScale(1.0)
    if isinstance(loss_scale, GradScaler):
        growth = {"growth_factor": loss_scale.get_growth_factor(), "growth_interval": loss_scale.get_growth_interval()}
        return DynamicLossScale(initial=loss_scale.get_scale(), backoff_factor=loss_scale.get_backoff_factor(), **growth)
    if isinstance(loss_scale, str | int | float):
        return named_loss_scale(loss_scale)
    if not (hasattr(loss_scale, "start") and hasattr(loss_scale, "after")):
        raise ValueError(
            f"loss_scale={loss_scale!r} must be a DynamicLossScale, a StaticLossScale, a GradScaler, the name of a rule or a number"
        )
    return loss_scale


def _exempt(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The submodules that ``float32_modules`` means, outermost first."""
    found: dict[str, list[nn.Module]] = {name: [] for name in names}
    for path, submodule in module.named_modules():
        for name in names:
            if path and (fnmatchcase(path, name) or type(submodule).__name__ == name):
                found[name].append(submodule)
    if missing := [name for name, modules in found.items() if not modules]:
        raise ValueError(f"float32_modules names {', '.join(missing)}, but the module has no submodule or class of that name")
    exempt = list(dict.fromkeys(submodule for modules in found.values() for submodule in modules))
    inside = {inner for part in exempt for inner in part.modules()}
    held = {param for part in exempt for param in part.parameters()}
    for path, submodule in module.named_modules():
        for name, param in submodule.named_parameters(recurse=False):
            if submodule not in inside and param in held:
                raise ValueError(
                    f"float32_modules names {', '.join(names)}, but a weight of it is tied to {path}.{name}, which is not named: name both "
                    "or neither"
                )
    return exempt


def _compute_in_float32(module: nn.Module, narrow: torch.dtype) -> None:
    """Hook ``module``, once: what comes in is widened, what comes out is ``narrow`` again."""
    if getattr(module, _FLOAT32, False):
        return
    setattr(module, _FLOAT32, True)

    def widen(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.is_floating_point() else tensor

    def narrowed(tensor: Tensor) -> Tensor:
        return tensor.to(narrow) if tensor.is_floating_point() and tensor.dim() else tensor

    module.register_forward_pre_hook(lambda _, args, kwargs: apply_to_collection((args, kwargs), Tensor, widen), with_kwargs=True)
    module.register_forward_hook(lambda _, args, output: apply_to_collection(output, Tensor, narrowed))


_FLOAT32 = "_lightning_par_float32"


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
