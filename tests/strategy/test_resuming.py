"""A run that is resumed anywhere sees the samples of the straight run from there on: none twice, none left out."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from multiprocessing import current_process
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from lightning_par import HybridParallelStrategy
from lightning_par.checkpoint import CheckpointError
from lightning_par.strategy.loaders import NextEpoch, StateOfGiven
from tests.harness import run_world
from tests.harness.models import QUIET
from tests.strategy.test_sampling import Numbers

ROWS, BATCH = 14, 4
EPOCH = math.ceil(ROWS / BATCH)
"""Batches of an epoch; the last one is short."""
Step = tuple[list[int], float, int, int, int]
"""Samples, a random number, epoch, batch, optimizer steps before."""


class MidStepError(Exception):
    """Of the user's own."""


class Notes(L.LightningModule):
    """Writes down what each batch was, and draws random numbers in between, as dropout does."""

    tp_plan: ClassVar[dict[str, str]] = {"layers.0": "colwise", "layers.1": "rowwise"}

    def __init__(self, fails_at: int | None = None, foresees: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 2), torch.nn.Linear(2, 1)])
        self.fails_at, self.foresees, self.steps = fails_at, foresees, []
        self.validated: list[tuple[int, int, int]] = []  # optimizer steps before, epoch, batch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part for part in (batch.values() if isinstance(batch, dict) else [batch]) if part is not None]
        samples = [sample for part in parts for sample in part.flatten().int().tolist()]
        self.steps.append((samples, torch.rand(()).item(), self.current_epoch, batch_idx, self.global_step))
        if len(self.steps) - 1 == self.fails_at:
            raise MidStepError
        x = parts[0]
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        torch.rand(())
        self.validated.append((self.global_step, self.current_epoch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.foresees:
            assert self.trainer.estimated_stepping_batches > 0  # as warmup schedules ask; Lightning makes the dataloader's iterator for it
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class SaveWhen(L.Callback):
    """Saves to ``folder / moment`` at each of some moments, by the number of batches before them."""

    def __init__(self, folder: Path, moments: dict[str, tuple[str, int]]) -> None:
        self.folder, self.moments = folder, moments

    def _save(self, trainer: L.Trainer, hook: str) -> None:
        for name, moment in self.moments.items():
            if moment == (hook, len(trainer.lightning_module.steps)):
                trainer.save_checkpoint(self.folder / name)

    def on_fit_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "fit")

    def on_sanity_check_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "sanity")

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "train")

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "begin")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "batch")

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "validates")

    def on_validation_batch_end(self, trainer: L.Trainer, _: L.LightningModule, outputs: Any, batch: Any, batch_idx: int, *__: Any) -> None:
        self._save(trainer, f"validated {batch_idx}")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "epoch")

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._save(trainer, "validation")


Loader = Callable[[int, int, int], Any]
"""Of batches of some size, for some number of replicas, of which this is one."""


def plain(size: int, replicas: int, index: int) -> Any:
    return DataLoader(Numbers(ROWS), batch_size=size)


def shuffled(size: int, replicas: int, index: int) -> Any:
    return DataLoader(Numbers(ROWS), batch_size=size, shuffle=True)


def shuffled_apart(size: int, replicas: int, index: int) -> Any:
    return DataLoader(Numbers(ROWS), batch_size=size, shuffle=True, generator=torch.Generator().manual_seed(2))


def with_workers(size: int, replicas: int, index: int) -> Any:
    current_process()._config["daemon"] = False  # ranks of tests are, and such may have no children
    return DataLoader(Numbers(ROWS), batch_size=size, shuffle=True, num_workers=1)


def persistent(size: int, replicas: int, index: int) -> Any:
    current_process()._config["daemon"] = False
    return DataLoader(Numbers(ROWS), batch_size=size, shuffle=True, num_workers=1, persistent_workers=True)


class Dice(Sampler):
    """Draws from generators of all kinds, and its order depends on the epoch and on itself."""

    def __init__(self) -> None:
        self.own, self.epoch = random.Random(5), 0

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Iterator[int]:
        order = [*range(ROWS)]
        self.own.shuffle(order)
        random.shuffle(order)
        turn = (int(np.random.randint(ROWS)) + self.epoch) % ROWS
        return iter(order[turn:] + order[:turn])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.own.getstate()
        return {"own": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        version, words, gauss = state["own"]
        self.own.setstate((version, tuple(words), gauss))


def own_sampler(size: int, replicas: int, index: int) -> Any:
    return DataLoader(Numbers(ROWS), batch_size=size, sampler=Dice())


def two(size: int, replicas: int, index: int) -> Any:
    """The shorter is drawn several times in an epoch."""
    short = DataLoader(Numbers(6), batch_size=size, shuffle=True)
    return CombinedLoader({"long": shuffled(size, replicas, index), "short": short}, "max_size_cycle")


def two_at_least(size: int, replicas: int, index: int) -> Any:
    return CombinedLoader({"long": shuffled(size, replicas, index), "short": DataLoader(Numbers(6), batch_size=size)}, "max_size")


class Growing(BatchSampler):
    """Batches of unequal size."""

    def __iter__(self) -> Iterator[list[int]]:
        batches = [*super().__iter__()]
        return iter([batches[0] + batches[1][:1], batches[1][1:], *batches[2:]])


def own_batches(size: int, replicas: int, index: int) -> Any:
    return DataLoader(Numbers(ROWS), batch_sampler=Growing(SequentialSampler(Numbers(ROWS)), size, drop_last=False))


def own_division(size: int, replicas: int, index: int) -> Any:
    sampler = DistributedSampler(Numbers(ROWS), num_replicas=replicas, rank=index, shuffle=True, seed=3)
    return DataLoader(Numbers(ROWS), batch_size=size, sampler=sampler)


class Stream(IterableDataset):
    """Has no length."""

    def __init__(self, replicas: int, index: int) -> None:
        self.replicas, self.index = replicas, index

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(number)]) for number in range(self.index, ROWS, self.replicas))


def stream(size: int, replicas: int, index: int) -> Any:
    return DataLoader(Stream(replicas, index), batch_size=size)


class Stateful(DataLoader):
    """A user's own: counts what it gave in an epoch."""

    given = 0

    def __iter__(self) -> Iterator[Any]:
        for place, batch in enumerate(super().__iter__()):
            if place >= self.given:
                self.given += 1
                yield batch
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def stateful_stream(size: int, replicas: int, index: int) -> Any:
    return Stateful(Stream(replicas, index), batch_size=size)


LOADERS: dict[str, Loader] = {loader.__name__: loader for loader in (shuffled, shuffled_apart, own_sampler, two, plain)} | {
    loader.__name__: loader for loader in (own_batches, own_division, stream, stateful_stream, two_at_least)
}
WITH_WORKERS = {"with_workers": with_workers, "persistent": persistent}
LOADERS |= WITH_WORKERS


def _fit(loader: str, layout: dict[str, int], limit: dict[str, int], folder: Path, **how: Any) -> list[Step]:
    """Train, saving at ``moments`` to ``folder`` or going on from ``resume`` in it; what was seen."""
    L.seed_everything(3, verbose=False)
    moments, resume, batch, after, fails_at, validate, foresees, scheduling = (
        how.pop(key, None) for key in ("moments", "resume", "batch", "after", "fails_at", "validate", "foresees", "scheduling")
    )
    strategy = HybridParallelStrategy(**layout)
    callbacks: list[L.Callback] = [SaveWhen(folder, moments)] if moments else []
    if scheduling:
        callbacks.append(GradientAccumulationScheduler(scheduling))
    if fails_at is not None:
        callbacks.append(OnExceptionCheckpoint(folder, "exception"))
    how = QUIET | {"enable_checkpointing": fails_at is not None, "num_sanity_val_steps": 0} | limit | how
    trainer = L.Trainer(devices=math.prod(layout.values()), strategy=strategy, callbacks=callbacks, **how)
    module = Notes(fails_at, bool(foresees))
    place = strategy.distributed_sampler_kwargs
    replicas = place["num_replicas"]
    data = LOADERS[loader]((batch or BATCH) // replicas, replicas, place["rank"])
    with suppress(MidStepError):
        trainer.fit(module, data, LOADERS[validate](2, 1, 0) if validate else None, ckpt_path=folder / resume if resume else None)
    if after:
        trainer.save_checkpoint(folder / after)
    return module.steps


def _fits(layout: dict[str, int], folder: Path, fits: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[list[Step]]:
    return [_fit(loader, layout, limit, folder / loader, **how) for loader, limit, how in fits]


def _world(layout: dict[str, int], folder: Path, fits: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[list[list[Step]]]:
    """Of each fit, in turn in one world: what each rank saw."""
    return [list(ranks) for ranks in zip(*run_world(_fits, math.prod(layout.values()), layout, folder, fits, timeout=120), strict=True)]


def _together(ranks: list[list[Step]]) -> list[list[int]]:
    """The samples of each batch of all replicas."""
    return [sorted(sample for step in steps for sample in step[0]) for steps in zip(*ranks, strict=True)]


MOMENTS = {"within": ("batch", 2), "last": ("batch", EPOCH), "end": ("epoch", EPOCH), "second": ("batch", EPOCH + 1)}
"""When the straight run saves: name, hook, batches before."""
LIMITS = {"steps": {"max_steps": 3 * EPOCH - 1}, "epochs": {"max_epochs": 3}}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2}, {"dp": 1}], ids=["dp2", "one rank"])
@pytest.mark.parametrize("limit", ["steps", "epochs"])
def test_K10_K11_any_dataloader_goes_on_with_the_next_sample_and_random_number(layout: dict[str, int], limit: str, tmp_path: Path) -> None:
    """Bit for bit in the same layout: samples, random numbers, epochs, batches, steps, wherever the run was saved."""
    names = [name for name in LOADERS if name not in WITH_WORKERS] if layout["dp"] > 1 else ["shuffled", "own_sampler", *WITH_WORKERS]
    straight = _world(layout, tmp_path, [(name, LIMITS[limit], {"moments": MOMENTS}) for name in names])
    cases = [(name, moment) for name in names for moment in MOMENTS]
    resumed = _world(layout, tmp_path, [(name, LIMITS[limit], {"resume": moment}) for name, moment in cases])
    for (name, moment), ranks in zip(cases, resumed, strict=True):
        for mine, whole in zip(ranks, straight[names.index(name)], strict=True):
            assert len(whole) == 3 * EPOCH - (limit == "steps"), name
            assert mine == whole[MOMENTS[moment][1] :], (name, moment)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param({"dp": 1}, id="one rank"),
        pytest.param({"tp": 2}, id="tp2", marks=pytest.mark.slow),
        pytest.param({"dp": 4}, id="dp4", marks=pytest.mark.slow),
    ],
)
def test_K10_another_dp_goes_on_with_the_next_sample(target: dict[str, int], tmp_path: Path) -> None:
    """Batches of all replicas are as large as before, so they are those of the straight run."""
    names = ["shuffled", "shuffled_apart", "own_sampler", "plain", *["two"] * (target.get("dp") != 4)]
    straight = _world({"dp": 2}, tmp_path, [(name, LIMITS["epochs"], {"moments": MOMENTS}) for name in names])
    cases = [(name, moment) for name in names for moment in ("within", "second")]
    resumed = _world(target, tmp_path, [(name, LIMITS["epochs"], {"resume": moment}) for name, moment in cases])
    for (name, moment), ranks in zip(cases, resumed, strict=True):
        whole, done = straight[names.index(name)], MOMENTS[moment][1]
        mine = _together(ranks[: target.get("dp", 1)])
        rest = EPOCH - done % EPOCH  # of the epoch at hand: the next draws from generators that went on otherwise
        if target.get("dp") == 4:  # 14 samples do not divide by 4: the first two come again at the end of an epoch
            mine, whole = [batch[:BATCH] for batch in mine[: rest - 1]], [steps[: done + rest - 1] for steps in whole]
            assert mine == _together(whole)[done:], (name, moment)
        else:
            assert mine[:rest] == _together(whole)[done : done + rest], (name, moment)
            assert len(mine) == 3 * EPOCH - done
            assert [step[2:4] for step in ranks[0]] == [step[2:4] for step in whole[0][done:]]


@pytest.mark.slow
def test_K10_another_batch_size_goes_on_with_the_next_sample(tmp_path: Path) -> None:
    """After 8 of 14 samples: 6 are left, whatever they are cut into."""
    straight = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["epochs"], {"moments": MOMENTS})])[0]
    given = sorted(sample for batch in _together(straight)[:2] for sample in batch)
    for layout, batch, sizes in (({"dp": 1}, 2, [2, 2, 2]), ({"dp": 2}, 6, [6]), ({"dp": 1}, 3, [3, 3])):
        ranks = _world(layout, tmp_path, [("shuffled", LIMITS["epochs"], {"resume": "within", "batch": batch})])[0]
        epoch = [samples for samples, step in zip(_together(ranks), ranks[0], strict=True) if step[2] == 0]
        assert [len(samples) for samples in epoch] == sizes
        assert sorted(given + [sample for samples in epoch for sample in samples]) == [*range(ROWS)]
        second = [samples for samples, step in zip(_together(ranks), ranks[0], strict=True) if step[2] == 1]
        assert sorted(sample for samples in second for sample in samples) == [*range(ROWS)]


def test_K10_a_run_may_be_resumed_again_after_a_change_of_batch_size(tmp_path: Path) -> None:
    """After 6 of 14 samples in one batch of 6, then after 10, where 4 more came in a batch of 4.

    And of two dataloaders with another dp: the shorter, drawn again in between, does not set the count of batches.
    """
    fits: list[Any] = [
        ("shuffled", {"max_epochs": 1}, {"batch": 6, "moments": {"6": ("batch", 1)}}),
        ("shuffled", {"max_epochs": 1}, {"batch": 4, "resume": "6", "moments": {"10": ("batch", 1)}}),
        *(("shuffled", {"max_epochs": 1}, {"batch": batch, "resume": "10"}) for batch in (4, 2)),
        ("two", {"max_epochs": 1}, {"moments": {"third": ("batch", 3)}}),
    ]
    straight, again, *last, both = ([step[0] for step in ranks[0]] for ranks in _world({"dp": 1}, tmp_path, fits))
    order = [sample for batch in straight for sample in batch]
    assert again == [order[6:10], order[10:]]
    assert last == [[order[10:]], [order[10:12], order[12:]]]
    fits = [("shuffled", {"max_epochs": 1}, {"batch": 4, "resume": "10"}), ("two", {"max_epochs": 1}, {"resume": "third"})]
    divided, both_divided = _world({"dp": 2}, tmp_path, fits)
    assert _together(divided) == [sorted(order[10:])]
    assert _together(both_divided) == [sorted(both[3])]
    assert both_divided[0][0][3] == 3


def test_K10_K11_between_two_optimizer_steps_the_run_goes_back_to_the_earlier(tmp_path: Path) -> None:
    """Gradients that wait for the next step are in no checkpoint, so their samples come again, with the same random numbers."""
    moments = {"first": ("batch", 1), "third": ("batch", 3), "fifth": ("batch", 5), "sixth": ("batch", 6)}
    back = {"first": 0, "third": 2, "fifth": 4, "sixth": 6}
    how = {"accumulate_grad_batches": 2}
    (straight,) = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["epochs"], {"moments": moments} | how)])
    resumed = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["epochs"], {"resume": name} | how) for name in moments])
    for name, ranks in zip(moments, resumed, strict=True):
        assert ranks == [steps[back[name] :] for steps in straight], name


class Normed(Notes):
    """Each batch counts in its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, torch.nn.BatchNorm1d(1))


def _fit_normed(folder: Path) -> list[dict[str, Tensor]]:
    ends = []
    for moments, resume in (({"between": ("batch", 3)}, None), ({}, folder / "between")):
        L.seed_everything(3, verbose=False)
        module, how = Normed(), QUIET | LIMITS["epochs"] | {"accumulate_grad_batches": 2, "num_sanity_val_steps": 0}
        trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), callbacks=[SaveWhen(folder, moments)], **how)
        trainer.fit(module, shuffled(BATCH, 1, 0), ckpt_path=resume)
        ends.append({name: value.clone() for name, value in module.state_dict().items()})
    return ends


def test_K10_between_two_optimizer_steps_no_batch_counts_twice_in_buffers(tmp_path: Path) -> None:
    ((straight, resumed),) = run_world(_fit_normed, 1, tmp_path)
    assert straight["layers.0.num_batches_tracked"] == 3 * EPOCH
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())


@pytest.mark.slow
def test_K10_K11_a_run_that_failed_within_a_step_takes_that_step_again(tmp_path: Path) -> None:
    for accumulate, back in ((1, 6), (2, 6), (3, 4)):
        how, folder = {"accumulate_grad_batches": accumulate}, tmp_path / f"{accumulate}"
        straight, failed = _world({"dp": 2}, folder, [("shuffled", LIMITS["epochs"], how | {"fails_at": at}) for at in (None, 6)])
        assert failed == [steps[:7] for steps in straight]
        (resumed,) = _world({"dp": 2}, folder, [("shuffled", LIMITS["epochs"], how | {"resume": "exception.ckpt"})])
        assert resumed == [steps[back:] for steps in straight]


@pytest.mark.parametrize("stop", [2, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (EPOCH, EPOCH + 1))])
def test_K10_a_fit_that_ended_by_max_steps_goes_on_in_its_epoch(stop: int, tmp_path: Path) -> None:
    """Saved after the fit, when Lightning has counted the epoch as over."""
    fits = [("shuffled", LIMITS["steps"], {}), ("shuffled", {"max_steps": stop}, {"after": "stopped", "moments": {"end": ("epoch", stop)}})]
    straight, first = _world({"dp": 2}, tmp_path, fits)
    assert first == [steps[:stop] for steps in straight]
    resumed = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["steps"], {"resume": name}) for name in ("stopped", "end")])
    assert resumed == [[steps[stop:] for steps in straight]] * 2


@pytest.mark.parametrize("limit", ["steps", pytest.param("epochs", marks=pytest.mark.slow)])
def test_K10_a_run_may_be_resumed_again_and_again(limit: str, tmp_path: Path) -> None:
    """After 2, 4, 6, 8 and 10 batches, two of them the ends of epochs."""
    (straight,) = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS[limit], {"moments": {"2": ("batch", 2)}})])
    names = ["2", "4", "6", "8", "10"]
    fits = [("shuffled", LIMITS[limit], {"resume": one, "moments": {next_: ("batch", 2)}}) for one, next_ in pairwise(names)]
    *_, last = _world({"dp": 2}, tmp_path, [*fits, ("shuffled", LIMITS[limit], {"resume": "10"})])
    assert last == [steps[10:] for steps in straight]


@pytest.mark.parametrize("limit", ["steps", pytest.param("epochs", marks=pytest.mark.slow)])
def test_K10_K11_validation_in_between_changes_nothing(limit: str, tmp_path: Path) -> None:
    moments = {"within": ("batch", 1), "validated": ("validation", 2), "last": ("validation", EPOCH), "end": ("epoch", EPOCH)}
    how = {"validate": "plain", "val_check_interval": 2}
    (straight,) = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS[limit], how | {"moments": moments})])
    resumed = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS[limit], how | {"resume": name}) for name in moments])
    for (name, (_, done)), ranks in zip(moments.items(), resumed, strict=True):
        assert ranks == [steps[done:] for steps in straight], name


@pytest.mark.parametrize("loader", ["shuffled", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two", "stateful_stream"))])
@pytest.mark.parametrize("interval", [2, EPOCH])
@pytest.mark.parametrize("limit", ["epochs", pytest.param("steps", marks=pytest.mark.slow)])
def test_K10_K11_the_validation_that_comes_after_the_save_is_not_left_out(loader: str, interval: int, limit: str, tmp_path: Path) -> None:
    """Also of an epoch's last batch, and in a run that is resumed twice."""
    moments = {"half": ("batch", 2), "last": ("batch", EPOCH), "next": ("batch", EPOCH + 1), "later": ("batch", EPOCH + 2)}
    how = {"validate": "plain", "val_check_interval": interval}
    (straight,) = _world({"dp": 2}, tmp_path, [(loader, LIMITS[limit], how | {"moments": moments})])
    again = {"moments": {"again": ("batch", 2)}}
    resumes: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in moments] + [("half", again), ("again", {})]
    resumed = _world({"dp": 2}, tmp_path, [(loader, LIMITS[limit], how | {"resume": name} | more) for name, more in resumes])
    done = {name: batches for name, (_, batches) in moments.items()} | {"again": 4}
    for (name, _), ranks in zip(resumes, resumed, strict=True):
        assert ranks == [steps[done[name] :] for steps in straight], name


@pytest.mark.parametrize("interval", [2, pytest.param(EPOCH, marks=pytest.mark.slow)])
def test_K10_K11_a_run_that_goes_back_to_a_step_does_not_validate_there_again(interval: int, tmp_path: Path) -> None:
    moments = {"first": ("batch", 1), "third": ("batch", 3), "fifth": ("batch", 5)}
    how = {"accumulate_grad_batches": 2, "validate": "plain", "val_check_interval": interval}
    (straight,) = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["epochs"], how | {"moments": moments})])
    resumed = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["epochs"], how | {"resume": name}) for name in moments])
    for (name, (_, batches)), ranks in zip(moments.items(), resumed, strict=True):
        assert ranks == [steps[batches - 1 :] for steps in straight], name


def test_K10_an_accumulation_that_changes_from_epoch_to_epoch_goes_on_as_it_was(tmp_path: Path) -> None:
    """Each fit has its own scheduler of it; steps are counted in what is noted."""
    done = {"second": EPOCH + 2, "last": 2 * EPOCH, "third": 2 * EPOCH + 2}
    moments = {name: ("batch", batches) for name, batches in done.items()}
    (straight,) = _world({"dp": 2}, tmp_path, [("shuffled", LIMITS["epochs"], {"scheduling": {0: 1, 1: 2}, "moments": moments})])
    fits = [("shuffled", LIMITS["epochs"], {"scheduling": {0: 1, 1: 2}, "resume": name}) for name in moments]
    for (name, batches), ranks in zip(done.items(), _world({"dp": 2}, tmp_path, fits), strict=True):
        assert ranks == [steps[batches:] for steps in straight], name


def test_K10_a_save_when_an_epoch_begins_leaves_none_out(tmp_path: Path) -> None:
    moments = {"begin": ("begin", 2 * EPOCH), "again": ("begin", EPOCH)}
    names = ["shuffled", "shuffled_apart"]
    straight = _world({"dp": 2}, tmp_path, [(name, LIMITS["epochs"], {"moments": moments}) for name in names])
    cases = [(name, moment) for name in names for moment in moments]
    resumed = _world({"dp": 2}, tmp_path, [(name, LIMITS["epochs"], {"resume": moment}) for name, moment in cases])
    for (name, moment), ranks in zip(cases, resumed, strict=True):
        assert ranks == [steps[moments[moment][1] :] for steps in straight[names.index(name)]], (name, moment)


@pytest.mark.parametrize("foresees", [False, True])
def test_K10_K11_a_save_before_the_first_batch_resumes_as_the_whole_run(foresees: bool, tmp_path: Path) -> None:
    """Before and after dataloaders were made: making an iterator draws a random number."""
    limit, how = {"max_steps": EPOCH + 1}, {"validate": "plain", "num_sanity_val_steps": 1, "foresees": foresees}
    moments = {hook: (hook, 0) for hook in ("fit", "sanity", "train")}
    (straight,) = _world({"dp": 1}, tmp_path, [("shuffled", limit, how | {"moments": moments})])
    resumed = _world({"dp": 1}, tmp_path, [("shuffled", limit, how | {"resume": moment}) for moment in moments])
    assert not [moment for moment, ranks in zip(moments, resumed, strict=True) if ranks != straight]


@pytest.mark.slow
def test_K10_workers_that_stay_from_epoch_to_epoch_draw_no_random_number_in_the_next(tmp_path: Path) -> None:
    (straight,) = _world({"dp": 1}, tmp_path, [("persistent", LIMITS["epochs"], {"moments": MOMENTS})])
    resumed = _world({"dp": 1}, tmp_path, [("persistent", LIMITS["epochs"], {"resume": name}) for name in MOMENTS])
    for (name, (_, batches)), ranks in zip(MOMENTS.items(), resumed, strict=True):
        assert ranks == [steps[batches:] for steps in straight], name


@pytest.mark.slow
@pytest.mark.parametrize("sanity", [0, 1])
def test_K10_K11_workers_that_stay_from_validation_to_validation_draw_no_random_number_in_the_next(sanity: int, tmp_path: Path) -> None:
    how = {"validate": "persistent", "num_sanity_val_steps": sanity}
    (straight,) = _world({"dp": 1}, tmp_path, [("shuffled_apart", LIMITS["epochs"], how | {"moments": MOMENTS})])
    resumed = _world({"dp": 1}, tmp_path, [("shuffled_apart", LIMITS["epochs"], how | {"resume": name}) for name in MOMENTS])
    for (name, (_, batches)), ranks in zip(MOMENTS.items(), resumed, strict=True):
        assert ranks == [steps[batches:] for steps in straight], name


def _validations(folder: Path, moments: dict[str, tuple[str, int]]) -> list[Any]:
    """What a run validates, and runs that are resumed from each of ``moments``, with the samples they train."""
    seen = []
    for resume in [None, *moments]:
        L.seed_everything(3, verbose=False)
        callbacks = [] if resume else [SaveWhen(folder, moments)]
        how = QUIET | {"num_sanity_val_steps": 0, "max_epochs": 2, "val_check_interval": 2}
        trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), callbacks=callbacks, **how)
        module = Notes()
        trainer.fit(module, plain(BATCH, 1, 0), plain(5, 1, 0), ckpt_path=folder / resume if resume else None)
        seen.append((module.validated, [step[0] for step in module.steps]))
    return seen


def test_K10_a_validation_within_which_the_run_was_saved_is_run_again_and_whole(tmp_path: Path) -> None:
    hooks = ["validates", "validated 0", "validated 1", "validated 2"]
    moments = {f"{hook} after {steps}": (hook, steps) for steps in (2, EPOCH, EPOCH + 2) for hook in hooks}
    ((validated, trained), *resumed) = run_world(_validations, 1, tmp_path, moments)[0]
    assert [steps for steps, _, batch in validated if batch == 0] == [2, 4, 6, 8]
    for (name, (_, steps)), (again, samples) in zip(moments.items(), resumed, strict=True):
        assert again == [one for one in validated if one[0] >= steps], name
        assert samples == trained[steps:], name


class OnPlateau(Notes):
    """Its learning rate, noted after each batch, falls after each epoch or step: what it goes by does not."""

    def __init__(self, interval: str = "epoch", monitor: str = "loss") -> None:
        super().__init__()
        self.rates: list[float] = []
        self.interval, self.monitor = interval, monitor

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("trained", 1.0, on_epoch=True, on_step=False, batch_size=len(batch))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.current_epoch + 1.0, batch_size=len(batch))

    def on_train_batch_end(self, *_: Any) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": self.monitor, "interval": self.interval, "strict": False},
        }


def _rates(
    folder: Path, limit: dict[str, int], moments: dict[str, tuple[str, int]], resumes: list[str], *plateau: str
) -> list[list[float]]:
    """Of a straight run that saves, and of those that are resumed from what it saved."""
    rates = []
    for resume in [None, *resumes]:
        L.seed_everything(3, verbose=False)
        callbacks = [] if resume else [SaveWhen(folder, moments)]
        module, how = OnPlateau(*plateau), QUIET | limit | {"num_sanity_val_steps": 0, "callbacks": callbacks}
        trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), **how)
        trainer.fit(module, shuffled(BATCH, 1, 0), plain(2, 1, 0), ckpt_path=folder / resume if resume else None)
        rates.append(module.rates)
    return rates


@pytest.mark.parametrize("limit", ["epochs", pytest.param("steps", marks=pytest.mark.slow)])
def test_K10_a_schedule_that_goes_by_a_metric_takes_each_epoch_into_account(limit: str, tmp_path: Path) -> None:
    done = {"within": EPOCH + 1, "last": 2 * EPOCH, "validated": 2 * EPOCH, "end": 2 * EPOCH}
    hooks = {"within": "batch", "last": "batch", "validated": "validation", "end": "epoch"}
    moments = {name: (hooks[name], batches) for name, batches in done.items()}
    ((straight, *resumed),) = run_world(_rates, 1, tmp_path, LIMITS[limit], moments, [*moments])
    assert {*straight[:-1]} == {0.1, 0.05}
    assert resumed == [straight[batches:] for batches in done.values()]


@pytest.mark.parametrize("interval", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_K10_a_schedule_that_goes_by_a_metric_takes_each_step_into_account(interval: int, tmp_path: Path) -> None:
    moments = {f"{hook}{batches}": (hook, batches) for hook in ("batch", "validation") for batches in range(interval, 2 * EPOCH)}
    moments |= {"end": ("epoch", EPOCH), "begin": ("begin", EPOCH)}
    limit = {"max_epochs": 3, "val_check_interval": interval}
    ((straight, *_),) = run_world(_rates, 1, tmp_path, limit, moments, [], "step")
    moments = {name: moment for name, moment in moments.items() if (tmp_path / name).exists()}
    ((_, *resumed),) = run_world(_rates, 1, tmp_path / "again", limit, {}, [tmp_path / name for name in moments], "step")
    assert len({*straight}) > EPOCH
    for (name, (_, batches)), rates in zip(moments.items(), resumed, strict=True):
        assert rates == straight[batches:], name


def _warnings(folder: Path, interval: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        _rates(folder, {"max_epochs": 1}, {"within": ("batch", 2)}, ["within"], interval, "trained")
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("interval", ["step", pytest.param("epoch", marks=pytest.mark.slow)])
def test_K10_a_schedule_whose_metric_a_checkpoint_cannot_have_is_named(interval: str, tmp_path: Path) -> None:
    told = [one for one in run_world(_warnings, 1, tmp_path, interval)[0] if "is lost: ReduceLROnPlateau on trained leaves this" in one]
    assert len(told) == 1
    assert interval in told[0]


@pytest.mark.slow
def test_K10_a_schedule_that_asks_for_the_number_of_steps_does_not_lose_the_place(tmp_path: Path) -> None:
    how, names = {"foresees": True}, ["shuffled", "two", "stateful_stream"]
    straight = _world({"dp": 2}, tmp_path, [(name, LIMITS["steps"], how | {"moments": MOMENTS}) for name in names])
    resumed = _world({"dp": 2}, tmp_path, [(name, LIMITS["steps"], how | {"resume": "within"}) for name in names])
    assert resumed == [[steps[2:] for steps in ranks] for ranks in straight]


class TwoSteps(Notes):
    """Steps two optimizers in a batch, and saves between them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.automatic_optimization, self.folder = False, folder

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.global_step == 3:
                self.trainer.save_checkpoint(self.folder)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in self.layers]


def _saved_between(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        trainer = L.Trainer(devices=1, strategy=HybridParallelStrategy(dp=1), max_epochs=1, **QUIET)
        trainer.fit(TwoSteps(folder / "last"), plain(BATCH, 1, 0))
    return [str(warning.message) for warning in caught]


def test_K10_a_save_between_the_optimizers_of_a_batch_is_told_to_repeat_it(tmp_path: Path) -> None:
    told = [one for one in run_world(_saved_between, 1, tmp_path)[0] if "within a training step that has stepped an optimizer" in one]
    assert len(told) == 1
    assert "3 steps are done, 2 before it" in told[0]


def _refused(loader: str, folder: Path, how: dict[str, Any]) -> str:
    with pytest.raises(CheckpointError) as error:
        _fit(loader, {"dp": 1}, LIMITS["epochs"], folder / loader, **how)
    return str(error.value)


def test_K10_what_cannot_go_on_with_another_dp_is_refused_by_name(tmp_path: Path) -> None:
    names = {"own_batches": "Growing", "own_division": "BatchSampler", "stream": "DataLoader", "stateful_stream": "Stateful"}
    _world({"dp": 2}, tmp_path, [(name, LIMITS["epochs"], {"moments": MOMENTS}) for name in [*names, "shuffled"]])
    for name, told in names.items():
        message = run_world(_refused, 1, name, tmp_path, {"resume": "within"})[0]
        assert "in the middle of an epoch with dp=2, and with dp=1 it cannot be told which samples come next" in message
        assert told in message
    how = {"resume": "second", "accumulate_grad_batches": 2, "batch": 2}
    message = run_world(_refused, 1, "shuffled", tmp_path, how | {"batch": 4})[0]
    assert "no multiple of accumulate_grad_batches=2" in message
    ended = _world({"dp": 1}, tmp_path, [(name, LIMITS["epochs"], {"resume": "end"}) for name in names])
    assert [len(ranks[0]) for ranks in ended] == [2 * EPOCH] * 4, "from the end of an epoch any of them may"


def test_K10_training_data_that_changed_since_are_told(tmp_path: Path) -> None:
    """Not a word of the right samples then; a run without division by us is left alone."""
    how = {"use_distributed_sampler": False}
    straight = _world({"dp": 2}, tmp_path, [("shuffled_apart", LIMITS["epochs"], how | {"moments": MOMENTS})])[0]
    assert straight[0] == straight[1], "each replica has them all"
    with pytest.raises(Exception, match="cannot be told which samples come next of DataLoader"):
        _world({"dp": 1}, tmp_path, [("shuffled_apart", LIMITS["epochs"], how | {"resume": "within"})])


def test_a_state_at_the_end_of_an_epoch_is_followed_by_the_next() -> None:
    over = stateful_stream(2, 1, 0)
    over.load_state_dict({"given": ROWS // 2})
    loader = NextEpoch(over)
    assert [len([*loader]) for _ in range(3)] == [ROWS // 2] * 3


def test_a_state_is_that_before_the_batch_that_lightning_draws_ahead() -> None:
    loader = StateOfGiven(stateful_stream(2, 1, 0))
    assert loader.state_dict() == {"given": 0}
    batches = iter(loader)
    states = [(next(batches), loader.state_dict()["given"])[1] for _ in range(7)]
    assert states == [*range(7)]
    assert loader.batch_size == 2
