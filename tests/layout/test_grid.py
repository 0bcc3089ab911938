"""Which rank stands where: bijective, tp fastest, and each axis partitions the world."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightning_par.layout import ParallelLayout, RankGrid

DEGREES = ("pp", "dp", "cp", "tp")
grids = st.tuples(*(st.integers(1, 3) for _ in DEGREES)).map(
    lambda sizes: RankGrid(ParallelLayout(**dict(zip(DEGREES, sizes, strict=True))))
)


@given(grids)
def test_coordinates_and_rank_are_inverse(grid: RankGrid) -> None:
    for rank in range(grid.layout.world):
        index = grid.coordinates(rank)
        assert grid.rank(**{axis: index[axis] for axis in DEGREES}) == rank


@given(grids, st.sets(st.sampled_from(DEGREES)))
def test_peers_along_any_axes_partition_the_world(grid: RankGrid, axes: set[str]) -> None:
    groups = {tuple(grid.peers(rank, *axes)) for rank in range(grid.layout.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(grid.layout.world))


def test_tp_neighbours_are_neighbouring_ranks_and_stages_lie_furthest_apart() -> None:
    grid = RankGrid(ParallelLayout(dp=2, tp=2, pp=2, cp=2))
    assert grid.peers(0, "tp") == [0, 1]
    assert grid.peers(0, "cp") == [0, 2]
    assert grid.peers(0, "dp") == [0, 4]
    assert grid.peers(0, "pp") == [0, 8]


def test_the_table_shows_every_rank_once() -> None:
    table = RankGrid(ParallelLayout(dp=2, tp=2, pp=2)).table()
    assert table.splitlines() == ["      dp 0  dp 1", "pp 0  0 1   2 3", "pp 1  4 5   6 7"]
