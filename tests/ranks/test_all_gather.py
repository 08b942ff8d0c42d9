"""all_gather: concatenated or stacked, in the group's order."""

from __future__ import annotations

import pytest
import torch
from support import COPIED, Placed, cases, ended, marked, name, tensor_of

import cupy_coll as cc


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_all_gather(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for shape, layout in cases(dtype):
            parts = [tensor_of(marked(shape, member), dtype) for member in ranks]
            for stacked in (False, True) if shape else (True,):
                for async_op in (False, True):
                    label = f"{ranks} {shape} {layout} stacked={stacked} async={async_op}"
                    expected = torch.stack(parts) if stacked else torch.cat(parts)
                    source = Placed(tensor_of(marked(shape, rank), dtype), layout)
                    output = Placed(torch.zeros(expected.shape, dtype=dtype), layout)
                    if group is None:
                        outside = f"TEST_{'_'.join(map(str, ranks))}"
                        expect(cc.all_gather(output.view, source.view, outside, async_op), None, label)
                        expect(output.view, torch.zeros(expected.shape, dtype=dtype), f"{label}: outside")
                        continue
                    ended(expect, cc.all_gather(output.view, source.view, group, async_op), async_op, label)
                    expect(output.view, expected, label)
                    expect.that(not output.spilled(), f"{label}: wrote beside the output")
                    expect(source.view, tensor_of(marked(shape, rank), dtype), f"{label}: input changed")


def test_a1_second_half(group_of, expect):
    """An input that does not begin where its memory begins."""
    group = group_of.of(2)
    if group is None:
        return
    output = torch.zeros(8)
    cc.all_gather(output, (torch.arange(8.0) + 10 * group.rank)[4:], group)
    expect(output, torch.tensor([4.0, 5, 6, 7, 14, 15, 16, 17]))


def test_a2_zero_size(group_of, expect):
    """Nothing is gathered, into the right shape, and the next operation is not disturbed."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        k = group.size
        for output in (torch.empty(k, 0, 2), torch.empty(k, 1, 0, 2)):
            shape = output.shape
            cc.all_gather(output, torch.empty(1, 0, 2), group)
            expect(output.shape, shape)
        one = torch.tensor([1.0])
        cc.all_reduce(one, group)
        expect(one, torch.tensor([float(k)]))


def test_expanded_input(world, rank, size, expect):
    output = torch.zeros(2 * size, 3)
    cc.all_gather(output, torch.tensor([[float(rank)]]).expand(2, 3), world)
    expect(output, torch.arange(float(size)).repeat_interleave(2)[:, None].expand(-1, 3))


def test_input_inside_the_output(world, rank, size, expect):
    """Each rank's part already lies at its place, as with torch.distributed."""
    output = torch.zeros(size, 5)
    output[rank] = torch.arange(5.0) + 10 * rank
    cc.all_gather(output.view(-1), output[rank], world)
    expect(output, torch.arange(5.0) + 10 * torch.arange(float(size))[:, None])


def test_bad_shapes_and_dtypes(world, size, raises_everywhere, expect):
    started = world.sequence
    output = torch.zeros(size * 3 + 1, 7)
    with raises_everywhere(cc.ShapeError, f"all_gather.*output_tensor.*{size * 3 + 1}.*{size * 3}") as raised:
        cc.all_gather(output, torch.ones(3, 7), world)
    expect.that("ShapeError" in raised.messages[0], raised.messages[0])
    with raises_everywhere(cc.ShapeError, "all_gather"):
        cc.all_gather(torch.zeros(size * 3, 8), torch.ones(3, 7), world)
    with raises_everywhere(cc.ShapeError, "all_gather"):  # the right number of elements, the wrong rows
        cc.all_gather(torch.zeros(3, 7 * size) if size > 1 else torch.zeros(7, 3), torch.ones(3, 7), world)
    with raises_everywhere(cc.DTypeError, "all_gather.*float64"):
        cc.all_gather(torch.zeros(size * 3, 7), torch.ones(3, 7, dtype=torch.float64), world)
    with raises_everywhere(cc.ShapeError, "all_gather.*output_tensor"):
        cc.all_gather(torch.zeros(1, 7).expand(size * 3, 7), torch.ones(3, 7), world)
    expect(world.sequence - started, 5, "only the five barriers were sent")
    expect(output, torch.zeros(size * 3 + 1, 7))
