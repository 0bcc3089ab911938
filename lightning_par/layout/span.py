"""Half-open ranges, and the one way this project cuts a length into parts."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple


class Span(NamedTuple):
    """The half-open range ``[start, stop)`` of indices along a dim or a flat buffer."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def intersect(self, other: Span) -> Span:
        """The common part; an empty span at ``start`` where there is none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def shift(self, by: int) -> Span:
        return Span(self.start + by, self.stop + by)

    def slice(self) -> slice:
        return slice(self.start, self.stop)


def split(total: int, parts: int) -> list[Span]:
    """Cut ``[0, total)`` into ``parts`` spans whose sizes differ by at most one, the bigger ones first.

    The same cut as ``torch.tensor_split``; parts beyond ``total`` are empty.
    """
    size, extra = divmod(total, parts)
    starts = [index * size + min(index, extra) for index in range(parts + 1)]
    return [Span(start, stop) for start, stop in pairwise(starts)]
