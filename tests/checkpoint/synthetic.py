"""A checkpoint made by hand: awkward shapes, tied and frozen weights, buffers, two groups, Lightning's keys, random generators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_par.checkpoint.source import MODULE, OPTIMIZERS, Entry, Source

SHAPES = {"embed.weight": (11, 5), "up.weight": (7, 5), "up.bias": (7,), "gain": (1,), "deep.weight": (3, 2, 2)}
ALIASES = {
    "gain": "gain",
    **{name: name for name in SHAPES if name != "gain"},
    "fixed": "fixed",
    "shift": "shift",
    "head.weight": "embed.weight",
}


def synthetic(
    *, steps: dict[str, float] | None = None, scale: float = 1.0, shapes: dict[str, tuple[int, ...]] | None = None, **meta: Any
) -> Source:
    """``steps``: of parameters that took others than 4; ``shapes``: of those that have others than SHAPES."""
    generator = torch.Generator().manual_seed(3)
    sizes = SHAPES | (shapes or {})
    tensors: dict[str, Tensor] = {f"model.{name}": scale * torch.randn(shape, generator=generator) for name, shape in sizes.items()}
    tensors |= {"model.fixed": torch.randn(5, generator=generator), "model.shift": torch.tensor([5, -1, 2])}
    for name, shape in sizes.items():
        tensors[f"optimizer.0.{name}.exp_avg"] = torch.randn(shape, generator=generator)
        tensors[f"optimizer.0.{name}.exp_avg_sq"] = torch.rand(shape, generator=generator)
        tensors[f"optimizer.0.{name}.step"] = torch.tensor((steps or {}).get(name, 4.0))
    tensors["rng.0.torch"] = torch.randint(0, 255, (40,), dtype=torch.uint8, generator=generator)
    options = {"lr": 0.25, "betas": (0.5, 0.75), "eps": 1e-6, "amsgrad": False}
    matrices = ["deep.weight", "embed.weight", "up.weight"]
    groups = [
        {"params": matrices, "weight_decay": 0.5, **options},
        {"params": ["up.bias", "fixed", "gain"], "weight_decay": 0.0, **options},
    ]
    told = {
        "epoch": 2,
        "global_step": 4,
        "loops": {"fit_loop": {"state_dict": {}}},
        "lr_schedulers": [{"last_epoch": 4}],
        "layout": {"dp": 2, "world": 2},
        OPTIMIZERS: [{"groups": groups, "scalars": {}}],
        MODULE: {"aliases": ALIASES, "buffers": ["shift"], "frozen": ["fixed"]},
    }
    return Source(Path("synthetic"), "made by hand", told | meta, {name: Entry.of(value) for name, value in tensors.items()})


def averaged(source: Source) -> Source:
    """``source``, whose weights are taken for averages, with those that are trained: of each the double."""
    current = {f"current.{name.removeprefix('model.')}": Entry.of(2 * source.read(name)) for name in source.weights}
    told = {"averaging_state": {"n_averaged": torch.tensor(3)}, "callbacks": {"average": {"latest_update_step": 4}, "other": {"best": 1.0}}}
    return replace(source, entries=source.entries | current, meta=source.meta | told)


def assert_same(got: Source, wanted: Source) -> None:
    """Every tensor to the bit, and everything else."""
    assert got.entries.keys() == wanted.entries.keys()
    for name, entry in wanted.entries.items():
        told = got.entries[name]
        assert (told.shape, told.dtype) == (entry.shape, entry.dtype), name
        torch.testing.assert_close(got.read(name), wanted.read(name), rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
    assert got.meta == wanted.meta
