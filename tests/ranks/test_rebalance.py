"""rebalance_nd_tensor: uneven rows of all ranks, on every rank, bit for bit."""

from __future__ import annotations

import pytest
import torch
from support import COPIED, LAYOUTS, Placed, marked, name, raw, tensor_of

import cupy_coll as cc


def rows(rank: int) -> int:
    return (2 * rank + 1) % 4


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_rebalance(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for tail in ((), (3,), (2, 0), (2, 1, 3)):
            right = torch.cat([tensor_of(marked((rows(r), *tail), r), dtype) for r in ranks])
            for layout in LAYOUTS if dtype == torch.float32 else ("transposed",):
                label = f"{ranks} {tail} {layout}"
                mine = Placed(tensor_of(marked((rows(rank), *tail), rank), dtype), layout).view
                if group is None:
                    outside = f"TEST_{'_'.join(map(str, ranks))}"
                    expect(cc.rebalance_nd_tensor(mine, outside), None, label)
                    continue
                got = cc.rebalance_nd_tensor(mine, group)
                expect(got, right, label)
                expect(mine, tensor_of(marked((rows(rank), *tail), rank), dtype), f"{label}: input changed")


def test_the_documented_example(group_of, expect):
    group = group_of.of(3)
    if group is None:
        return
    whole = torch.arange(40.0).reshape(10, 4)
    mine = whole.split([3, 5, 2])[group.rank]
    expect(cc.rebalance_nd_tensor(mine, group=group), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=name)
def test_a8_uneven_rows(dtype, group_of, expect):
    group = group_of.of(4)
    if group is None:
        return
    whole = torch.arange(15).reshape(5, 3).to(dtype)
    expect(cc.rebalance_nd_tensor(whole.split([2, 1, 1, 1])[group.rank], group), whole)


def test_a8_bits_that_arithmetic_would_lose(world, rank, size, expect):
    """2**53 + 1, negative zero, a NaN with a payload, true: nothing is computed on the way."""
    wide = cc.rebalance_nd_tensor(torch.full((rank + 1,), 2**53 + 1))
    expect(wide, torch.full((size * (size + 1) // 2,), 2**53 + 1))
    zeros = cc.rebalance_nd_tensor(torch.full((rank + 1, 2), -0.0))
    expect(raw(zeros), raw(torch.full((size * (size + 1) // 2, 2), -0.0)))
    payload = torch.full((rank + 1,), 0x7FC0BEEF, dtype=torch.int32).view(torch.float32)
    got = cc.rebalance_nd_tensor(payload)
    expect(got.view(torch.int32), torch.full((size * (size + 1) // 2,), 0x7FC0BEEF, dtype=torch.int32))
    flags = cc.rebalance_nd_tensor(torch.tensor([True] * (rank + 1)))
    expect(flags, torch.tensor([True] * (size * (size + 1) // 2)))


def test_no_rows_at_all(world, expect):
    expect(cc.rebalance_nd_tensor(torch.zeros(0, 3)), torch.zeros(0, 3))


def test_all_rows_on_one_rank(world, rank, size, expect):
    for holder in range(size):
        mine = torch.arange(6.0).reshape(3, 2) if rank == holder else torch.zeros(0, 2)
        expect(cc.rebalance_nd_tensor(mine), torch.arange(6.0).reshape(3, 2), f"from {holder}")


def test_many_rows(world, rank, size, expect):
    """Megabytes."""
    got = cc.rebalance_nd_tensor(torch.arange(400_000.0 + rank))
    expect(got, torch.cat([torch.arange(400_000.0 + r) for r in range(size)]))


def test_expanded_input(world, rank, size, expect):
    got = cc.rebalance_nd_tensor(torch.tensor([[float(rank)]]).expand(2, 3))
    expect(got, torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3))


def test_differences_raise_everywhere(world, rank, size, raises_everywhere, expect):
    """Another width, number of dimensions or dtype on one rank; the message names it; the next call works."""
    odd = size - 1
    if size > 1:
        wrong = [torch.zeros(2, 4), torch.zeros(2, 3, 1), torch.zeros(2), torch.zeros(2, 3, dtype=torch.float64)]
        for bad in wrong:
            with raises_everywhere(cc.CupyCollError, rf"rebalance_nd_tensor.*\b{odd}\b"):
                cc.rebalance_nd_tensor(bad if rank == odd else torch.zeros(2, 3))
    with raises_everywhere(cc.CupyCollError, "rebalance_nd_tensor"):  # no rows to count
        cc.rebalance_nd_tensor(torch.tensor(1.0) if rank == odd else torch.zeros(2))
    with raises_everywhere(cc.CupyCollError, "rebalance_nd_tensor"):
        cc.rebalance_nd_tensor([1.0] if rank == odd else torch.zeros(2))
    expect(cc.rebalance_nd_tensor(torch.ones(1, 2)), torch.ones(size, 2))
