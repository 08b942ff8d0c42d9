"""Every operation on the host's transport and on NCCL's over the stand-in: the same data, the same expected values.

Sums and products of the data are exact in every dtype, so the results are the same bits; averages of floats are within
the rounding that each transport documents (NCCL's: at every step).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support import COPIED, FLOAT8, FLOATS, INTEGERS, KINDS, LAYOUTS, REDUCED, Placed, ended, marked, name, tensor_of
from torch.distributed import ReduceOp

import cupy_coll as cc

FOLDS = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
SMALL_INTEGERS = (torch.int16, torch.uint16)  # NCCL has none
SHAPE = (4, 3)


def contribution(shape, rank):
    """1, 2 or 3: a sum or product over four ranks is exact in every dtype but float8."""
    return ((np.arange(math.prod(shape)) * 2 + rank) % 3 + 1).reshape(shape)


def reduced(op, shape, dtype, ranks):
    parts = [tensor_of(contribution(shape, rank), dtype) for rank in ranks]
    if dtype == torch.bool:
        stack = torch.stack(parts)
        return stack.any(dim=0) if op in ("SUM", "MAX") else stack.all(dim=0)
    wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
    stack = np.stack([part.to(wide).numpy() for part in parts])
    if op != "AVG":
        return torch.from_numpy(np.asarray(FOLDS[op].reduce(stack, axis=0))).to(dtype)
    mean = stack.sum(axis=0) / len(parts)
    return torch.from_numpy(np.asarray(np.trunc(mean) if dtype in INTEGERS else mean)).to(dtype)


def tolerance(op, dtype, size):
    """An average of floats: the reciprocal is rounded, and each of the products and additions."""
    return torch.finfo(dtype).eps * (size + 1) if op == "AVG" and dtype not in INTEGERS else 0.0


def reductions(transport, dtype):
    """What the transport has for the dtype."""
    if dtype == torch.bool:
        return ["SUM", "PRODUCT", "MIN", "MAX"]
    if dtype.is_complex:
        return ["SUM", "AVG"]
    if transport == "nccl" and dtype in SMALL_INTEGERS:
        return []
    return ["SUM", "AVG", "MIN", "MAX"] if dtype in FLOAT8 else ["SUM", "AVG", "PRODUCT", "MIN", "MAX"]


def layouts(op, dtype):
    """(layout, async_op): all of them for sums and copies of float32, one or two for the others."""
    if op != "SUM":
        return [("transposed", True)]
    every = [(one, index % 2 == 1) for index, one in enumerate(LAYOUTS)]
    return every if dtype == torch.float32 else [every[0], every[3]]


@pytest.mark.parametrize("dtype", [*REDUCED, *FLOAT8], ids=name)
def test_all_reduce(transport, dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for op in reductions(transport, dtype):
            for layout, async_op in layouts(op, dtype):
                label = f"{op} {ranks} {layout} async={async_op}"
                placed = Placed(tensor_of(contribution(SHAPE, rank), dtype), layout)
                work = cc.all_reduce(placed.view, group, getattr(ReduceOp, op), async_op)
                ended(expect, work, async_op, label)
                expected = reduced(op, SHAPE, dtype, ranks)
                expect(placed.view, expected, label, rtol=tolerance(op, dtype, group.size))
                expect.that(not placed.spilled(), f"{label}: wrote beside the view")


@pytest.mark.parametrize("dtype", KINDS, ids=name)
def test_reduce(transport, dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for op in reductions(transport, dtype):
            for layout, async_op in layouts(op, dtype):
                for dst in ranks if op == "SUM" else ranks[-1:]:
                    label = f"{op} {ranks} to {dst} {layout} async={async_op}"
                    mine = tensor_of(contribution(SHAPE, rank), dtype)
                    placed = Placed(mine, layout)
                    work = cc.reduce(placed.view, group, dst, getattr(ReduceOp, op), async_op)
                    ended(expect, work, async_op, label)
                    expected = reduced(op, SHAPE, dtype, ranks) if rank == dst else mine
                    rtol = tolerance(op, dtype, group.size) if rank == dst else 0.0
                    expect(placed.view, expected, label, rtol=rtol)
                    expect.that(not placed.spilled(), f"{label}: wrote beside the view")


@pytest.mark.parametrize("dtype", KINDS, ids=name)
def test_reduce_scatter(transport, dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        for op in reductions(transport, dtype):
            for layout, async_op in layouts(op, dtype):
                label = f"{op} {ranks} {layout} async={async_op}"
                shape = (2 * group.size, 3)
                mine = tensor_of(contribution(shape, rank), dtype)
                source = Placed(mine, layout)
                output = Placed(torch.zeros(2, 3).to(dtype), layout)
                work = cc.reduce_scatter(output.view, source.view, group, getattr(ReduceOp, op), async_op)
                ended(expect, work, async_op, label)
                expected = reduced(op, shape, dtype, ranks).view(group.size, 2, 3)[group.rank]
                expect(output.view, expected, label, rtol=tolerance(op, dtype, group.size))
                expect(source.view, mine, f"{label}: input changed")
                expect.that(not output.spilled(), f"{label}: wrote beside the output")


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_all_gather(transport, dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        parts = [tensor_of(marked(SHAPE, member), dtype) for member in ranks]
        for layout, async_op in layouts("SUM", dtype):
            label = f"{ranks} {layout} async={async_op}"
            output = Placed(torch.zeros(group.size * 4, 3).to(dtype), layout)
            work = cc.all_gather(output.view, Placed(parts[group.rank], layout).view, group, async_op)
            ended(expect, work, async_op, label)
            expect(output.view, torch.cat(parts), label)
            expect.that(not output.spilled(), f"{label}: wrote beside the output")


@pytest.mark.parametrize("dtype", [*KINDS, *FLOAT8], ids=name)
def test_broadcast_gather_scatter(transport, dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        parts = [tensor_of(marked(SHAPE, member), dtype) for member in ranks]
        for index, (layout, async_op) in enumerate(layouts("SUM", dtype)):
            root = ranks[index % len(ranks)]
            label = f"{ranks} root {root} {layout} async={async_op}"
            placed = Placed(parts[group.rank], layout)
            ended(expect, cc.broadcast(placed.view, group, root, async_op), async_op, f"broadcast {label}")
            expect(placed.view, parts[ranks.index(root)], f"broadcast {label}")
            expect.that(not placed.spilled(), f"broadcast {label}: wrote beside the view")

            outputs = [Placed(torch.zeros(SHAPE).to(dtype), layout) for _ in ranks] if rank == root else None
            views = [output.view for output in outputs] if outputs else None
            mine = Placed(parts[group.rank], layout).view
            ended(expect, cc.gather(mine, group, views, root, async_op), async_op, f"gather {label}")
            for output, part in zip(outputs or [], parts, strict=False):
                expect(output.view, part, f"gather {label}")
                expect.that(not output.spilled(), f"gather {label}: wrote beside the view")

            inputs = [Placed(part, layout).view for part in parts] if rank == root else None
            target = Placed(torch.zeros(SHAPE).to(dtype), layout)
            ended(expect, cc.scatter(target.view, group, inputs, root, async_op), async_op, f"scatter {label}")
            expect(target.view, parts[group.rank], f"scatter {label}")
            expect.that(not target.spilled(), f"scatter {label}: wrote beside the view")


@pytest.mark.parametrize("dtype", KINDS, ids=name)
def test_uneven(transport, dtype, group_of, expect, rank):
    """Rows of different counts, none among them."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        rows = [tensor_of(marked((index * 2 % 3, 3), member), dtype) for index, member in enumerate(ranks)]
        mine = rows[group.rank]
        for layout, _ in layouts("SUM", dtype):
            balanced = cc.rebalance_nd_tensor(Placed(mine, layout).view, group)
            expect(balanced, torch.cat(rows), f"rebalance {ranks} {layout}")
        counts = [[(source + target) % 3 for target in range(group.size)] for source in range(group.size)]
        blocks = [
            [tensor_of(marked((counts[s][t], 2), 10 * s + t), dtype) for t in range(group.size)]
            for s in range(group.size)
        ]
        sent = torch.cat(blocks[group.rank])
        output = cc.all_to_all_uneven(
            sent, counts[group.rank], [counts[source][group.rank] for source in range(group.size)], group
        )
        expect(output, torch.cat([blocks[source][group.rank] for source in range(group.size)]), f"uneven {ranks}")


def test_all_to_all_with_gradient(transport, world, size, rank, expect):
    mine = torch.arange(float(size * 6)).view(1, 3, size, 2).add_(100 * rank).requires_grad_()
    output = cc.all_to_all(mine, 1, 2, world)
    whole = [torch.arange(float(size * 6)).view(1, 3, size, 2).add_(100 * member) for member in range(size)]
    expect(output.detach(), torch.cat([part[:, :, rank : rank + 1] for part in whole], dim=1))
    (output * (rank + 1)).sum().backward()
    expect(mine.grad, torch.arange(1.0, size + 1).view(1, 1, size, 1).expand(1, 3, size, 2).contiguous())


def test_send_recv(transport, world, rank, size, expect):
    """In a chain: what is sent must meet its receive before the next on the same communicator."""
    for dtype in (torch.float32, torch.bool, torch.complex64):
        for layout in ("contiguous", "transposed"):
            for async_op in (False, True):
                tensor = Placed(tensor_of(marked(SHAPE, rank), dtype), layout)
                if rank > 0:
                    ended(expect, cc.recv(tensor.view, rank - 1, world, async_op), async_op, "recv")
                if rank < size - 1:
                    ended(expect, cc.send(tensor.view, rank + 1, world, async_op), async_op, "send")
                expect(tensor.view, tensor_of(marked(SHAPE, 0), dtype), f"{layout} {dtype} async={async_op}")
                expect.that(not tensor.spilled(), f"{layout}: wrote beside the view")


def test_nothing_at_all(transport, world, rank, size, expect):
    """Tensors without elements, in every operation."""
    empty = torch.zeros(0, 3)
    cc.all_reduce(empty, world)
    cc.reduce(empty, world)
    cc.broadcast(empty, world)
    cc.all_gather(torch.zeros(0, 3), empty, world)
    cc.reduce_scatter(torch.zeros(0, 3), empty, world)
    parts = [torch.zeros(0, 3) for _ in range(size)]
    cc.gather(empty, world, parts if rank == 0 else None)
    cc.scatter(empty, world, parts if rank == 0 else None)
    expect(cc.rebalance_nd_tensor(empty, world), empty)
    if size > 1 and rank < 2:
        (cc.recv if rank else cc.send)(empty, 1 - rank, world)


def test_large(transport, world, rank, size, expect):
    """More than the pieces in which the transports work."""
    count = 300_001
    tensor = torch.arange(count, dtype=torch.int64) + rank
    cc.all_reduce(tensor, world)
    expect(tensor, torch.arange(count) * size + sum(range(size)))
    output = torch.empty(count * size, dtype=torch.int32)
    cc.all_gather(output, torch.full((count,), rank, dtype=torch.int32), world)
    expect(output, torch.arange(size, dtype=torch.int32).repeat_interleave(count))


def test_in_place(transport, world, rank, size, expect):
    """The input is a part of the output, at its place or elsewhere; and the other way round."""
    for place in range(size):
        output = torch.zeros(size, 4)
        output[place] = rank + 1.0
        cc.all_gather(output, output[place], world)
        expect(output, torch.arange(1.0, size + 1).view(size, 1).repeat(1, 4), f"all_gather from {place}")
        whole = torch.full((size, 4), 1.0)
        cc.reduce_scatter(whole[place], whole, world)
        expect(whole[place], torch.full((4,), float(size)), f"reduce_scatter to {place}")


def test_bool_from_elsewhere(transport, world, rank, size, expect):
    """Bytes other than 0 and 1 are true; the result's are 1."""
    for op in ("SUM", "MAX", "MIN", "PRODUCT"):
        foreign = torch.tensor([2, 0, 255] if rank else [4, 0, 1], dtype=torch.uint8)
        cc.all_reduce(foreign.view(torch.bool), world, getattr(ReduceOp, op))
        expect(foreign, torch.tensor([1, 0, 1], dtype=torch.uint8), op)


def test_conjugates(transport, world, size, expect):
    tensor = torch.tensor([1 + 2j, 3 - 1j]).conj()
    cc.all_reduce(tensor, world)
    expect(tensor.resolve_conj(), torch.tensor([1 - 2j, 3 + 1j]) * size)
    gathered = torch.zeros(2 * size)
    cc.all_gather(gathered, torch.tensor([1 + 2j, 3 - 1j]).conj().imag, world)
    expect(gathered, torch.tensor([-2.0, 1.0]).repeat(size))


def test_rounding_of_sums(fake, world, rank, size, expect):
    """NCCL rounds 16-bit sums at every step, the host once: as each documents."""
    for dtype in (torch.float16, torch.bfloat16):
        bound = 1 / torch.finfo(dtype).eps  # from here on adding 1/2 changes nothing
        mine = torch.full((5,), 2 * bound if rank == 0 else 0.75, dtype=dtype)
        cc.all_reduce(mine, world)
        stepwise = torch.full((5,), 2 * bound, dtype=dtype)
        for _ in range(size - 1):
            stepwise = stepwise + torch.full((5,), 0.75, dtype=dtype)
        expect(mine, stepwise, f"NCCL {dtype}")


def test_averages_of_integers(fake, world, rank, size, expect):
    """Toward zero; and, as NCCL does, of a sum that has wrapped."""
    tensor = torch.tensor([-1 if rank == 0 else 0, -size - 1 if rank == 0 else 0, 3], dtype=torch.int32)
    cc.all_reduce(tensor, world, ReduceOp.AVG)
    expect(tensor, torch.tensor([-1 if size == 1 else 0, -2 if size == 1 else -1, 3], dtype=torch.int32))


def test_large_float_types(fake, world, size, expect):
    for dtype in FLOATS:
        tensor = torch.ones(70_000, dtype=dtype)
        cc.all_reduce(tensor, world)
        expect(tensor, torch.full((70_000,), float(size), dtype=dtype), name(dtype))
