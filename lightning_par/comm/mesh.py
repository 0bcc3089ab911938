"""Mesh: the process groups of one layout, as one rank sees them.

Note [How the groups are made]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A process group made after the default one has its backend's default timeout, not that of the default group; a device mesh has no word
for it, and set later it does not reach gloo's sends and receives. So the groups are made one by one with their timeout. Along given
axes they are a partition of the ranks: each rank makes exactly one group, its own, and all ranks go through the axes in the same
order. So nobody waits for a group it is not in, and where NCCL splits the default communicator, all ranks come to every split.

Groups of the same ranks share a process group, but for ``shard``, ``values`` and ``replicate``: a rank that used all its parameters
reduces gradients during backward, one that did not only after it, so these calls interleave differently with all others.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from lightning_par.comm.group import Group
from lightning_par.comm.trace import Trace
from lightning_par.layout import AXES, ParallelLayout, RankGrid


@dataclass(frozen=True)
class Mesh:
    """The groups along each axis and those over which gradients and norms are summed.

    Attributes:
        pp, dp, cp, tp: the ranks along one axis.
        data: over dp · cp, where gradients are reduced.
        shard: of those, the ranks among which ZeRO shards; their gradients are reduced here.
        values: the same ranks; their values are gathered here.
        replicate: of those, the ranks that hold equal shards.
        copy: over pp · shard · cp · tp, the ranks that hold one full copy of everything that is sharded.
        model: over pp · tp, the ranks that hold different parameters for the same data.
        batch: over pp · dp · cp, the ranks that see one global batch together, at one tp index.
        world: every rank.
    """

    grid: RankGrid
    rank: int
    pp: Group
    dp: Group
    cp: Group
    tp: Group
    data: Group
    shard: Group
    values: Group
    replicate: Group
    copy: Group
    model: Group
    batch: Group
    world: Group
    trace: Trace = field(repr=False)

    @property
    def layout(self) -> ParallelLayout:
        return self.grid.layout

    @classmethod
    def build(cls, layout: ParallelLayout, timeout: timedelta | None = None) -> Mesh:
        """Create the groups. All ranks must call, after ``init_process_group``; ``layout`` must be resolved for this world.

        Groups carry tensors of any device that the default group does. ``timeout`` is how long a rank waits
        for the others in the groups made here; the default group keeps its own. See Note [How the groups are made].
        """
        rank = dist.get_rank() if dist.is_initialized() else 0
        grid, trace = RankGrid(layout), Trace()
        handles: dict[tuple[int, ...], dist.ProcessGroup] = {}  # axes that differ in axes of size 1 share a handle
        if len(everyone := tuple(grid.peers(rank, *AXES))) > 1:
            handles[everyone] = dist.group.WORLD

        def group(*axes: str, apart: bool = False) -> Group:
            ranks = tuple(grid.peers(rank, *axes))
            handle = handles.get(ranks)
            if len(ranks) > 1 and (apart or handle is None):
                handle = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
                if not apart:
                    handles[ranks] = handle
            return Group("·".join(axes), ranks, ranks.index(rank), handle, trace, timeout)

        return cls(
            grid=grid,
            rank=rank,
            pp=group("pp"),
            dp=group("dp"),
            cp=group("cp"),
            tp=group("tp"),
            data=group("dp", "cp"),
            shard=group("shard", "cp", apart=True),
            values=group("shard", "cp", apart=True),
            replicate=group("replicate", apart=True),
            copy=group("pp", "shard", "cp", "tp"),
            model=group("pp", "tp"),
            batch=group("pp", "dp", "cp"),
            world=group(*AXES),
            trace=trace,
        )


def apart(group: Group, backend: str | None = None) -> Group:
    """The same ranks with a process group of their own: its calls need keep no order with others. All ranks call."""
    if group.size == 1:
        return group
    handle = dist.new_group(list(group.ranks), timeout=group.timeout, backend=backend, use_local_synchronization=True)
    return replace(group, handle=handle)
