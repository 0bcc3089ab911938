"""Models of the pipeline tests, in float64 and with the same weights on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_par.pipeline import Placement, StageExit, Uses
from lightning_par.pipeline.split import cut
from lightning_par.pipeline.stage import Arrived
from lightning_par.pipeline.torch_functions import tensors_in
from lightning_par.pipeline.unknown import require_known
from lightning_par.recipes.gpt import GPT, GPTConfig, Layer
from tests.pipeline.parity import VOCAB


class CheckpointedLayer(Layer):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return checkpoint(super().forward, x, cos, sin, use_reentrant=False)


def gpt(layers: int = 7, tie: bool = False, *, checkpointed: bool = False) -> nn.Module:
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=VOCAB, hidden=24, layers=layers, heads=4, kv_heads=2, ffn=29, tie_embeddings=tie)).double()
    for layer in model.layers if checkpointed else ():
        layer.__class__ = CheckpointedLayer
    return model


def through_the_stages(model: nn.Module, x: Tensor, placement: Placement, ranks: int | None = None, uses: Uses | None = None) -> Tensor:
    """What the last stage computes, each stage cut from a copy of the model, the boundary handed on as the engine does. In one process."""
    arrived, stages = Arrived(), len(placement.spans)
    for stage in range(stages):
        part: Any = copy.deepcopy(model)
        layers = cut(part, placement, range(stage % (ranks or stages), stages, ranks or stages), uses)
        with layers.active(stage, arrived):
            try:
                result = part(x)
                if stage == stages - 1:
                    require_known(result, "the result")
                    layers.check_loss(result, part)
            except StageExit as stop:
                arrived = Arrived([_as_received(tensor) for tensor in tensors_in(stop.output)], stop.forms)
            else:
                return result
    raise AssertionError("the last stage ended early")


def _as_received(tensor: Tensor) -> Tensor:
    """In training whatever can have a gradient needs one."""
    is_right = tensor.requires_grad or not torch.is_grad_enabled() or not tensor.is_floating_point()
    return tensor if is_right else tensor.detach().requires_grad_().view_as(tensor)
