"""Dataloaders in the place of the user's, where a resumed run needs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typing_extensions import override

from lightning_par.strategy.state import generators, set_generators


class _InPlaceOf:
    """Has everything that the dataloader has."""

    def __init__(self, dataloader: Any) -> None:
        self._dataloader = dataloader

    def __len__(self) -> int:
        return len(self._dataloader)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataloader":  # a copy in the making
            raise AttributeError(name)
        return getattr(self._dataloader, name)


class Onward(_InPlaceOf):
    """Its first pass begins behind ``given`` batches, which are drawn and dropped."""

    def __init__(self, dataloader: Any, given: int) -> None:
        super().__init__(dataloader)
        self._given = given

    def __iter__(self) -> Iterator[Any]:
        batches, given = iter(self._dataloader), self._given
        self._given = 0
        for _ in range(given):
            next(batches, None)
        return batches


class _Stateful(_InPlaceOf):
    def state_dict(self) -> dict[str, Any]:
        return self._dataloader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataloader.load_state_dict(state)


class NextEpoch(_Stateful):
    """Has the state of a dataloader at the end of an epoch: where a first pass has no batch left, it begins another.

    That first pass leaves random generators as they were.

    Args:
        ends: that epoch is to be ended before the next begins, so the first iterator of all is not used.
    """

    _is_new = True

    def __init__(self, dataloader: Any, *, ends: bool = False) -> None:
        super().__init__(dataloader)
        self._ends = ends

    def __iter__(self) -> Iterator[Any]:
        ends, self._ends = self._ends, False
        return iter(()) if ends else self._batches()

    def _batches(self) -> Iterator[Any]:
        is_empty, self._is_new, before = self._is_new, False, generators()
        for batch in self._dataloader:
            is_empty = False
            yield batch
        if is_empty:
            set_generators(before)
            yield from self._dataloader


class StateOfGiven(_Stateful):
    """Tells the state of a dataloader without a length as it was before the last batch that it gave.

    Lightning draws one batch ahead of the step, to know which is the last; a run that is resumed from the state after it would miss it.
    """

    _state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._dataloader)
        while True:
            self._state = self._dataloader.state_dict()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    @override
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._state is None else self._state
