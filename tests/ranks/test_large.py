"""Messages of more bytes than a C int counts."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

import cupy_coll as cc

COUNT = 2**31 + 8
PERIOD = torch.arange(251, dtype=torch.int16).to(torch.int8)  # divides no power of two: a wrong offset shows


def fill(tensor: torch.Tensor, begin: int) -> None:
    """The elements from ``begin`` of the endless pattern."""
    pattern = PERIOD.roll(-(begin % 251))
    whole = tensor.numel() // 251 * 251
    tensor[:whole].view(-1, 251).copy_(pattern.expand(whole // 251, 251))
    tensor[whole:].copy_(pattern[: tensor.numel() - whole])


def holds(tensor: torch.Tensor, begin: int) -> bool:
    pattern = PERIOD.roll(-(begin % 251))
    whole = tensor.numel() // 251 * 251
    rows = tensor[:whole].view(-1, 251)
    blocks = all(bool((block == pattern).all()) for block in rows.split(100_000))
    return blocks and torch.equal(tensor[whole:], pattern[: tensor.numel() - whole])


@pytest.mark.slow
@pytest.mark.limit(300)
def test_a20_over_2_gib(group_of, expect):
    """2^31 + 8 bytes in one broadcast, all-reduce and all-gather. Takes some 7 GB for the two ranks together."""
    group = group_of.of(2)
    if group is None:
        return
    tensor = torch.zeros(COUNT, dtype=torch.int8)
    if group.rank == 0:
        fill(tensor, 5)
    cc.broadcast(tensor, group, group_src=0)
    expect.that(holds(tensor, 5), "broadcast")
    tensor.div_(2, rounding_mode="trunc")
    cc.all_reduce(tensor, group)
    halves = PERIOD.div(2, rounding_mode="trunc") * 2
    rows = tensor[: COUNT // 251 * 251].view(-1, 251)
    right = all(bool((block == halves.roll(-5)).all()) for block in rows.split(100_000))
    expect.that(right, "all_reduce")
    expect(tensor[COUNT // 251 * 251 :], halves.roll(-5)[: COUNT % 251], "the end of the all_reduce")
    part = tensor[: COUNT // 2].clone()
    tensor.zero_()
    fill(part, 5 + group.rank * 7)
    cc.all_gather(tensor, part, group)
    expect.that(holds(tensor[: COUNT // 2], 5) and holds(tensor[COUNT // 2 :], 12), "all_gather")


def test_several_pieces(world, rank, size, expect):
    """Sizes beside the bounds at which a reduction is cut into pieces, on tensors of some megabytes."""
    for nbytes in (32 << 10, 1 << 20, 4 << 20, 9 << 20):
        for extra in (-1, 0, 1, 17):
            count = nbytes // 4 + extra
            tensor = torch.arange(count, dtype=torch.int32) % 1000 + rank
            cc.all_reduce(tensor, world, ReduceOp.MAX)
            expect.that(torch.equal(tensor, torch.arange(count, dtype=torch.int32) % 1000 + size - 1), f"{count}")
