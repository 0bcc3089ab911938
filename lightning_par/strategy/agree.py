"""One reduction a batch, after which every rank knows what was logged. See Note [Logging under any layout] in ``logs``.

Note [Stopping]
~~~~~~~~~~~~~~~
A step may set ``trainer.should_stop``, by what only its rank knows: the last stage its loss, a replica that of its samples. The others
would wait for that rank for ever; so if one has set it by the end of a batch, all do. Without a pipeline a GPU's numbers are read when the
next batch comes: until then a rank that is not joined by all others takes its wish back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_par.comm import Later, Mesh
from lightning_par.strategy.logs import CELLS, HEAD, NAMES, Logged, LogRecorder, name_hash

LOSS = ""
"""The name under which the loss itself travels."""


@dataclass(frozen=True)
class Doubt:
    """Something that must not be: a 0-dim tensor that says whether it is, and what to raise then."""

    is_so: Tensor
    error: Callable[[], Exception]


class Agreement:
    """Combines what the ranks of ``mesh.batch`` recorded for one batch, and replays it on all of them."""

    def __init__(self, trainer: pl.Trainer, mesh: Mesh, device: torch.device) -> None:
        self.trainer, self.mesh, self.device = trainer, mesh, device
        self._options: dict[float, dict[str, dict[str, Any]]] = {}  # by hash: the names that travel, in order, and their options
        self._unchecked: tuple[Later, float, list[str]] | None = None
        self.more = False  # the step of the batch at hand returned more than its loss, on the last stage

    def reach(
        self,
        log: LogRecorder,
        losses: list[Tensor],
        shares: list[Tensor],
        samples: int | None = None,
        *,
        last: bool = False,
        more: bool = False,
        doubts: Sequence[Doubt] = (),
    ) -> Tensor:
        """Agree on the loss and the logged values of a batch, log them, and return the loss (0-dim, float64). All ranks call.

        Afterwards ``trainer.should_stop`` is set on all ranks if it was on one. See Note [Stopping].

        Args:
            losses, shares: of this rank's pieces; empty on ranks that have none.
            samples: of the whole batch, where steps ran on parts of it.
            last: this is the last training batch of this rank's epoch.
            more: the step returned more than its loss; afterwards ``self.more`` says so on every rank.
            doubts: of the last stage of a pipeline.

        Raises:
            RuntimeError: the ranks logged different names, or only stages before the last did, or it is the last batch for some of them
                only.
            Exception: that of a doubt.
        """
        loss = Logged([loss.double().to(self.device).reshape(()) for loss in losses], shares, options={"more": more})
        mine = {LOSS: loss, **log.logged}
        speaks = self.mesh.pp.index == self.mesh.layout.loss_index
        cells = torch.zeros(CELLS, dtype=torch.float64, device=self.device)
        options = {name: entry.options for name, entry in mine.items()}
        traits = {LOSS: bool(losses) + 2 * more}
        key = name_hash([f"{name}:{entry.op}:{traits.get(name, bool(entry.sizes))}" for name, entry in mine.items()])
        if speaks:
            self._fill(cells, key, mine, samples)
            cells[1] = last
            if doubts:
                cells[2] = torch.stack([doubt.is_so for doubt in doubts]).any()
        cells[3] = self.trainer.should_stop
        self.mesh.batch.all_reduce(cells)
        numbers = cells.tolist() if self.mesh.pp.size > 1 else None
        if numbers is not None and numbers[2]:
            raise self._trouble(doubts)
        options = self._names(cells, key, options, numbers, speaks=speaks)
        places = dict(zip(options, range(HEAD, CELLS, 3), strict=False))
        values = {name: cells[cell] / cells[cell + 1] for name, cell in places.items()}
        self._extremes(mine, values, options)
        if numbers is not None:
            log.require_heard(options)
            log.sizes = {name: round(numbers[cell + 2]) for name, cell in places.items()}
        log.replay({name: value for name, value in values.items() if name != LOSS}, options)
        self.more = options[LOSS]["more"]
        return values[LOSS]

    def is_common(self, mine: bool) -> bool:
        """Whether all ranks say so. Every rank of the world calls."""
        said = torch.tensor(float(mine), device=self.device)
        self.mesh.world.all_reduce(said, "min")
        return bool(said.item())

    def _fill(self, cells: Tensor, key: float, mine: dict[str, Logged], samples: int | None) -> None:
        """Three cells for each name: what is added up, what the sum is divided by, and what the user said of its batch's size."""
        if len(mine) > NAMES:
            raise ValueError(f"one step logged {len(mine) - 1} numbers, more than {NAMES - 1}: log fewer, or log rarely")
        cells[0] = key
        for cell, entry in zip(range(HEAD, CELLS, 3), mine.values(), strict=False):
            if not entry.values:
                continue
            cells[cell + 2] = entry.size(samples)
            cells[cell], cells[cell + 1] = entry.total()
            if entry.op == "sum":
                cells[cell] /= self.mesh.cp.size
                cells[cell + 1] = 1.0 / self.mesh.data.size

    def _names(
        self, cells: Tensor, key: float, mine: dict[str, dict[str, Any]], numbers: list[float] | None, *, speaks: bool
    ) -> dict[str, dict[str, Any]]:
        """The names in the cells and their options, on every rank; checks that all ranks that logged mean the same names."""
        if numbers is None:
            self._check(cells[:HEAD], key * self.mesh.data.size, list(mine))
            return mine
        total, ends, _, stops = numbers[:HEAD]
        self._require_same_end(ends)
        self._stop_if(stops)
        agreed = total / self.mesh.data.size
        if speaks and agreed != key:
            raise _disagreement(list(mine))
        if agreed not in self._options:
            self._options[agreed] = self.mesh.pp.broadcast_object(mine, self.mesh.layout.loss_index)
        return mine if speaks else self._options[agreed]

    def _trouble(self, doubts: Sequence[Doubt]) -> Exception:
        """Of the last stage, on every rank of the pipeline."""
        mine = next((doubt.error() for doubt in doubts if doubt.is_so), None)
        error = self.mesh.pp.broadcast_object(mine, self.mesh.layout.loss_index)
        return error or RuntimeError("the pipeline of another replica refused this batch, and says why")

    def _check(self, found: Tensor, wanted: float, names: list[str]) -> None:
        """Raise if ranks disagree. On devices that run behind the host, the numbers are read when the next batch comes."""
        wants_to_stop = self.trainer.should_stop
        is_decided = self._check_last()
        self._unchecked = (Later(found), wanted, names)
        if not found.is_cuda:
            self._check_last()
        elif wants_to_stop and not is_decided:
            self.trainer.should_stop = self._unchecked[0].read()[3].item() == self.mesh.batch.size

    def _check_last(self) -> bool:
        """Whether what was unchecked says that all stop."""
        unchecked, self._unchecked = self._unchecked, None
        if unchecked is None:
            return False
        found, wanted, names = unchecked
        total, ends, _, stops = found.read().tolist()
        if total != wanted:
            raise _disagreement(names)
        self._require_same_end(ends)
        self._stop_if(stops)
        return stops > 0

    def _stop_if(self, stops: float) -> None:
        if stops:
            self.trainer.should_stop = True

    def _require_same_end(self, ends: float) -> None:
        if ends not in (0, self.mesh.data.size):
            raise RuntimeError(
                f"this is the epoch's last training batch on {ends:.0f} of {self.mesh.data.size} data ranks, but others have more: they "
                "would train while those validate. Give all ranks equally many, or Trainer(limit_train_batches=...) that all of them have"
            )

    def _extremes(self, mine: dict[str, Logged], values: dict[str, Tensor], options: dict[str, dict[str, Any]]) -> None:
        """Names logged with ``reduce_fx`` min or max, which a sum cannot carry."""
        for name in options:
            op = Logged(options=options[name]).op
            if op in ("min", "max"):
                worst = float("inf") if op == "min" else float("-inf")
                seen = mine[name].values if name in mine else []
                nothing = torch.tensor(worst, dtype=torch.float64, device=self.device)
                values[name] = getattr(torch.stack(seen), op)() if seen else nothing
                self.mesh.batch.all_reduce(values[name], op)


def _disagreement(names: list[str]) -> RuntimeError:
    logged = ", ".join(repr(name) for name in names if name != LOSS) or "nothing"
    return RuntimeError(
        f"the ranks logged different names in one step (this rank: {logged}). Call self.log on every rank, or with rank_zero_only=True "
        "for what only rank 0 shall log"
    )
