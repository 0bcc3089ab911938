"""The real DeepSpeed engine on CPU ranks, with a tiny model that has everything a checkpoint can get wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAVED = 3
"""After how many steps a run saves."""
ORDER = ["down.weight", "fixed.weight", "up.weight", "embed.weight", "gain", "up.bias", "fixed.bias", "down.bias"]
"""The parameters as the optimizer gets them."""


class Awkward(nn.Module):
    """Odd sizes, a tied and a frozen weight, a frozen bias, a single number, buffers of two dtypes and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 5)
        self.up = nn.Linear(5, 7)
        self.fixed = nn.Linear(7, 3).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor([1.25]))
        self.down = nn.Linear(3, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.randn(5))
        self.register_buffer("seen", torch.tensor([3, 1]))
        self.register_buffer("mask", torch.ones(5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids) + self.shift.to(self.embed.weight.dtype)
        hidden = self.down(torch.tanh(self.fixed(torch.tanh(self.up(hidden)))) * self.gain)
        return F.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.roll(1, 1).flatten())


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    """Two groups, neither in the order of the module."""
    decay = [p for p in reversed(list(module.parameters())) if p.dim() >= 2]
    rest = [p for p in module.parameters() if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2)


@dataclass
class Outcome:
    """What a run of the engine had: losses of this rank, the whole state in fp32 when it saved (or loaded), and weights at its end."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)  # buffers, and below stage 3 the parameters as the module has them
    end: dict[str, Tensor] = field(default_factory=dict)
    scale: float | None = None


def config(stage: int, dtype: str, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "sub_group_size": 60, "stage3_param_persistence_threshold": 0},
    }
    if dtype == "bf16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32" if stage else "bf16"}
    if dtype == "fp16":
        settings["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    for key, value in more.items():
        settings[key] = settings[key] | value if isinstance(settings.get(key), dict) else value
    return settings


@dataclass(frozen=True)
class Task:
    """What is trained, and with what."""

    build: Callable[[], nn.Module] = Awkward
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer


def run(
    stage: int,
    dtype: str,
    steps: int,
    *,
    first: int = 0,
    load: Path | None = None,
    save: Path | None = None,
    task: Task = Task(),
    **more: Any,
) -> Outcome:
    """Train this rank for ``steps`` steps, to be saved after ``SAVED`` of them; or load and go on from step ``first``. All ranks call."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.torch

    deepspeed.comm.torch.build_shm_op = lambda: None  # it would compile an extension into the user's cache
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch computes in it on any CPU, if slowly
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    module = task.build()
    if load is not None:  # nothing may survive of it; from a universal checkpoint DeepSpeed does not restore what is not trained
        universal = "checkpoint" in more
        shifts = [] if universal else [buffer for name, buffer in module.named_buffers() if name.endswith("shift")]
        with torch.no_grad():
            for tensor in (*(p for p in module.parameters() if p.requires_grad or not universal), *shifts):
                tensor.add_(1.0)
    engine, *_ = deepspeed.initialize(model=module, optimizer=task.optimizer(module), config=config(stage, dtype, **more))
    outcome = Outcome()
    if load is not None:
        tag, _ = engine.load_checkpoint(str(load))
        assert tag is not None, f"DeepSpeed finds no checkpoint in {load}"
        _look(engine, module, stage, outcome)
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 * step + torch.distributed.get_rank())
        loss = engine(torch.randint(0, 11, (2, 6), generator=generator))
        engine.backward(loss)
        engine.step()
        outcome.losses.append(loss.item())
        if save is not None and step + 1 == SAVED:
            engine.save_checkpoint(str(save), tag=f"step{SAVED}", client_state={"note": "the user's own"})
            _look(engine, module, stage, outcome)
    outcome.end = _weights(module) if stage else {name: param.detach().clone() for name, param in module.named_parameters()}
    engine.destroy()
    return outcome


def _look(engine: Any, module: nn.Module, stage: int, outcome: Outcome) -> None:
    from deepspeed.utils import safe_get_full_optimizer_state

    outcome.scale = float(engine.optimizer.loss_scale) if hasattr(engine.optimizer, "loss_scale") else None
    outcome.others = {name: buffer.clone() for name, buffer in module.named_buffers()}
    if stage < 3:
        outcome.others |= {name: param.detach().clone() for name, param in module.named_parameters()}
    if stage == 0:
        return
    if stage < 3:  # DeepSpeed links moments after the first group's step, when those of the others are not there yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    outcome.weights = _weights(module)
    for name, param in module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq") if param.requires_grad else ():
            outcome.moments[f"{name}.{key}"] = safe_get_full_optimizer_state(param, key).clone()


def _weights(module: nn.Module) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(param).clone() for name, param in module.named_parameters() if param.requires_grad}
