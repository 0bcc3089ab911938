"""Lanes: messages one way between two ranks, in order, the two directions apart; how long they, and the mesh's groups, wait."""

from __future__ import annotations

import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_par.comm import Group, Lanes, Mesh, apart
from lightning_par.layout import ParallelLayout
from tests.harness import run_world


def _both_ways() -> None:
    group = Mesh.build(ParallelLayout(pp=2).resolve(2)).pp
    lanes = Lanes.open(group, [(0, 1), (1, 0)])
    peer, cpu = 1 - group.index, torch.device("cpu")
    empty = [torch.empty(2), torch.empty(3, dtype=torch.int64)]
    first = lanes.receive(empty, peer)  # both post a receive before either sends
    second = torch.empty(1)
    third = lanes.receive([second], peer)
    sends = [
        lanes.send([torch.full((2,), group.index + 0.5), torch.arange(3)], peer),
        lanes.send([torch.full((1,), 7.0 + group.index)], peer),
    ]
    header = lanes.send_object({"shape": (group.index, 2)}, peer, cpu)
    third.wait()
    first.wait()
    assert empty[0].tolist() == [peer + 0.5] * 2
    assert empty[1].tolist() == [0, 1, 2]
    assert second.item() == 7 + peer
    assert lanes.receive_object(peer, cpu) == {"shape": (peer, 2)}
    for work in (*sends, header):
        work.wait()
        work.wait()


def test_two_ranks_that_send_both_ways_do_not_mix_messages() -> None:
    run_world(_both_ways, 2)


def test_a_group_of_one_has_no_lanes() -> None:
    Lanes.open(Group("pp"), [])


def _waits_alone(timeout: timedelta) -> None:
    """Rank 0 comes to every group of a mesh, the others to none until it is through."""
    mesh = Mesh.build(ParallelLayout(pp=2, dp=2).resolve(4), timeout=timeout)
    assert {group.timeout for group in (mesh.pp, mesh.data, mesh.cp, mesh.world)} == {timeout}
    with patch.object(Group, "_is_gloo", False), patch.object(Lanes, "_greet"):  # as on NCCL: a process group for each lane
        lanes = Lanes.open(mesh.pp, [(0, 1), (1, 0)])
    if mesh.rank == 0:
        for wait in (
            lambda: mesh.pp.all_reduce(torch.ones(1)),
            lambda: mesh.data.all_gather(torch.ones(2), torch.ones(1)),
            lambda: lanes.receive([torch.ones(1)], 1).wait(),
        ):
            start = time.monotonic()
            with pytest.raises(RuntimeError, match=r"(?i)timed? ?out"):
                wait()
            assert 0.5 < time.monotonic() - start < 10
    dist.barrier()


def test_subgroups_and_lanes_wait_for_as_long_as_they_are_told() -> None:
    run_world(_waits_alone, 4, timedelta(seconds=1), timeout=60)


def _a_group_each(size: int) -> None:
    mesh = Mesh.build(ParallelLayout(pp=size).resolve(size))
    pairs = [pair for i in range(size - 1) for pair in ((i, i + 1), (i + 1, i))]
    with patch.object(Group, "_is_gloo", False), patch.object(Lanes, "_greet"):
        lanes = Lanes.open(mesh.pp, pairs)
    neighbours = [peer for peer in (mesh.rank - 1, mesh.rank + 1) if 0 <= peer < size]
    inbox = {peer: torch.empty(1) for peer in neighbours}
    works = [lanes.receive([inbox[peer]], peer) for peer in neighbours]
    works += [lanes.send([torch.full((1,), 10.0 * mesh.rank + peer)], peer) for peer in neighbours]
    for work in works:
        work.wait()
    assert {peer: word.item() for peer, word in inbox.items()} == {peer: 10 * peer + mesh.rank for peer in neighbours}
    total = torch.ones(1)
    apart(mesh.world).all_reduce(total)
    assert total.item() == size


@pytest.mark.parametrize("size", [3, 4])
def test_lanes_of_their_own_open_in_the_middle_too_and_so_does_what_is_made_after_them(size: int) -> None:
    run_world(_a_group_each, size, size, timeout=60)
