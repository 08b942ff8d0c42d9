"""The NCCL transport on one GPU at world size 1, and on several ranks where the machine allows it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from starting import RUNNER, mpiexec, run_command
from torch.distributed import ReduceOp

import cupy_coll as cc
from cupy_coll.transport.nccl_members import SHARED_GPU_VERSION

MANY = 1 << 22


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("async_op", [False, True])
def test_operations(world, dtype, async_op):
    tensor = (torch.arange(12, device="cuda") % 2).to(dtype).view(3, 4).t()
    expected = tensor.clone()
    output, part = torch.zeros_like(expected), torch.zeros_like(expected)
    parts = [torch.zeros_like(expected)]
    works = [
        cc.all_reduce(tensor, world, async_op=async_op),
        cc.reduce(tensor, world, async_op=async_op),
        cc.broadcast(tensor, world, async_op=async_op),
        cc.all_gather(output, tensor, world, async_op=async_op),
        cc.reduce_scatter(part, tensor, world, async_op=async_op),
        cc.gather(tensor, world, parts, async_op=async_op),
    ]
    for work in works:
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
    for result in (tensor, output, part, parts[0]):
        assert torch.equal(result, expected)
    assert torch.equal(cc.rebalance_nd_tensor(tensor, world), expected)


def test_all_types_and_reductions(world):
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.float16, torch.float64):
        for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
            tensor = torch.arange(5, device="cuda").to(dtype)
            cc.all_reduce(tensor, world, getattr(ReduceOp, op))
            assert torch.equal(tensor, torch.arange(5, device="cuda").to(dtype))


def test_a_stream_that_fills_slowly(world):
    """An operation sees what its stream has been given before, and what follows sees its result: 50 times exact."""
    side = torch.cuda.Stream()
    wide = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    wrong = 0
    for turn in range(50):
        with torch.cuda.stream(side):
            tensor = torch.zeros(MANY, device="cuda")
            for _ in range(4):
                wide @ wide
            tensor += turn + 1
            work = cc.all_reduce(tensor, world, async_op=turn % 2 == 1)
            if work is not None:
                work.wait()
            doubled = tensor * 2
        side.synchronize()
        wrong += int(doubled.ne(2.0 * (turn + 1)).sum())
    assert wrong == 0


def test_dropped_work(world):
    expected = []
    for turn in range(20):
        tensor = torch.full((MANY,), float(turn), device="cuda")
        expected.append(torch.empty_like(tensor))
        cc.all_gather(expected[-1], tensor, world, async_op=True)
        del tensor
        torch.full((MANY,), -1.0, device="cuda")  # would take over memory that has been let go too early
    torch.cuda.synchronize()
    assert all(bool(result.eq(turn).all()) for turn, result in enumerate(expected))


def test_graph_capture(world):
    world.warm_up()
    tensor, output = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tensor.add_(1)
        cc.all_reduce(tensor, world)
        work = cc.all_gather(output, tensor, world, async_op=True)
        work.wait()
    for turn in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert bool(output.eq(2 + turn).all())


def test_first_use_in_a_capture(world):
    fresh = cc.CommContext().init_group([0], "FRESH")
    tensor = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(cc.TransportError, match="warm_up"), torch.cuda.graph(graph):
        cc.all_reduce(tensor, fresh)
    fresh.close()


def test_bridges(world):
    import cupy

    for dtype in ("float32", "int64", "bool", "complex64", "uint16", "float16"):
        array = cupy.arange(12).reshape(3, 4).astype(dtype)
        for one in (array, array.T, array[::2, 1:], array[:0], array[1, 1]):
            tensor = cc.to_torch(one)
            assert tensor.data_ptr() == one.data.ptr or not one.size
            assert cupy.array_equal(cc.to_cupy(tensor), one)
    with pytest.raises(cc.ShapeError):
        cc.to_torch(array[::-1])
    leaf = torch.ones(2, device="cuda", requires_grad=True)
    assert cc.to_cupy(leaf).data.ptr == leaf.data_ptr()
    with pytest.raises(cc.ArgumentError):
        cc.to_cupy(torch.ones(2, device="cuda", dtype=torch.complex64).conj())
    with pytest.raises(cc.DTypeError):
        cc.to_cupy(torch.ones(2, device="cuda").to(torch.float8_e5m2))


def test_cupy_streams(world):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    for turn in range(20):
        with stream:
            array = cupy.zeros(MANY, cupy.float32)
            for _ in range(20):
                array += 1
            array += turn
            cc.all_reduce(array, world)
            work = cc.all_reduce(array, world, async_op=True)
            work.wait()
            result = (array * 2).get(stream=stream)
        stream.synchronize()
        assert (result == 2.0 * (20 + turn)).all()


@pytest.mark.parametrize("ending", ["", "raise SystemExit(5)"])
def test_exit_without_destroy(tmp_path, ending):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, cupy_coll as cc\n"
        "cc.CommContext().init_distributed_env(timeout=60)\n"
        "cc.all_reduce(torch.ones(1 << 20, device='cuda'), 'GLOBAL', async_op=True)\n" + ending
    )
    done = run_command([mpiexec(), "-n", "1", sys.executable, "-c", RUNNER, str(script)], 120)
    assert done.status == (5 if "5" in ending else 0), done.output


MATRIX = """
import torch, cupy_coll as cc
context = cc.CommContext()
context.init_distributed_env(timeout=60)
rank, size = context.get_global_rank(), context.get_world_size("GLOBAL")
torch.cuda.set_device(context.get_in_node_rank() % torch.cuda.device_count())
world = context.get_group("GLOBAL")
world.warm_up()
groups = [world, context.init_group(list(range(size))[::-1], "BACK")]
for group in groups:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float16):
        for async_op in (False, True):
            def ended(work):
                if work is not None:
                    work.wait()
            mine = torch.full((4, 3), rank + 1, device="cuda").to(dtype).t()
            total = torch.full((3, 4), sum(range(1, size + 1))).to(dtype)
            ended(cc.all_reduce(mine, group, async_op=async_op))
            assert torch.equal(mine.cpu(), total), (dtype, mine)
            output = torch.zeros(group.size, 5, device="cuda").to(dtype)
            ended(cc.all_gather(output, torch.full((5,), group.rank % 2, device="cuda").to(dtype), group, async_op))
            column = (torch.arange(group.size) % 2).to(dtype)
            assert torch.equal(output.cpu(), column[:, None].expand(-1, 5)), (dtype, output)
            one = torch.full((3,), group.rank % 2, device="cuda").to(dtype)
            ended(cc.broadcast(one, group, async_op=async_op, group_src=group.size - 1))
            assert torch.equal(one.cpu(), column[-1:].expand(3)), (dtype, one)
    rows = cc.rebalance_nd_tensor(torch.full((group.rank, 2), float(group.rank), device="cuda"), group)
    expected = torch.cat([torch.full((n, 2), float(n)) for n in range(group.size)])
    assert torch.equal(rows.cpu(), expected), rows
context.destroy()
print("right", flush=True)
"""


def ranks_possible() -> int:
    from cupy_coll.transport.nccl import _binding

    shared = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and _binding().get_version() >= SHARED_GPU_VERSION
    return 2 if shared and torch.cuda.device_count() < 2 else min(4, torch.cuda.device_count())


def test_several_ranks(tmp_path: Path):
    ranks = ranks_possible()
    if ranks < 2:
        pytest.skip("one GPU: needs two, or NCCL 2.30 with NCCL_MULTI_RANK_GPU_ENABLE=1")
    script = tmp_path / "script.py"
    script.write_text(MATRIX)
    done = run_command([mpiexec(), "-n", str(ranks), sys.executable, "-c", RUNNER, str(script)], 240)
    assert done.status == 0, done.output
    assert done.output.count("right") == ranks
