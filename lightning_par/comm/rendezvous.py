"""Words between ranks before there is a process group."""

from __future__ import annotations

from torch import distributed as dist


class Bulletin:
    """Texts that rank 0 posts and the others wait for, in the store where the ranks' environment lets them meet.

    Ranks must know RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets them. Keep it until the process group is made: that
    meets in the same store.
    """

    def __init__(self) -> None:
        self._store, self.rank, self.world_size = next(dist.rendezvous("env://"))

    def post(self, name: str, text: str) -> None:
        self._store.set(f"lightning_par/{name}", text)

    def read(self, name: str) -> str:
        """The text posted under this name; waits for it (up to the store's own five minutes)."""
        return self._store.get(f"lightning_par/{name}").decode()
