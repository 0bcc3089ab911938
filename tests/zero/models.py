"""Models of awkward shape for the data-parallel tests. Build them with float64 as the default dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH = 11, 5


class Layer(nn.Module):
    """A residual branch; ``checkpointed``: None, "non-reentrant" or "reentrant"."""

    def __init__(self, hidden: int = 7, checkpointed: str | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, hidden)
        self.empty = nn.Linear(4, 0, bias=False)  # lies between two others in every bucket
        self.outer = nn.Linear(hidden, WIDTH)
        self.checkpointed = checkpointed

    def branch(self, h: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(h)))

    def forward(self, h: Tensor) -> Tensor:
        if self.checkpointed and torch.is_grad_enabled():
            return h + checkpoint(self.branch, h, use_reentrant=self.checkpointed == "reentrant")
        return h + self.branch(h)


class Gain(nn.Module):
    """One parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, h: Tensor) -> Tensor:
        return self.gain * h


class Awkward(nn.Module):
    """A tied language model with frozen, unused, zero-sized and one-element parameters; its first layer is called twice, in between.

    Args:
        order: of the layers' calls.
        wrapped: whole layers are checkpointed from outside.
    """

    def __init__(self, *, order: tuple[int, ...] = (0, 2, 0, 1), checkpointed: str | None = None, wrapped: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.wrapped = order, wrapped
        self.empty_first = nn.Linear(4, 0, bias=False)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.layers = nn.ModuleList(Layer(hidden, checkpointed) for hidden in (7, 6, 9))
        self.spare = nn.Linear(3, 3)
        self.gain = Gain()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.empty_last = nn.Linear(4, 0, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.frozen(self.embed(ids)) + self.empty_first(torch.ones(4)).sum()
        for index in self.order:
            h = checkpoint(self.layers[index], h, use_reentrant=False) if self.wrapped else self.layers[index](h)
        return self.head(self.gain(self.norm(h)))


def awkward() -> nn.Module:
    return Awkward()


def all_frozen_but_one() -> nn.Module:
    module = Awkward().requires_grad_(False)
    module.layers[1].inner.bias.requires_grad_(True)
    return module


class Heads(nn.Module):
    """Two heads on one trunk, of one size; as attributes, or as members of a ModuleList (then each is a unit of ZeRO 3)."""

    def __init__(self, *, listed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        heads = [nn.Linear(WIDTH, VOCAB) for _ in range(2)]
        self.listed = nn.ModuleList(heads) if listed else None
        if not listed:
            self.a, self.b = heads

    def forward(self, ids: Tensor, which: int) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        return (self.listed if self.listed is not None else (self.a, self.b))[which](h)


def heads() -> nn.Module:
    return Heads(listed=False)


def listed_heads() -> nn.Module:
    return Heads(listed=True)
