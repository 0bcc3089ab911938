"""Your own LightningModule, as it is, on four ranks: two tensor-parallel halves of each of two pipeline stages.

    python examples/own_module.py
    torchrun --standalone --nproc-per-node 4 examples/own_module.py

Any other split of one replica, such as tp=2 on two devices or pp=3 on three, prints the same loss.
"""

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_par import HybridParallelStrategy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ResidualMLP(L.LightningModule):
    # Which weights tensor parallelism may split; the only line here that is about parallelism, and only tp reads it.
    tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self, features: int = 8, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(features, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def data() -> DataLoader:
    x = torch.randn(1024, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x.sin().sum(dim=1, keepdim=True)), batch_size=32)


def main() -> None:
    L.seed_everything(0)
    strategy = HybridParallelStrategy(tp=2, pp=2)
    trainer = L.Trainer(strategy=strategy, devices=4, accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False)
    trainer.fit(ResidualMLP(), data())
    if trainer.is_global_zero:
        print(f"train_loss {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    main()
