"""broadcast, scatter and gather: data from or to one root."""

from __future__ import annotations

import pytest
import torch
from support import COPIED, Placed, cases, ended, marked, name, roots, tensor_of

import cupy_coll as cc


def outside(ranks: tuple[int, ...]) -> str:
    """The mode's name of a group, for the ranks that are not in it."""
    return f"TEST_{'_'.join(map(str, ranks))}"


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_broadcast(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for index, src in roots(dtype, ranks):
            for turn, (shape, layout) in enumerate(cases(dtype)):
                for async_op in (False, True) if index == len(ranks) - 1 else (turn % 2 == 0,):
                    label = f"{ranks} from {src} {shape} {layout} async={async_op}"
                    placed = Placed(tensor_of(marked(shape, rank), dtype), layout)
                    if group is None:
                        expect(cc.broadcast(placed.view, outside(ranks), src=src), None, label)
                        expect(placed.view, tensor_of(marked(shape, rank), dtype), f"{label}: outside")
                        continue
                    root = {"group_src": index} if async_op else {"src": src}
                    ended(expect, cc.broadcast(placed.view, group, async_op=async_op, **root), async_op, label)
                    expect(placed.view, tensor_of(marked(shape, src), dtype), label)
                    expect.that(not placed.spilled(), f"{label}: wrote beside the view")


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_scatter(dtype, group_of, expect, rank):
    """Member i gets the list's tensor i; the root too."""
    for ranks in group_of.several():
        group = group_of(ranks)
        for index, src in roots(dtype, ranks):
            for turn, (shape, layout) in enumerate(cases(dtype)):
                for async_op in (False, True) if index == len(ranks) - 1 else (turn % 2 == 0,):
                    label = f"{ranks} from {src} {shape} {layout} async={async_op}"
                    placed = Placed(torch.zeros(shape, dtype=dtype), layout)
                    if group is None:
                        expect(cc.scatter(placed.view, outside(ranks), src=src), None, label)
                        continue
                    parts = None
                    if rank == src:
                        parts = [Placed(tensor_of(marked(shape, i + 5), dtype), layout).view for i in range(group.size)]
                    root = {"group_src": index} if async_op else {"src": src}
                    work = cc.scatter(placed.view, group, parts, async_op=async_op, **root)
                    ended(expect, work, async_op, label)
                    expect(placed.view, tensor_of(marked(shape, group.rank + 5), dtype), label)
                    expect.that(not placed.spilled(), f"{label}: wrote beside the view")


@pytest.mark.parametrize("dtype", COPIED, ids=name)
def test_gather(dtype, group_of, expect, rank):
    for ranks in group_of.several():
        group = group_of(ranks)
        for index, dst in roots(dtype, ranks):
            for turn, (shape, layout) in enumerate(cases(dtype)):
                for async_op in (False, True) if index == len(ranks) - 1 else (turn % 2 == 0,):
                    label = f"{ranks} to {dst} {shape} {layout} async={async_op}"
                    source = Placed(tensor_of(marked(shape, rank), dtype), layout)
                    if group is None:
                        expect(cc.gather(source.view, outside(ranks), dst=dst), None, label)
                        continue
                    parts = [Placed(torch.zeros(shape, dtype=dtype), layout) for _ in ranks] if rank == dst else []
                    root = {"group_dst": index} if async_op else {"dst": dst}
                    listed = [part.view for part in parts] or None
                    work = cc.gather(source.view, group, listed, async_op=async_op, **root)
                    ended(expect, work, async_op, label)
                    for member, part in zip(ranks, parts, strict=False):
                        expect(part.view, tensor_of(marked(shape, member), dtype), f"{label}: from {member}")
                        expect.that(not part.spilled(), f"{label}: wrote beside the view")
                    expect(source.view, tensor_of(marked(shape, rank), dtype), f"{label}: input changed")


def test_a1_strided_scatter_list(group_of, expect):
    group = group_of.of(2)
    if group is None:
        return
    parts = [torch.arange(6.0)[::2], torch.arange(6.0)[::2]] if group.rank == 0 else None
    tensor = torch.zeros(3)
    cc.scatter(tensor, group, parts, src=group.ranks[0])
    expect(tensor, torch.tensor([0.0, 2.0, 4.0]))


def test_scatter_of_expanded_parts(world, rank, size, expect):
    parts = [torch.tensor([[i + 1.0]]).expand(2, 3) for i in range(size)] if rank == 0 else None
    tensor = torch.zeros(2, 3)
    cc.scatter(tensor, world, parts)
    expect(tensor, torch.full((2, 3), rank + 1.0))


def test_a6_roots_are_global_ranks(world, group_of, rank, size, expect, raises_everywhere):
    """In a group of the last two of three ranks; group_src counts within the group instead."""
    if size < 3:
        pytest.skip(f"needs 3 ranks, this run has {size}")
    ranks = (1, 2)
    group = group_of(ranks)
    for root in ({"src": 1}, {"group_src": 0}):
        if group is None:
            continue
        tensor = torch.full((2,), float(rank))
        cc.broadcast(tensor, group, **root)
        expect(tensor, torch.full((2,), 1.0), f"broadcast {root}")
        part = torch.zeros(2)
        cc.scatter(part, group, [torch.full((2,), 7.0), torch.full((2,), 8.0)] if rank == 1 else None, **root)
        expect(part, torch.full((2,), 6.0 + rank), f"scatter {root}")
        objects = [{"v": 7} if rank == 1 else None]
        cc.broadcast_object_list(objects, group, **root)
        expect(objects, [{"v": 7}], f"objects {root}")
    for root in ({"dst": 1}, {"group_dst": 0}):
        if group is None:
            continue
        parts = [torch.zeros(2), torch.zeros(2)] if rank == 1 else None
        cc.gather(torch.full((2,), float(rank)), group, parts, **root)
        if rank == 1:
            expect(torch.stack(parts), torch.tensor([[1.0, 1.0], [2.0, 2.0]]), f"gather {root}")
        total = torch.full((2,), float(rank))
        cc.reduce(total, group, **root)
        if rank == 1:
            expect(total, torch.full((2,), 3.0), f"reduce {root}")


def rooted_calls(tensor, group, size):
    """Each operation with a root, as a function of the keywords that name it."""
    parts = [torch.zeros(2) for _ in range(size)]
    return {
        "broadcast": ("src", lambda **root: cc.broadcast(tensor, group, **root)),
        "scatter": ("src", lambda **root: cc.scatter(tensor, group, parts, **root)),
        "gather": ("dst", lambda **root: cc.gather(tensor, group, parts, **root)),
        "reduce": ("dst", lambda **root: cc.reduce(tensor, group, **root)),
        "broadcast_object_list": ("src", lambda **root: cc.broadcast_object_list([1], group, **root)),
    }


def test_a6_roots_outside_the_group(world, group_of, rank, size, expect, raises_everywhere):
    """GroupError on every member before anything is sent; the next operation of the group works."""
    ranks = tuple(range(1, size)) if size > 1 else (0,)
    outsider = 0 if size > 1 else 1
    group = group_of(ranks)
    tensor = torch.full((2,), float(rank))
    for function, (side, call) in rooted_calls(tensor, group, len(ranks)).items():
        wrong = [
            {side: outsider},
            {side: size},
            {side: -1},
            {f"group_{side}": len(ranks)},
            {f"group_{side}": -1},
            {side: ranks[0], f"group_{side}": 0},
        ]
        for root in wrong:
            with raises_everywhere(cc.GroupError, function, ranks=ranks) as raised:
                if group is not None:
                    before = group.sequence
                    call(**root)
            if group is not None:
                expect(group.sequence, before, f"{function} {root}: something was sent")
            named = [str(value) for value in root.values()]
            message = raised.messages[ranks[0]]
            expect.that(any(value in message for value in named), f"{function} {root}: {message}")
    expect(tensor, torch.full((2,), float(rank)))
    if group is not None:
        cc.broadcast(tensor, group, src=ranks[-1])
        expect(tensor, torch.full((2,), float(ranks[-1])))


def test_the_default_root_is_global_rank_0(world, group_of, size, raises_everywhere):
    """A group without rank 0 needs its root named: the default is not silently the group's first."""
    if size < 2:
        pytest.skip(f"needs 2 ranks, this run has {size}")
    group = group_of(range(1, size))
    with raises_everywhere(cc.GroupError, "broadcast.*src", ranks=range(1, size)):
        if group is not None:
            cc.broadcast(torch.zeros(2), group)


def test_bad_lists_raise_at_the_root(world, rank, size, expect, raises_everywhere):
    """Only the root can see them, and nothing is sent; the others have not called yet."""
    tensor = torch.zeros(2)
    right = [torch.zeros(2) for _ in range(size)]
    bad = [
        (cc.ArgumentError, None),
        (cc.ArgumentError, [*right, torch.zeros(2)]),
        (cc.ArgumentError, right[1:]),
        (cc.ShapeError, [*right[1:], torch.zeros(3)]),
        (cc.DTypeError, [*right[1:], torch.zeros(2, dtype=torch.int32)]),
        (cc.ArgumentError, [*right[1:], "text"]),
    ]
    for error, parts in bad:
        started = world.sequence
        with raises_everywhere(error, "scatter.*scatter_list", ranks=[0]):
            if rank == 0:
                cc.scatter(tensor, world, parts)
        with raises_everywhere(error, "gather.*gather_list", ranks=[0]):
            if rank == 0:
                cc.gather(tensor, world, parts)
        expect(world.sequence - started, 2, f"{parts}: more than the barriers was sent")
    shared = torch.zeros(1).expand(2)
    with raises_everywhere(cc.ShapeError, "gather.*gather_list", ranks=[0]):
        if rank == 0:
            cc.gather(tensor, world, [*right[1:], shared])


def test_expanded_outputs_are_refused(world, rank, size, raises_everywhere):
    with raises_everywhere(cc.ShapeError, "broadcast.*tensor", ranks=range(1, size)):  # the root only reads its own
        if rank != 0:
            cc.broadcast(torch.zeros(1, 3).expand(4, 3), world)
    with raises_everywhere(cc.ShapeError, "scatter.*tensor"):
        cc.scatter(torch.zeros(1, 3).expand(4, 3), world, [torch.zeros(4, 3)] * size)


def test_expanded_input_of_gather(world, rank, size, expect):
    parts = [torch.zeros(2, 3) for _ in range(size)] if rank == size - 1 else None
    cc.gather(torch.full((1, 1), float(rank)).expand(2, 3), world, parts, dst=size - 1)
    for member, part in enumerate(parts or []):
        expect(part, torch.full((2, 3), float(member)))
