"""init_group, init_mesh, modes, and the groups that come of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

import cupy_coll as cc


def test_the_world(world, rank, size, expect):
    context = cc.CommContext()
    expect.that(context is cc.CommContext(), "not a singleton")
    expect(context.is_initialized(), True)
    expect((world.ranks, world.rank, world.size), (tuple(range(size)), rank, size))
    expect.that("GLOBAL" in world.name, world.name)
    expect(context.get_world_size(cc.CommMode.GLOBAL), size)
    expect(context.get_global_rank(), rank)
    expect(context.get_local_rank(cc.CommMode.GLOBAL), rank)
    expect(context.get_ranks_in_group("GLOBAL"), list(range(size)))
    expect(context.is_main_rank(), rank == 0)
    expect.that(context.get_group("GLOBAL") is world, "another group")
    expect.that(not isinstance(world, torch.distributed.ProcessGroup), "a ProcessGroup")


def test_one_node(world, rank, size, expect):
    """All ranks of this run share a node: one intra-node group, and an inter-node group for each rank alone."""
    context = cc.CommContext()
    expect(context.get_in_node_rank(), rank)
    expect(context.get_local_world_size(), size)
    intra, inter = context.get_intra_node_process_group(), context.get_inter_node_process_group()
    expect.that(intra is context.get_group(cc.CommMode.INTRA_NODE), "intra")
    expect.that(inter is context.get_group(cc.CommMode.INTER_NODE), "inter")
    expect((intra.ranks, inter.ranks), (tuple(range(size)), (rank,)))
    tensor = torch.ones(2)
    cc.all_reduce(tensor, cc.CommMode.INTRA_NODE)
    expect(tensor, torch.full((2,), float(size)))
    cc.all_reduce(tensor, cc.CommMode.INTER_NODE)
    expect(tensor, torch.full((2,), float(size)))


def test_modes_are_strings(world, expect):
    names = {
        cc.CommMode: ["GLOBAL", "INTRA_NODE", "INTER_NODE"],
        cc.ParallelMode: [
            "GLOBAL",
            "INTRA_NODE",
            "INTER_NODE",
            "TRAIN_DATA_PARALLEL",
            "DATA_PARALLEL",
            "TENSOR_PARALLEL",
            "SEQUENCE_PARALLEL",
            "CONTEXT_PARALLEL",
            "PIPELINE_PARALLEL",
            "WEIGHT_TRANSFER",
        ],
    }
    for modes, strings in names.items():
        expect([getattr(modes, string) for string in strings], strings)
    expect(issubclass(cc.ParallelMode, cc.CommMode), True)


def test_the_order_of_ranks_is_kept(world, rank, size, expect):
    """The first is the sender in weight transfer; the index in the list is the rank in the group."""
    ranks = list(range(size))[::-1]
    group = cc.CommContext().init_group(ranks, mode=cc.ParallelMode.WEIGHT_TRANSFER)
    expect((group.ranks, group.rank), (tuple(ranks), size - 1 - rank))
    expect(cc.CommContext().get_local_rank("WEIGHT_TRANSFER"), size - 1 - rank)
    expect(cc.CommContext().get_ranks_in_group(cc.ParallelMode.WEIGHT_TRANSFER), ranks)
    gathered = torch.zeros(size)
    cc.all_gather(gathered, torch.tensor([float(rank)]), "WEIGHT_TRANSFER")
    expect(gathered, torch.tensor(ranks).float())
    group.close()


def test_every_way_to_name_a_group(world, group_of, rank, size, expect):
    """Mode, Group, None for the world; a torch ProcessGroup is matched by its ranks."""
    ranks = tuple(range(1, size)) or (0,)
    group = group_of(ranks)
    right = float(len(ranks))
    for named in (group, f"TEST_{'_'.join(map(str, ranks))}") if group is not None else ():
        tensor = torch.ones(1)
        cc.all_reduce(tensor, named)
        expect(tensor.item(), right, str(named))
    tensor = torch.ones(1)
    cc.all_reduce(tensor, None)
    expect(tensor.item(), float(size), "None")


def test_torch_process_groups(no_context, rank, size, expect):
    """Only their ranks matter: torch's stand-in backend for tests sends nothing itself."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    context = cc.CommContext()
    context.init_distributed_env(timeout=20)  # a context without other tests' groups
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        tensor = torch.ones(1)
        cc.all_reduce(tensor, dist.group.WORLD)
        expect(tensor.item(), float(size), "WORLD")
        ranks = list(range(1, size)) or [0]
        context.init_group(ranks, mode="SOME")
        process_group = dist.new_group(ranks)
        tensor = torch.ones(1)
        result = cc.all_reduce(tensor, process_group, async_op=True)
        expect(result is None, rank not in ranks)
        if result is not None:
            result.wait()
        expect(tensor.item(), float(len(ranks)) if rank in ranks else 1.0, str(ranks))
        if size > 2:
            unknown = dist.new_group([0, 2])
            tensor = torch.ones(1)
            cc.all_reduce(tensor, unknown)  # its members make the group
            expect(tensor.item(), 2.0 if rank in (0, 2) else 1.0, "members alone")
            cc.all_reduce(tensor, unknown)
            expect(tensor.item(), 4.0 if rank in (0, 2) else 1.0, "the same group again")
    finally:
        dist.destroy_process_group()


def test_ranks_outside(world, group_of, rank, size, expect):
    """The mode is known, the group is None; what needs a member raises."""
    if size < 2:
        pytest.skip(f"needs 2 ranks, this run has {size}")
    context = cc.CommContext()
    group = context.init_group([size - 1], mode="LAST_ALONE")
    if rank == size - 1:
        expect((group.ranks, group.rank, group.size), ((rank,), 0, 1))
        group.close()
        return
    expect(group, None)
    expect(context.get_group("LAST_ALONE"), None)
    for question in (context.get_world_size, context.get_local_rank):
        with pytest.raises(cc.GroupError, match=rf"{question.__name__}.*LAST_ALONE"):
            question("LAST_ALONE")
    expect(cc.barrier("LAST_ALONE"), None)
    expect(cc.all_reduce(torch.ones(1), "LAST_ALONE", async_op=True), None)


def test_a_later_list_without_this_rank_keeps_its_registration(world, rank, size, expect):
    """Lists of one mode, one call each: every rank ends up in the group of its own list."""
    context = cc.CommContext()
    for begin in range(size):
        context.init_group([begin], mode="ALONE")
    group = context.get_group("ALONE")
    expect(group.ranks, (rank,))
    tensor = torch.full((1,), float(rank))
    cc.all_reduce(tensor, "ALONE")
    expect(tensor.item(), float(rank))
    group.close()
    # a later list with this rank in it takes the mode over
    context.init_group(range(size), mode="ALONE")
    expect(context.get_world_size("ALONE"), size)
    context.get_group("ALONE").close()


def test_lists_that_differ_raise_everywhere(world, rank, size, raises_everywhere, expect):
    if size < 2:
        pytest.skip(f"needs 2 ranks, this run has {size}")
    context = cc.CommContext()
    odd = rank == size - 1
    with raises_everywhere(cc.MismatchError, rf"init_group.*\b{size - 1}\b"):
        context.init_group([0] if odd else [0, 1], mode="DIFFERS")
    with raises_everywhere(cc.MismatchError, "init_group"):
        context.init_group([1, 0] if odd else [0, 1], mode="DIFFERS")  # another order is another group
    with raises_everywhere(cc.MismatchError, "init_group"):
        context.init_group([0, 1], mode="DIFFERS" if odd else "DIFFERENT")
    with raises_everywhere(cc.MismatchError, "init_mesh"):
        context.init_mesh(**({"dp": size} if odd else {"tp": size}))
    with pytest.raises(cc.NotInitializedError):  # nothing was registered
        context.get_group("DIFFERS")


def test_bad_lists_raise_everywhere(world, rank, size, raises_everywhere):
    context = cc.CommContext()
    for bad in ([], [0, 0], [size], [-1], "text", None, [0.5], 0):
        with raises_everywhere(cc.ArgumentError, "init_group.*ranks"):
            context.init_group(bad, mode="BAD")
    for mode in (None, "", 3):
        with raises_everywhere(cc.ArgumentError, "init_group.*mode"):
            context.init_group([0], mode=mode)
    with raises_everywhere(cc.ArgumentError, "init_group.*backend"):
        context.init_group([0], mode="BAD", backend="smoke signals")
    if size > 1:  # wrong on one rank: an error on all
        with raises_everywhere(cc.CupyCollError, "init_group"):
            context.init_group([size] if rank == 1 else [0], mode="BAD")
        with raises_everywhere(cc.CupyCollError, "init_group"):
            context.init_group([0], mode=None if rank == 1 else "BAD")


def test_unknown_modes(world, raises_everywhere, expect):
    """An error, also a KeyError, that says how to make the mode known."""
    context = cc.CommContext()
    started = world.sequence
    for error in (cc.NotInitializedError, KeyError):
        with raises_everywhere(error, "all_reduce.*NOBODYS.*init_group"):
            cc.all_reduce(torch.ones(1), "NOBODYS")
        with raises_everywhere(error, "get_group.*NOBODYS.*init_group"):
            context.get_group("NOBODYS")
        with raises_everywhere(error, "NOBODYS"):
            context.get_world_size("NOBODYS")
    for bad in (3.5, 0, [0, 1], object()):
        with raises_everywhere(cc.GroupError, "all_reduce"):
            cc.all_reduce(torch.ones(1), bad)
    expect(world.sequence - started, 10, "only the ten barriers were sent")


def test_closed_groups(world, rank, size, raises_everywhere, expect):
    context = cc.CommContext()
    group = context.init_group(range(size), mode="SHORT_LIVED")
    tensor = torch.ones(1)
    group.warm_up()
    work = cc.all_reduce(tensor, group, async_op=True)
    group.close()  # finishes what is in flight
    group.close()  # again: nothing
    expect(tensor.item(), float(size))
    expect(work.is_completed(), True)
    for call in (lambda: cc.all_reduce(tensor, group), lambda: cc.barrier("SHORT_LIVED"), group.warm_up):
        with raises_everywhere(cc.GroupError, "closed"):
            call()
    again = context.init_group(range(size), mode="SHORT_LIVED")
    cc.all_reduce(tensor, "SHORT_LIVED")
    expect(tensor.item(), float(size * size))
    again.close()


def test_host_only_groups_take_cpu_tensors(world, size, expect):
    context = cc.CommContext()
    for options in ({"backend": "mpi"}, {"backend": "gloo"}, {"backend": "auto"}, {"use_cpu": True}):
        group = context.init_group(range(size), mode="ON_THE_HOST", **options)
        tensor = torch.ones(1)
        cc.all_reduce(tensor, group)
        expect(tensor.item(), float(size), str(options))
        group.close()


def test_groups_do_not_hear_each_other(group_of, rank, size, expect):
    """Overlapping groups, operations begun in different orders by different ranks."""
    lists = [tuple(range(size)), tuple(range(size))[::-1], tuple(range(1, size)) or (0,)]
    groups = [(ranks, group_of(ranks)) for ranks in lists]
    mine = [(ranks, group) for ranks, group in groups if group is not None]
    works = []
    for ranks, group in mine if rank % 2 else mine[::-1]:
        tensor = torch.full((4000,), float(lists.index(ranks) + 1))
        works.append((cc.all_reduce(tensor, group, async_op=True), tensor, ranks))
    for work, tensor, ranks in works:
        work.wait()
        expect(tensor, torch.full((4000,), float(len(ranks) * (lists.index(ranks) + 1))), str(ranks))


def test_init_mesh(world, rank, size, expect):
    """The last name varies fastest."""
    context = cc.CommContext()
    for dp in [d for d in (1, 2, 3, 4) if size % d == 0]:
        tp = size // dp
        mesh = context.init_mesh(dp=dp, cp=1, tp=tp)
        expect(list(mesh), ["dp", "cp", "tp"])
        column, row = rank % tp, rank // tp
        right = {
            "dp": tuple(i * tp + column for i in range(dp)),
            "cp": (rank,),
            "tp": tuple(row * tp + j for j in range(tp)),
        }
        expect({axis: group.ranks for axis, group in mesh.items()}, right, f"dp={dp}")
        modes = {
            "DATA_PARALLEL": "dp",
            "TRAIN_DATA_PARALLEL": "dp",
            "CONTEXT_PARALLEL": "cp",
            "TENSOR_PARALLEL": "tp",
        }
        for mode, axis in modes.items():
            expect.that(context.get_group(mode) is mesh[axis], f"dp={dp}: {mode}")
        for axis in ("dp", "tp"):
            tensor = torch.tensor([float(rank)])
            cc.all_reduce(tensor, mesh[axis], ReduceOp.SUM)
            expect(tensor.item(), float(sum(right[axis])), f"dp={dp}: {axis}")
        for group in mesh.values():
            group.close()


def test_ranks_of_other_kinds(world, rank, size, expect):
    """Whatever holds whole numbers may list the ranks."""
    for ranks in (range(size), tuple(range(size)), np.arange(size), torch.arange(size)):
        group = cc.CommContext().init_group(ranks, mode="SOME_KIND")
        expect(group.ranks, tuple(range(size)))
        expect.that(all(type(member) is int for member in group.ranks), f"{group.ranks!r}")
        group.close()


def test_barrier(group_of, share, expect):
    """Nobody leaves before the last has come (the ranks of a machine have one clock)."""
    for ranks in group_of.several():
        group = group_of(ranks)
        times = None
        if group is not None:
            time.sleep(0.01 * group.rank)
            come = time.monotonic()
            expect(cc.barrier(group), None)
            times = (come, time.monotonic())
        known = [pair for pair in share(times) if pair]
        expect.that(min(left for _, left in known) >= max(come for come, _ in known), f"{ranks}: {known}")


def test_other_mesh_axes(world, rank, size, expect):
    context = cc.CommContext()
    mesh = context.init_mesh(pp=size, sp=1, experts=1)
    expect.that(context.get_group(cc.ParallelMode.PIPELINE_PARALLEL) is mesh["pp"], "pp")
    expect.that(context.get_group(cc.ParallelMode.SEQUENCE_PARALLEL) is mesh["sp"], "sp")
    expect(mesh["experts"].ranks, (rank,))
    for group in mesh.values():
        group.close()


def test_bad_meshes(world, size, raises_everywhere):
    context = cc.CommContext()
    for axes in ({"dp": size + 1}, {"dp": size, "tp": 2}, {"dp": 0}, {"dp": -size, "tp": -1}, {"dp": 1.5}):
        with raises_everywhere(cc.ArgumentError, "init_mesh"):
            context.init_mesh(**axes)
