"""A pipeline under the real engine, and the same model under ours: tied, with a buffer, a frozen weight and a layer that is a function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_par import HybridParallelStrategy
from tests.checkpoint.deepspeed.engine import SAVED, Outcome, config
from tests.checkpoint.fits import QUIET, moments, world_size

MICRO, ROWS = 2, 2  # micro-batches of a step and data rank, rows of each
LAYERS = ["embed", "layers.*", "norm"]


class Block(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.fixed = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.down = nn.Linear(7, 5)
        self.register_buffer("shift", torch.randn(5))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.fixed(self.up(self.norm(hidden))))) + self.shift.to(hidden.dtype)


class Embed(nn.Embedding):
    def __init__(self) -> None:
        torch.manual_seed(8)
        super().__init__(11, 5)


def head(embed: nn.Embedding, hidden: Tensor) -> Tensor:
    return F.linear(hidden, embed.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def optimizer(module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    decay, rest = [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2]
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-2}], lr=1e-2)


def rows(step: int, micro: int, rank: int) -> Tensor:
    """Of one data rank's micro-batch."""
    return torch.randint(0, 11, (ROWS, 6), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def _batches(first: int, steps: int, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(first, first + steps):
        for micro in range(MICRO):
            ids = rows(step, micro, rank)
            yield ids, ids.roll(1, 1)


def run(stage: int, dtype: str, steps: int, *, tied: bool = True, save: Path, data_ranks: int = 1) -> Outcome:
    """Train a pipeline of two stages for ``steps`` steps, and save after ``SAVED``. All ranks call. Names are DeepSpeed's."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import deepspeed.comm.torch
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    deepspeed.comm.torch.build_shm_op = lambda: None  # it would compile an extension into the user's cache
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # torch computes in it on any CPU, if slowly
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    first = TiedLayerSpec("embed", Embed) if tied else LayerSpec(Embed)
    last = TiedLayerSpec("embed", Embed, forward_fn=head) if tied else LayerSpec(nn.Linear, 5, 11, bias=False)
    layers = [first, LayerSpec(Block, 1), torch.tanh, LayerSpec(Block, 2), LayerSpec(Block, 3), LayerSpec(nn.LayerNorm, 5), last]
    torch.manual_seed(9)
    module = PipelineModule(layers, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    more = {"gradient_accumulation_steps": MICRO, "gradient_clipping": 0.0, "train_micro_batch_size_per_gpu": ROWS}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer(module), config=config(stage, dtype, **more))
    outcome = Outcome()
    data = _batches(0, steps, engine.grid.get_data_parallel_id())
    for step in range(steps):
        outcome.losses.append(engine.train_batch(data).item())
        if step + 1 == SAVED:
            engine.save_checkpoint(str(save), tag=f"step{SAVED}", client_state={"note": "the user's own"})
            outcome.weights, outcome.moments = _masters(engine, module, stage), _moments(engine, module, stage)
            outcome.others = {name: value.detach().clone() for name, value in module.state_dict().items()}
            outcome.scale = float(engine.optimizer.loss_scale) if hasattr(engine.optimizer, "loss_scale") else None
    outcome.end = _masters(engine, module, stage)
    engine.destroy()
    return outcome


def _masters(engine: Any, module: nn.Module, stage: int) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if hasattr(engine.optimizer, "fp32_groups"):
        masters = (master for group in engine.optimizer.fp32_groups for master in group)
        params = [param for group in engine.optimizer.fp16_groups for param in group]
        by_param = dict(zip(params, masters, strict=True))
        return {name: by_param[param].detach().clone() for name, param in named.items()}
    if not hasattr(next(iter(named.values())), "_hp_mapping"):
        return {name: param.detach().clone() for name, param in named.items()}
    return {name: safe_get_full_fp32_param(param).clone() for name, param in named.items()}


def _moments(engine: Any, module: nn.Module, stage: int) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_optimizer_state

    if stage == 0:
        return {}
    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    named = {name: param for name, param in module.named_parameters() if param.requires_grad}
    keys = ("exp_avg", "exp_avg_sq")
    return {f"{name}.{key}": safe_get_full_optimizer_state(param, key).clone() for name, param in named.items() for key in keys}


class Net(nn.Module):
    """The same model, as one writes it without a pipeline."""

    tp_plan = {  # noqa: RUF012
        "embed": "embedding_rowwise",
        "layers.*.up": "colwise",
        "layers.*.fixed": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = Embed()
        self.layers = nn.ModuleList([Block(seed) for seed in (1, 2, 3)])
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for place, layer in enumerate(self.layers):
            hidden = layer(torch.tanh(hidden) if place == 1 else hidden)
        return loss_of(self.head(self.norm(hidden)), ids.roll(1, 1))


class Module(Net, L.LightningModule):
    """As one trains it with us."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer(self)


def shifted(tied: bool = True) -> Module:
    """Nothing may survive of it once a checkpoint is loaded."""
    module = Module(tied)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1.0)
    return module


def resume(folder: Path, layout: dict[str, int], precision: str, steps: int, *, tied: bool = True, ranks: int = 1) -> dict[str, Any]:
    """Go on for ``steps`` steps; what this rank has then. ``ranks``: data ranks of the engine, whose batches these are."""
    strategy = HybridParallelStrategy(**layout)
    settings = QUIET | {"max_steps": SAVED + steps, "precision": precision, "gradient_clip_val": 0.0}
    trainer = L.Trainer(devices=world_size(layout), strategy=strategy, **settings)
    module = shifted(tied)
    drawn = [rows(step, micro, rank) for step in range(SAVED, SAVED + max(steps, 1)) for micro in range(MICRO) for rank in range(ranks)]
    loader = DataLoader(list(torch.cat(drawn)), batch_size=ranks * MICRO * ROWS // layout.get("dp", 1), shuffle=False)
    trainer.fit(module, loader, ckpt_path=folder)
    answer = {"losses": module.losses, "steps": trainer.global_step, "scale": strategy.precision_plugin.loss_scale}
    return answer | {"weights": strategy.full_state_dict(), "moments": moments(trainer)}
