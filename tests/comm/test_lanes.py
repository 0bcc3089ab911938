"""Lanes: messages one way between two ranks, in order, the two directions apart."""

from __future__ import annotations

import torch

from lightning_par.comm import Group, Lanes, Mesh
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
