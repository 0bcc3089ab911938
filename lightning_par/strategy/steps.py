"""Run the user's steps on this rank's pieces of a batch.

Note [One batch, many pieces]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every rank of a replica gets the whole batch of the replica. A pipeline cuts it into micro-batches, context parallelism cuts each of those
along the sequence. The user's step runs on one piece at a time and returns a mean over it; ``share`` is the piece's part of the batch's
weight (see numerics.loss_weight), so that ``sum(share · loss)`` over pieces is the loss of the uncut batch, and the gradients of
``share · loss`` only have to be added over cp and averaged over dp.

Without a pipeline ``training_step`` hands Lightning ``share · loss``, dressed with the value of the whole batch's loss, and Lightning calls
backward. With one, forward and backward are interleaved, so all of it happens within ``training_step``; the gradients are then
withheld, because Lightning calls zero_grad between ``training_step`` and ``backward``, and handed out in ``backward``.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection
from torch import Tensor

from lightning_par.comm import Mesh
from lightning_par.context import RingAttention, ShardedBatch, ring_attention, shard_batch, verify_step
from lightning_par.layout import Span, split
from lightning_par.numerics import IGNORED_LABEL, SEEDS, LossWatch, MicrobatchStreams, batch_size, loss_weight
from lightning_par.pipeline import Arrived, Pipeline, aside, require_known
from lightning_par.strategy import seams
from lightning_par.strategy.agree import Agreement, Doubt
from lightning_par.strategy.logs import recording
from lightning_par.strategy.means import require_straight
from lightning_par.strategy.pieces import Handout, Piece, join, microbatches, own, samples_at, signature, sizes_of
from lightning_par.strategy.trial import TRIED, Trial, frozen_stay, loss_error, own_loss_warning, trying
from lightning_par.zero import DataParallel

Step = Callable[..., Any]


class StepRunner:
    """Runs steps of ``module`` (a LightningModule) under one layout. See Note [One batch, many pieces].

    Args:
        context: makes the context in which a forward pass runs (autocast, default dtype).
    """

    def __init__(self, module: Any, mesh: Mesh, pipeline: Pipeline | None, device: torch.device) -> None:
        self.module, self.mesh, self.pipeline, self.device = module, mesh, pipeline, device
        self.agreement = Agreement(module.trainer, mesh, device)
        self._ring: RingAttention | None = None
        self._has_looked = False  # at how a loss is made
        self._batches: Counter[tuple[str, int]] = Counter()  # by step and dataloader, how many there were
        self._told: set[str] = set()  # names that are logged, of which was told that they are no means
        self._verified: set[str] = set()  # steps that were seen to be right on a shard

    def train(self, step: Step, context: Callable[[], AbstractContextManager], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One batch without a pipeline: what ``training_step`` returned, its loss dressed with the value that all ranks agree on."""
        piece = self._pieces(args[0], 1)[0]
        with recording(self.module, self.device, deferred=False) as log, self.attention(), context():
            log.weight = piece.share
            output = step(piece.batch, *args[1:], **kwargs)
        self._verify("train", piece.batch)
        loss = self._loss_of(output)
        losses, shares = ([], []) if loss is None else ([loss.detach()], [piece.share])
        value = self.agreement.reach(log, losses, shares, last=self._is_last_batch)
        if loss is None:
            return output
        weighted = loss * piece.share.to(loss.dtype) if self.mesh.cp.size > 1 else loss
        dressed = _Dressed.apply(weighted, value.to(loss).reshape(loss.shape))
        return {**output, "loss": dressed} if isinstance(output, Mapping) else dressed

    def train_pipeline(
        self,
        step: Step,
        context: Callable[[], AbstractContextManager],
        data_parallel: DataParallel,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        scaled: Callable[[Tensor], Tensor],
    ) -> Tensor | dict[str, Any]:
        """One batch through the pipeline, forward and backward: its loss, in float64 since early stages know no other dtype.

        If the step returned more, so does this, on every rank of a replica (under context parallelism that of this shard).

        Gradients are left in ``data_parallel``, not yet reduced.

        Args:
            scaled: what becomes of a loss before backward.
        """
        assert self.pipeline is not None
        samples = self._samples(args[0])
        pieces = self._pieces(args[0], self._count(samples))
        losses: list[Tensor] = []
        others: list[dict[str, Any]] = []
        watch, handout, runs = LossWatch(), self._handout(pieces), len(pieces) * self.pipeline.chunks
        number = self._trial_number("training_step")
        trial = self._trial(number, args[0], samples, len(pieces)) if number is not None else None

        with recording(self.module, self.device, deferred=True) as log:

            def forward(m: int) -> Tensor:
                log.weight = pieces[m].share
                watch.next_piece()
                with context(), log.attempt(), watch if self.pipeline.is_last else nullcontext(), handout.piece(m) as batch:
                    output = step(batch, *args[1:], **kwargs)
                    require_known(output, f"what {step.__name__} returns")
                loss = self._loss_of(output)
                if loss is None:
                    raise RuntimeError("training_step returned no loss: under a pipeline a batch cannot be skipped")
                if len(pieces) > 1 and not self._has_looked and isinstance(loss, Tensor):
                    require_straight(loss, watch.nodes)
                watch.nodes.clear()
                losses.append(loss.detach())
                others.append({key: value for key, value in output.items() if key != "loss"} if isinstance(output, Mapping) else {})
                return scaled(loss * pieces[m].share.to(loss.dtype))

            with self.attention(), data_parallel.hold(), frozen_stay(self.module) if number is not None and runs > 1 else nullcontext():
                signatures = [("train", signature(piece.batch)) for piece in pieces]
                split = not data_parallel.kept.frees_values
                arrivals = self.pipeline.forward_backward(forward, signatures, split=split, quiet=data_parallel.may_add, keep=_kept(trial))
        doubts = self._doubts(watch, pieces, samples, losses) if losses else []
        if number is not None:
            with data_parallel.hold(), torch.enable_grad():
                trial = self._try(trial, arrivals, step, context, args, kwargs)
        if losses and len(pieces) > 1:
            is_mean = trial is not None and self._judge(trial, doubts)
            if not (is_mean or watch.has_seen or self._has_looked) and self._tells:
                warnings.warn(own_loss_warning(trial), stacklevel=2)
        self._has_looked |= len(pieces) > 1
        shares = [piece.share for piece in pieces[: len(losses)]]
        value = self.agreement.reach(
            log, losses, shares, samples, last=self._is_last_batch, more=any(others), doubts=doubts
        ).requires_grad_()
        if losses:
            self._verify("train", pieces[0].batch)
        if not self.agreement.more:
            return value
        return {"loss": value, **self._shared(others, pieces, samples, "training_step")}

    def evaluate(
        self, name: str, step: Step, context: Callable[[], AbstractContextManager], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One batch of validation, test or prediction: what the step returned, the same on every rank of a replica.

        Under context parallelism that holds for a step that returns one number; anything else is this shard's.

        Args:
            name: of the step in Lightning.
        """
        samples = self._samples(args[0]) if self.pipeline else None
        pieces = self._pieces(args[0], self._count(samples) if self.pipeline else 1)
        outputs: list[Any] = []
        watch, handout, number = LossWatch(), self._handout(pieces), self._trial_number(name, args[2] if len(args) > 2 else 0)
        trial = self._trial(number, args[0], samples, len(pieces)) if number is not None else None
        with recording(self.module, self.device, deferred=self.pipeline is not None) as log, self.attention():

            def forward(m: int) -> None:
                log.weight = pieces[m].share
                watch.next_piece()
                watching = watch if len(pieces) > 1 and self.pipeline.is_last else nullcontext()
                with context(), log.attempt(), watching, handout.piece(m) as batch:
                    outputs.append(step(batch, *args[1:], **kwargs))
                    if self.pipeline is not None:
                        require_known(outputs[-1], f"what {step.__name__} returns")

            if self.pipeline is None:
                forward(0)
            else:
                signatures = [(step.__name__, signature(piece.batch)) for piece in pieces]
                arrivals = self.pipeline.forward_only(forward, signatures, keep=_kept(trial))
        if number is not None:
            self._try(trial, arrivals, step, context, args, kwargs)
        if self.pipeline is None or self.pipeline.is_last:
            self._verify(step.__name__, pieces[0].batch)
        doubts = self._doubts(watch, pieces, samples) if outputs else []
        if self.pipeline is not None:
            outputs = [self._shared(outputs, pieces, samples, step.__name__)]
        if self.mesh.cp.size == 1 or not isinstance(outputs[0], Tensor) or outputs[0].numel() != 1:
            self.agreement.reach(log, [], [], samples, doubts=doubts)
            return outputs[0]
        if self.pipeline is None:
            value = self.agreement.reach(log, [outputs[0]], [pieces[0].share])
        else:  # micro-batches were joined: one value of this shard
            value = self.agreement.reach(log, [outputs[0]], [sum(piece.share for piece in pieces)], samples, doubts=doubts)
        return value.to(outputs[0]).reshape(outputs[0].shape)

    def _trial_number(self, name: str, loader: int = 0) -> int | None:
        """How often a step was tried before its next batch, on which it is tried again; None if it is not."""
        layout = self.mesh.layout
        if self.pipeline is None or layout.microbatches == 1 or name == "predict_step" or layout.cp > 1 or layout.zero == 3:
            return None
        self._batches[name, loader] += 1
        return TRIED.index(self._batches[name, loader]) if self._batches[name, loader] in TRIED else None

    def _trial(self, number: int, batch: Any, samples: int, count: int) -> Trial | None:
        """Of two of ``count`` micro-batches, on the last stage, each time others; they are copied before the step itself has them."""
        if count == 1 or not self.pipeline.is_last:
            return None
        place = number % (count - 1)
        first, second = split(samples, count)[place : place + 2]
        both = Span(first.start, second.stop)
        whole, *others = samples_at(batch, [both, both, both, first, second])
        pieces = [piece for parts in (others[2:], [whole], others[:1], others[1:2]) for piece in self._shared_out(whole, parts)]
        with torch.no_grad():
            copies = [Piece(own(piece.batch), piece.share) for piece in pieces]
        return Trial(place, (first.size, second.size), copies, together=self.mesh.tp.size > 1)

    def _try(
        self,
        trial: Trial | None,
        arrivals: list[Arrived],
        step: Step,
        context: Callable[[], AbstractContextManager],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Trial | None:
        """Run the step again on what arrived at the last stage. Every rank calls. The trial, if it took place."""
        arrived = trial.inputs(arrivals) if trial is not None else []
        if not self.agreement.is_common(bool(arrived) or not self.pipeline.is_last) or trial is None:
            return None
        seeds = SEEDS.get_state()
        with aside(self.module), MicrobatchStreams(len(arrived), self.device) as streams:
            for place, (piece, each) in enumerate(zip(trial.pieces, arrived, strict=True)):
                streams.begin(place)
                with trying(self.module), recording(self.module, self.device, deferred=True) as log, context():
                    log.real, log.weight = _nothing, piece.share
                    trial.run(partial(self.pipeline.finish, partial(step, piece.batch, *args[1:], **kwargs), each), log, self.module)
        SEEDS.set_state(seeds)
        if self._tells:
            trial.warn_of_logs(self._told)
        return trial

    def _judge(self, trial: Trial, doubts: list[Doubt]) -> bool:
        """Whether the loss was seen to be a mean. The last stage's ranks of tp call; what they see is the same for all."""
        loss = trial.loss
        verdict = torch.tensor(0.5 if loss.is_combined is None else float(loss.is_combined), device=self.device)
        self.mesh.tp.all_reduce(verdict, "min")
        doubts.append(Doubt(verdict == 0, lambda: loss_error(loss, trial.sizes)))
        return verdict.item() == 1

    @property
    def _tells(self) -> bool:
        """Whether this rank warns of what the last stage sees."""
        return self.pipeline.is_last and self.mesh.data.index == self.mesh.tp.index == 0

    def rehearse(self, step: Step, context: Callable[[], AbstractContextManager], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step on the first piece that a pipeline would cut from a batch: what it returned. Nothing is logged."""
        piece = self._pieces(args[0], self._count(self._samples(args[0])))[0]
        with recording(self.module, self.device, deferred=True), self.attention(), context():
            return step(piece.batch, *args[1:], **kwargs)

    def loss_of(self, output: Any) -> Tensor | None:
        """The loss among what a training step returned."""
        return self._loss_of(output)

    def attention(self) -> AbstractContextManager:
        """The context in which attention sees the other ranks' tokens; forward and backward of a batch run in it."""
        return nullcontext() if self._ring is None else self._ring

    @property
    def _is_last_batch(self) -> bool:
        return seams.is_last_batch(self.module.trainer)

    def _samples(self, batch: Any) -> int | None:
        """Those of a batch, which needs to have a number of them only if it is cut."""
        return batch_size(batch) if self.mesh.layout.microbatches != 1 else None

    def _count(self, samples: int | None) -> int:
        return 1 if samples is None else self.mesh.layout.microbatches_for(samples)

    def _pieces(self, batch: Any, count: int) -> list[Piece]:
        """This rank's pieces, and their shares of the whole batch's weight."""
        if count == 1 and self.mesh.cp.size == 1:
            return [Piece(batch, torch.ones((), dtype=torch.float64, device=self.device))]
        return self._shared_out(batch, microbatches(batch, count))

    def _shared_out(self, batch: Any, parts: list[Any]) -> list[Piece]:
        """This rank's pieces of parts of a batch."""
        if self.mesh.cp.size > 1:
            cut = [shard_batch(part, self.mesh.cp) for part in parts]
            parts = [part for part, _ in cut]
            self._ring = ring_attention(self.mesh.cp, cut[0][1], padded=any(part.padded for part in parts))
        total = _weight(batch, tokens=self.mesh.cp.size > 1)
        return [Piece(part, (_weight(part) / total).to(self.device)) for part in parts]

    def _handout(self, pieces: list[Piece]) -> Handout:
        return Handout([piece.batch for piece in pieces], 1 if self.pipeline is None else self.pipeline.chunks)

    def _verify(self, step: str, batch: Any) -> None:
        """Once for each step: one that ran on a shard of a sequence must have used what makes it right there."""
        if step not in self._verified:
            self._verified.add(step)
            if self._ring is not None:
                verify_step(batch, self._ring)

    def _shared(self, outputs: list[Any], pieces: list[Piece], samples: int | None, step: str) -> Any:
        """What the step returned for the whole batch, on every rank of a pipeline; ``outputs`` are those of the last stage."""
        joined = join(outputs, [piece.share for piece in pieces], samples, f"what {step} returned") if outputs else None
        onto_host = apply_to_collection(joined, Tensor, lambda tensor: tensor.detach().cpu())  # pickled CUDA tensors come back elsewhere
        shared = self.mesh.pp.broadcast_object(onto_host, self.mesh.layout.loss_index)
        return apply_to_collection(shared, Tensor, lambda tensor: tensor.to(self.device))

    def _doubts(self, watch: LossWatch, pieces: list[Piece], samples: int | None, losses: list[Tensor] | None = None) -> list[Doubt]:
        """What would be wrong if the micro-batches of a step were put together with their shares."""
        if len(pieces) == 1 or samples is None or self.mesh.cp.size > 1:
            return []
        shares, sizes = [piece.share for piece in pieces], sizes_of(samples, len(pieces))
        found = [Doubt(watch.averages_otherwise(shares, sizes).to(self.device), lambda: watch.complaint(shares))]
        if losses:
            found.append(Doubt(watch.adds_up(losses, sizes).to(self.device), _sum_error))
        return found

    def _loss_of(self, output: Any) -> Tensor | None:
        if not isinstance(output, Mapping):
            return output
        if "weight" in output and self.mesh.pp.size * self.mesh.cp.size > 1:
            raise ValueError(
                "training_step returned a 'weight' beside its loss. Under pp or cp pieces are weighted by the labels of the batch that are "
                f"not {IGNORED_LABEL} (or its samples); a weight of one's own is not supported there: leave it out, or use pp=1 and cp=1"
            )
        return output.get("loss")


def _sum_error() -> ValueError:
    return ValueError(
        "training_step's loss is a sum (reduction='sum'), or a multiple of one: that of a batch is the sum over its "
        "micro-batches, which a pipeline takes for means. Return a mean over the samples or the labels that count, or set microbatches=1"
    )


def _weight(batch: Any, *, tokens: bool = False) -> Tensor:
    """Of a batch or a part of it; where sequences are cut (``tokens``), as ``ShardedBatch.weight``: the shards' weights add up to it."""
    if isinstance(batch, ShardedBatch):
        return batch.weight()
    if tokens:
        ids, labels = batch["input_ids"], batch.get("shift_labels", batch.get("labels"))
        if not isinstance(labels, Tensor) or labels.shape != ids.shape or labels.is_floating_point():
            return torch.tensor(float(ids.numel()), dtype=torch.float64)
    return loss_weight(batch)


def _kept(trial: Trial | None) -> Collection[int]:
    """The micro-batches of which a trial needs what arrives at the last stage."""
    return () if trial is None else (trial.place, trial.place + 1)


def _nothing(*_: Any, **__: Any) -> None:
    """Logs nothing."""


class _Dressed(torch.autograd.Function):
    """The first tensor's gradient, the second's value."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
