"""One reduction a batch, after which every rank knows what was logged. See Note [Logging under any layout] in ``logs``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_par.comm import Mesh
from lightning_par.strategy.logs import CELLS, Logged, LogRecorder, name_hash

LOSS = ""
"""The name under which the loss itself travels."""


class Agreement:
    """Combines what the ranks of ``mesh.batch`` recorded for one batch, and replays it on all of them."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh, device
        self._options: dict[float, dict[str, dict[str, Any]]] = {}  # by hash: the names that travel, in order, and their options
        self._unchecked: tuple[Tensor, list[str]] | None = None

    def reach(self, log: LogRecorder, losses: list[Tensor], shares: list[Tensor], samples: int | None = None) -> Tensor:
        """Agree on the loss and the logged values of a batch, log them, and return the loss (0-dim, float64). All ranks call.

        Args:
            losses, shares: of this rank's pieces; empty on ranks that have none.
            samples: of the whole batch, where steps ran on parts of it.
        """
        mine = {LOSS: Logged([loss.double().to(self.device).reshape(()) for loss in losses], shares), **log.logged}
        speaks = self.mesh.pp.index == self.mesh.pp.size - 1
        cells = torch.zeros(CELLS, dtype=torch.float64, device=self.device)
        options = {name: entry.options for name, entry in mine.items()}
        key = name_hash([f"{name}:{entry.op}" for name, entry in mine.items()])
        if speaks:
            self._fill(cells, key, mine)
        self.mesh.batch.all_reduce(cells)
        options = self._names(cells, key, options, speaks=speaks)
        values = dict(zip(options, cells[1:], strict=False))
        self._extremes(mine, values, options)
        log.replay({name: value for name, value in values.items() if name != LOSS}, options, samples)
        return values[LOSS]

    def _fill(self, cells: Tensor, key: float, mine: dict[str, Logged]) -> None:
        if len(mine) >= CELLS:
            raise ValueError(f"one step logged {len(mine) - 1} numbers, more than {CELLS - 2}: log fewer, or log rarely")
        layout = self.mesh.layout
        cells[0] = key
        for cell, entry in enumerate(mine.values(), start=1):
            if entry.values:
                if entry.op == "sum":
                    cells[cell] = torch.stack(entry.values).sum() / layout.cp
                else:
                    cells[cell] = (torch.stack(entry.values) * torch.stack(entry.weights)).sum() / layout.dp

    def _names(self, cells: Tensor, key: float, mine: dict[str, dict[str, Any]], *, speaks: bool) -> dict[str, dict[str, Any]]:
        """The names in the cells and their options, on every rank; checks that all ranks that logged mean the same names."""
        if self.mesh.pp.size == 1:
            self._check_last()
            self._unchecked = (cells[0] - key * self.mesh.data.size, list(mine))
            if self.device.type == "cpu":
                self._check_last()
            return mine
        agreed = cells[0].item() / self.mesh.data.size
        if speaks and agreed != key:
            raise _disagreement(list(mine))
        if agreed not in self._options:
            self._options[agreed] = self.mesh.pp.broadcast_object(mine, self.mesh.pp.size - 1)
        return mine if speaks else self._options[agreed]

    def _check_last(self) -> None:
        """On devices that run behind the host the check waits for the next batch, when its number is there."""
        if self._unchecked is not None and self._unchecked[0].item() != 0:
            raise _disagreement(self._unchecked[1])
        self._unchecked = None

    def _extremes(self, mine: dict[str, Logged], values: dict[str, Tensor], options: dict[str, dict[str, Any]]) -> None:
        """Names logged with ``reduce_fx`` min or max, which a sum cannot carry."""
        for name in options:
            op = Logged(options=options[name]).op
            if op in ("min", "max"):
                worst = float("inf") if op == "min" else float("-inf")
                seen = mine[name].values if name in mine else []
                values[name] = getattr(torch.stack(seen), op)() if seen else torch.tensor(worst, dtype=torch.float64, device=self.device)
                self.mesh.batch.all_reduce(values[name], op)


def _disagreement(names: list[str]) -> RuntimeError:
    logged = ", ".join(repr(name) for name in names if name != LOSS) or "nothing"
    return RuntimeError(
        f"the ranks logged different names in one step (this rank: {logged}). Call self.log on every rank, or with rank_zero_only=True "
        "for what only rank 0 shall log"
    )
