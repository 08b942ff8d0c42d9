"""What else may stand for a tensor: NumPy arrays, tensors that require grad; and what may not."""

from __future__ import annotations

import numpy as np
import torch
from torch.distributed import ReduceOp

import cupy_coll as cc


def test_numpy_arrays(world, rank, size, expect):
    """In place in the array's own memory, whatever its strides; beside torch tensors."""
    array = np.full((3, 4), rank + 1.0)
    cc.all_reduce(array, world)
    expect(array.tolist(), np.full((3, 4), size * (size + 1) / 2).tolist(), "all_reduce")
    memory = np.full((3, 4), rank + 1, np.int32)
    work = cc.all_reduce(memory.T[::2], world, ReduceOp.MAX, async_op=True)
    work.wait()
    right = np.full((3, 4), rank + 1, np.int32)
    right[:, ::2] = size
    expect(memory.tolist(), right.tolist(), "all_reduce of a strided view")
    output = np.zeros((size, 2), np.float32)
    cc.all_gather(output, torch.full((1, 2), float(rank)), world)
    expect(output.tolist(), [[float(r)] * 2 for r in range(size)], "all_gather")
    parts = [np.full(2, i) for i in range(size)] if rank == 0 else None
    part = np.zeros(2, int)
    cc.scatter(part, world, parts)
    expect(part.tolist(), [rank, rank], "scatter")
    lists = [np.zeros(2, int) for _ in range(size)] if rank == 0 else None
    cc.gather(part, world, lists)
    for member, got in enumerate(lists or []):
        expect(got.tolist(), [member, member], "gather")
    flags = np.array([rank == 0, True, False])
    cc.all_reduce(flags, world, ReduceOp.MIN)
    expect(flags.tolist(), [size == 1, True, False], "bool")
    scalar = np.array(rank + 0.0)
    cc.broadcast(scalar, world, src=size - 1)
    expect(scalar.item(), size - 1.0, "0-d")
    out = np.zeros((2,), np.complex64)
    cc.reduce_scatter(out, np.ones((2 * size,), np.complex64), world)
    expect(out.tolist(), [size + 0j] * 2, "reduce_scatter")
    got = cc.rebalance_nd_tensor(np.full((rank, 2), rank))
    expect(torch.as_tensor(got).tolist(), [[r, r] for r in range(size) for _ in range(r)], "rebalance")


def test_read_only_arrays(world, rank, size, raises_everywhere, expect):
    """Refused where something would be written into them, taken where they are only read."""
    frozen = np.full(3, rank + 0.0)
    frozen.flags.writeable = False
    started = world.sequence
    with raises_everywhere(cc.ArgumentError, "all_reduce.*tensor.*read-only"):
        cc.all_reduce(frozen, world)
    with raises_everywhere(cc.ArgumentError, "all_gather.*output_tensor.*read-only"):
        cc.all_gather(np.broadcast_to(np.zeros(3), (3 * size, 3)), torch.zeros(3, 3), world)
    expect(world.sequence - started, 2, "only the two barriers were sent")
    output = torch.zeros(3 * size, dtype=torch.float64)
    cc.all_gather(output, frozen, world)
    expect(output, torch.arange(float(size), dtype=torch.float64).repeat_interleave(3))
    expect(frozen.tolist(), [rank + 0.0] * 3)


def test_reversed_and_foreign_arrays(world, rank, size, raises_everywhere):
    """What torch cannot view in place is refused in words, not copied behind the caller's back."""
    bad = [
        np.zeros(4)[::-1],
        np.array(["a", "b"]),
        np.array([object()]),
        np.zeros(3, ">f8"),
        np.zeros(3, [("a", "f4"), ("b", "f4")]),
        np.zeros(3, "datetime64[s]"),
    ]
    for array in bad:
        with raises_everywhere(cc.ArgumentError, "all_reduce.*tensor"):
            cc.all_reduce(array, world)


def test_what_is_no_array(world, raises_everywhere):
    for bad in (1.0, [1.0, 2.0], None, "text", object()):
        with raises_everywhere(cc.ArgumentError, "all_reduce.*tensor"):
            cc.all_reduce(bad, world)
        with raises_everywhere(cc.ArgumentError, "all_gather.*input_tensor"):
            cc.all_gather(torch.zeros(2), bad, world)


def test_unreachable_memory(world, raises_everywhere):
    with raises_everywhere(cc.ArgumentError, "all_reduce.*tensor.*meta"):
        cc.all_reduce(torch.empty(3, device="meta"), world)
    with raises_everywhere(cc.ArgumentError, "all_reduce.*tensor.*sparse"):
        cc.all_reduce(torch.eye(3).to_sparse(), world)


def test_a11_tensors_at_the_bridge(group_of, expect):
    """The leaf that requires grad is reduced: its value changes, it stays a leaf and gets no gradient."""
    group = group_of.of(2)
    if group is None:
        return
    tensor = torch.ones(1, 2, 2)
    cc.all_reduce(tensor, group)
    expect(tensor, torch.full((1, 2, 2), 2.0))
    flags = torch.tensor([True, False])
    cc.all_reduce(flags, group)
    expect(flags, torch.tensor([True, False]))
    leaf = torch.tensor([1.0, 1.0], requires_grad=True)
    cc.all_reduce(leaf, group)
    expect(leaf, torch.tensor([2.0, 2.0]))
    expect((leaf.is_leaf, leaf.requires_grad, leaf.grad), (True, True, None))
    (leaf * 3).sum().backward()
    expect(leaf.grad, torch.tensor([3.0, 3.0]))


def test_written_tensors_tell_autograd(world, rank, size, expect):
    """A tensor saved for backward and overwritten by an operation since: torch notices, as it does for its own."""
    x = torch.ones(3, requires_grad=True)
    calls = {
        "all_reduce": lambda y: cc.all_reduce(y, world),
        "broadcast": lambda y: cc.broadcast(y, world, src=0),
        "async": lambda y: cc.all_reduce(y, world, async_op=True).wait(),
        "all_gather": lambda y: cc.all_gather(y.repeat(size), y, world),
    }
    for label, call in calls.items():
        y = x * 2
        z = (y * y).sum()
        call(y.detach())
        noticed = False
        try:
            z.backward()
        except RuntimeError as error:
            noticed = "modified by an inplace operation" in str(error)
        only_read = label == "all_gather" or (label == "broadcast" and rank == 0)
        expect(noticed, not only_read, label)


def test_parameters(world, rank, size, expect):
    """Weights of a module, as broadcast before training."""
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(rank + 1.0)
    for parameter in layer.parameters():
        cc.broadcast(parameter, world, src=size - 1)
        expect(parameter, torch.full_like(parameter, float(size)))
        expect(parameter.is_leaf and parameter.requires_grad, True)


def test_tensors_without_memory_are_refused(world, size, expect, raises_everywhere):
    """torch.func's tensors and wrappers have no address: refused before anything is sent, so the next call works."""

    def reduced(x):
        cc.all_reduce(x, world)
        return x.sum()

    def gathered(x):
        cc.all_gather(torch.empty(size, 3), x.view(1, 3), world)
        return x.sum()

    calls = {
        "vmap": lambda: torch.func.vmap(reduced)(torch.ones(2, 3)),
        "vmap of nothing": lambda: torch.func.vmap(reduced)(torch.ones(2, 0)),
        "grad": lambda: torch.func.grad(gathered)(torch.ones(3)),
        "all_to_all": lambda: torch.func.vmap(lambda x: cc.all_to_all(x, 0, 1, world))(torch.ones(2, size, size)),
    }
    for label, call in calls.items():
        with raises_everywhere(cc.ArgumentError, "dense tensor in memory"):
            call()
        usual = torch.ones(3)
        cc.all_reduce(usual, world)
        expect(usual.tolist(), [float(size)] * 3, f"after {label}")
