"""Saving and loading, as one rank does its part of it.

Note [Saving while training goes on]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With ``async_save``, a save returns when the rank's shards are copied to host memory; a thread writes the copies, see ``Background`` in
``checkpoint.savers``. The folder gets its name when all ranks have written, as always. Whoever saves next, reads a checkpoint, ends the fit
or is thrown out of it, waits for what is under way first. An error is raised on every rank by the next save, or at the end of the fit.

ModelCheckpoint knows nothing of this. So it asks for a name that is being written, and hears that it is taken (``foreseen``); it deletes
the last checkpoint as soon as it has saved the next, and the deletion waits until that one is complete. Outside of training, where nobody
would wait for them, saves are complete when they return.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.checkpoint import (
    AVERAGING_STATE,
    CURRENT,
    CURRENT_STATE,
    EXTRA_STATES,
    MODEL,
    MODULE,
    OPTIMIZERS,
    CheckpointError,
    Shard,
    Source,
    collect,
    is_extra,
    open_checkpoint,
    plain,
)
from lightning_par.checkpoint.files import NO_URL
from lightning_par.checkpoint.native import describe
from lightning_par.checkpoint.savers import Background, Saver
from lightning_par.comm import Group, Meeting, Mesh
from lightning_par.strategy import state
from lightning_par.strategy.assemble import Assembled
from lightning_par.zero import DataParallel, full_parameters

PATIENCE = timedelta(minutes=5)
"""How long a rank that saves a checkpoint waits for the others to do so, unless the strategy's timeout is shorter."""
PATIENCE_AFTER_EXCEPTION = timedelta(seconds=3)
"""The same for a rank that was thrown out of its run: the others may be in the middle of a step."""
T = TypeVar("T")


class Attendance:
    """Whether all ranks come where they must meet. All of them make it together.

    Attributes:
        is_alone: this rank was thrown out of its run, and the others do not come any more.
    """

    def __init__(self, world: Group) -> None:
        self._meeting, self._patience = Meeting(world), min(PATIENCE, world.timeout or PATIENCE)
        self.is_alone = False

    def all_come_to_save(self, filepath: str | os.PathLike[str], *, interrupted: bool) -> bool:
        """Whether a save can begin. A rank that was thrown out of its run alone goes on without, for its exception to be seen.

        Raises:
            CheckpointError: other ranks do not save, and no exception is the reason.
        """
        missing = [] if self.is_alone else self._meeting.missing(PATIENCE_AFTER_EXCEPTION if interrupted else self._patience)
        self.is_alone |= bool(missing)
        if missing and not interrupted:
            raise CheckpointError(
                f"{filepath} is not saved: ranks {missing} have not come within {self._patience}. Each rank writes its own part, so "
                "trainer.save_checkpoint must be called on all ranks"
            )
        if self.is_alone:
            warnings.warn(f"{filepath} is not saved: an exception has ended the run on this rank, and not on all", stacklevel=4)
        return not self.is_alone


def settle(saver: Saver, *, interrupted: bool) -> None:
    """Wait for what is under way. Where an exception has ended the run, that is what must be seen: a failed save is a warning then."""
    try:
        saver.wait()
    except CheckpointError as error:
        if not interrupted:
            raise
        warnings.warn(f"{error}", stacklevel=3)


@contextmanager
def foreseen(trainer: pl.Trainer, saver: Background) -> Iterator[None]:
    """ModelCheckpoint looks for names that are taken on rank 0, as they will be when all that is under way is done."""

    def exists(filepath: str | os.PathLike[str], trainer: pl.Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(trainer.is_global_zero and saver.will_exist(filepath), all=False)

    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    for callback in callbacks:
        callback.file_exists = exists
    try:
        yield
    finally:
        for callback in callbacks:
            del callback.file_exists


def saving_violations(trainer: pl.Trainer, *, async_save: bool) -> list[str]:
    """What of the callbacks does not go with how we save."""
    folders = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
    found = [f"{folder} of a checkpoint callback: {NO_URL}" for folder in folders if folder is not None and "://" in os.fspath(folder)]
    return found + (_link_violations(trainer) if async_save else [])


def _link_violations(trainer: pl.Trainer) -> list[str]:
    links = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "save_last", None) == "link"]
    if not links:
        return []
    return [
        "async_save=True with ModelCheckpoint(save_last='link'): the link would take the place of the last one while the checkpoint it "
        "points to is still being written; use save_last=True, or async_save=False"
    ]


@dataclass(frozen=True)
class Holdings:
    """What this rank holds of a run: its part of the module, and of the optimizers' state. All ranks call each method together.

    Attributes:
        orders: the parameters of this rank that each optimizer was given.
    """

    part: Assembled
    data_parallel: DataParallel | None
    optimizers: Sequence[Optimizer]
    orders: state.Orders
    device: torch.device

    @property
    def mesh(self) -> Mesh:
        return self.part.mesh

    def module_shards(self) -> dict[str, Shard]:
        return state.module_shards(self.part, self.data_parallel)

    def full_state_dict(self) -> dict[str, Tensor] | None:
        """The whole module's parameters and buffers on CPU, under its original names, on rank 0; None elsewhere."""
        shards = state.with_one_writer(self.module_shards(), self.part, self._tell())
        whole = collect(shards, self.mesh.world, self.device)
        return None if whole is None else {name: whole[first] for name, first in self.part.aliases.items() if first in whole}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's shards of the state of ``optimizer``, and the part of it that is no tensor."""
        assert self.data_parallel is not None
        index = self.optimizers.index(optimizer)
        return {
            "shards": state.optimizer_shards(optimizer, index, self.data_parallel, self.mesh),
            "meta": state.optimizer_meta(optimizer, self.data_parallel),
        }

    def save(self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], saver: Saver) -> None:
        """Have Lightning's ``checkpoint`` written as a sharded folder. See Note [A complete folder] in ``checkpoint.native``."""
        if self.data_parallel is not None:
            self.data_parallel.require_alike()
        optimizers = checkpoint.pop(OPTIMIZERS, [])
        metas = [optimizer["meta"] for optimizer in optimizers]
        mine, error = _tried(lambda: (self._weights(checkpoint), self._told(metas, extras=True)))
        # all in one exchange, since a step waits for it
        told = self.mesh.world.gather_objects((None if mine is None else mine[1], None if error is None else describe(error)))
        _raise(f"{filepath} is not saved", [fault for _, fault in told], error)
        weights, everyone = mine[0], [rank for rank, _ in told]
        tensors = {
            f"{kind}.{name}": shard
            for kind, shards in weights.items()
            for name, shard in state.with_one_writer(shards, self.part, everyone).items()
        }
        for optimizer in optimizers:
            tensors |= optimizer["shards"]
        tensors |= state.rng_shards(self.mesh.rank)
        order, _ = self._whole_orders(everyone)
        by_optimizer = zip(*(told.optimizers for told in everyone), strict=True)
        merged = [state.merge_optimizer_meta(ranks, order[index]) for index, ranks in enumerate(by_optimizer)]
        extras = {key: value for told in reversed(everyone) for key, value in told.extras.items()}  # of equal parts the first rank tells
        untold = [f"{MODEL}.{key} (neither parameter nor buffer, nor of get_extra_state)" for key in self.part.untold]
        dropped = [*dict.fromkeys([*untold, *(path for told in everyone for path in told.dropped)])]
        module = state.module_meta(self.part, everyone) | ({EXTRA_STATES: extras} if extras else {})
        meta = plain(checkpoint | {OPTIMIZERS: merged, MODULE: module}, dropped)
        if dropped:
            rank_zero_warn(
                f"not saved in {filepath}: {', '.join(dropped)}. Checkpoints hold parameters, buffers that were there at the start, and "
                "plain data: numbers, strings, tensors, and dicts, lists, tuples and sets of them"
            )
        meta["layout"] = self._layout()
        saver.save(filepath, tensors, meta)

    def _weights(self, checkpoint: dict[str, Any]) -> dict[str, dict[str, Shard]]:
        """Take this rank's weights out of ``checkpoint``: of averages, which each rank has whole, rank 0 writes all."""
        weights, aliases = checkpoint.pop("state_dict"), self.part.aliases
        if CURRENT_STATE not in checkpoint:
            return {MODEL: _shards(weights)}
        current = _shards(checkpoint.pop(CURRENT_STATE))
        ours = {key: value for key, value in weights.items() if not (is_extra(key) or key in self.part.untold)}
        if strange := {name: value for name, value in ours.items() if name not in aliases or not isinstance(value, Tensor)}:
            raise _strange(strange)
        averages = {aliases[key]: Shard.whole(value, writes=self.mesh.rank == 0) for key, value in ours.items()}
        return {MODEL: averages, CURRENT: current}

    def load(self, filepath: str | os.PathLike[str]) -> dict[str, Any]:
        """The plain part of a checkpoint of any format; ``load_model`` and ``load_optimizers`` read its tensors.

        Its ``state_dict`` shows weights on the meta device, and if they are averages, ``CURRENT_STATE`` those that are trained. What hooks
        leave there, under whatever names, and their own tensors, is loaded.

        Raises:
            CheckpointError: on every rank, if any does not see a complete checkpoint.
        """

        def read() -> Source:
            source = state.by_keys(open_checkpoint(filepath), self.part)
            source.check(index=self.mesh.rank, ranks=self.mesh.world.size)
            return source

        source = self._everywhere(f"ckpt_path={str(filepath)!r}", read)
        if len(set(self.mesh.world.gather_objects(source.mark))) > 1:
            raise CheckpointError(f"checkpoint {filepath} was replaced by another while it was read: read it again")
        if source.is_numbered and self.orders:
            everyone = self._tell()
            order, certain = self._whole_orders(everyone)
            if not certain:
                raise CheckpointError(
                    f"{filepath} numbers the parameters of its optimizer, but the order that configure_optimizers gives them in cannot be "
                    f"told from the stages of a pipeline: load it once with pp=1 instead of pp={self.mesh.layout.pp}, and save it"
                )
            frozen = state.module_meta(self.part, everyone)["frozen"]
            source = source.named([[name for group in groups for name in group] for groups in order], frozen)
        source = state.in_module(source, self.part)
        seen = {entry: source.entries[entry].like() for entry in [*source.weights, *source.current]}
        extras = source.meta.get(MODULE, {}).get(EXTRA_STATES, {})
        kinds = {"state_dict": MODEL} | ({CURRENT_STATE: CURRENT} if source.current else {})
        shown = {
            key: {entry.removeprefix(f"{kind}."): weight for entry, weight in seen.items() if entry.startswith(f"{kind}.")} | extras
            for key, kind in kinds.items()
        }
        return shown | source.meta | {_SOURCE: source, _SEEN: seen}

    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Fill this rank's parameters and buffers from what ``load`` returned.

        Raises:
            CheckpointError: a tensor has another shape; with ``strict``, also if one is missing, or the model has no place for it.
        """
        self._load_weights(_chosen(checkpoint, "state_dict"), strict=strict)

    def load_averages(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """For callbacks that keep averages, after ``load_model``: put whole values into ``checkpoint``, of what was loaded.

        If these are averages, also of the weights that are trained, which are loaded then.
        """
        told = cast("dict[str, Any]", checkpoint)
        told["state_dict"] = self._values()
        if CURRENT_STATE in told and AVERAGING_STATE in told:
            self._load_weights(_chosen(told, CURRENT_STATE), CURRENT_STATE, strict=strict)
            told[CURRENT_STATE] = self._values()

    def _values(self) -> dict[str, Any]:
        """The state dict of the module, which is whole on every rank, on CPU."""
        with full_parameters(self.part.module):
            found = self.part.module.state_dict()
            return {
                key: value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
                for key, value in found.items()
            }

    def _load_weights(self, source: Source, key: str = "state_dict", *, strict: bool) -> None:
        what = f"{f'{key} of ' * (key != 'state_dict')}checkpoint {source.path}"
        spared = {f"{MODEL}.{name}" for name in self.part.left_out if strict} - source.entries.keys()
        shards = {name: shard for first, shard in self.module_shards().items() if (name := self._stored(source, first)) not in spared}
        extras = {f"{MODEL}.{key}": value for key, value in source.meta.get(MODULE, {}).get(EXTRA_STATES, {}).items()}
        places = {f"{MODEL}.{key}": module for key, module in state.extra_places(self.part).items()}
        ours = dict.fromkeys(name for names in self.mesh.world.gather_objects([*shards, *places]) for name in names)
        known = ours.keys() | {f"{MODEL}.{alias}" for alias in self.part.aliases}
        stored = source.entries.keys() | extras.keys()
        unexpected = [name for name in [*source.weights, *extras] if name not in known]
        if unexpected and strict:
            raise CheckpointError(f"{what} holds weights that the model has not: {', '.join(unexpected)}")
        if not strict:
            missing = [name for name in ours if name not in stored]
            if missing or unexpected:
                rank_zero_warn(
                    f"{what} was not loaded whole, as strict_loading=False allows. Not in it, and left as they are: "
                    f"{', '.join(missing) or 'nothing'}. In it, but not in the model: {', '.join(unexpected) or 'nothing'}"
                )
            shards = {name: shard for name, shard in shards.items() if name in source.entries}
        elif untold := [name for name in ours if is_extra(name) and name not in stored]:
            rank_zero_warn(f"{what} has no {', '.join(untold)}: what get_extra_state returns there is left as it is")
        if spared:
            rank_zero_warn(f"{what} has no {', '.join(sorted(spared))}, and the module's state_dict has not either: left as it is")

        def fill() -> None:
            source.fill(shards)
            state.spread_buffers(self.part)
            for name in places.keys() & extras.keys():
                places[name].set_extra_state(extras[name])

        self._everywhere(f"the model from {source.path}", fill)
        if self.data_parallel is not None:
            self.data_parallel.loaded()
            self.data_parallel.settle_values()  # after a fit nobody else would wait for them

    def _everywhere(self, what: str, action: Callable[[], T]) -> T:
        """What ``action``, which talks to no other rank, returns; if it fails on one, all raise what was to be loaded and why it is not."""
        result, error = _tried(action)
        faults = self.mesh.world.gather_objects(None if error is None else describe(error))
        _raise(f"{what} cannot be loaded", faults, error, "Each rank reads its own part, so it must lie on storage that every rank reaches")
        return cast("T", result)

    def _stored(self, source: Source, name: str) -> str:
        """The entry of one of our parameters or buffers: a checkpoint may have another of its names, if it is tied."""
        aliases = [name, *(alias for alias, first in self.part.aliases.items() if first == name)]
        return next((entry for alias in aliases if (entry := f"{MODEL}.{alias}") in source.entries), f"{MODEL}.{name}")

    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the state of this rank's optimizers, and set its random generators, from what ``load`` returned.

        Raises:
            CheckpointError: the checkpoint holds another number of optimizers, or lacks a part of the state of a parameter.
        """
        assert self.data_parallel is not None
        source, metas = checkpoint[_SOURCE].trained(), checkpoint[OPTIMIZERS]
        if not source.is_of_a_run:
            return  # weights that training begins with
        if len(metas) != len(self.optimizers):
            raise CheckpointError(
                f"checkpoint {source.path} holds {len(metas)} optimizers, but configure_optimizers made {len(self.optimizers)}. "
                f"{state.ANEW}"
            )
        state.require_states(source)
        self._everywhere(f"the state of optimizers from {source.path}", lambda: self._fill_optimizers(source, metas))
        self.restore_rng(checkpoint)

    def _fill_optimizers(self, source: Source, metas: Sequence[Mapping[str, Any]]) -> None:
        assert self.data_parallel is not None
        stored = {name: (torch.Size(entry.shape), entry.dtype) for name, entry in source.entries.items()}
        for index, (optimizer, meta) in enumerate(zip(self.optimizers, metas, strict=True)):
            tensors, unused = state.lacking(source, index, meta)
            if tensors:
                raise CheckpointError(f"checkpoint {source.path} lacks {', '.join(tensors)}")
            if unused:
                rank_zero_warn(f"checkpoint {source.path} has no state of optimizer {index} for {', '.join(unused)}: it begins anew")
            source.fill(state.empty_optimizer_state(optimizer, index, self.data_parallel, stored))
            state.apply_optimizer_meta(optimizer, meta, self.data_parallel)

    def restore_rng(self, checkpoint: Mapping[str, Any]) -> None:
        """Set this rank's random generators: under another layout, to those of a rank that there was."""
        source: Source = checkpoint[_SOURCE]
        saved, now = source.meta.get("layout"), self._layout()
        rank = self.mesh.rank % (saved or now)["world"]
        shards = state.rng_shards(rank)
        told = {name: shard for name, shard in shards.items() if saved is not None and name in source.entries}
        self._everywhere(f"the states of random generators from {source.path}", lambda: source.fill(told))
        state.restore_rng(shards, rank)  # those that are not told as they are
        if untold := [name.rpartition(".")[2] for name in shards if name not in told]:
            rank_zero_warn(
                f"checkpoint {source.path} does not tell the states of random generators {', '.join(untold)}: they start from the seed "
                "again"
            )
        if saved is not None and saved != now:
            state.share_rng(self.mesh)
            rank_zero_warn(
                f"checkpoint {source.path} was written under another layout ({saved}): random numbers are not those of a run that kept it"
            )

    def _tell(self) -> list[state.Told]:
        """Of every rank."""
        return self.mesh.world.gather_objects(self._told([], extras=False))

    def _told(self, optimizers: list[dict[str, Any]], *, extras: bool) -> state.Told:
        return state.Told.of(self.part, self.orders, optimizers, extras=extras)

    def _whole_orders(self, everyone: Sequence[state.Told]) -> tuple[state.Orders, bool]:
        return state.merge_orders([told.orders for told in everyone], self.part.order)

    def _layout(self) -> dict[str, Any]:
        return vars(self.mesh.layout) | {"world": self.mesh.world.size}


def _shards(weights: Mapping[str, Any]) -> dict[str, Shard]:
    """What ``on_save_checkpoint`` has left of ``module_shards``, if it has put in nothing else."""
    if strange := {name: value for name, value in weights.items() if not isinstance(value, Shard)}:
        raise _strange(strange)
    return dict(weights)


def _strange(values: Mapping[str, Any]) -> CheckpointError:
    told = ", ".join(f"{name} ({type(value).__name__})" for name, value in values.items())
    return CheckpointError(
        f"on_save_checkpoint has put {told} into checkpoint['state_dict'], where this rank's shards of the weights are. "
        "They can be left out there; put tensors of your own under a key of your own: checkpoint['ema'] = ..."
    )


def _tried(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        return None, error


def _raise(what: str, faults: Sequence[str | None], error: Exception | None, hint: str = "") -> None:
    """Raise what ranks have found, by rank, if any has found something; ``error`` is this rank's own."""
    ranks: dict[str, list[int]] = {}
    for rank, fault in enumerate(faults):
        if fault is not None:
            ranks.setdefault(fault, []).append(rank)
    if not ranks:
        return
    told = "; ".join(f"as ranks {found} see it: {text}" for text, found in ranks.items()) + (f". {hint}" if hint else "")
    raise CheckpointError(f"{what}: {next(iter(ranks)) if None not in faults and len(ranks) == 1 else told}") from error


_SOURCE, _SEEN = "lightning_par_source", "lightning_par_seen"


def _chosen(checkpoint: Mapping[str, Any], key: str) -> Source:
    """The checkpoint with the weights that hooks have left in it under ``key``."""
    source: Source = checkpoint[_SOURCE]
    entries = {id(weight): entry for entry, weight in checkpoint[_SEEN].items()}
    left = {name: weight for name, weight in checkpoint[key].items() if not is_extra(name)}
    weights = {name: entries.get(id(weight), weight) for name, weight in left.items()}
    if unknown := [
        name for name, weight in weights.items() if not isinstance(weight, str) and (not isinstance(weight, Tensor) or weight.is_meta)
    ]:
        raise CheckpointError(
            f"on_load_checkpoint has put {', '.join(unknown)} into the {key} of {source.path}, computed from weights: those are read "
            "afterwards, each rank its part. There they can be left out, renamed, and replaced by tensors with values"
        )
    extras = {name: value for name, value in checkpoint[key].items() if is_extra(name)}
    module = source.meta.get(MODULE, {}) | {EXTRA_STATES: extras}
    return replace(source.with_weights(weights), meta=source.meta | {MODULE: module})
