"""Check mode: whatever ranks call that does not belong together raises on every one of them, and they go on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch.distributed import ReduceOp

import cupy_coll as cc

GLOBAL = cc.CommMode.GLOBAL


@pytest.fixture
def checked(no_context: None, size: int) -> cc.CommContext:
    """A context in check mode; at least two ranks."""
    if size < 2:
        pytest.skip("takes two ranks to disagree")
    context = cc.CommContext()
    context.init_distributed_env(timeout=20, check=True)
    return context


@pytest.fixture
def checked_briefly(no_context: None, size: int) -> cc.CommContext:
    """The same with a timeout of a second."""
    if size < 2:
        pytest.skip("takes two ranks to miss one")
    context = cc.CommContext()
    context.init_distributed_env(timeout=1.0, check=True)
    return context


def wide(rows: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(rows, 4, dtype=dtype)


# One call of each op, as a function of what may be wrong in it.
Op = Callable[[int, torch.dtype, ReduceOp, int], object]


def calls(size: int) -> dict[str, Op]:
    def gather(rows: int, dtype: torch.dtype, op: ReduceOp, root: int) -> None:
        parts = [wide(rows, dtype) for _ in range(size)] if cc.CommContext().get_global_rank() == root else None
        cc.gather(wide(rows, dtype), GLOBAL, parts, dst=root)

    def scatter(rows: int, dtype: torch.dtype, op: ReduceOp, root: int) -> None:
        parts = [wide(rows, dtype) for _ in range(size)] if cc.CommContext().get_global_rank() == root else None
        cc.scatter(wide(rows, dtype), GLOBAL, parts, src=root)

    return {
        "all_reduce": lambda rows, dtype, op, root: cc.all_reduce(wide(rows, dtype), GLOBAL, op),
        "reduce": lambda rows, dtype, op, root: cc.reduce(wide(rows, dtype), GLOBAL, root, op),
        "broadcast": lambda rows, dtype, op, root: cc.broadcast(wide(rows, dtype), GLOBAL, root),
        "all_gather": lambda rows, dtype, op, root: cc.all_gather(wide(rows * size, dtype), wide(rows, dtype), GLOBAL),
        "reduce_scatter": lambda rows, dtype, op, root: cc.reduce_scatter(
            wide(rows, dtype), wide(rows * size, dtype), GLOBAL, op
        ),
        "gather": gather,
        "scatter": scatter,
        "all_to_all": lambda rows, dtype, op, root: cc.all_to_all(torch.ones(rows, size, 4, dtype=dtype), 0, 1, GLOBAL),
    }


OPS = sorted(calls(2))
RIGHT = (3, torch.float32, ReduceOp.SUM, 0)
KINDS = {
    "shape": ((5, torch.float32, ReduceOp.SUM, 0), set(OPS)),
    "dtype": ((3, torch.float64, ReduceOp.SUM, 0), set(OPS)),
    "reduction": ((3, torch.float32, ReduceOp.MAX, 0), {"all_reduce", "reduce", "reduce_scatter"}),
    "root": ((3, torch.float32, ReduceOp.SUM, 1), {"reduce", "broadcast", "gather", "scatter"}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_differ(kind, checked, rank, size, raises_everywhere, expect):
    """The last rank is the odd one; every message names it and shows both sides.

    Of two ranks whose splits of an all_to_all do not fit, none is odd.
    """
    wrong, families = KINDS[kind]
    odd = size - 1
    for name in sorted(families):
        with raises_everywhere(cc.MismatchError, rf"\b{odd} differ") as raised:
            calls(size)[name](*(wrong if rank == odd else RIGHT))
        for text in raised.messages.values():
            lines = text.splitlines()
            expect.that(len(lines) == 3 and all(name in line for line in lines[1:]), f"{name}: {text}")
        calls(size)[name](*RIGHT)


@pytest.mark.parametrize("name", OPS)
def test_another_op(name, checked, rank, size, raises_everywhere, expect):
    with raises_everywhere(cc.MismatchError, f"{name}.*"):
        if rank == 0:
            calls(size)[name](*RIGHT)
        else:
            cc.barrier()


def test_the_order_of_two_ops(checked, rank, size, raises_everywhere, expect):
    odd = size - 1
    order = ["all_reduce", "broadcast"]
    for name in reversed(order) if rank == odd else order:
        with raises_everywhere(cc.MismatchError, f"rank {odd} differs") as raised:
            calls(size)[name](*RIGHT)
        expect.that("all_reduce" in raised.messages[0] and "broadcast" in raised.messages[0], raised.messages[0])


def test_another_mode(checked, rank, size, raises_everywhere, expect):
    """The last rank calls in a group that not everybody is in; those outside it learn of it as well."""
    part = checked.init_group(list(range(size - 2, size)), "PART")
    odd = size - 1
    with raises_everywhere(cc.MismatchError, "GLOBAL") as raised:
        cc.all_reduce(wide(), "PART" if rank == odd else GLOBAL)
    expect.that("PART" in raised.messages[0], raised.messages[0])
    for _ in range(3):  # both groups are in step again
        tensor = wide()
        cc.all_reduce(tensor, GLOBAL)
        expect(tensor, wide() * size)
        if part is not None:
            tensor = wide()
            cc.all_reduce(tensor, part)
            expect(tensor, wide() * 2)


def test_objects_against_tensors(checked, rank, size, raises_everywhere):
    with raises_everywhere(cc.MismatchError, "gather_jagged_object_lists"):
        if rank == size - 1:
            cc.gather_jagged_object_lists([rank])
        else:
            cc.all_reduce(wide(), GLOBAL)


def test_one_rank_missing(checked_briefly, rank, size, raises_everywhere, expect):
    """The others name it after the timeout, and say where it is; when it comes it raises as well."""
    odd = size - 1
    with raises_everywhere(cc.MismatchError, rf"rank {odd} did not call it within 1 s") as raised:
        if rank == odd:
            time.sleep(1.5)
        cc.all_reduce(wide(), GLOBAL)
    expect.that("test_check_mode.py" in raised.messages[0], raised.messages[0])


def test_what_is_right_passes(checked, rank, size, expect):
    """All ops, asynchronous ones too, and overlapping groups."""
    for name in OPS:
        calls(size)[name](*RIGHT)
    groups = [checked.init_group(ranks, f"PAIR_{i}") for i, ranks in enumerate([[0, 1], [size - 2, size - 1]])]
    tensors = [wide(), wide()]
    works = [cc.all_reduce(t, g, async_op=True) for t, g in zip(tensors, groups, strict=True) if g is not None]
    for work in works:
        work.wait()
    for tensor, group in zip(tensors, groups, strict=True):
        expect(tensor, wide() * (1 if group is None else 2))
    rows = torch.full((rank + 1, 2), float(rank))
    expect(cc.rebalance_nd_tensor(rows), torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)]))


def test_by_the_environment(no_context, rank, size, monkeypatch, share, expect):
    """CUPY_COLL_CHECK=1, the same on all ranks or an error."""
    monkeypatch.setenv("CUPY_COLL_CHECK", "yes")
    with pytest.raises(cc.ArgumentError, match="CUPY_COLL_CHECK"):
        cc.CommContext().init_distributed_env(timeout=20)
    if size > 1:
        monkeypatch.setenv("CUPY_COLL_CHECK", "1" if rank == 0 else "0")
        with pytest.raises(cc.MismatchError, match="check"):
            cc.CommContext().init_distributed_env(timeout=20)
    monkeypatch.setenv("CUPY_COLL_CHECK", "1")
    cc.CommContext().init_distributed_env(timeout=20)
    if size > 1:
        with pytest.raises(cc.MismatchError, match=rf"rank {size - 1} differs"):
            cc.all_reduce(wide(4 if rank == size - 1 else 3), GLOBAL)
    expect(share("raised"), ["raised"] * size)
