"""CommContext's life: before it begins, beginning, end, and again."""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
import torch
from mpi4py import MPI

import cupy_coll as cc


def one_of_each():
    """Every public operation that needs a context, with arguments that are otherwise right."""
    tensor = torch.ones(2)
    context = cc.CommContext()
    return {
        "all_reduce": lambda: cc.all_reduce(tensor, "GLOBAL"),
        "reduce": lambda: cc.reduce(tensor, "GLOBAL"),
        "reduce_scatter": lambda: cc.reduce_scatter(tensor, tensor, "GLOBAL"),
        "broadcast": lambda: cc.broadcast(tensor, "GLOBAL"),
        "scatter": lambda: cc.scatter(tensor, "GLOBAL", [tensor]),
        "gather": lambda: cc.gather(tensor, "GLOBAL", [tensor]),
        "all_gather": lambda: cc.all_gather(tensor, tensor, None),
        "send": lambda: cc.send(tensor, 0, "GLOBAL"),
        "recv": lambda: cc.recv(tensor, 0, "GLOBAL"),
        "barrier": lambda: cc.barrier(),
        "broadcast_object_list": lambda: cc.broadcast_object_list([1], "GLOBAL"),
        "all_reduce_dict": lambda: cc.all_reduce_dict({"a": 1}, "GLOBAL"),
        "gather_jagged_object_lists": lambda: cc.gather_jagged_object_lists([1]),
        "rebalance_nd_tensor": lambda: cc.rebalance_nd_tensor(tensor),
        "all_to_all": lambda: cc.all_to_all(torch.ones(1, 1), 0, 1, None),
        "all_to_all_uneven": lambda: cc.all_to_all_uneven(tensor, [2], [2], None),
        "scatter_to_sequence_parallel_region": lambda: cc.scatter_to_sequence_parallel_region(torch.ones(1, 1)),
        "gather_from_sequence_parallel_region": lambda: cc.gather_from_sequence_parallel_region(torch.ones(1, 1)),
        "get_group": lambda: context.get_group("GLOBAL"),
        "get_world_size": lambda: context.get_world_size("GLOBAL"),
        "get_global_rank": lambda: context.get_global_rank(),
        "get_local_rank": lambda: context.get_local_rank("GLOBAL"),
        "get_in_node_rank": lambda: context.get_in_node_rank(),
        "get_local_world_size": lambda: context.get_local_world_size(),
        "get_ranks_in_group": lambda: context.get_ranks_in_group("GLOBAL"),
        "get_intra_node_process_group": lambda: context.get_intra_node_process_group(),
        "get_inter_node_process_group": lambda: context.get_inter_node_process_group(),
        "is_main_rank": lambda: context.is_main_rank(),
        "init_group": lambda: context.init_group([0], mode="X"),
        "init_mesh": lambda: context.init_mesh(dp=1),
    }


def test_before_init(no_context, expect):
    """Nothing is initialised implicitly: NotInitializedError, also a RuntimeError and a KeyError, says how."""
    expect(cc.CommContext().is_initialized(), False)
    for function, call in one_of_each().items():
        for error in (cc.NotInitializedError, KeyError, RuntimeError):
            with pytest.raises(error, match=rf"{function}.*init_distributed_env"):
                call()
    expect(cc.CommContext().is_initialized(), False)
    cc.CommContext().destroy()  # nothing to end


def test_again_after_destroy(no_context, size, expect):
    """Several lives in one process; what belonged to an earlier one says so."""
    context = cc.CommContext()
    for life in range(3):
        expect(context.init_distributed_env(timeout=20), None)
        group = context.init_group(range(size), mode=f"LIFE_{life}")
        tensor = torch.ones(2)
        work = cc.all_reduce(tensor, group, async_op=True)
        expect(context.destroy(), None)
        expect(tensor, torch.full((2,), float(size)), "in flight at destroy()")
        expect(work.is_completed(), True)
        expect(context.is_initialized(), False)
        for stale in (group, f"LIFE_{life}"):
            with pytest.raises((cc.NotInitializedError, cc.GroupError), match="all_reduce"):
                cc.all_reduce(tensor, stale)
        context.destroy()
        context.init_distributed_env(timeout=20)
        with pytest.raises(cc.GroupError, match="all_reduce"):
            cc.all_reduce(tensor, group)
        with pytest.raises(cc.NotInitializedError):
            cc.all_reduce(tensor, f"LIFE_{life}")
        context.destroy()


def test_with_statement(no_context, size, expect):
    with cc.CommContext() as context:
        context.init_distributed_env(timeout=timedelta(seconds=20))
        tensor = torch.ones(1)
        cc.all_reduce(tensor, "GLOBAL")
        expect(tensor.item(), float(size))
    expect(cc.CommContext().is_initialized(), False)


def test_function_form(no_context, rank, size, expect):
    """Rank first, then world size."""
    cc.initialize_distributed_env(rank, size, timeout=20)
    expect(cc.CommContext().get_world_size("GLOBAL"), size)
    cc.CommContext().destroy()
    cc.initialize_distributed_env(rank=rank, world_size=size, backend="mpi", dist_url="tcp://ignored", timeout=20)
    expect(cc.CommContext().get_global_rank(), rank)


def test_regions_need_their_mode(no_context, rank, size, expect):
    """An error that names the mode where it is not initialised; None on a rank outside."""
    context = cc.CommContext()
    context.init_distributed_env(timeout=20)
    x = torch.ones(1, 12)
    calls = (cc.scatter_to_sequence_parallel_region, cc.gather_from_sequence_parallel_region)
    for call in calls:
        with pytest.raises(cc.NotInitializedError, match=f"{call.__name__}.*SEQUENCE_PARALLEL"):
            call(x)
    members = list(range(size))[1:] or [0]
    context.init_group(members, mode=cc.ParallelMode.SEQUENCE_PARALLEL)
    for call in calls:
        out = call(x)
        expect(out is None, rank not in members, call.__name__)


def test_timeout_from_the_environment(no_context, monkeypatch, raises_everywhere):
    context = cc.CommContext()
    monkeypatch.setenv("CUPY_COLL_TIMEOUT", "soon")
    with raises_everywhere(cc.ArgumentError, "init_distributed_env.*CUPY_COLL_TIMEOUT.*soon"):
        context.init_distributed_env()
    monkeypatch.setenv("CUPY_COLL_TIMEOUT", "17.5")
    context.init_distributed_env()
    cc.barrier()


def test_wrong_world_size_or_rank(no_context, rank, size, raises_everywhere, expect):
    """Numbers that disagree with MPI are an error that shows both."""
    context = cc.CommContext()
    with raises_everywhere(cc.ArgumentError, rf"init_distributed_env.*world_size.*{size + 1}.*{size}"):
        context.init_distributed_env(world_size=size + 1)
    with raises_everywhere(cc.ArgumentError, r"init_distributed_env.*rank is \d+, but MPI says \d+"):
        context.init_distributed_env(rank=rank + 1)
    with raises_everywhere(cc.ArgumentError, "rank"):
        cc.initialize_distributed_env((rank + 1) % size if size > 1 else 1, size)
    if size > 1:  # wrong on one rank: an error on all
        with raises_everywhere(cc.CupyCollError, "init_distributed_env"):
            context.init_distributed_env(world_size=size + (rank == 1), timeout=20)
    expect(context.is_initialized(), False)
    context.init_distributed_env(size, rank, timeout=20)  # right ones are fine
    expect(context.get_world_size("GLOBAL"), size)


def test_bad_options(no_context, raises_everywhere, expect):
    context = cc.CommContext()
    for timeout in (0, -1, "soon", None, float("nan")):
        with raises_everywhere(cc.ArgumentError, "init_distributed_env.*timeout"):
            context.init_distributed_env(timeout=timeout)
    with raises_everywhere(cc.ArgumentError, "init_distributed_env.*backend"):
        context.init_distributed_env(backend="smoke")
    with raises_everywhere(cc.ArgumentError, "init_distributed_env.*comm"):
        context.init_distributed_env(comm="COMM_WORLD")
    expect(context.is_initialized(), False)


def test_twice(world, raises_everywhere):
    with raises_everywhere(cc.CupyCollError, "init_distributed_env.*already"):
        cc.CommContext().init_distributed_env()


def test_a_world_of_ones_own(no_context, rank, size, expect):
    """comm=: halves of the job that know nothing of each other; ranks count within."""
    half = MPI.COMM_WORLD.Split(color=rank % 2, key=-rank)
    members = [r for r in range(size) if r % 2 == rank % 2][::-1]
    context = cc.CommContext()
    context.init_distributed_env(comm=half, timeout=20)
    expect((context.get_global_rank(), context.get_world_size("GLOBAL")), (members.index(rank), len(members)))
    tensor = torch.tensor([float(rank)])
    cc.all_reduce(tensor, "GLOBAL")
    expect(tensor.item(), float(sum(members)))
    if len(members) > 1:
        group = context.init_group([1], mode="SECOND")
        expect(group is not None, members.index(rank) == 1)
    context.destroy()
    expect(half.Get_size(), len(members), "the caller's communicator is not freed")
    half.Free()


def test_the_callers_traffic_is_not_touched(world, rank, size, expect):
    """Messages of the program's own on COMM_WORLD, with any tag, are neither taken nor disturbed."""
    comm = MPI.COMM_WORLD
    requests = [comm.isend(("mine", rank), dest=(rank + 1) % size, tag=tag) for tag in (0, 1, 2)]
    tensor = torch.ones(3)
    cc.all_reduce(tensor, world)
    cc.barrier()
    got = [comm.recv(source=(rank - 1) % size, tag=tag) for tag in (2, 1, 0)]
    MPI.Request.waitall(requests)
    expect(got, [("mine", (rank - 1) % size)] * 3)
    expect(tensor, torch.full((3,), float(size)))


@pytest.mark.parametrize("told", ["right", "wrong"])
def test_a17_local_rank(told, no_context, rank, size, monkeypatch, caplog, expect):
    """Shared memory tells the truth; a scheduler's variable left over does not count; what differs is reported."""
    import os

    mine = rank if told == "right" else rank + 1
    monkeypatch.setenv("SLURM_LOCALID", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(mine))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with caplog.at_level(logging.WARNING):
        cc.CommContext().init_distributed_env(timeout=20)
    expect(cc.CommContext().get_in_node_rank(), rank)
    expect(os.environ["CUDA_VISIBLE_DEVICES"], "3")
    warned = "OMPI_COMM_WORLD_LOCAL_RANK" in caplog.text
    expect(warned, told == "wrong", caplog.text)
