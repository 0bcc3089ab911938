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
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.comm import Mesh
from lightning_par.pipeline import LayerCosts, NumbersError, PipelineError, Uses, aside, dry_run, find_layers, weigh
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

    def uses(self) -> Uses | None:
        """Where modules are used; None where no step can run without numbers, or there is no batch to try."""
        seen: list[Uses] = []
        try:
            seen.append(self._seen(self._fn, self._fn))
        except Exception as error:  # whatever it is, the run itself will meet it
            if isinstance(error, NumbersError):
                seen.append(error.uses)
                error = error.__cause__
            rank_zero_info(
                f"the step could not be run dry ({type(error).__name__}: {error}), so modules stand before or after the pipeline's "
                "layers as they are registered, or as pipeline_before and pipeline_after of the model say"
            )
        fit = (TrainerFn.FITTING, TrainerFn.VALIDATING)
        for other in fit:
            if other != self._fn and is_overridden(STEPS[other], self._module):
                for source in (self._fn, other) if self._fn in fit else (self._fn,):
                    with suppress(Exception):
                        seen.append(self._seen(other, source))
                        break
        return self._mesh.world.broadcast_object(reduce(or_, seen) if seen else None)

    def _seen(self, fn: TrainerFn, source: TrainerFn) -> Uses:
        """What the step of one kind of run does, on the data of another."""
        with self._unseen():
            step, args, options = self._arguments(fn, source)
            if fn != TrainerFn.FITTING:
                self._module.eval()
            return dry_run(self._module, find_layers(self._module), lambda args: self._graphs(step, args, options), args)

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
        should_stop = trainer.should_stop
        data, states = vars(trainer.datamodule) if trainer.datamodule is not None else {}, isolate_rng()
        attributes = dict(data)
        states.__enter__()
        try:
            with aside(self._module):
                yield
        finally:
            states.__exit__(None, None, None)  # also where the step has failed
            data.clear()
            data.update(attributes)
            trainer.loggers, trainer.should_stop = loggers, should_stop

    def _arguments(self, fn: TrainerFn, source: TrainerFn) -> tuple[Step, tuple[Any, ...], dict[str, int]]:
        """A step, and its arguments as Lightning gives them for the first batch."""
        step, state = getattr(self._module, STEPS[fn]), self._module.trainer.state
        if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
            raise NoSampleError(f"{step.__name__} fetches its batches itself")
        state.fn, now = source, state.fn
        try:
            data = seams.dataloaders(self._module.trainer)
        finally:
            state.fn = now
        in_turn = source != TrainerFn.FITTING and isinstance(data, list | tuple)
        batch = seams.transferred(sample(data[0] if in_turn else data), self._module)
        index = (0,) if is_param_in_hook_signature(step, "batch_idx", min_args=2) else ()
        return step, (batch, *index), {"dataloader_idx": 0} if in_turn and len(data) > 1 and fn != TrainerFn.FITTING else {}

    def _loss(self, args: tuple[Any, ...], options: dict[str, int]) -> Tensor | None:
        """Of the step on the first piece of a batch; None in evaluation, which has no backward."""
        if self._trains:
            return self._runner.loss_of(self._runner.rehearse(self._step, self._context, args, options))
        self._module.eval()
        with torch.no_grad():
            self._runner.rehearse(self._step, self._context, args, options)
        return None

    def _graphs(self, step: Step, args: tuple[Any, ...], options: dict[str, int]) -> Any:
        """What a step returned and logged: all that may have a graph."""
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
