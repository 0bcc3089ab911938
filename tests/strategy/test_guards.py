"""What a layout cannot compute rightly is refused by name, not computed wrongly."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_par import HybridParallelStrategy, LayoutError
from tests.harness import WorldError
from tests.harness.parity import assert_same, fit, fit_world

BATCH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.first(x))))


class Net(L.LightningModule):
    """A small network, with one thing or another that some layouts cannot have."""

    tp_plan: ClassVar[dict[str, str]] = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self, case: str = "") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        self.inp = nn.Linear(5, 8)
        if case == "registered before":
            self.norm = nn.LayerNorm(8)
        self.blind = case in ("skip", "registered before")  # to a dry run, which has no numbers
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.out = nn.Linear(8, 3)
        if case == "batch norm":
            self.out = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
        if case == "lora":
            for name, param in self.named_parameters():
                param.requires_grad = "down" in name or "out" in name
        self.automatic_optimization = case != "manual"

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x, y = batch
        if self.blind:
            torch.rand(()).item()
        x = first = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        if self.case == "skip":
            x = x + first
        if self.case == "registered before":
            x = self.norm(x)
        loss = F.cross_entropy(self.out(x), y)
        self.log("train_loss", loss)
        return {"loss": loss, "weight": len(y)} if self.case == "weight" else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = [p for p in self.parameters() if p.requires_grad]
        if self.case == "muon":
            return torch.optim.Muon([p for p in self.layers.parameters() if p.dim() == 2], lr=0.01)
        makers = {"lbfgs": torch.optim.LBFGS, "adafactor": torch.optim.Adafactor, "adagrad": torch.optim.Adagrad}
        return makers.get(self.case, torch.optim.SGD)(params, lr=0.1)

    def configure_callbacks(self) -> list[L.Callback]:
        return [StochasticWeightAveraging(0.1)] if self.case == "swa" else []


def rows(ignored: bool = False, num_replicas: int = 1, rank: int = 0) -> DataLoader:
    x = torch.randn(18, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    if ignored:
        y[::5] = -100
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, num_replicas=num_replicas, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=BATCH // num_replicas, sampler=sampler)


def _run(case: str, layout: dict[str, Any], loader: Any = rows) -> Any:
    return fit_world(partial(Net, case), loader, layout, 2, gradient_clip_val=None)


@pytest.mark.parametrize(
    ("case", "layout", "message"),
    [
        ("skip", {"pp": 2}, r"self\.log\('train_loss', \.\.\.\) needs what inp returns"),
        ("registered before", {"pp": 2}, r"self\.log\('train_loss', \.\.\.\) needs what norm returns.*pipeline_after = \[.*norm"),
        ("batch norm", {"pp": 2}, r"out\.0 is a batch norm: with pp=2"),
        ("manual", {"pp": 2}, r"manual optimization with pp=2"),
        ("manual", {"cp": 2}, r"manual optimization with cp=2"),
        ("weight", {"pp": 2}, r"returned a 'weight' beside its loss"),
        ("muon", {"tp": 2}, r"Muon is not known to work element by element, but tp=2"),
        ("adafactor", {"tp": 2}, r"Adafactor is not known to work element by element, but tp=2"),
        ("lbfgs", {"pp": 2}, r"LBFGS computes with all parameters at once"),
        ("swa", {"dp": 2, "zero": 3}, r"StochasticWeightAveraging callback with .*zero=3"),
    ],
)
def test_what_would_be_wrong_is_refused(case: str, layout: dict[str, Any], message: str) -> None:
    with pytest.raises(WorldError, match=f"(?s){message}"):
        _run(case, layout)


def test_labels_that_the_weights_do_not_know_of_are_noticed() -> None:
    with pytest.raises(WorldError, match=r"average over \[\d, \d, \d\] targets"):
        _run("", {"pp": 2, "microbatches": 3}, partial(rows, True))


@pytest.mark.parametrize("case", ["lora", "adagrad"])
def test_partly_frozen_layers_and_optimizers_that_start_with_state_at_stage_3(case: str) -> None:
    assert_same(_run(case, {"dp": 2, "zero": 3}), fit(partial(Net, case), rows, gradient_clip_val=None))


class Tokens(L.LightningModule):
    """Classifies whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.embed(batch["input_ids"]) + 0 * batch["position_ids"][..., None]
        x = F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]
        return F.cross_entropy(self.head(x.mean(1)), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sequences(**_: int) -> DataLoader:
    data = [{"input_ids": torch.arange(8) % 11, "labels": torch.tensor(i % 3)} for i in range(6)]
    return DataLoader(data, batch_size=3)


def test_a_loss_over_whole_sequences_is_refused_under_context_parallelism() -> None:
    with pytest.raises(WorldError, match=r"labels of shape \(3,\) are not one a token"):
        fit_world(Tokens, sequences, {"cp": 2}, 2)


@pytest.mark.parametrize("given", [{"layout": {"tp": 2}}, {"zero_options": "x"}, {"timeout": 30}], ids=lambda given: next(iter(given)))
def test_arguments_of_the_wrong_kind_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(given))}="):
        HybridParallelStrategy(**given)


def test_more_micro_batches_than_samples_are_refused_before_anything_starts() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=HybridParallelStrategy(pp=2, microbatches=7), logger=False, max_steps=1)
    with pytest.raises(LayoutError, match=r"microbatches=7 cannot be cut from a replica's batch of 6 samples"):
        trainer.fit(Net(), rows())
    assert not torch.distributed.is_initialized()
