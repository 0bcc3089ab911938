"""Pipelines that really compute, beside torch's and DDP. ``python -m benchmarks.compute --help``.

Both pipelines cut the same decoder into the same stages and train it with the same optimizer on the same micro-batches of one sequence
each; ``*_balanced`` takes the cut that ``balance="flops"`` chooses, ``*_default`` what ``pp=2`` alone gives: the cut by parameters, one
micro-batch a stage. Ranks and cores are equally many, so that a wait is a wait. What a step takes of DDP's on the tiny model is what it
costs to run a model in so many pieces; ``alone`` does that and nothing else, so no pipeline can take less.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from typing_extensions import override

from benchmarks import peers
from benchmarks.launch import HOST, launch
from benchmarks.models import SIZES, global_batch
from benchmarks.rank import run
from benchmarks.report import Limit, aligned, cost_cells, verdicts
from benchmarks.variant import Built, Context, Variant, names_among
from lightning_par.comm import Mesh
from lightning_par.layout import SCHEDULES, ParallelLayout
from lightning_par.pipeline import Pipeline
from lightning_par.recipes.gpt import GPT, next_token_loss, rotary_angles

CHUNKS = {"1f1b": 1, "interleaved_1f1b": 2}
MICROBATCHES = 8
"""Of one sequence each."""


def ours(context: Context, *, schedule: str, balance: str = "equal", microbatches: int | None = None) -> Built:
    """The unmodified model under ``Pipeline.split``."""
    model, chunks = context.model(), CHUNKS[schedule]
    mesh = Mesh.build(ParallelLayout(pp=context.world, chunks=chunks, schedule=schedule, microbatches=microbatches).resolve(context.world))
    microbatches = mesh.layout.microbatches_for(context.size.batch)
    stages = context.world * chunks
    layers = [len(model.layers) // stages] * stages if balance == "equal" else balance
    pipeline = Pipeline.split(model, mesh.pp, schedule, chunks, balance=layers, device=torch.device("cpu"))
    optimizer = context.optimizer(model)

    def step(i: int) -> Tensor | None:
        tokens, targets = (whole.chunk(microbatches) for whole in global_batch(context.size, i))
        losses: list[Tensor] = []

        def forward(m: int) -> Tensor:
            loss = model(tokens[m], targets[m])
            losses.append(loss.detach())
            return loss / microbatches

        pipeline.forward_backward(forward, ["same"] * microbatches)
        context.mark("backward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).mean() if losses else None

    return Built(step)


class Part(nn.Module):
    """Layers first to last of a decoder, with the embedding before the first and the head after the last, as torch's stages need them."""

    def __init__(self, model: GPT, layers: range) -> None:
        super().__init__()
        self.config = model.config
        self.embed = model.embed if layers.start == 0 else None
        self.layers = nn.ModuleList(model.layers[i] for i in layers)
        is_last = layers.stop == len(model.layers)
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    @override
    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        x = x if self.embed is None else self.embed(x)
        cos, sin = rotary_angles(positions, self.config.head_dim, self.config.rope_theta, x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.head is None else self.head(self.norm(x))


def torchs(context: Context, *, schedule: str) -> Built:
    """torch.distributed.pipelining, told what each stage is."""
    kinds: dict[str, Any] = {"1f1b": pipelining.Schedule1F1B, "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B}
    model, chunks, microbatches = context.model(), CHUNKS[schedule], MICROBATCHES
    count = context.world * chunks
    each = len(model.layers) // count
    mine = SCHEDULES[schedule].stages_of(context.rank, context.world, chunks)
    parts = {s: Part(model, range(s * each, (s + 1) * each)) for s in mine}
    stages = [pipelining.PipelineStage(part, s, count, torch.device("cpu")) for s, part in parts.items()]
    schedules = kinds[schedule](stages if chunks > 1 else stages[0], microbatches, loss_fn=next_token_loss)
    optimizer = context.optimizer(nn.ModuleList(parts.values()))

    def step(i: int) -> Tensor | None:
        tokens, targets = global_batch(context.size, i)
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if count - 1 in mine else {}
        schedules.step(*([tokens] if 0 in mine else []), **last)
        context.mark("backward")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return Built(step)


def alone(context: Context) -> Built:
    """This rank's half of the model on every micro-batch, forward and backward, with nothing sent and nobody waited for."""
    model = context.model()
    each = len(model.layers) // context.world
    part = Part(model, range(context.rank * each, (context.rank + 1) * each))
    optimizer = context.optimizer(part)

    def step(i: int) -> Tensor:
        for tokens, targets in zip(*(whole.chunk(MICROBATCHES) for whole in global_batch(context.size, i)), strict=True):
            hidden = torch.ones(*tokens.shape, model.config.hidden, requires_grad=True)
            output = part(hidden if part.embed is None else tokens)
            if part.head is None:
                output.backward(torch.ones_like(output))
            else:
                (next_token_loss(output, targets) / MICROBATCHES).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return torch.tensor(torch.nan)  # of a model whose halves do not meet

    return Built(step)


VARIANTS = {
    "ddp": Variant(peers.ddp),
    "alone": Variant(alone),
    "ours_1f1b": Variant(partial(ours, schedule="1f1b", microbatches=MICROBATCHES)),
    "torch_1f1b": Variant(partial(torchs, schedule="1f1b")),
    "ours_interleaved": Variant(partial(ours, schedule="interleaved_1f1b", microbatches=MICROBATCHES)),
    "torch_interleaved": Variant(partial(torchs, schedule="interleaved_1f1b")),
    "ours_1f1b_balanced": Variant(partial(ours, schedule="1f1b", balance="flops", microbatches=MICROBATCHES)),
    "ours_interleaved_balanced": Variant(partial(ours, schedule="interleaved_1f1b", balance="flops", microbatches=MICROBATCHES)),
    "ours_1f1b_default": Variant(partial(ours, schedule="1f1b", balance="parameters")),
    "ours_interleaved_default": Variant(partial(ours, schedule="interleaved_1f1b", balance="parameters")),
}

LIMITS = {
    "base": [("torch_1f1b", Limit("ours_1f1b", "walls", 0.97)), ("torch_interleaved", Limit("ours_interleaved", "walls", 0.97))],
    "tiny": [("ddp", Limit("ours_1f1b", "walls", 1.8)), ("ddp", Limit("ours_interleaved", "walls", 2.1))],
}
"""What a step may take of whose, with the same cut and the same micro-batches; the other variants are there for comparison."""


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    if not dist.is_torchelastic_launched():
        return launch("benchmarks.compute", arguments, ranks=options.ranks, link=options.link)
    warnings.filterwarnings("ignore")
    size = SIZES[options.size]
    size = replace(size, rounds=options.rounds or size.rounds)
    records = run({name: VARIANTS[name] for name in options.variants}, size, "adamw")
    passed = True
    if dist.get_rank() == 0:
        base = records[options.variants[0]]
        over = f"/ {options.variants[0]}"
        header = ["variant", "CPU ms", "[q1, q3]", over, "[q1, q3]", "wall ms", "[q1, q3]", over, "[q1, q3]", "loss of step 5"]
        rows = [
            [name, *cost_cells(record.cpus, base.cpus), *cost_cells(record.walls, base.walls), f"{record.losses[-1]:.5f}"]
            for name, record in records.items()
            if record.skipped is None
        ]
        print(f"\n{options.size}, {options.ranks} ranks, {MICROBATCHES} micro-batches (default: one a stage)\n\n{aligned([header, *rows])}")
        for anchor, limit in LIMITS[options.size] if options.check else []:
            lines, kept = verdicts(records, anchor, [limit])
            print(*lines)
            passed &= kept
    dist.barrier()
    sys.stdout.flush()
    os._exit(0 if passed else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.compute", description="Pipelines that compute, beside torch's and DDP.")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--variants", type=names_among(VARIANTS), default=list(VARIANTS), help=f"comma-separated, of {', '.join(VARIANTS)}")
    parser.add_argument("--rounds", type=int, help="turns of each variant (default: as the size says)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default=HOST, help="as in benchmarks.zero")
    parser.add_argument("--check", action="store_true", help="exit 1 if a step takes more than it may")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
