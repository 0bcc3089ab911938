"""The same on a GPU: two ranks on one card over gloo, and one rank over NCCL. Run with ``make test-gpu``."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_par import HybridParallelStrategy, ParallelPrecision
from tests.harness import run_world
from tests.harness.models import QUIET, TinyGPT, token_loader

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Bench(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def _bare(stage: int, dtype: torch.dtype) -> dict[str, Tensor]:
    from lightning_par.comm import Mesh
    from lightning_par.layout import ParallelLayout, ShardSpec
    from lightning_par.zero import DataParallel, ParameterInfo, ReduceGroups, ZeroOptions, full_parameters

    device = torch.device("cuda")
    module = Bench().to(device, dtype)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    mesh = Mesh.build(ParallelLayout(zero=stage).resolve(torch.distributed.get_world_size()))
    infos = [ParameterInfo(name, param, ShardSpec.whole(param)) for name, param in module.named_parameters()]
    options = ZeroOptions(min_unit_mb=0, bucket_mb=1e-4)
    dp = DataParallel(module, infos, ReduceGroups.of(mesh), stage=stage, options=options, optimizers=[optimizer])
    dp.attach(optimizer)
    for step in range(3):
        batch = torch.randn(6, 7, generator=torch.Generator().manual_seed(step)).to(device, dtype)
        module(batch.chunk(mesh.data.size)[mesh.data.index]).square().mean().backward()
        dp.finish()
        optimizer.step()
        optimizer.zero_grad()
    with full_parameters(module):
        return {name: param.detach().cpu().clone() for name, param in module.named_parameters()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_on_one_card_equal_one(stage: int, dtype: torch.dtype, tolerance: float) -> None:
    (alone,) = run_world(_bare, 1, 0, dtype)
    for told in run_world(_bare, 2, stage, dtype):
        for name, value in alone.items():
            torch.testing.assert_close(told[name], value, rtol=tolerance, atol=tolerance)


def _fit(precision: str, zero: int) -> float:
    plugin = ParallelPrecision(precision)
    trainer = L.Trainer(
        devices=1, strategy=HybridParallelStrategy(zero=zero), plugins=[plugin], max_steps=6, **(QUIET | {"accelerator": "gpu"})
    )
    trainer.fit(TinyGPT(layers=2), token_loader(4))
    assert plugin.scale is None or plugin.scale.steps == 6
    return trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_each_precision_under_the_trainer(zero: int) -> None:
    (exact,) = run_world(_fit, 1, "32-true", zero)
    for precision in ("bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        (told,) = run_world(_fit, 1, precision, zero)
        assert told == pytest.approx(exact, rel=0.02), precision
