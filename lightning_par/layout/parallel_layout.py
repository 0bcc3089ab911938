"""ParallelLayout: the degrees of every axis, and every rule they must keep, checked before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from lightning_par.layout.schedules import SCHEDULES

ZERO_STAGES = (0, 1, 2, 3)
BALANCES = ("parameters", "flops", "profile")


class LayoutError(ValueError):
    """A layout that cannot run; the message lists every violation with its numbers and a way out."""

    def __init__(self, violations: list[str]) -> None:
        count = "1 reason" if len(violations) == 1 else f"{len(violations)} reasons"
        super().__init__(f"this parallel layout cannot run, for {count}:\n" + "\n".join(f"  - {v}" for v in violations))
        self.violations = violations


@dataclass(frozen=True)
class ModelFacts:
    """What the rules need to know of a model and its data; None where it is not known (that rule is then skipped)."""

    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    vocab: int | None = None
    sequence: int | None = None  # tokens of the shortest sample
    batch: int | None = None  # samples of one replica's batch

    def __or__(self, other: ModelFacts) -> ModelFacts:
        """These facts, completed by ``other`` where they are None."""
        return replace(other, **{name: value for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True)
class ParallelLayout:
    """How many ways each axis is cut. World size = dp · cp · tp · pp.

    Args:
        dp: data-parallel replicas; ``"auto"`` = world / (tp · pp · cp).
        tp: tensor-parallel degree (ranks that share each matrix).
        pp: pipeline-parallel degree (ranks that share the layers).
        cp: context-parallel degree (ranks that share each sequence).
        zero: 0 bucketed all-reduce · 1 optimizer states sharded over dp · cp · 2 gradients too · 3 parameters too.
        replicate: of the dp replicas, how many groups hold a full set of shards (hybrid sharding: shard inside, replicate across).
        schedule: order of the pipeline's forwards and backwards: ``gpipe``, ``1f1b``, ``interleaved_1f1b``, ``zb_h1`` or ``zbv``.
        chunks: stages on each pipeline rank (``interleaved_1f1b``: any number, ``zbv``: 2, the others: 1).
        microbatches: pieces a pipeline cuts each batch into; None = pp · chunks, at most the batch size.
        balance: how layers are spread over the pp · chunks stages: so that the dearest stage is as cheap as can be, counting
            ``"parameters"``, multiplications (``"flops"``) or measured time (``"profile"``: the step is tried before the run starts); or by
            hand, as the number of layers of each stage along the model.
    """

    dp: int | Literal["auto"] = "auto"
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    replicate: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    microbatches: int | None = None
    balance: str | tuple[int, ...] = "parameters"

    def __post_init__(self) -> None:
        if isinstance(self.balance, Iterable) and not isinstance(self.balance, str):
            object.__setattr__(self, "balance", tuple(self.balance))  # lists come from a config file
        if violations := self._own_violations():
            raise LayoutError(violations)

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one replica together."""
        return self.tp * self.pp * self.cp

    @property
    def world(self) -> int:
        """Ranks in all; the layout must be resolved."""
        assert isinstance(self.dp, int), "resolve() the layout first"
        return self.dp * self.model_ranks

    def resolve(self, world: int, facts: ModelFacts | None = None) -> ParallelLayout:
        """This layout with ``dp`` a number, or a LayoutError that names every rule broken at this world size and model."""
        if violations := self.violations(world, facts):
            raise LayoutError(violations)
        return replace(self, dp=world // self.model_ranks)

    @property
    def shards(self) -> int:
        """Data-parallel ranks that shard among themselves, context shards included; the layout must be resolved."""
        assert isinstance(self.dp, int), "resolve() the layout first"
        return self.dp // self.replicate * self.cp

    def violations(self, world: int, facts: ModelFacts | None = None) -> list[str]:
        """Every rule this layout breaks, one sentence each with its numbers and a way out."""
        facts = facts or ModelFacts()
        return self._world_violations(world) + self._model_violations(facts) + self._data_violations(facts)

    @property
    def loss_index(self) -> int:
        """Index along pp of the ranks with the last stage, where losses are."""
        return SCHEDULES[self.schedule].rank_of(self.pp * self.chunks - 1, self.pp)

    def microbatches_for(self, batch: int) -> int:
        """Pieces a pipeline cuts a batch of this many samples into."""
        return min(self.microbatches or self.pp * self.chunks, max(batch, 1))

    def _own_violations(self) -> list[str]:
        found = []
        for axis in ("dp", "tp", "pp", "cp", "replicate", "chunks"):
            degree = getattr(self, axis)
            if not (axis == "dp" and degree == "auto") and not _positive(degree):
                found.append(f"{axis}={degree!r}: a degree is a whole number of at least 1" + (', or "auto"' if axis == "dp" else ""))
        if self.zero not in ZERO_STAGES or isinstance(self.zero, bool):
            found.append(f"zero={self.zero!r}: choose one of {', '.join(map(str, ZERO_STAGES))}")
        if self.zero == 0 and self.replicate != 1:
            found.append(f"replicate={self.replicate} with zero=0: everything is replicated then; leave it at 1, or choose zero 1, 2 or 3")
        if self.schedule not in list(SCHEDULES):
            found.append(f"schedule={self.schedule!r}: choose one of {', '.join(SCHEDULES)}")
        elif _positive(self.chunks) and self.pp != 1 and (refusal := SCHEDULES[self.schedule].refusal(self.chunks)):
            found.append(refusal)
        if _positive(self.chunks) and self.chunks > 1 and self.pp == 1:
            found.append(f"chunks={self.chunks} with pp=1: only a pipeline has stages; leave chunks at 1, or raise pp")
        if self.microbatches is not None and not _positive(self.microbatches):
            found.append(f"microbatches={self.microbatches!r}: give a whole number of at least 1, or None for one a stage")
        elif self.microbatches is not None and self.pp == 1:
            found.append(f"microbatches={self.microbatches} with pp=1: only a pipeline cuts batches; leave it None or raise pp")
        return found + self._balance_violations()

    def _balance_violations(self) -> list[str]:
        if isinstance(self.balance, str) and self.balance in BALANCES:
            return []
        if not isinstance(self.balance, tuple) or not all(map(_positive, self.balance)):
            choices = ", ".join(BALANCES)
            return [f"balance={self.balance!r}: choose one of {choices}, or give the number of layers of each stage, as in (3, 4)"]
        if _positive(self.pp) and _positive(self.chunks) and len(self.balance) != self.pp * self.chunks:
            return [
                f"balance={self.balance} speaks of {len(self.balance)} stages, but pp={self.pp} · chunks={self.chunks} are "
                f"{self.pp * self.chunks}: give the number of layers of each"
            ]
        return []

    def _world_violations(self, world: int) -> list[str]:
        degrees = f"tp={self.tp} · pp={self.pp} · cp={self.cp}"
        if self.dp == "auto":
            if world % self.model_ranks:
                return [
                    f"world size {world} is not a multiple of {degrees} = {self.model_ranks}: start "
                    f"{_near_multiples(world, self.model_ranks)} ranks, or lower a degree"
                ]
        elif self.world != world:
            return [f"dp={self.dp} · {degrees} = {self.world} ranks, but {world} run: start {self.world} ranks, or leave dp at auto"]
        dp = world // self.model_ranks
        if dp % self.replicate:
            return [f"replicate={self.replicate} does not divide the {dp} data-parallel replicas: choose it among {_divisors(dp)}"]
        return []

    def _model_violations(self, facts: ModelFacts) -> list[str]:
        found = []
        stages = self.pp * self.chunks
        if facts.layers is not None and stages > facts.layers:
            found.append(
                f"pp={self.pp} · chunks={self.chunks} = {stages} stages need a layer each, but the model has {facts.layers}: "
                "lower pp or chunks"
            )
        if facts.layers is not None and isinstance(self.balance, tuple) and sum(self.balance) != facts.layers:
            found.append(f"balance={self.balance} places {sum(self.balance)} layers, but the model has {facts.layers}: place each once")
        for key, count in (("attention heads", facts.heads), ("key-value heads", facts.kv_heads)):
            if count is not None and count % self.tp:
                found.append(f"tp={self.tp} does not divide the model's {count} {key}: choose tp among {_divisors(count)}")
        if facts.vocab is not None and self.tp > facts.vocab:
            found.append(f"tp={self.tp} is more than the vocabulary of {facts.vocab}: lower tp")
        return found

    def _data_violations(self, facts: ModelFacts) -> list[str]:
        found = []
        if facts.sequence is not None and facts.sequence < self.cp:
            found.append(
                f"cp={self.cp} leaves ranks without a token of a sequence of {facts.sequence}: lower cp to {facts.sequence} or less"
            )
        if facts.batch is not None and self.microbatches is not None and self.microbatches > facts.batch:
            found.append(
                f"microbatches={self.microbatches} cannot be cut from a replica's batch of {facts.batch} samples: "
                f"choose at most {facts.batch}, or raise the batch size"
            )
        return found


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def _near_multiples(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)
