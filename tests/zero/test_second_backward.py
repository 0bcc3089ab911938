"""Two backwards before a step, both reduced, where ranks hold pieces of one loss: nothing is counted twice."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_par.zero import full_gradient
from tests.harness import run_world
from tests.harness.models import mlp
from tests.zero.bare import data_parallel, sgd


def _pieces() -> dict[int, dict[str, Tensor]]:
    """cp=2: the replica's loss is the sum of what its two ranks compute."""
    torch.set_default_dtype(torch.float64)
    told = {}
    for stage in (0, 1, 2, 3):
        module = _module()
        mesh, dp = data_parallel(module, sgd(module), stage, cp=2)
        for part in _data().chunk(2):
            module(part.chunk(mesh.data.size)[mesh.data.index]).square().sum().backward()
            dp.finish()
        told[stage] = {name: full_gradient(param) for name, param in module.named_parameters()}
    return told


def _module() -> nn.Module:
    torch.manual_seed(0)
    return mlp(3, 5, 2)


def _data() -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def test_Z11_context_shards_of_two_backwards_are_counted_once() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        module = _module()
        (module(_data()).square().sum() / 2).backward()  # the mean over two replicas
    finally:
        torch.set_default_dtype(before)
    for told in run_world(_pieces, 4):
        for stage, grads in told.items():
            for name, param in module.named_parameters():
                torch.testing.assert_close(grads[name], param.grad, msg=lambda t, where=f"stage {stage} {name}": f"{where}: {t}")
