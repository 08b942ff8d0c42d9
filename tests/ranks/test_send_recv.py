"""send and recv: two ranks at a time."""

from __future__ import annotations

import pytest
import torch
from support import COPIED, Placed, cases, marked, name, tensor_of

import cupy_coll as cc


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_ring(dtype, group_of, expect, rank):
    """Everybody sends to the next and receives from the one before."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None or group.size == 1:
            continue
        following, before = ranks[(group.rank + 1) % group.size], ranks[group.rank - 1]
        for shape, layout in cases(dtype):
            label = f"{ranks} {shape} {layout}"
            source = Placed(tensor_of(marked(shape, rank), dtype), layout)
            output = Placed(torch.zeros(shape, dtype=dtype), layout)
            sent = cc.send(source.view, following, group, async_op=True)
            received = cc.recv(output.view, before, group, async_op=True)
            received.wait()
            sent.wait()
            expect(output.view, tensor_of(marked(shape, before), dtype), label)
            expect.that(not output.spilled(), f"{label}: wrote beside the view")


def test_synchronous(group_of, expect):
    """In the order sent, many between the same two ranks, of different sizes; both directions."""
    group = group_of.of(2)
    if group is None:
        return
    me, other = group.rank, group.ranks[1 - group.rank]
    for count in (1, 0, 7, 100_000):
        for turn in (0, 1):
            tensor = torch.full((count,), 5.0 + turn)
            if me == turn:
                expect(cc.send(tensor, other, group), None)
            else:
                tensor.zero_()
                expect(cc.recv(tensor, other, group), None)
                expect(tensor, torch.full((count,), 5.0 + turn), f"{count} elements")


def test_peers_by_their_rank_in_the_group(group_of, expect):
    group = group_of.of(2)
    if group is None:
        return
    tensor = torch.full((3,), 1.0 + group.rank)
    if group.rank == 0:
        cc.send(tensor, None, group, group_dst=1)
    else:
        cc.recv(tensor, None, group, group_src=0)
        expect(tensor, torch.full((3,), 1.0))


def test_messages_keep_their_order(group_of, expect):
    group = group_of.of(2)
    if group is None:
        return
    tensors = [torch.full((4,), float(i)) if group.rank == 0 else torch.zeros(4) for i in range(20)]
    call = cc.send if group.rank == 0 else cc.recv
    works = [call(tensor, group.ranks[1 - group.rank], group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    expect([tensor[0].item() for tensor in tensors], [float(i) for i in range(20)])


def test_between_collectives(group_of, expect):
    """Two members exchange messages while a collective of the whole group is in flight."""
    group = group_of.of(3)
    if group is None:
        return
    total = torch.ones(3)
    work = cc.all_reduce(total, group, async_op=True)
    tensor = torch.full((2,), 9.0 if group.rank == 2 else 0.0)
    if group.rank == 2:
        cc.send(tensor, group.ranks[1], group)
    elif group.rank == 1:
        cc.recv(tensor, group.ranks[2], group)
        expect(tensor, torch.full((2,), 9.0))
    work.wait()
    expect(total, torch.full((3,), 3.0))


@pytest.mark.parametrize("count", [5, 2])
def test_messages_of_another_size(count, group_of, expect):
    """The receiver is told; the messages after it are not disturbed."""
    group = group_of.of(2)
    if group is None:
        return
    if group.rank == 0:
        cc.send(torch.ones(3), group.ranks[1], group)
        cc.send(torch.full((3,), 2.0), group.ranks[1], group)
    else:
        with pytest.raises(cc.MismatchError, match="recv"):
            cc.recv(torch.zeros(count), group.ranks[0], group)
        tensor = torch.zeros(3)
        cc.recv(tensor, group.ranks[0], group)
        expect(tensor, torch.full((3,), 2.0))
    total = torch.ones(1)
    cc.all_reduce(total, group)
    expect(total, torch.full((1,), 2.0))


def test_bad_arguments(world, group_of, rank, size, raises_everywhere, expect):
    tensor = torch.zeros(3)
    started = world.sequence
    with raises_everywhere(cc.GroupError, "send.*dst"):
        cc.send(tensor, size, world)
    with raises_everywhere(cc.GroupError, "recv.*src"):
        cc.recv(tensor, -1, world)
    with raises_everywhere(cc.GroupError, "send.*dst"):
        cc.send(tensor, rank, world, group_dst=0)
    with raises_everywhere(cc.ArgumentError, "send.*rank"):
        cc.send(tensor, rank, world)  # to itself
    if size > 1:
        with raises_everywhere(cc.ShapeError, "recv.*tensor"):
            cc.recv(torch.zeros(1).expand(3), (rank + 1) % size, world)
    expect(world.sequence - started, 5 if size > 1 else 4, "only the barriers were sent")


def test_outside_of_the_group(world, group_of, rank, size, expect):
    ranks = tuple(range(1, size)) or (0,)
    if group_of(ranks) is None:
        mode = f"TEST_{'_'.join(map(str, ranks))}"
        expect(cc.send(torch.zeros(1), ranks[0], mode), None)
        expect(cc.recv(torch.zeros(1), ranks[0], mode, async_op=True), None)
