"""Groups made after the world is connected get a piece of its communicator; all others a unique id of their own."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch
from conftest import standin

import cupy_coll as cc


@pytest.fixture
def connected(fake, world):
    world.warm_up()
    standin.clear()
    return world


def names() -> list[str]:
    return [call.name for call in standin.calls("CommSplit", "GetUniqueId", "CommInitRank")]


def use(group, expect):
    tensor = torch.full((3,), float(group.rank + 1))
    cc.all_reduce(tensor, group)
    expect(tensor, torch.full((3,), group.size * (group.size + 1) / 2))
    order = torch.empty(group.size)
    cc.all_gather(order, torch.tensor([float(cc.CommContext().get_global_rank())]), group)
    expect(order.tolist(), [float(rank) for rank in group.ranks], "the group's own order")


def test_a_group_without_rank_0_in_its_own_order(connected, size, rank, expect):
    ranks = list(range(size - 1, 0, -1)) or [0]
    group = cc.CommContext().init_group(ranks, "SPLIT")
    expect(names(), ["CommSplit"], "every rank of the world takes part")
    if rank in ranks:
        use(group, expect)
        expect(names(), ["CommSplit"], "connected already")
        group.close()
    use(connected, expect)


def test_a_mesh(connected, size, expect):
    mesh = cc.CommContext().init_mesh(up=size, along=1)
    expect(names(), ["CommSplit", "CommSplit"], "once an axis")
    for group in mesh.values():
        use(group, expect)
        group.close()


def test_what_is_in_flight_ends_before(connected, size, expect):
    standin.asynchronous(True)
    tensor = torch.ones(1000)
    work = cc.all_reduce(tensor, connected, async_op=True)
    group = cc.CommContext().init_group(list(range(size)), "BEHIND")
    expect(tensor, torch.full((1000,), float(size)), "before it was waited for")
    work.wait()
    standin.asynchronous(False)
    use(group, expect)
    group.close()


@pytest.mark.parametrize("why", ["one rank has an older NCCL", "one rank captures", "the group is for CPU tensors"])
def test_where_one_cannot(fake, connected, size, rank, expect, why):
    with mock.patch.dict(os.environ, NCCL_STANDIN_VERSION="21799" if "older" in why and rank == size - 1 else "22807"):
        fake.capturing = "captures" in why and rank == size - 1
        group = cc.CommContext().init_group(list(range(size)), "NOT_SPLIT", use_cpu="CPU" in why)
        fake.capturing = False
    expect(names(), [])
    if "CPU" in why:
        fake.enabled = False
    use(group, expect)
    expect("CommInitRank" in names(), "CPU" not in why)
    group.close()


def test_before_the_world_is_connected(fake, size, expect):
    """Nothing is connected that nobody asked for."""
    world = cc.CommContext().get_group("GLOBAL")
    with mock.patch.object(world, "_nccl", None):
        standin.clear()
        group = cc.CommContext().init_group(list(range(size)), "EARLY")
    expect(names(), [])
    use(group, expect)
    expect("CommInitRank" in names(), True)
    group.close()
