"""Where in its training data a run is, and how a run that is resumed gets there.

Note [The next sample]
~~~~~~~~~~~~~~~~~~~~~~
Lightning saves how many batches of an epoch were given out, and begins its dataloaders anew: unless they have a ``state_dict``, a run that
is resumed in the middle of an epoch sees its first samples again, and never its last. So a checkpoint of ours also tells what the epoch's
order was drawn from (random generators, the sampler's own generator or state, the epoch it was told). What happens then depends on who
orders the samples::

    a sampler that the strategy divides         the order is drawn again, and goes on behind the samples that all replicas together
                                                were given: with any number of replicas, and any batch size
    a dataloader with a state_dict              has its state again, each replica its own; with another number of replicas only if the
                                                dataloader says ``state_is_global = True``: it means the same for any number of them
    anything else: an own batch sampler, an     its batches are drawn again and dropped, so their order must depend on the epoch alone;
    own division, data without a length         another number of replicas is refused

Gradients that wait for the next optimizer step are in no checkpoint. One that is saved between two steps is that of the earlier one: its
place in the data, its random generators and its buffers are those with which the accumulation at hand began.

Random generators are restored once the dataloader's iterator is made in the middle of an epoch, since making it draws from them, which the
straight run did when the epoch began. A save before training's dataloaders were made (in ``on_fit_start``) says so: the resumed run's
iterator draws what the straight run's did after the save. What workers draw inside of a dataset does not go on: they start from another
seed.

A validation within which the run was saved is run again from its first batch. What it draws at random, and what is drawn after it, are then
other numbers than those of the straight run.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_par.checkpoint import CURRENT_STATE, DATA, CheckpointError, Shard, plain
from lightning_par.comm import Mesh
from lightning_par.strategy import progress, seams
from lightning_par.strategy.loaders import NextEpoch, Onward, StateOfGiven
from lightning_par.strategy.sampling import ReplicaSampler
from lightning_par.strategy.state import generators, generators_kept, set_generators


@dataclass
class _Resumed:
    """What a checkpoint tells.

    Attributes:
        batches: how many of the epoch at hand were given out; None: a new one begins.
        told: of each dataloader, in order.
        states: of those that have one.
        at_end: no batch of the epoch at hand is left.
        in_epoch_end: the epoch was complete, but for what comes after ``on_train_epoch_end``.
        metrics: that callbacks can ask for, and are complete.
        partial: names of metrics that training logs, whose values so far are lost; None: not known.
        validates: validation comes next; False: it does not, whatever the batch; None: that is not known.
        steps_plateaus: what comes next is a step of each ReduceLROnPlateau that goes by them. After validation Lightning resumes with it.
        stays: workers of validation's dataloaders were there, if they stay from one validation to the next.
        entered: how many dataloaders have come.
    """

    batches: int | None
    replicas: int
    mode: str
    told: list[dict[str, Any]]
    states: list[Any]
    at_end: bool
    validates: bool | None
    in_epoch_end: bool
    metrics: dict[str, Tensor]
    partial: list[str] | None
    steps_plateaus: bool
    stays: bool
    entered: int = 0


@dataclass(frozen=True)
class _Window:
    """The accumulation at hand: its first batch, and what was then: optimizer steps, random generators, and persistent buffers by name."""

    first: int
    steps: int
    generators: dict[str, Tensor]
    buffers: dict[str, Tensor]

    def put_back(self, weights: dict[str, Shard]) -> None:
        """Set the generators to what they were; ``weights``, to be saved, get the buffers."""
        set_generators(self.generators)
        for name in weights.keys() & self.buffers.keys():
            weights[name] = replace(weights[name], data=self.buffers[name])


class DataPlace:
    """Of one strategy. All ranks call each method together. See Note [The next sample]."""

    def __init__(self) -> None:
        self._resumed: _Resumed | None = None
        self._restored: dict[str, Tensor] | None = None  # generators, before iterators were made
        self._window = _Window(-1, 0, {}, {})
        self._loaders: CombinedLoader | None = None  # those that were begun with
        self._untouched: dict[str, Any] | None = None  # what the checkpoint told, until then
        self._epoch = 0
        self._before_sanity: dict[str, Tensor] | None = None  # generators; Lightning sets them to that again after its sanity check

    # --- while training

    def forget(self) -> None:
        """A checkpoint that an earlier run read is none of the next one's business."""
        self._resumed = self._restored = self._before_sanity = None

    def enter(self, trainer: pl.Trainer, mesh: Mesh, dataloader: Any) -> Any:
        """A training dataloader before its first use, or what takes its place: at the batch that comes next.

        Raises:
            CheckpointError: it cannot be told which that is.
        """
        resumed, replicas = self._resumed, mesh.dp.size
        if resumed is not None and self._restored is None:
            self._restored = generators()
        told, batches = (None, None) if resumed is None else _of_next(resumed)
        if seams.is_stateful(dataloader):
            if batches and resumed.replicas != replicas and not getattr(dataloader, "state_is_global", False):
                what = f"the state of {type(dataloader).__name__}"
                raise _another_number(resumed.replicas, replicas, what, "says state_is_global = True")
            return self._restored_state(trainer, dataloader)
        if resumed is None or not seams.takes_batches(trainer):
            return dataloader  # a step that fetches batches itself is not counted with
        sampler = _sampler(dataloader)
        if sampler is not None and (batches is None or _cuts_alike(dataloader)):
            self._draw_again(trainer, sampler, dataloader, told, batches)
        elif batches:
            if resumed.replicas != replicas:
                what = f"{type(dataloader).__name__} with {type(getattr(dataloader, 'batch_sampler', None)).__name__}"
                raise _another_number(resumed.replicas, replicas, what, "leaves the division to the strategy, or has a state_dict")
            seams.set_epoch(dataloader, told.get("epoch", trainer.current_epoch))
            if sampler is not None:
                sampler.draw_again(told.get("drawn_from"), 0)
            return Onward(dataloader, batches)
        return dataloader

    def enter_validation(self, trainer: pl.Trainer, dataloader: Any) -> None:
        """As ``enter``, one of validation's: it begins anew, but draws what the straight run's did."""
        if trainer.sanity_checking and self._before_sanity is None:
            self._before_sanity = generators()
        if self._resumed is not None and self._resumed.stays and trainer.validating and getattr(dataloader, "persistent_workers", False):
            _begin(dataloader)

    def _restored_state(self, trainer: pl.Trainer, dataloader: Any) -> Any:
        resumed = self._resumed
        if resumed is not None and resumed.states:
            dataloader.load_state_dict(resumed.states.pop(0))
            if resumed.batches is None or resumed.at_end:
                dataloader = NextEpoch(dataloader, ends=resumed.batches is not None)
        ahead = seams.length(dataloader) is None and seams.takes_batches(trainer)
        return StateOfGiven(dataloader) if ahead else dataloader

    def _draw_again(
        self, trainer: pl.Trainer, sampler: ReplicaSampler, dataloader: DataLoader, told: Mapping[str, Any], batches: int | None
    ) -> None:
        resumed, samples = self._resumed, len(sampler.sampler)
        drawn_from = told.get("drawn_from")
        if told.get("samples", samples) != samples:
            rank_zero_warn(f"the training data had {told['samples']} samples when the checkpoint was saved, and has {samples} now")
            drawn_from = None
        if not batches and drawn_from is None:
            return
        if drawn_from is None and not isinstance(sampler.sampler, SequentialSampler):
            rank_zero_warn(
                "the checkpoint ended in the middle of an epoch, and does not tell how the order of its samples can be drawn again: "
                f"{batches} batches of another order are left out instead"
            )
        if batches is None:
            stay = dataloader.persistent_workers and not trainer.reload_dataloaders_every_n_epochs
            sampler.draw_again(drawn_from, samples if stay else None)
            if stay:  # the iterator of the straight run was there when this epoch began, with no sample left
                _begin(dataloader)
            return
        size = dataloader.batch_size or 1
        before, now = told.get("batch_size", size) * resumed.replicas, sampler.replicas * size
        ahead = told.get("ahead", 0)
        first = min(batches * before + ahead, samples)
        sampler.draw_again(drawn_from, first, ahead)
        if before == now and (resumed.replicas == sampler.replicas or len(resumed.told) > 1):
            return
        if len(resumed.told) > 1:
            raise CheckpointError(
                f"the checkpoint was saved in the middle of an epoch with {before} samples a batch over all replicas, now there are "
                f"{now}: with several training dataloaders choose a batch size with which that stays the same"
            )
        count = len(dataloader) - _batches(samples - first, sampler.replicas, size, drop_last=dataloader.drop_last)
        accumulated = seams.accumulation(trainer)
        if count % accumulated:
            raise CheckpointError(
                f"the checkpoint was saved after {first} samples of an epoch, which are {first / now:g} batches now: "
                f"no multiple of accumulate_grad_batches={accumulated}; choose dp, batch size and accumulation with "
                f"which as many samples as before ({before} in a batch) make an optimizer step"
            )
        sampler.ahead = first - count * now
        seams.set_batches(trainer, count)

    def begin(self, trainer: pl.Trainer) -> None:
        """Training starts: iterators are made."""
        self._loaders = seams.train_loaders(trainer)
        resumed, restored, self._resumed, self._restored = self._resumed, self._restored, None, None
        if resumed is None:
            return
        if resumed.batches and resumed.told and resumed.entered not in (0, len(resumed.told)):
            raise CheckpointError(f"the checkpoint tells of {len(resumed.told)} training dataloaders, but there are {resumed.entered}")
        if resumed.states and resumed.entered:
            raise CheckpointError(
                f"the checkpoint has {len(resumed.states)} more states of training dataloaders than there are with a state"
            )
        trainer.accumulate_grad_batches = seams.accumulation(trainer)  # its scheduler sets it at the start of an epoch only
        seams.set_metrics(trainer, resumed.metrics)
        if resumed.in_epoch_end:
            seams.update_plateaus(trainer)
        elif resumed.partial is not None:
            seams.update_plateaus_later(trainer, resumed.partial)
        if resumed.steps_plateaus:
            seams.update_step_plateaus(trainer, resumed.partial)
        if resumed.batches is None:
            seams.begin_epoch(trainer)
        elif resumed.validates:
            seams.validate_next(trainer)
        elif resumed.validates is False:
            seams.pass_over_validation(trainer)
        if resumed.batches is not None and restored is not None:
            set_generators(restored)
        if resumed.at_end:  # the next iterator is that of the next epoch
            for sampler in filter(None, map(_sampler, self._loaders.flattened)):
                sampler.drop_rest()

    def begin_batch(self, trainer: pl.Trainer, batch_idx: int, buffers: Callable[[], Mapping[str, Tensor]]) -> None:
        """A batch was fetched, and its step comes next; it may change ``buffers``, the persistent ones."""
        self._loaders, self._epoch = seams.train_loaders(trainer), trainer.current_epoch
        if batch_idx % trainer.accumulate_grad_batches == 0:
            copies = {name: buffer.detach().clone(memory_format=torch.contiguous_format) for name, buffer in buffers().items()}
            self._window = _Window(batch_idx, trainer.global_step, generators(), copies)

    # --- in checkpoints

    @contextmanager
    def written(self, checkpoint: dict[str, Any], trainer: pl.Trainer, mesh: Mesh) -> Iterator[None]:
        """Inside the block Lightning's ``checkpoint`` tells the place, and random generators are those that belong to it.

        Its buffers are so for good.
        """
        loops = checkpoint.get("loops", {}).get("fit_loop")
        if loops is None or self._loaders is None or not seams.takes_batches(trainer):
            if self._loaders is None:
                checkpoint[DATA] = self._untouched or {"begun": seams.train_loaders(trainer) is not None}
            with generators_kept() if trainer.sanity_checking else nullcontext():
                if trainer.sanity_checking and self._before_sanity is not None:
                    set_generators(self._before_sanity)
                yield
            return
        dataloaders = self._loaders.flattened
        progress.unbegin(loops)
        given = loops[progress.BATCHES]["current"]["ready"]
        in_batch_end = progress.is_in_batch_end(loops)
        validates = seams.validates(trainer) if in_batch_end else seams.is_validating(trainer)
        back = progress.rewind(loops, trainer.accumulate_grad_batches)
        if back is not None:
            _put_back(loops, dataloaders, given - back)
        checkpoint[DATA] = {
            "replicas": mesh.dp.size,
            "mode": seams.combination(self._loaders),
            "loaders": [_told(dataloader, self._epoch) for dataloader in dataloaders],
            "states": _states(loops, mesh),
            "validates": validates and back is None,
            "metrics": seams.metrics(trainer, complete=progress.is_over(loops)),
            "partial": seams.logged_in_training(trainer),
            "steps_plateaus": back is None and in_batch_end and not validates,
            "stays": seams.validation_stays(trainer),
        }
        with generators_kept() if back is not None else nullcontext():
            if back is not None and back == self._window.first:
                self._window.put_back(checkpoint.get(CURRENT_STATE, checkpoint["state_dict"]))
                if trainer.global_step > self._window.steps:
                    rank_zero_warn(
                        f"the checkpoint is saved within a training step that has stepped an optimizer ({trainer.global_step} steps are "
                        f"done, {self._window.steps} before it): a run that is resumed takes that batch again. Save in on_train_batch_end"
                    )
            yield

    def read(self, checkpoint: dict[str, Any], trainer: pl.Trainer, mesh: Mesh) -> AbstractContextManager:
        """Take the place from a loaded ``checkpoint``, and put into it what Lightning restores: a context for the run.

        Raises:
            CheckpointError: dataloaders' states are those of another number of replicas.
        """
        loops = checkpoint["loops"]["fit_loop"]
        told = checkpoint.get(DATA, {})
        begun = told.get("begun", True)
        self._loaders, self._untouched = None, told if begun else None
        by_steps = trainer.max_steps != -1
        if by_steps and checkpoint.get("global_step", 0) >= trainer.max_steps:
            return nullcontext()  # nothing is left to train
        validates = told.get("validates") and trainer.enable_validation
        in_epoch_end = progress.is_in_epoch_end(loops)
        progress.reopen(loops, by_steps=by_steps, validates=bool(validates))
        batches = progress.batches_given(loops) if begun else None
        replicas = told.get("replicas", mesh.dp.size)
        states = loops.get("state_dict", {}).pop("combined_loader", [])  # Lightning restores them in the middle of an epoch only
        if by_replica := told.get("states"):
            if replicas != mesh.dp.size and batches:
                raise _another_number(replicas, mesh.dp.size, "the state of its dataloaders, which replicas do not share", "carries none")
            states = by_replica[mesh.dp.index % replicas]
        mode, at_end = told.get("mode", "max_size_cycle"), progress.is_at_end(loops)
        self._resumed = _Resumed(
            batches=batches,
            replicas=replicas,
            mode=mode,
            told=told.get("loaders", []),
            states=[*states],
            at_end=at_end,
            validates=validates,
            in_epoch_end=in_epoch_end,
            metrics=told.get("metrics", {}),
            partial=told.get("partial"),
            steps_plateaus=told.get("steps_plateaus", False),
            stays=told.get("stays", False),
        )
        self._restored = None
        seams.set_up_again(trainer)
        return seams.no_word_of_lost_places() if DATA in checkpoint else nullcontext()


def _begin(dataloader: DataLoader) -> None:
    """Let workers that stay be there: a dataloader draws a number when they begin."""
    with generators_kept():
        iter(dataloader)


def _of_next(resumed: _Resumed) -> tuple[dict[str, Any], int | None]:
    """What is told of the next dataloader, and how many batches of the epoch at hand it gave."""
    told = resumed.told[resumed.entered] if resumed.entered < len(resumed.told) else {}
    resumed.entered += 1
    return told, None if resumed.batches is None else _given(resumed.batches, told.get("length"), resumed.mode)


def _given(batches: int, length: int | None, mode: str) -> int:
    """By one of several dataloaders of which ``batches`` were taken together; ``length``: how many it has."""
    if not length or not batches or mode == "min_size":
        return batches
    return (batches - 1) % length + 1 if mode == "max_size_cycle" else min(batches, length)


def _sampler(dataloader: Any) -> ReplicaSampler | None:
    sampler = seams.order_of(dataloader) if isinstance(dataloader, DataLoader) else None
    return sampler if isinstance(sampler, ReplicaSampler) else None


def _cuts_alike(dataloader: DataLoader) -> bool:
    """Every batch is as many places of the order, one after the other."""
    return dataloader.batch_sampler is None or type(dataloader.batch_sampler) is BatchSampler


def _batches(samples: int, replicas: int, size: int, *, drop_last: bool) -> int:
    local = -(-samples // replicas)
    return local // size if drop_last else -(-local // size)


def _told(dataloader: Any, epoch: int) -> dict[str, Any]:
    told: dict[str, Any] = {"epoch": epoch, "length": seams.length(dataloader)}
    if (sampler := _sampler(dataloader)) is not None:
        told |= {"samples": len(sampler.sampler), "drawn_from": sampler.drawn_from, "ahead": sampler.ahead}
        if _cuts_alike(dataloader):
            told["batch_size"] = dataloader.batch_size or 1
    return told


def _put_back(loops: Mapping[str, Any], dataloaders: Sequence[Any], batches: int) -> None:
    """Tell the states of dataloaders that have their own as they were ``batches`` ago, where they can."""
    for place, dataloader in enumerate(filter(seams.is_stateful, dataloaders)):
        if hasattr(dataloader, "state_before"):
            loops["state_dict"]["combined_loader"][place] = dataloader.state_before(batches)
        else:
            rank_zero_warn(
                f"the checkpoint is saved between two optimizer steps, and {type(dataloader).__name__} tells its own state: {batches} "
                "batches whose gradients wait for the next step will be missing in it. Save after a step, or give the dataloader "
                "state_before(batches), its state so many batches ago"
            )


def _states(loops: Mapping[str, Any], mesh: Mesh) -> Sequence[Any] | None:
    """The states of dataloaders by replica, if replicas differ."""
    mine = loops["state_dict"].get("combined_loader")
    if mine is None:
        return None
    by_replica = dict(mesh.world.gather_objects((mesh.dp.index, plain(mine, []))))
    states = [by_replica[replica] for replica in range(mesh.dp.size)]
    return states if len({pickle.dumps(state) for state in states}) > 1 else None


def _another_number(before: int, now: int, what: str, fix: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint was saved in the middle of an epoch with dp={before}, and with dp={now} it cannot be told which samples come next "
        f"of {what}: resume with dp={before}, or from the end of an epoch, or with a dataloader that {fix}"
    )
