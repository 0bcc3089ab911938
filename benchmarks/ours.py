"""This project: its data parallelism under a bare loop, and its strategy under the Lightning Trainer."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from benchmarks.variant import Built, Context, UnavailableError
from lightning_par import HybridParallelStrategy
from lightning_par.comm import Mesh
from lightning_par.layout import LayoutError, ParallelLayout, ShardSpec
from lightning_par.zero import DataParallel, ParameterInfo, ReduceGroups, ZeroOptions


def bare(context: Context, *, stage: int) -> Built:
    """``DataParallel`` and the user's optimizer in a loop of five lines."""
    mesh = Mesh.build(_layout(stage).resolve(context.world))
    model = context.model()
    optimizer = context.optimizer(model)
    data_parallel = parallelize(model, optimizer, ReduceGroups.of(mesh), stage)

    def step(i: int) -> Tensor:
        loss = model(*context.batch(i))
        context.mark("forward")
        loss.backward()
        context.mark("hooks")
        data_parallel.finish()
        context.mark("backward")
        optimizer.step()
        context.mark("step")
        optimizer.zero_grad(set_to_none=True)
        context.mark("zero")
        return loss.detach()

    return Built(step, data_parallel.settle_values, mesh.trace)


def parallelize(
    model: nn.Module, optimizer: Optimizer, groups: ReduceGroups, stage: int, options: ZeroOptions | None = None
) -> DataParallel:
    """What the strategy does with a module that no other axis has cut."""
    infos = [ParameterInfo(name, param, ShardSpec.whole(param)) for name, param in model.named_parameters()]
    data_parallel = DataParallel(model, infos, groups, stage=stage, options=options, optimizers=[optimizer])
    data_parallel.attach(optimizer)
    return data_parallel


def trainer(context: Context, *, stage: int) -> Built:
    """The same under ``Trainer(strategy=HybridParallelStrategy(zero=stage))``."""
    _layout(stage)
    strategy = HybridParallelStrategy(zero=stage)
    step = _interleaved(context, strategy)
    return Built(step, strategy.data_parallel.settle_values, strategy.mesh.trace)


def plain_trainer(context: Context) -> Built:
    """The Trainer with what Lightning itself offers: DDP, or one device for one rank."""
    return Built(_interleaved(context, "auto" if context.world == 1 else DDPStrategy(process_group_backend="gloo")))


def _layout(stage: int) -> ParallelLayout:
    try:
        return ParallelLayout(zero=stage)
    except LayoutError as error:
        raise UnavailableError("; ".join(error.violations)) from error


def _interleaved(context: Context, strategy: Strategy | str) -> Callable[[int], Tensor]:
    """Run a Trainer step by step from outside, its own loop included.

    ``fit`` runs in a thread. Its dataset is where it is held: asking for the next batch means that the step before is over.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    fitter = L.Trainer(
        accelerator="cpu",
        devices=context.world,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    gate, module, failures = _Gate(), _Module(context), []

    def fit() -> None:
        try:
            fitter.fit(module, DataLoader(gate, batch_size=None))
        except BaseException as error:  # to be raised where the bench waits
            failures.append(error)
        gate.done.release()

    def wait() -> None:
        gate.done.acquire()
        if failures:
            raise failures[0]

    threading.Thread(target=fit, daemon=True).start()
    wait()

    def step(i: int) -> Tensor:
        gate.batch = context.batch(i)
        gate.go.release()
        wait()
        return module.loss

    return step


class _Gate(Dataset):
    """Hands out one batch at a time, when told to."""

    def __init__(self) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.batch: Any = None

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Any:
        self.done.release()
        self.go.acquire()
        return self.batch


class _Module(L.LightningModule):
    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context, self.model = context, context.model()
        self.loss: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.model(*batch)
        self.loss = loss.detach()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.context.mark("backward")

    def configure_optimizers(self) -> Any:
        return self.context.optimizer(self)
