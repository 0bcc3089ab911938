"""What this rank handed to the network: tests assert it, benchmarks report it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sent:
    """One call: its operation, the group it ran in, the elements this rank puts on the wire, and their size in bytes."""

    op: str
    group: str
    elements: int
    itemsize: int

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize


@dataclass(slots=True)
class Trace:
    """Records every call of the groups of one mesh while ``recording``; costs one truth test a call otherwise."""

    _open: list[list[Sent]] = field(default_factory=list)

    @contextmanager
    def recording(self) -> Iterator[list[Sent]]:
        """Collect the calls made inside the block, on this rank, in order."""
        calls: list[Sent] = []
        self._open.append(calls)
        try:
            yield calls
        finally:
            self._open = [other for other in self._open if other is not calls]

    def add(self, op: str, group: str, elements: int, tensor: Tensor) -> None:
        if self._open:
            sent = Sent(op, group, elements, tensor.element_size())
            for calls in self._open:
                calls.append(sent)
