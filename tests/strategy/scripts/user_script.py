"""What a user writes: a LightningModule of their own and a Trainer. Run it with `python` or `torchrun`.

Its test says by environment variables which layout to use and what goes wrong (FAULT=train:1: rank 1 raises in training_step).
"""

import os
import time
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F

from lightning_par import HybridParallelStrategy

RANK = os.environ.get("LOCAL_RANK", "0")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(L.LightningModule):
    tp_plan = {  # noqa: RUF012
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
    }

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(3))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.fail("train")
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))
        self.fail("validate")

    def on_save_checkpoint(self, checkpoint):
        self.fail("save")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def fail(self, moment):
        """In the second epoch, if FAULT says so: raise, exit:RANK without a word, or sleep:RANK a while."""
        what, _, rank = os.environ.get("FAULT", "").partition(":")
        here = what == moment or (what in ("exit", "sleep") and moment == "train")
        if not here or rank != RANK or self.trainer.current_epoch != 1:
            return
        Path(os.environ["OUT"], "fault").write_text(str(time.time()))
        if what == "exit":
            os._exit(7)
        if what == "sleep":
            return time.sleep(3)
        raise ValueError(f"the user's own error in {moment} on rank {rank}")


def train(out, **options):
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loader = torch.utils.data.DataLoader(data, batch_size=16)  # all of them: order, which Lightning shuffles over ranks, does not matter
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", max_epochs=4, default_root_dir=out, **quiet, **options)
    net = Net()
    trainer.fit(net, loader, loader)
    return trainer, net


if __name__ == "__main__":
    out = os.environ["OUT"]
    Path(out, f"pid{RANK}").write_text(str(os.getpid()))
    strategy = HybridParallelStrategy(**eval(f"dict({os.environ['LAYOUT']})"))
    trainer, net = train(out, devices=int(os.environ["DEVICES"]), strategy=strategy)
    weights = strategy.full_state_dict()
    if trainer.is_global_zero:
        torch.save(weights, f"{out}/weights.pt")
