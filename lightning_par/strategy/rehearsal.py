"""Run the user's step before the module is cut, on a batch of the run's data, to see what the cut should know.

Note [A step nobody saw]
~~~~~~~~~~~~~~~~~~~~~~~~
Which modules come before a pipeline's layers and which after, and what each layer costs, shows itself when the step runs. So it runs a
few times too many, before anything is cut: on the meta device, which computes nothing, and, for ``balance=profile``, on the first piece of
a real batch. A module is cut once, for all that its Trainer will do: on the meta device training_step and validation_step run both,
whichever comes first, if need be on the other's batches. Afterwards everything is as it was: random generators, buffers, modes, counters
and metrics of the module; nothing is logged, no gradient comes to be. The dataloaders are those of a hook called once too often
(Lightning's own call comes after ``on_fit_start`` and after a checkpoint was loaded, and must not be forestalled); what is read are their
first samples, past any sampler. Ranks may see different times, and different data: what rank 0 saw, or the median of all, is what all go
by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, contextmanager
from functools import partial, reduce
from itertools import islice
from operator import or_
from types import ModuleType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.comm import Mesh
from lightning_par.pipeline import LayerCosts, NumbersError, PipelineError, Uses, aside, dry_run, find_layers, unchanged, weigh
from lightning_par.strategy import seams
from lightning_par.strategy.steps import Step, StepRunner

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class NoSampleError(ValueError):
    """There is no batch to try; the message says why."""


class Rehearsal:
    """See Note [A step nobody saw]. All ranks call its methods, before the module is cut for a pipeline.

    Args:
        context: makes the context in which the step runs (autocast, default dtype).
    """

    def __init__(self, module: pl.LightningModule, mesh: Mesh, device: torch.device, context: Callable[[], AbstractContextManager]) -> None:
        self._module, self._mesh, self._device, self._context = module, mesh, device, context
        self._fn: TrainerFn = module.trainer.state.fn
        self._trains = self._fn == TrainerFn.FITTING
        self._step = getattr(module, STEPS[self._fn])
        self._batches: dict[TrainerFn, tuple[Any, int] | Exception] = {}

    def uses(self) -> Uses:
        """Where modules are used, as far as steps can run without numbers, and there are batches to try."""
        seen: list[Uses] = []
        fit, deciding = (TrainerFn.FITTING, TrainerFn.VALIDATING), ""
        with self._unseen():
            failure = self._tried(self._fn, (self._fn,), seen)
            for other in fit:
                if other != self._fn and is_overridden(STEPS[other], self._module):
                    failed = self._tried(other, (self._fn, other) if self._fn in fit else (self._fn,), seen)
                    deciding = deciding if failed else STEPS[other]
        if failure is not None:
            order = f"{deciding} uses them" if deciding else "they are registered"
            rank_zero_warn(
                f"{STEPS[self._fn]} could not be run dry ({type(failure).__name__}: {failure}), so nobody has seen which modules it uses "
                f"where. They stand before or after the pipeline's layers as {order}, or as "
                "pipeline_before and pipeline_after of the model say. Compare the first losses with those of pp=1"
            )
        return self._mesh.world.broadcast_object(reduce(or_, seen))

    def _tried(self, fn: TrainerFn, sources: tuple[TrainerFn, ...], seen: list[Uses]) -> BaseException | None:
        """Try a step on one source of data after the other until it runs, and add to what was seen. Why it did not run on the first."""
        failures: list[BaseException] = []
        for source in sources:
            try:
                seen.append(self._seen(fn, source))
            except Exception as error:  # whatever it is, the run itself will meet it
                if isinstance(error, NumbersError):
                    seen.append(error.uses)
                failures.append(error.__cause__ or error if isinstance(error, NumbersError) else error)
            else:
                return None
        seen.append(Uses(unseen=frozenset({STEPS[fn]})))
        return failures[0]

    def _seen(self, fn: TrainerFn, source: TrainerFn) -> Uses:
        """What the step of one kind of run does, on the data of another."""
        step, args, options = self._arguments(fn, source)
        return dry_run(self._module, find_layers(self._module), lambda args: self._graphs(fn, step, args, options), args)

    def costs(self) -> LayerCosts:
        """What layers cost, by measured time.

        Raises:
            PipelineError: there is no batch to try, or the step did not run all layers.
        """
        try:
            with self._unseen():
                _, args, options = self._arguments(self._fn, self._fn)
                measured = weigh(self._module, find_layers(self._module), lambda: self._loss(args, options), self._device)
        except NoSampleError as error:
            raise PipelineError(f"balance=profile tries the step on a batch, but {error}; {_OTHERWISE}") from None
        except Exception as error:
            error.add_note(f"this came up as balance=profile tried the step to weigh the layers; {_OTHERWISE}")
            raise
        return LayerCosts.agreed(self._mesh.world.gather_objects(measured))

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        trainer = self._module.trainer
        loggers, trainer.loggers = trainer.loggers, [DummyLogger() for _ in trainer.loggers]
        data, states = vars(trainer.datamodule) if trainer.datamodule is not None else {}, isolate_rng()
        attributes, stops = dict(data), trainer.should_stop
        self._batches.clear()  # what hooks leave behind goes with them
        states.__enter__()
        try:
            with aside(self._module):
                yield
        finally:
            states.__exit__(None, None, None)  # also where the step has failed
            data.clear()
            data.update(attributes)
            trainer.loggers, trainer.should_stop = loggers, stops

    def _arguments(self, fn: TrainerFn, source: TrainerFn) -> tuple[Step, tuple[Any, ...], dict[str, int]]:
        """A step, and its arguments as Lightning gives them for the first batch."""
        step = getattr(self._module, STEPS[fn])
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise NoSampleError(f"{step.__name__} fetches its batches itself")
        batch, loaders = self._batch(source)
        index = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        return step, (batch, *index), {"dataloader_idx": 0} if loaders > 1 and fn != TrainerFn.FITTING else {}

    def _batch(self, source: TrainerFn) -> tuple[Any, int]:
        """A batch that a kind of run would read, and how many dataloaders it reads in turn. Fetched once, or fails once."""
        if source not in self._batches:
            try:
                self._batches[source] = self._fetched(source)
            except Exception as error:
                self._batches[source] = error
        batch = self._batches[source]
        if isinstance(batch, Exception):
            raise batch
        return batch

    def _fetched(self, source: TrainerFn) -> tuple[Any, int]:
        state = self._module.trainer.state
        state.fn, now = source, state.fn
        try:
            data = seams.dataloaders(self._module.trainer)
        finally:
            state.fn = now
        in_turn = source != TrainerFn.FITTING and isinstance(data, list | tuple)
        return seams.transferred(sample(data[0] if in_turn else data), self._module), len(data) if in_turn else 1

    def _loss(self, args: tuple[Any, ...], options: dict[str, int]) -> Tensor | None:
        """Of the step on the first piece of a batch; None in evaluation, which has no backward."""
        if self._trains:
            return self._runner.loss_of(self._runner.rehearse(self._step, self._context, args, options))
        self._module.eval()
        with torch.no_grad():
            self._runner.rehearse(self._step, self._context, args, options)
        return None

    def _graphs(self, fn: TrainerFn, step: Step, args: tuple[Any, ...], options: dict[str, int]) -> Any:
        """What a step returned and logged: all that may have a graph."""
        if fn != TrainerFn.FITTING:
            self._module.eval()
        logged: list[Any] = []
        self._module.__dict__["log"] = lambda name, value, *_, **__: logged.append(value)
        try:
            with self._context(), torch.enable_grad():
                return step(*args, **options), logged
        finally:
            del self._module.__dict__["log"]

    @property
    def _runner(self) -> StepRunner:
        return StepRunner(self._module, self._mesh, None, self._device)


_OTHERWISE = "balance by parameters, by flops or by hand, as in balance=(3, 4)"


def sample(data: Any) -> Any:
    """A first batch of what a Trainer was given, from the first samples of its data, whatever its samplers say.

    Raises:
        NoSampleError: there is none, or it could not be read a second time.
    """
    if isinstance(data, Mapping):
        return {key: sample(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [sample(value) for value in data]
    if isinstance(data, DataLoader):
        return _first_batch(data)
    if data is None or isinstance(data, CombinedLoader):
        raise NoSampleError("the data is a CombinedLoader" if data is not None else "there is no dataloader")
    for batch in _again_and_again(data):
        return batch
    raise NoSampleError(f"the {type(data).__name__} is empty")


def _first_batch(loader: DataLoader) -> Any:
    """A batch of the first samples; the dataset and the collate function are as before, so that the run draws what it would have drawn."""
    with unchanged(_parts(loader.dataset, loader.collate_fn)):
        return _collated(loader)


def _parts(*things: Any) -> Iterator[Any]:
    """These objects, and those that stand behind them: of subsets and concatenations, methods and partial functions."""
    todo, seen = list(things), set[int]()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | ModuleType):
            continue
        seen.add(id(thing))
        yield thing
        if isinstance(thing, partial):
            todo += [thing.func, *thing.args, *thing.keywords.values()]
        else:
            several = getattr(thing, "datasets", None)
            todo += [getattr(thing, name, None) for name in ("dataset", "__self__")]
            todo += several if isinstance(several, list | tuple) else []


def _collated(loader: DataLoader) -> Any:
    size = 1 if loader.batch_sampler is None else loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        raise NoSampleError(f"the {type(loader.batch_sampler).__name__} of the dataloader does not tell its batch_size")
    if isinstance(loader.dataset, IterableDataset):
        samples = list(islice(_again_and_again(loader.dataset), size))
    else:
        places = list(range(min(size, len(loader.dataset)) if isinstance(loader.dataset, Sized) else size))
        several = getattr(loader.dataset, "__getitems__", None)
        samples = several(places) if several is not None else [loader.dataset[place] for place in places]
    if not samples:
        raise NoSampleError("the dataset is empty")
    return loader.collate_fn(samples if loader.batch_sampler is not None else samples[0])


def _again_and_again(data: Any) -> Iterator[Any]:
    iterator = iter(data)
    if iterator is data:
        raise NoSampleError(f"the {type(data).__name__} can be read only once")
    return iterator
