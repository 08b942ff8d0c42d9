"""Rank arithmetic: closed forms, and what every division of a world into groups must satisfy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupy_coll import topology
from cupy_coll.errors import ArgumentError

BY_SIZE = [topology.data_parallel_groups, topology.tensor_parallel_groups, topology.sequence_parallel_groups]


def test_data_parallel() -> None:
    """Size d in a world of W: {i W/d + j : i < d} for each j < W/d."""
    assert topology.data_parallel_groups(8, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert topology.data_parallel_groups(8, 4) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert topology.data_parallel_groups(6, 6) == [[0, 1, 2, 3, 4, 5]]
    assert topology.data_parallel_groups(3, 1) == [[0], [1], [2]]


@pytest.mark.parametrize("function", [topology.tensor_parallel_groups, topology.sequence_parallel_groups])
def test_consecutive_blocks(function) -> None:
    assert function(8, 2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert function(6, 3) == [[0, 1, 2], [3, 4, 5]]
    assert function(1, 1) == [[0]]


@pytest.mark.parametrize("function", BY_SIZE)
@pytest.mark.parametrize(("world", "size"), [(8, 3), (4, 8), (4, 0), (4, -2), (0, 1), (-4, 2)])
def test_sizes_that_do_not_divide(function, world, size) -> None:
    with pytest.raises(
        ArgumentError, match=rf"{function.__name__}.*{min(size, world) if min(size, world) < 1 else size}"
    ):
        function(world, size)


@pytest.mark.parametrize("function", BY_SIZE)
@pytest.mark.parametrize("size", [2.0, "2", None, True])
def test_sizes_that_are_no_integers(function, size) -> None:
    with pytest.raises(ArgumentError, match=function.__name__):
        function(4, size)


def test_nodes() -> None:
    """Ranks need not be placed node after node, nor nodes hold equally many."""
    assert topology.intra_node_groups(["a", "a", "b", "b"]) == [[0, 1], [2, 3]]
    assert topology.inter_node_groups(["a", "a", "b", "b"]) == [[0, 2], [1, 3]]
    assert topology.intra_node_groups(["a", "b", "a", "b"]) == [[0, 2], [1, 3]]
    assert topology.inter_node_groups(["a", "b", "a", "b"]) == [[0, 1], [2, 3]]
    assert topology.intra_node_groups(["a", "b", "b", "b"]) == [[0], [1, 2, 3]]
    assert topology.inter_node_groups(["a", "b", "b", "b"]) == [[0, 1], [2], [3]]
    assert topology.inter_node_groups(["a"]) == topology.intra_node_groups(["a"]) == [[0]]


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=24))
def test_nodes_of_any_placement(hosts: list[str]) -> None:
    intra, inter = topology.intra_node_groups(hosts), topology.inter_node_groups(hosts)
    for groups in (intra, inter):
        assert sorted(rank for group in groups for rank in group) == list(range(len(hosts)))
    assert all(group == sorted(group) for group in intra)
    assert all(len({hosts[rank] for rank in group}) == 1 for group in intra)
    in_node = {rank: group.index(rank) for group in intra for rank in group}
    for group in inter:
        assert len({hosts[rank] for rank in group}) == len(group)  # one rank of a node
        assert len({in_node[rank] for rank in group}) == 1  # the same place in each
        nodes = [hosts[rank] for rank in group]
        assert nodes == sorted(nodes, key=hosts.index)  # so that a node has the same index in each group


def test_mesh() -> None:
    assert topology.mesh_groups(4, dp=2, cp=1, tp=2) == {
        "dp": [[0, 2], [1, 3]],
        "cp": [[0], [1], [2], [3]],
        "tp": [[0, 1], [2, 3]],
    }
    assert topology.mesh_groups(8, pp=2, dp=2, tp=2) == {
        "pp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "dp": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "tp": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert topology.mesh_groups(6, tp=3, dp=2) == {"tp": [[0, 2, 4], [1, 3, 5]], "dp": [[0, 1], [2, 3], [4, 5]]}
    assert list(topology.mesh_groups(1, z=1, a=1)) == ["z", "a"]  # in the order given


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_mesh_of_any_shape(sizes: list[int]) -> None:
    """Each axis divides the ranks into groups of its size, along which that coordinate alone runs, in order."""
    world = 1
    for size in sizes:
        world *= size
    axes = {f"axis{i}": size for i, size in enumerate(sizes)}
    strides = [1]
    for size in sizes[:0:-1]:
        strides.insert(0, strides[0] * size)

    def coordinates(rank: int) -> list[int]:
        return [rank // stride % size for stride, size in zip(strides, sizes, strict=True)]

    for number, (axis, groups) in enumerate(topology.mesh_groups(world, **axes).items()):
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        for group in groups:
            assert [coordinates(rank)[number] for rank in group] == list(range(axes[axis]))
            others = {tuple(c for i, c in enumerate(coordinates(rank)) if i != number) for rank in group}
            assert len(others) == 1


@pytest.mark.parametrize("function", [topology.tensor_parallel_groups, topology.data_parallel_groups])
@pytest.mark.parametrize("world", [1, 2, 6, 12])
def test_mesh_and_sizes_agree(function, world) -> None:
    for size in (s for s in range(1, world + 1) if world % s == 0):
        mesh = topology.mesh_groups(world, dp=world // size, tp=size)
        assert topology.tensor_parallel_groups(world, size) == mesh["tp"]
        assert topology.data_parallel_groups(world, world // size) == mesh["dp"]


@pytest.mark.parametrize(
    ("world", "axes"), [(4, {"dp": 3}), (4, {"dp": 2}), (4, {"dp": 4, "tp": 0}), (4, {"dp": -2, "tp": -2}), (4, {})]
)
def test_meshes_that_do_not_fit(world, axes) -> None:
    with pytest.raises(ArgumentError, match="mesh_groups"):
        topology.mesh_groups(world, **axes)
