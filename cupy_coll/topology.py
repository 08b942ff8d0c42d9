"""Which ranks form which group: arithmetic on rank numbers, nothing else.

Every function returns a list of groups, each a list of global ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from cupy_coll.errors import ArgumentError

__all__ = [
    "data_parallel_groups",
    "inter_node_groups",
    "intra_node_groups",
    "mesh_groups",
    "sequence_parallel_groups",
    "tensor_parallel_groups",
]


def data_parallel_groups(world_size: int, size: int) -> list[list[int]]:
    """Groups of ``size`` ranks that hold the same shard: {i * (W/size) + j : i < size} for each j < W/size."""
    stride = _divide("data_parallel_groups", world_size, size)
    return [[i * stride + j for i in range(size)] for j in range(stride)]


def tensor_parallel_groups(world_size: int, size: int) -> list[list[int]]:
    """Consecutive blocks of ``size`` ranks."""
    return _blocks("tensor_parallel_groups", world_size, size)


def sequence_parallel_groups(world_size: int, size: int) -> list[list[int]]:
    """Consecutive blocks of ``size`` ranks."""
    return _blocks("sequence_parallel_groups", world_size, size)


def intra_node_groups(hosts: Sequence[Hashable]) -> list[list[int]]:
    """The ranks of each node, nodes in the order of their first rank; ``hosts[r]`` is where rank r runs."""
    nodes: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def inter_node_groups(hosts: Sequence[Hashable]) -> list[list[int]]:
    """The ranks with the same in-node rank across nodes.

    Where nodes hold different numbers of ranks, the group of in-node rank i has the nodes with more than i ranks.
    """
    nodes = intra_node_groups(hosts)
    widest = max((len(node) for node in nodes), default=0)
    return [[node[i] for node in nodes if len(node) > i] for i in range(widest)]


def mesh_groups(world_size: int, **axes: int) -> dict[str, list[list[int]]]:
    """The groups along each axis of a mesh of ranks; the last axis varies fastest.

    ``mesh_groups(4, dp=2, tp=2)`` gives dp [[0, 2], [1, 3]] and tp [[0, 1], [2, 3]].

    Raises:
        ArgumentError: an axis is not a positive int, or the product of all is not ``world_size``.
    """
    _positive("mesh_groups", "world_size", world_size)
    product = 1
    for name, size in axes.items():
        _positive("mesh_groups", name, size)
        product *= size
    if product != world_size:
        shape = " x ".join(f"{name}={size}" for name, size in axes.items()) or "no axes"
        raise ArgumentError(f"mesh_groups: {shape} gives {product} ranks, expected the world size {world_size}")
    groups: dict[str, list[list[int]]] = {}
    stride = world_size
    for name, size in axes.items():
        stride //= size
        starts = (block + j for block in range(0, world_size, stride * size) for j in range(stride))
        groups[name] = [[start + i * stride for i in range(size)] for start in starts]
    return groups


def _blocks(function: str, world_size: int, size: int) -> list[list[int]]:
    _divide(function, world_size, size)
    return [list(range(start, start + size)) for start in range(0, world_size, size)]


def _divide(function: str, world_size: int, size: int) -> int:
    _positive(function, "world_size", world_size)
    _positive(function, "size", size)
    if world_size % size:
        raise ArgumentError(f"{function}: size {size} does not divide world_size {world_size}")
    return world_size // size


def _positive(function: str, name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(f"{function}: {name} must be a positive int, got {value!r}")
