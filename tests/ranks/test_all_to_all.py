"""all_to_all and all_to_all_uneven, forward and backward."""

from __future__ import annotations

import pytest
import torch
from support import COPIED, FLOATS, Placed, marked, name, tensor_of

import cupy_coll as cc


def test_a7_sequence_to_heads_and_back(group_of, expect):
    """More than one batch entry: parts of different entries must not be mixed up."""
    group = group_of.of(2)
    if group is None:
        return
    r = group.rank
    x = (torch.arange(16.0) + 16 * r).reshape(2, 2, 4).requires_grad_()
    out = cc.all_to_all(x, 1, 2, group)
    right = [
        [[[0, 1], [4, 5], [16, 17], [20, 21]], [[8, 9], [12, 13], [24, 25], [28, 29]]],
        [[[2, 3], [6, 7], [18, 19], [22, 23]], [[10, 11], [14, 15], [26, 27], [30, 31]]],
    ]
    expect(out, torch.tensor(right[r], dtype=torch.float32))
    expect(cc.all_to_all(out, gather_dim=2, scatter_dim=1, group=group), x.detach())
    out.sum().backward()  # an expanded gradient
    expect(x.grad, torch.ones(2, 2, 4))
    x.grad = None
    (cc.all_to_all(x, 1, 2, group) * (r + 1)).sum().backward()
    expect(x.grad, torch.tensor([1.0, 1.0, 2.0, 2.0]).expand(2, 2, 4))


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_all_to_all(dtype, group_of, expect, rank):
    """Every pair of dimensions of a 3-dimensional tensor, also counted from the end."""
    for ranks in group_of.several():
        group = group_of(ranks)
        n = len(ranks)
        for scatter_dim in range(3):
            for gather_dim in {0, 1, 2} - {scatter_dim}:
                shape = [2, 3, 2]
                shape[scatter_dim] = 2 * n
                for layout in ("contiguous", "transposed") if dtype == torch.float32 else ("transposed",):
                    label = f"{ranks} gather {gather_dim} scatter {scatter_dim} {layout}"
                    x = Placed(tensor_of(marked(shape, rank), dtype), layout).view
                    if group is None:
                        outside = f"TEST_{'_'.join(map(str, ranks))}"
                        expect(cc.all_to_all(x, gather_dim, scatter_dim, outside), None, label)
                        continue
                    out = cc.all_to_all(x, gather_dim, scatter_dim - 3, group)
                    parts = [tensor_of(marked(shape, r), dtype).narrow(scatter_dim, 2 * group.rank, 2) for r in ranks]
                    expect(out, torch.cat(parts, dim=gather_dim), label)
                    expect(x, tensor_of(marked(shape, rank), dtype), f"{label}: input changed")


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=name)
def test_gradient_of_all_to_all(dtype, group_of, expect, rank):
    """The gradient that comes in is sent back; whatever its layout, it is not changed."""
    for ranks in group_of.several():
        group = group_of(ranks)
        if group is None:
            continue
        n = group.size
        x = torch.zeros(2, 3 * n, 4, dtype=dtype, requires_grad=True)
        for layout in ("contiguous", "transposed", "expanded"):
            label = f"{ranks} {layout}"
            out = cc.all_to_all(x, 2, 1, group)  # [2, 3, 4 n]

            def incoming(r, layout=layout, n=n):
                if layout == "expanded":
                    return tensor_of([[[r + 1]]], dtype).expand(2, 3, 4 * n)
                return Placed(tensor_of(marked((2, 3, 4 * n), r), dtype), layout).view

            given = incoming(rank)
            before = given.clone()
            (grad,) = torch.autograd.grad(out, x, given)
            index = group.rank
            right = torch.cat([incoming(r)[:, :, 4 * index : 4 * index + 4] for r in ranks], dim=1)
            expect(grad, right, label)
            expect(given, before, f"{label}: incoming gradient changed")


def test_a_non_leaf_and_no_grad(world, size, expect):
    x = torch.ones(size, 2, requires_grad=True)
    out = cc.all_to_all(x * 2, 1, 0, world)
    (out * 3).sum().backward()
    expect(x.grad, torch.full((size, 2), 6.0))
    with torch.no_grad():
        expect(cc.all_to_all(x, 1, 0, world).requires_grad, False)
    expect(cc.all_to_all(torch.ones(size, 2), 1, 0, world).requires_grad, False)


def test_zero_size(world, size, expect):
    x = torch.ones(0, size, 3, requires_grad=True)
    out = cc.all_to_all(x, 0, 1, world)
    expect(out.shape, torch.Size([0, 1, 3]))
    out.sum().backward()
    expect(x.grad, torch.zeros(0, size, 3))


def test_group_none_is_the_world(world, rank, size, expect):
    out = cc.all_to_all(torch.full((size, 1), float(rank)), 1, 0, None)
    expect(out, torch.arange(float(size))[None])


def test_bad_arguments(world, size, raises_everywhere, expect):
    x = torch.ones(2 * size, 3, 2 * size + 1)
    started = world.sequence
    with raises_everywhere(cc.ArgumentError, "all_to_all.*dim"):
        cc.all_to_all(x, 0, 0, world)
    with raises_everywhere(cc.ArgumentError, "all_to_all.*dim"):
        cc.all_to_all(x, 2, -1, world)
    with raises_everywhere(cc.ArgumentError, "all_to_all.*dim"):
        cc.all_to_all(x, 0, 3, world)
    with raises_everywhere(cc.ArgumentError, "all_to_all.*dim"):
        cc.all_to_all(x, -4, 0, world)
    if size > 1:
        with raises_everywhere(cc.ShapeError, f"all_to_all.*{2 * size + 1}"):
            cc.all_to_all(x, 0, 2, world)
        expect(world.sequence - started, 5, "only the five barriers were sent")


# ------------------------------------------------------------------------------------------------ uneven


def test_a3_uneven(group_of, expect):
    group = group_of.of(3)
    if group is None:
        return
    r = group.rank
    sends = [[3, 2, 1], [2, 2, 2], [1, 2, 3]]
    receives = [[row[i] for row in sends] for i in range(3)]
    x = (torch.arange(6.0) + 10 * r).requires_grad_()
    out = cc.all_to_all_uneven(x, sends[r], receives[r], group)
    right = [[0, 1, 2, 10, 11, 20], [3, 4, 12, 13, 21, 22], [5, 14, 15, 23, 24, 25]]
    expect(out, torch.tensor(right[r], dtype=torch.float32))
    out.backward(torch.full((6,), float(r)))
    expect(x.grad, torch.arange(3.0).repeat_interleave(torch.tensor(sends[r])))


def rows(source: int, destination: int) -> int:
    """How many rows go from one member to another; some none."""
    return (source * 2 + destination * 3) % 4


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_uneven(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        n = len(ranks)
        if group is None:
            outside = f"TEST_{'_'.join(map(str, ranks))}"
            expect(cc.all_to_all_uneven(torch.zeros(1), [1], [1], outside), None, f"{ranks}: outside")
            continue
        me = group.rank
        sends = [rows(me, i) for i in range(n)]
        receives = [rows(i, me) for i in range(n)]

        def held(index, ranks=ranks, n=n):
            count = sum(rows(index, i) for i in range(n))
            return tensor_of(marked((count, 3), ranks[index]), dtype)

        def sent(source, destination):
            begin = sum(rows(source, i) for i in range(destination))
            return slice(begin, begin + rows(source, destination))

        for layout in ("contiguous", "transposed", "strided"):
            x = Placed(held(me), layout).view
            out = cc.all_to_all_uneven(x, sends, receives, group)
            right = torch.cat([held(source)[sent(source, me)] for source in range(n)])
            expect(out, right, f"{ranks} {layout}")
        if not (dtype.is_floating_point or dtype.is_complex) or dtype.itemsize == 1:
            continue
        x = held(me).requires_grad_()
        out = cc.all_to_all_uneven(x, sends, receives, group)
        given = (tensor_of([[me + 1]], dtype)).expand(out.shape)
        out.backward(given)
        right = torch.cat([tensor_of([[i + 1]], dtype).expand(sends[i], 3) for i in range(n)])
        expect(x.grad, right, f"{ranks}: gradient")


def test_uneven_nothing_at_all(world, size, expect):
    x = torch.zeros(0, 2, requires_grad=True)
    out = cc.all_to_all_uneven(x, [0] * size, [0] * size, world)
    expect(out, torch.zeros(0, 2))
    out.sum().backward()
    expect(x.grad, torch.zeros(0, 2))


def test_uneven_bad_arguments_raise_everywhere(world, rank, size, raises_everywhere):
    """Splits are exchanged and checked always, so that one rank's mistake raises on all."""
    last = size - 1
    x = torch.ones(size, 2)
    right = [1] * size
    with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):  # does not add up, on one rank
        cc.all_to_all_uneven(x, [1] * last + [2] if rank == last else right, right, world)
    with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):  # too few
        cc.all_to_all_uneven(x, right[1:] if rank == last else right, right, world)
    with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):  # negative
        cc.all_to_all_uneven(x, [-1] * size if rank == last else right, right, world)
    with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):  # rank 0 sends 1 row, the last expects 2
        cc.all_to_all_uneven(x, right, [2, *right[1:]] if rank == last else right, world)
    with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):  # no dimension 0
        cc.all_to_all_uneven(torch.tensor(1.0) if rank == last else x, right, right, world)
    if size > 1:
        with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):  # rows of another width
            cc.all_to_all_uneven(torch.ones(size, 3) if rank == last else x, right, right, world)
        with raises_everywhere(cc.CupyCollError, "all_to_all_uneven"):
            cc.all_to_all_uneven(x.double() if rank == last else x, right, right, world)
