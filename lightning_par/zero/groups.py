"""The groups of ranks over which gradients and values travel."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_par.comm import Group, Mesh


@dataclass(frozen=True)
class ReduceGroups:
    """Where gradients travel.

    Attributes:
        shard: ranks that saw different samples or tokens and share the optimizer's work: gradients are reduce-scattered among them.
        values: the same ranks, for gathering values: apart from ``shard`` since calls on the two may interleave differently on each rank.
            A group of one: each of them does all the work, and gradients are all-reduced.
        replicate: groups of such ranks that do the same work: over them each span is summed again.
        replicas: by how many samples' gradients are divided: context shards of one replica are pieces of one loss, so they only add.
        data: shard · replicate.
        pp: over which weights tied across stages are summed.
        tp: over which partial gradients of replicated parameters are summed.
    """

    shard: Group
    values: Group
    replicate: Group
    data: Group
    replicas: int
    pp: Group
    tp: Group

    @classmethod
    def of(cls, mesh: Mesh) -> ReduceGroups:
        return cls(mesh.shard, mesh.values, mesh.replicate, mesh.data, mesh.layout.dp, mesh.pp, mesh.tp)
