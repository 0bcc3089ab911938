"""A pipelined step against the same step of the whole model in one process: loss and every gradient, without Lightning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_par.comm import Group, Mesh
from lightning_par.layout import ParallelLayout
from lightning_par.pipeline import Pipeline, Uses

VOCAB = 37
Batch = dict[str, Tensor]


def pp_group(size: int) -> Group:
    return Mesh.build(ParallelLayout(pp=size).resolve(size)).pp


def tokens(rows: int, length: int, seed: int = 0) -> Batch:
    """Token ids as a causal language model wants them; rows ignore different numbers of labels."""
    ids = torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(rows):
        labels[row, : 1 + row % 3] = -100
    return {"input_ids": ids, "labels": labels}


def cut(batch: Batch, pieces: int) -> list[Batch]:
    chunks = {key: value.tensor_split(pieces) for key, value in batch.items()}
    return [{key: parts[i] for key, parts in chunks.items()} for i in range(pieces)]


def counted(batch: Batch) -> int:
    """Labels that the loss averages over."""
    labels = batch.get("labels")
    return len(next(iter(batch.values()))) if labels is None or labels.dim() == 1 else int((labels[:, 1:] != -100).sum())


@dataclass
class Step:
    """The user's step on each micro-batch, weighted, as a strategy would hand it to the pipeline."""

    model: nn.Module
    pieces: Sequence[Batch]
    call: Callable[[nn.Module, Batch], Tensor]
    losses: list[Tensor] = field(default_factory=list)

    def __call__(self, microbatch: int) -> Tensor:
        piece = self.pieces[microbatch]
        loss = self.call(self.model, piece) * counted(piece) / sum(map(counted, self.pieces))
        self.losses.append(loss.detach())
        return loss

    @property
    def signatures(self) -> list[tuple]:
        return [tuple((key, value.shape, value.dtype) for key, value in piece.items()) for piece in self.pieces]


def model_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


class Twin:
    """A model cut by the pipeline, and the whole model it was cut from.

    ``pieces``: the whole model takes the micro-batches one by one, too (transformers computes losses and norms in float32, so other
    pieces round otherwise); else the batch at once, which is what a user without a pipeline has.
    """

    def __init__(
        self,
        model: nn.Module,
        group: Group,
        schedule: str,
        chunks: int = 1,
        *,
        layers: str | None = None,
        uses: Uses | None = None,
        pieces: bool = False,
        call: Callable[[nn.Module, Batch], Tensor] = model_loss,
    ) -> None:
        self.whole, self.model, self.group, self.call, self.pieces = copy.deepcopy(model), model, group, call, pieces
        self.pipeline = Pipeline.split(model, group, schedule, chunks, layers, uses=uses)

    def train_step(self, batch: Batch, microbatches: int, tolerance: float = 1e-10) -> None:
        """One step on both; asserts equal losses and gradients."""
        self.whole.zero_grad()
        expected = self._expected(batch, microbatches)
        expected.backward()
        self.model.zero_grad()
        step = Step(self.model, cut(batch, microbatches), self.call)
        self.pipeline.forward_backward(step, step.signatures)
        if self.pipeline.is_last:
            torch.testing.assert_close(torch.stack(step.losses).sum(), expected.detach(), rtol=0, atol=tolerance)
        else:
            assert not step.losses
        self.check_gradients(tolerance)

    def evaluate(self, batch: Batch, microbatches: int, tolerance: float = 1e-10) -> None:
        """Forward only on both; asserts equal losses, and that no gradient came to be."""
        with torch.no_grad():
            expected = self._expected(batch, microbatches)
        self.model.zero_grad()
        step = Step(self.model, cut(batch, microbatches), self.call)
        self.pipeline.forward_only(step, step.signatures)
        if self.pipeline.is_last:
            torch.testing.assert_close(torch.stack(step.losses).sum(), expected, rtol=0, atol=tolerance)
        assert all(p.grad is None for p in self.model.parameters())

    def _expected(self, batch: Batch, microbatches: int) -> Tensor:
        """The loss of the whole model in one process."""
        if not self.pieces:
            return self.call(self.whole, batch)
        step = Step(self.whole, cut(batch, microbatches), self.call)
        return torch.stack([step(m) for m in range(microbatches)]).sum()

    def check_gradients(self, tolerance: float) -> None:
        gradients = {first: self.model.get_parameter(name).grad for name, first in self.pipeline.names.items()}
        for first, ranks in self.pipeline.tied.items():
            assert (first in gradients) == (self.group.index in ranks), f"{first} is said to be on {ranks}"
            own = gradients.get(first)
            total = torch.zeros_like(self.whole.get_parameter(first)) if own is None else own.clone()
            self.group.all_reduce(total)
            if first in gradients and self.whole.get_parameter(first).requires_grad:
                gradients[first] = total
        for first, gradient in gradients.items():
            expected = self.whole.get_parameter(first).grad
            if expected is None or gradient is None:
                assert expected is gradient, first
            else:
                torch.testing.assert_close(gradient, expected, rtol=0, atol=tolerance, msg=lambda text, n=first: f"{n}: {text}")
        everywhere = self.group.gather_objects(sorted(gradients))
        assert {name for names in everywhere for name in names} == {name for name, _ in self.whole.named_parameters()}
