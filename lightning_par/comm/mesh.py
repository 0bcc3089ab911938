"""Mesh: the process groups of one layout, as one rank sees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_par.comm.group import Group
from lightning_par.comm.trace import Trace
from lightning_par.layout import AXES, ParallelLayout, RankGrid


@dataclass(frozen=True)
class Mesh:
    """The groups along each axis and those over which gradients and norms are summed.

    Attributes:
        pp, dp, cp, tp: the ranks along one axis.
        data: over dp · cp, where gradients are reduced.
        shard: of those, the ranks among which ZeRO shards.
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
    def build(cls, layout: ParallelLayout, device_type: str = "cpu") -> Mesh:
        """Create the groups. All ranks must call, after ``init_process_group``; ``layout`` must be resolved for this world."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        grid, trace = RankGrid(layout), Trace()
        wide = {axis: degree for axis, degree in zip(AXES, grid.shape, strict=True) if degree > 1}
        torch_mesh = init_device_mesh(device_type, tuple(wide.values()), mesh_dim_names=tuple(wide)) if wide else None

        def group(*axes: str) -> Group:
            ranks = tuple(grid.peers(rank, *axes))
            along = ("replicate", "shard", *axes) if "dp" in axes else axes
            handle = _handle(torch_mesh, tuple(axis for axis in wide if axis in along)) if len(ranks) > 1 else None
            return Group("·".join(axes), ranks, ranks.index(rank), handle, trace)

        return cls(
            grid=grid,
            rank=rank,
            pp=group("pp"),
            dp=group("dp"),
            cp=group("cp"),
            tp=group("tp"),
            data=group("dp", "cp"),
            shard=group("shard", "cp"),
            replicate=group("replicate"),
            copy=group("pp", "shard", "cp", "tp"),
            model=group("pp", "tp"),
            batch=group("pp", "dp", "cp"),
            world=group(*AXES),
            trace=trace,
        )


def _handle(torch_mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The process group along ``axes``: the mesh's own for one axis, the default group for all, a flattened one between."""
    if axes == torch_mesh.mesh_dim_names:
        return dist.group.WORLD
    if len(axes) == 1:
        return torch_mesh.get_group(axes[0])
    return torch_mesh[axes]._flatten("_".join(axes)).get_group()
