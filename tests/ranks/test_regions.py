"""Sequence-parallel regions and sums across a group, forward and backward."""

from __future__ import annotations

import pytest
import torch
from support import Placed, marked, tensor_of

import cupy_coll as cc

MODE = cc.ParallelMode.SEQUENCE_PARALLEL


@pytest.fixture
def sequence_groups(world, size):
    """One after the other: the whole world, its reverse, and blocks of two; each the mode's group."""

    def groups():
        context = cc.CommContext()
        everyone = list(range(size))
        yield context.init_group(everyone, mode=MODE)
        if size > 1:
            yield context.init_group(everyone[::-1], mode=MODE)
        if size == 4:
            lists = [context.init_group(ranks, mode=MODE) for ranks in ([0, 1], [2, 3])]
            yield next(group for group in lists if group is not None)

    return groups


def whole(rank: int, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[2, 2 n, 3], different on every rank."""
    return tensor_of(marked((2, 2 * n, 3), rank), dtype)


@pytest.mark.parametrize("rank0_only", [True, False])
def test_scatter_to_region(rank0_only, sequence_groups, expect, rank):
    for group in sequence_groups():
        n, first = group.size, group.ranks[0]
        for layout in ("contiguous", "transposed"):
            x = Placed(whole(rank, n), layout).view.requires_grad_()
            out = cc.scatter_to_sequence_parallel_region(x, rank0_only=rank0_only)
            part = slice(2 * group.rank, 2 * group.rank + 2)
            label = f"{group.ranks} {layout}"
            expect(out, whole(first if rank0_only else rank, n)[:, part], label)
            # backward: the whole gathered gradient divided by the size, on every rank, either way
            for expanded in (False, True):
                given = [
                    torch.full((1, 1, 1), r + 1.0).expand(2, 2, 3) if expanded else whole(r, 1) for r in group.ranks
                ]
                before = given[group.rank].clone()
                (grad,) = torch.autograd.grad(out, x, given[group.rank], retain_graph=True)
                expect(grad, torch.cat(given, dim=1) / n, f"{label} expanded={expanded}: gradient", rtol=1e-6)
                expect(given[group.rank], before, f"{label}: incoming gradient changed")


@pytest.mark.parametrize("rank0_only", [True, False])
def test_gather_from_region(rank0_only, sequence_groups, expect, rank):
    for group in sequence_groups():
        n, first = group.size, group.ranks[0]
        for layout in ("contiguous", "transposed"):
            x = Placed(whole(rank, 1), layout).view.requires_grad_()
            out = cc.gather_from_sequence_parallel_region(x, rank0_only=rank0_only)
            label = f"{group.ranks} {layout}"
            expect(out, torch.cat([whole(r, 1) for r in group.ranks], dim=1), label)
            # backward: this rank's part of the gradient (the first rank's or its own) times the size; no sum
            part = slice(2 * group.rank, 2 * group.rank + 2)
            for expanded in (False, True):

                def incoming(r, expanded=expanded, n=n):
                    return torch.full((1, 1, 1), r + 1.0).expand(2, 2 * n, 3) if expanded else whole(r, n)

                given = incoming(rank)
                before = given.clone()
                (grad,) = torch.autograd.grad(out, x, given, retain_graph=True)
                right = incoming(first if rank0_only else rank)[:, part] * n
                expect(grad, right, f"{label} expanded={expanded}: gradient")
                expect(given, before, f"{label}: incoming gradient changed")


def test_there_and_back(sequence_groups, expect, rank):
    """scatter then gather is the first rank's tensor, and its gradient arrives whole: 1/n and n cancel."""
    for group in sequence_groups():
        x = whole(rank, group.size).requires_grad_()
        parts = cc.scatter_to_sequence_parallel_region(x)
        out = cc.gather_from_sequence_parallel_region(parts)
        expect(out, whole(group.ranks[0], group.size))
        weights = whole(7, group.size)
        (out * weights).sum().backward()
        expect(x.grad, weights, rtol=1e-6)


def test_default_is_rank0_only(sequence_groups, expect, rank):
    for group in sequence_groups():
        part = slice(2 * group.rank, 2 * group.rank + 2)
        out = cc.scatter_to_sequence_parallel_region(whole(rank, group.size))
        expect(out, whole(group.ranks[0], group.size)[:, part])


def test_the_result_is_the_callers_own(sequence_groups, expect, rank):
    """Writing into a result does not reach the input, nor another rank."""
    for group in sequence_groups():
        x = whole(rank, group.size)
        for rank0_only in (True, False):
            cc.scatter_to_sequence_parallel_region(x, rank0_only).zero_()
            expect(x, whole(rank, group.size), f"{group.ranks} scatter rank0_only={rank0_only}")
        part = whole(rank, 1)
        cc.gather_from_sequence_parallel_region(part).zero_()
        expect(part, whole(rank, 1), f"{group.ranks} gather")


def test_other_dtypes(sequence_groups, expect, rank):
    for group in sequence_groups():
        for dtype in (torch.bfloat16, torch.int64, torch.bool):
            part = slice(2 * group.rank, 2 * group.rank + 2)
            out = cc.scatter_to_sequence_parallel_region(whole(rank, group.size, dtype))
            expect(out, whole(group.ranks[0], group.size, dtype)[:, part])
            out = cc.gather_from_sequence_parallel_region(whole(rank, 1, dtype))
            expect(out, torch.cat([whole(r, 1, dtype) for r in group.ranks], dim=1))


def test_bad_shapes(sequence_groups, raises_everywhere, size):
    for _group in sequence_groups():
        if size > 1:
            for rank0_only in (True, False):
                with raises_everywhere(cc.ShapeError, "scatter_to_sequence_parallel_region.*input_"):
                    cc.scatter_to_sequence_parallel_region(torch.zeros(2, 4 * size + 1, 3), rank0_only)
        with raises_everywhere(cc.ShapeError, "scatter_to_sequence_parallel_region.*input_"):
            cc.scatter_to_sequence_parallel_region(torch.zeros(4))
        with raises_everywhere(cc.ShapeError, "gather_from_sequence_parallel_region.*input_"):
            cc.gather_from_sequence_parallel_region(torch.zeros(4))


# ------------------------------------------------------------------------------------------------ sums


def test_group_all_reduce_sum_with_grad(group_of, expect, rank):
    """Forward the sum, a new tensor; backward the identity: each rank's own gradient, not summed, not changed."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for layout in ("contiguous", "transposed"):
            x = Placed(tensor_of(marked((3, 4), rank), torch.float32), layout).view.requires_grad_()
            out = cc.group_all_reduce_sum_with_grad(x, group)
            right = sum(tensor_of(marked((3, 4), r), torch.float32) for r in ranks)
            label = f"{ranks} {layout}"
            expect(out, right, label)
            expect(x, tensor_of(marked((3, 4), rank), torch.float32), f"{label}: input changed")
            given = torch.full((1, 1), rank + 1.0).expand(3, 4)
            (grad,) = torch.autograd.grad(out, x, given)
            expect(grad, torch.full((3, 4), rank + 1.0), f"{label}: gradient")
            expect(given, torch.full((3, 4), rank + 1.0), f"{label}: incoming gradient changed")


def test_group_all_reduce_sum(group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        x = tensor_of(marked((3, 4), rank), torch.float32).requires_grad_()
        out = cc.group_all_reduce_sum(x, group)
        expect(out, sum(tensor_of(marked((3, 4), r), torch.float32) for r in ranks), str(ranks))
        expect(out.requires_grad, False)
        expect(x, tensor_of(marked((3, 4), rank), torch.float32), f"{ranks}: input changed")


def test_sums_without_a_group(world, rank, expect):
    """None means not split: the tensor itself, no communication, the gradient passes."""
    started = world.sequence
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    out = cc.group_all_reduce_sum_with_grad(x, None)
    expect(out, torch.full((3,), rank + 1.0))
    (grad,) = torch.autograd.grad(out.sum(), x)
    expect(grad, torch.ones(3))
    out = cc.group_all_reduce_sum(x, None)
    expect(out, torch.full((3,), rank + 1.0))
    expect(out.requires_grad, False)
    expect(world.sequence, started)
