"""What steps of usual make do under a pipeline: the numbers of one process, or a refusal by name."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from lightning_par import HybridParallelStrategy
from lightning_par.strategy.steps import StepRunner
from lightning_par.strategy.trial import Trial
from tests.harness import WorldError, run_world
from tests.harness.models import QUIET


class Net(L.LightningModule):
    """Embedding, four layers, head; batches are tuples of inputs [6, 5] and classes [6]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: list[Tensor], **options: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y, **options)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({key: value.tolist() for key, value in outputs.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(ignored: int | None = None, batch: int = 6) -> DataLoader:
    """Batches of 24 samples; the class of one may be -100."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 5, generator=generator, dtype=torch.float64), torch.randint(0, 3, (24,), generator=generator)
    if ignored is not None:
        y[ignored] = -100
    return DataLoader(TensorDataset(x, y), batch_size=batch)


def fit(build: Any, strategy: Any = "auto", devices: int = 1, loaders: Any = data, **options: Any) -> tuple[Any, dict[str, float]]:
    given = loaders()
    settings = QUIET | {"precision": "64-true", "max_epochs": 1, "num_sanity_val_steps": 0} | options
    trainer = L.Trainer(devices=devices, strategy=strategy, **settings)
    module = build()
    trainer.fit(module, *(given if isinstance(given, tuple) else (given,)))
    return module.seen, {name: value.item() for name, value in trainer.callback_metrics.items()}


def _fit_rank(build: Any, layout: dict[str, Any], options: dict[str, Any]) -> tuple[Any, dict[str, float]]:
    return fit(build, HybridParallelStrategy(**layout), 2, **options)


def world(build: Any, layout: dict[str, Any] | None = None, **options: Any) -> list[tuple[Any, dict[str, float]]]:
    return run_world(_fit_rank, 2, build, layout or {"pp": 2}, options)


class Dict(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "classes": logits.argmax(-1)}


@pytest.mark.parametrize("layout", [{"pp": 2, "microbatches": 4}, {"pp": 2, "chunks": 2, "schedule": "zbv"}])
def test_hooks_get_all_that_a_training_step_returned(layout: dict[str, Any]) -> None:
    wanted, _ = fit(Dict)
    assert len(wanted[0]["classes"]) == 6
    for seen, _ in world(Dict, layout):
        for mine, one in zip(seen, wanted, strict=True):
            assert mine == {"loss": pytest.approx(one["loss"], abs=1e-10), "classes": one["classes"]}


class Weighted(Net):
    """Batches weigh in the mean over the epoch by a number that the step says."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        tokens = int((batch[0] > 0).sum())
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=tokens)
        self.log("by_samples", loss, batch_size=len(batch[0]))


def test_a_batch_size_that_is_logged_adds_up_over_micro_batches() -> None:
    _, wanted = fit(Weighted, loaders=_both)
    assert wanted["val_loss"] != pytest.approx(wanted["by_samples"], rel=1e-5)
    for _, metrics in world(Weighted, loaders=_both):
        assert metrics == pytest.approx(wanted, rel=1e-6)


def _both(train: int | None = None, validation: int | None = None) -> tuple[DataLoader, DataLoader]:
    return data(train), data(validation)


class InLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].register_forward_hook(
            lambda module, args, output: self.log("norm", output.norm().item())
        )  # of which no dry run knows


class OwnLogger(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if isinstance(self.logger, CSVLogger):
            self.logger.log_metrics({"mine": loss.item()})
        return loss


class InLayerMetric(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0][0].mean = metric = MeanMetric()
        self.layers[0].register_forward_hook(lambda module, args, output: metric.update(output.detach()))

    def on_train_epoch_end(self) -> None:
        self.log("mean", self.layers[0][0].mean.compute())


class OnOneRank(Net):
    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.log("mine", 1.0)


class Sum(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return 0.1 * self.loss(batch, reduction="sum")


class Two(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + F.cross_entropy(logits, y.where(torch.arange(len(y)) % 3 > 0, -100))


class SquaredSum(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0])[:, 0], batch[1].double(), reduction="sum")


class Masked(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mask = batch[1] > 0
        return F.mse_loss(self(batch[0])[mask, 0], batch[1][mask].double())


class Root(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch).sqrt()


class Contrastive(Net):
    """Samples are to be unlike the others of the batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = F.normalize(self(batch[0]), dim=-1)
        return F.cross_entropy(out @ out.T, torch.arange(len(out)))


class OwnSum(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).square().sum()


class OwnLoss(Net):
    """A mean, which shows itself as it is tried, in spite of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.dropout(self(batch[0])).square().mean()


class Denoised(Net):
    """A mean, which nobody can know, since no two runs are alike."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        return (out - torch.randn_like(out)).square().mean()


class Augmented(Net):
    """Draws before the layers: what arrives at the last stage is the same in each run."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0] + torch.randn_like(batch[0])).square().mean()


class SometimesMasked(Net):
    """A mean over a mask, which is of one size in the first batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        mask = (batch[0][:, 0] > 0).double() if batch_idx else torch.ones(len(batch[0]))
        return (self(batch[0]).square().mean(-1) * mask).sum() / mask.sum()


class OwnGenerator(Net):
    """Compares with noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        out = self(batch[0])
        return (out - torch.randn(out.shape, generator=self.generator, dtype=out.dtype)).square().mean()


class MovingAverage(Net):
    """Of a weight, kept in a weight that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.zeros(8, 5), requires_grad=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.lerp_(torch.ones_like(self.teacher), 0.1)
        return self.loss(batch)


class MovingData(MovingAverage):
    """As many write it. In the first batch the average is what it was."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.teacher.data.mul_(0.9).add_(0.1 * batch_idx)
        return self.loss(batch)


class PairsOfRows(Net):
    """Rows come in pairs; micro-batches have whole ones."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        first, second = self(batch[0]).view(-1, 2, 3).unbind(1)
        return -F.logsigmoid(first - second).mean()


class ClassWeights(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch, weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))


class Validated(Net):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class EverySecond(Net):
    """Uses the embedding behind the layers as well, but not in the first batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        return loss + self.embed(batch[0]).square().mean() if batch_idx % 2 else loss


@pytest.mark.parametrize(
    ("build", "loaders", "why"),
    [
        (InLayer, data, r"self.log\('norm', ...\) was called on a pipeline stage before the last"),
        (OwnLogger, data, r"self.logger.log_metrics in a step under a pipeline.*on_train_batch_end"),
        (InLayerMetric, data, "the metric layers.0.0.mean is updated on a pipeline stage before the last"),
        (OnOneRank, data, "in on_train_epoch_end only some pipeline ranks have logged on_train_epoch_end.mine"),
        (Sum, data, r"loss is a sum \(reduction='sum'\), or a multiple of one"),
        (SquaredSum, data, r"loss is a sum \(reduction='sum'\), or a multiple of one"),
        (Masked, data, r"average over \[\d+, \d+\] targets"),
        (Root, data, r"loss is sqrt\(\.\.\.\) of a mean"),
        (Two, partial(data, None, 7), "have no common weight"),
        (Contrastive, data, r"two micro-batches of 3 and 3 samples, of which a pipeline makes"),
        (Contrastive, partial(data, None, 2), r"two micro-batches of 1 and 1 samples, of which a pipeline makes"),
        (SometimesMasked, data, r"two micro-batches of 3 and 3 samples, of which a pipeline makes"),
        (MovingAverage, data, r"training_step writes to teacher"),
        (MovingData, data, r"training_step writes to teacher"),
        (OwnSum, data, r"two micro-batches of 3 and 3 samples, of which a pipeline makes"),
        (ClassWeights, data, "class weights, have no common weight"),
        (Validated, partial(data, 13), r"average over \[2, 3\] targets"),
        (Validated, partial(_both, None, 13), r"evaluate(?s:.*)average over \[2, 3\] targets"),
        (EverySecond, data, r"what training_step returns needs what embed returns, which is on another pipeline stage"),
    ],
    ids=[
        "log in a layer",
        "logger",
        "metric in a layer",
        "log on one rank",
        "sum",
        "sum of squares",
        "mean over a mask",
        "root",
        "two",
        "pairs",
        "pairs of one sample each",
        "mean over a mask in a later batch",
        "moving average",
        "moving average of data",
        "sum by hand",
        "class weights",
        "ignored in a later batch",
        "ignored in validation",
        "unknown in a later batch",
    ],
)
def test_what_micro_batches_would_make_another_number_of_is_refused(build: Any, loaders: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(WorldError, match=why):
        world(build, loaders=loaders, logger=CSVLogger(tmp_path))


def _fit_warned(build: Any, layout: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(build, HybridParallelStrategy(**layout), 2)
    return [str(warning.message) for warning in caught if "no loss function of torch's" in str(warning.message)]


@pytest.mark.parametrize(
    ("build", "layout", "count"),
    [(Denoised, {}, 1), (Denoised, {"microbatches": 1}, 0), (OwnLoss, {}, 0), (Net, {}, 0), (Augmented, {}, 0), (OwnGenerator, {}, 1)],
)
def test_a_loss_that_nobody_knows_is_taken_for_a_mean_with_a_warning(build: Any, layout: dict[str, Any], count: int) -> None:
    told = run_world(_fit_warned, 2, build, {"pp": 2} | layout)
    assert [len(messages) for messages in told] == [0, count]


@pytest.mark.parametrize("layout", [{"microbatches": 3}, {"chunks": 2, "schedule": "zbv", "microbatches": 3}])
def test_pairs_of_rows_are_right_where_micro_batches_have_whole_ones(layout: dict[str, Any]) -> None:
    wanted, _ = fit(PairsOfRows)
    for seen, _ in world(PairsOfRows, {"pp": 2} | layout):
        assert [step["loss"] for step in seen] == pytest.approx([step["loss"] for step in wanted], abs=1e-10)


@pytest.mark.parametrize(
    "layout", [{"pp": 2, "dp": 2, "zero": 2}, {"pp": 2, "dp": 2}, {"pp": 4, "chunks": 1}], ids=["zero=2", "one replica", "four stages"]
)
def test_a_loss_that_is_no_mean_ends_every_rank(layout: dict[str, int]) -> None:
    with pytest.raises(WorldError) as caught:
        run_world(_fit_ranks, 4, layout)
    told = [part for part in str(caught.value).split("--- rank ")[1:] if "of which a pipeline makes" in part or "says why" in part]
    assert len(told) == 4


def _fit_ranks(layout: dict[str, int]) -> None:
    fit(ContrastiveOnOne if layout.get("dp") and not layout.get("zero") else Contrastive, HybridParallelStrategy(**layout), 4)


class ContrastiveOnOne(Contrastive):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        is_first = self.trainer.strategy.mesh.dp.index == 0
        return super().training_step(batch, batch_idx) if is_first else F.cross_entropy(self(batch[0]), batch[1])


class OwnMean(Net):
    """A mean all the same, and a sum that is only logged."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        summed = self.loss(batch, reduction="sum")
        self.log("summed", summed, reduce_fx="sum", on_step=False, on_epoch=True)
        return summed / len(batch[0])


def test_a_sum_that_is_divided_or_only_logged_is_right() -> None:
    wanted, metrics = fit(OwnMean)
    for seen, mine in world(OwnMean, {"pp": 2, "microbatches": 4}):
        assert [step["loss"] for step in seen] == pytest.approx([step["loss"] for step in wanted], abs=1e-10)
        assert mine == pytest.approx(metrics, rel=1e-6)


class Epochs(Net):
    """Metrics and sums of an epoch are logged at its end; a scheduler goes by one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)])
        self.trained = MulticlassAccuracy(3)
        self.right = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        self.trained.update(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("trained", self.trained.compute())
        self.trained.reset()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.metrics.update(logits, batch[1])
        self.right += int((logits.argmax(-1) == batch[1]).sum())

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.metrics.compute())
        self.metrics.reset()
        self.log("right", float(self.right))
        self.seen.append({"rate": self.optimizers().param_groups[0]["lr"]})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "trained"}}


def test_what_is_logged_at_the_end_of_an_epoch_is_the_last_stages_and_decides_for_all() -> None:
    options = {"loaders": _both, "max_epochs": 6}
    wanted, metrics = fit(Epochs, callbacks=[EarlyStopping("MulticlassAccuracy", mode="max", patience=3)], **options)
    assert 0 < metrics["MulticlassAccuracy"] < 1
    for seen, mine in world(Epochs, callbacks=[EarlyStopping("MulticlassAccuracy", mode="max", patience=3)], **options):
        assert len(seen) == len(wanted)
        assert [step["rate"] for step in seen if "rate" in step] == [step["rate"] for step in wanted if "rate" in step]
        assert mine == pytest.approx(metrics, rel=1e-6)


class Stopping(Net):
    """Has enough when the last rank has come to the end of a step."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.stop("train")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.loss(batch)
        self.stop("validate")

    def stop(self, step: str) -> None:
        if step == self.step and self.global_rank == self.trainer.world_size - 1:
            self.trainer.should_stop = True


@pytest.mark.parametrize("step", ["train", "validate"])
@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2}], ids=str)
def test_a_step_that_stops_on_one_rank_stops_all(layout: dict[str, Any], step: str) -> None:
    loaders = partial(_both, None, None)
    want, _ = fit(partial(Stopping, step), loaders=loaders, max_epochs=3)
    runs = world(partial(Stopping, step), layout, loaders=loaders, max_epochs=3)
    assert [len(seen) for seen, _ in runs] == [1 if step == "train" else 4 // layout.get("dp", 1)] * 2
    if "pp" in layout:
        assert all(seen == [pytest.approx(one, abs=1e-12) for one in want] for seen, _ in runs)


class StoppedDry(Net):
    """Would stop in the dry run."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch[0].is_meta:
            self.trainer.should_stop = True
        return self.loss(batch)


def test_a_dry_run_stops_no_fit() -> None:
    assert [len(seen) for seen, _ in world(StoppedDry)] == [4, 4]


class Together(Net):
    """Calls what all ranks must call at the end of a step."""

    def __init__(self, call: str, folder: Path) -> None:
        super().__init__()
        self.call, self.folder = call, folder

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not loss.is_meta and self.call != "validate":
            self.together(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = self.loss(batch)
        if not loss.is_meta and self.call == "validate":
            self.trainer.strategy.barrier()

    def together(self, loss: Tensor) -> None:
        match self.call:
            case "all_gather":
                self.all_gather(loss)
            case "save_checkpoint":
                self.trainer.save_checkpoint(self.folder / "in step")
            case "broadcast":
                self.trainer.strategy.broadcast(loss)
            case "barrier":
                self.trainer.strategy.barrier()
            case "reduce_boolean_decision":
                self.trainer.strategy.reduce_boolean_decision(loss.item() > 0)


@pytest.mark.parametrize("call", ["all_gather", "save_checkpoint", "broadcast", "barrier", "reduce_boolean_decision", "validate"])
def test_what_all_ranks_must_call_is_refused_within_steps(call: str, tmp_path: Path) -> None:
    why = f"{'barrier' if call == 'validate' else call} within a step with pp=2: all ranks must call it together.*on_train_batch_end"
    with pytest.raises(WorldError, match=why):
        world(partial(Together, call, tmp_path), loaders=_both)


@pytest.mark.parametrize("call", ["all_gather", "barrier", "validate"])
def test_without_a_pipeline_steps_may_call_what_all_ranks_call(call: str, tmp_path: Path) -> None:
    assert [len(seen) for seen, _ in world(partial(Together, call, tmp_path), {"dp": 2}, loaders=_both)] == [2, 2]


CHUNKS = [{"pp": 2, "schedule": schedule, "chunks": 2, "microbatches": 2} for schedule in ("interleaved_1f1b", "zbv")]


@dataclass
class Classes:
    y: Tensor


def _collated(rows: list[Any]) -> dict[str, Any]:
    x, y = (torch.stack(column) for column in zip(*rows, strict=True))
    return {"x": x, "several": [y], "named": Classes(y), "array": y.numpy().copy()}


def _containers() -> tuple[DataLoader, DataLoader]:
    loader = DataLoader(data().dataset, batch_size=6, collate_fn=_collated)
    return loader, loader


class Rewriting(Net):
    """Changes containers and arrays of its batch before the layers, and in validation tensors behind them."""

    def rewritten(self, batch: dict[str, Any]) -> list[Tensor]:
        batch["array"] += 1
        batch["named"].y = batch["named"].y + torch.as_tensor(batch["array"])
        batch["several"][0] = batch["several"][0] + batch["named"].y
        return [batch.pop("x"), batch["several"].pop() % 3]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.loss(self.rewritten(batch))

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        x, y = self.rewritten(batch)
        batch["named"].y.zero_()
        self.log("val_loss", self.loss([x, y]))
        x.zero_()


@pytest.mark.parametrize("layout", CHUNKS, ids=str)
def test_what_a_step_does_to_its_batch_meets_no_other_stage_of_the_rank(layout: dict[str, Any]) -> None:
    want, metrics = fit(Rewriting, loaders=_containers)
    for seen, logged in world(Rewriting, layout, loaders=_containers):
        assert seen == [pytest.approx(one, abs=1e-12) for one in want]
        assert logged == pytest.approx(metrics, abs=1e-6)


class InPlace(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        batch[1].add_(1).remainder_(3)
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        batch[1].add_(1).remainder_(3)
        self.log("val_loss", self.loss(batch))


class InPlaceValidation(InPlace):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("layout", CHUNKS, ids=str)
def test_a_tensor_of_the_batch_changed_in_place_between_stages_of_a_rank_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(WorldError, match=r"the step changes batch\[1\] in place before the layers.*Clone it first, or use chunks=1"):
        world(InPlace, layout)


@pytest.mark.parametrize(("build", "layout"), [(InPlace, {"pp": 2}), (InPlaceValidation, CHUNKS[0])], ids=["one stage", "validation"])
def test_tensors_changed_in_place_are_right_where_no_other_run_sees_them(build: Any, layout: dict[str, Any]) -> None:
    want, metrics = fit(build, loaders=_both)
    for seen, logged in world(build, layout, loaders=_both):
        assert seen == [pytest.approx(one, abs=1e-12) for one in want]
        assert logged == pytest.approx(metrics, abs=1e-6)


class Logging(Net):
    """Logs what is a mean, what adds up, what is another each time, and what is no mean."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log_dict({"loss": loss, "noise": torch.rand(()), "perplexity": loss.exp(), "rate": 0.1})
        self.log("samples", float(len(batch[0])), reduce_fx="sum")
        self.log("size", float(len(batch[0])))
        self.log("largest", batch[0].max(), reduce_fx="max")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("right", (logits.argmax(-1) == batch[1]).sum().double())
        self.log("val_loss", F.cross_entropy(logits, batch[1]))


def _logged(layout: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Logging, HybridParallelStrategy(**layout), 2, _both)
    return [str(warning.message) for warning in caught if "A pipeline logs means over micro-batches" in str(warning.message)]


def test_logged_values_that_are_no_means_are_told_by_name() -> None:
    nothing, told = run_world(_logged, 2, {"pp": 2})
    assert not nothing
    assert [re.findall(r"self\.log\('(\w+)'", message) for message in told] == [["perplexity", "size"], ["right"]]
    assert run_world(_logged, 2, {"pp": 2, "microbatches": 1}) == [[], []]


class Counting(Net):
    """Counts its steps, keeps metrics and a generator, draws at random, changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.metric, self.dropout, self.generator, self.losses = MeanMetric(), nn.Dropout(), torch.Generator(), []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.steps += 1
        batch[0].add_(torch.randn(batch[0].shape, generator=self.generator, dtype=torch.float64))
        loss = F.cross_entropy(self.dropout(self(batch[0])), batch[1])
        self.metric.update(loss.detach())
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        counts = int(self.steps), len(self.losses), self.metric.update_count
        self.seen.append((*counts, torch.rand(()).item(), outputs["loss"].item(), batch[0].sum().item()))


def _counted(tries: bool) -> Any:
    ran, run = [], Trial.run
    Trial.run = lambda *args: ran.append(run(*args))
    if not tries:
        StepRunner._trial_number = lambda *_: None
    seen = fit(Counting, HybridParallelStrategy(pp=2), 2)[0]
    return seen, len(ran)


def test_a_trial_leaves_nothing_behind() -> None:
    (_, first), (tried, ran) = run_world(_counted, 2, True)
    assert (first, ran) == (0, 3 * 5)  # on batches 1, 2 and 4
    (_, first), (untried, ran) = run_world(_counted, 2, False)
    assert (first, ran) == (0, 0)
    assert tried == untried
    assert [step[:3] for step in tried] == [(n, n, n) for n in (2, 4, 6, 8)]
