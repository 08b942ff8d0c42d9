"""torch.distributed over the backend "cupy_coll": its public surface, against closed forms."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from support import COPIED, name, tensor_of
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import cupy_coll as cc
from cupy_coll.torch_backend import CupyCollProcessGroup

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64]


@pytest.fixture
def torch_world(world) -> None:
    """torch.distributed over this package, the same one for all tests that ask for it."""
    if not dist.is_initialized():
        cc.init_torch()


def end_torch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def torch_ends(initialised) -> Iterator[None]:
    yield
    end_torch()


@pytest.fixture
def no_torch(world) -> None:
    end_torch()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_reductions(torch_world, size, rank, expect, dtype, async_op):
    total = size * (size + 1) // 2

    def run(function, *arguments, **options):
        work = function(*arguments, async_op=async_op, **options)
        expect(work is None, not async_op)
        if work is not None:
            work.wait()
            expect(work.is_completed(), True)

    wide = torch.full((4, 6), rank + 1, dtype=dtype)
    for tensor in (
        wide.clone(),
        wide.clone().t(),
        wide.clone()[:, ::2],
        torch.full((), rank + 1, dtype=dtype),
        wide[:0],
    ):
        run(dist.all_reduce, tensor)
        expect(tensor, torch.full_like(tensor, total), "all_reduce")
    if not dtype.is_complex:
        tensor = wide.clone()
        run(dist.all_reduce, tensor, op=dist.ReduceOp.MAX)
        expect(tensor, torch.full_like(tensor, size))
    tensor = wide.clone()
    run(dist.reduce, tensor, size - 1)
    if rank == size - 1:
        expect(tensor, torch.full_like(tensor, total), "reduce")
    output = torch.empty(3, dtype=dtype)
    run(dist.reduce_scatter_tensor, output, torch.arange(3 * size).to(dtype))
    expect(output, (torch.arange(3 * rank, 3 * rank + 3) * size).to(dtype), "reduce_scatter_tensor")
    parts = [torch.full((2,), i + 1, dtype=dtype) for i in range(size)]
    output = torch.empty(2, dtype=dtype)
    run(dist.reduce_scatter, output, parts)
    expect(output, torch.full((2,), size * (rank + 1), dtype=dtype), "reduce_scatter")
    uneven = [torch.full((i + 1,), i + 1, dtype=dtype) for i in range(size)]
    output = torch.empty(rank + 1, dtype=dtype)
    run(dist.reduce_scatter, output, uneven)
    expect(output, torch.full((rank + 1,), size * (rank + 1), dtype=dtype), "uneven")


OPS = {
    "SUM": lambda values: sum(values),
    "PRODUCT": math.prod,
    "MIN": min,
    "MAX": max,
    "AVG": lambda values: sum(values) / len(values),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.bool], ids=name)
def test_every_operator(torch_world, size, rank, expect, raises_everywhere, op, dtype):
    """Values of rank r: r + 1, and for bool whether r is odd; of bools SUM and MAX are "or", PRODUCT and MIN "and"."""
    values = [i % 2 == 1 for i in range(size)] if dtype == torch.bool else [i + 1 for i in range(size)]
    reduce_op = getattr(dist.ReduceOp, op)
    tensor = torch.full((2, 3), values[rank], dtype=dtype)
    if dtype == torch.bool and op == "AVG":
        with raises_everywhere(cc.DTypeError, "all_reduce.*bool.*AVG"):
            dist.all_reduce(tensor, op=reduce_op)
        return
    right = bool(OPS[op](values)) if dtype == torch.bool else OPS[op](values)
    right = math.trunc(right) if dtype == torch.int32 else right
    dist.all_reduce(tensor, op=reduce_op)
    expect(tensor, torch.full_like(tensor, right), "all_reduce")
    output = torch.empty(2, dtype=dtype)
    dist.reduce_scatter_single(output, torch.full((1,), values[rank], dtype=dtype).expand(2 * size), op=reduce_op)
    expect(output, torch.full_like(output, right), "reduce_scatter_single of an expanded tensor")


def test_copies_async_expanded_and_empty(torch_world, size, rank, expect):
    """Inputs of any layout; nobody waits before all are started."""
    grid = torch.arange(12.0).view(3, 4)
    tensors = {"expanded": grid[:, :1].expand(3, 4), "transposed": grid.t(), "strided": grid[:, ::2], "empty": grid[:0]}
    started = []
    for label, tensor in tensors.items():
        mine = tensor + rank if label != "expanded" else (grid[:, :1] + rank).expand(3, 4)
        outputs = [torch.empty(tensor.shape) for _ in range(size)]
        whole = torch.empty(size * tensor.shape[0], *tensor.shape[1:])
        received = tensor.contiguous() + rank
        works = [
            dist.all_gather(outputs, mine, async_op=True),
            dist.all_gather_single(whole, mine, async_op=True),
            dist.broadcast(received, size - 1, async_op=True),
        ]
        started.append((label, tensor, outputs, whole, received, works))
    for label, tensor, outputs, whole, received, works in started:
        for work in works:
            work.wait()
        everybodys = [tensor + i for i in range(size)]
        for one, right in zip(outputs, everybodys, strict=True):
            expect(one, right, f"all_gather, {label}")
        expect(whole, torch.cat(everybodys), f"all_gather_single, {label}")
        expect(received, everybodys[-1], f"broadcast, {label}")


@pytest.mark.parametrize("dtype", [d for d in COPIED if "float8" not in str(d)], ids=name)
def test_copies(torch_world, size, rank, expect, dtype):
    def of(value, count=3):
        return tensor_of([(value * 7 + i) % 100 for i in range(count)], dtype)

    def same(actual, expected, label):
        for one, other in zip(actual, expected, strict=True):
            expect(one, other, label)

    tensor = of(rank)
    dist.broadcast(tensor, size - 1)
    expect(tensor, of(size - 1), "broadcast")
    found = [torch.empty(3, dtype=dtype) for _ in range(size)]
    dist.all_gather(found, of(rank))
    same(found, [of(i) for i in range(size)], "all_gather")
    whole = torch.empty(3 * size, dtype=dtype)
    dist.all_gather_into_tensor(whole, of(rank))
    expect(whole, torch.cat([of(i) for i in range(size)]), "all_gather_into_tensor")
    found = [torch.empty(3, dtype=dtype) for _ in range(size)] if rank == 0 else None
    dist.gather(of(rank), found, dst=0)
    if rank == 0:
        same(found, [of(i) for i in range(size)], "gather")
    dist.scatter(tensor, [of(i + 10) for i in range(size)] if rank == size - 1 else None, src=size - 1)
    expect(tensor, of(rank + 10), "scatter")
    found = [torch.empty(rank + 1, dtype=dtype) for _ in range(size)]
    dist.all_to_all(found, [of(rank, i + 1) for i in range(size)])
    same(found, [of(i, rank + 1) for i in range(size)], "all_to_all")
    whole = torch.empty(size * (rank + 1), dtype=dtype)
    dist.all_to_all_single(
        whole, torch.cat([of(rank, i + 1) for i in range(size)]), [rank + 1] * size, [i + 1 for i in range(size)]
    )
    expect(whole, torch.cat([of(i, rank + 1) for i in range(size)]), "all_to_all_single")
    if size > 1:
        right, left = (rank + 1) % size, (rank - 1) % size
        tensor = torch.empty(3, dtype=dtype)
        work = [dist.isend(of(rank), right), dist.irecv(tensor, left)]
        for one in work:
            one.wait()
        expect(tensor, of(left), "isend and irecv")
        tensor = torch.empty(3, dtype=dtype)
        for one in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, of(rank), right), dist.P2POp(dist.irecv, tensor, left)]
        ):
            one.wait()
        expect(tensor, of(left), "batch_isend_irecv")


def test_objects_groups_and_meshes(torch_world, size, rank, expect):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    expect(found, [{"rank": i} for i in range(size)])
    box = [f"from {rank}"]
    dist.broadcast_object_list(box, size - 1)
    expect(box, [f"from {size - 1}"])
    gathered = [None] * size if rank == size - 1 else None
    dist.gather_object((rank, "x"), gathered, dst=size - 1)
    expect(gathered, [(i, "x") for i in range(size)] if rank == size - 1 else None)
    dist.scatter_object_list(box, [{i} for i in range(size)] if rank == 0 else None, src=0)
    expect(box, [{rank}])
    if size > 1 and rank < 2:
        messages = ["ping", 1] if rank == 0 else [None, None]
        dist.send_object_list(messages, 1) if rank == 0 else dist.recv_object_list(messages, 0)
        expect(messages, ["ping", 1])
    backwards = list(range(size - 1, -1, -1))
    group = dist.new_group(backwards, sort_ranks=False)
    expect(dist.get_rank(group), size - 1 - rank, "unsorted")
    tensor = torch.full((1,), float(rank))
    whole = torch.empty(size)
    dist.all_gather_into_tensor(whole, tensor, group=group)
    expect(whole.tolist(), [float(i) for i in backwards])
    some = list(range(1, size)) or [0]
    if rank in some:
        group = dist.new_group(some, use_local_synchronization=True)
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)
        expect(tensor.item(), float(len(some)), "made by its members alone")
        dist.destroy_process_group(group)
    dist.barrier()
    if size % 2 == 0:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        tensor = torch.full((1,), float(rank))
        dist.all_reduce(tensor, group=mesh.get_group("dp"))
        expect(tensor.item(), float(rank % (size // 2) * 2 + size // 2))
        ours = torch.full((1,), float(rank))
        cc.all_reduce(ours, mesh["dp"])
        expect(ours, tensor, "a dimension of a mesh is a group of ours, too")


def test_groups_meet(torch_world, world, group_of, size, rank, expect, raises_everywhere):
    pg = dist.group.WORLD
    expect(isinstance(pg, CupyCollProcessGroup) and pg.cupy_coll_group is world, True, "the same communicators")
    before = world.sequence
    cc.all_reduce(torch.ones(1), pg)
    dist.all_reduce(torch.ones(1))
    expect(world.sequence - before, 2, "one after another on the same Group")
    group = group_of(range(size - 1, -1, -1))
    torch_group = group.torch()
    expect(dist.get_process_group_ranks(torch_group), list(group.ranks))
    tensor = torch.full((1,), float(rank))
    dist.broadcast(tensor, group.ranks[0], group=torch_group)
    expect(tensor.item(), float(size - 1))
    expect(torch_group.cupy_coll_group is group, True)
    if size % 2 == 0:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        with raises_everywhere(cc.GroupError, r"the DeviceMesh has dimensions \('dp', 'tp'\), expected one"):
            cc.all_reduce(torch.ones(1), mesh)


def test_groups_of_the_same_ranks_are_independent(torch_world, world, size, rank, expect):
    """Members may take two groups in different orders, as two threads would; each has its own communicators."""
    groups = [dist.new_group(list(range(size))) for _ in range(2)]
    ours = [group.cupy_coll_group for group in groups]
    expect(len({id(group) for group in (world, *ours)}), 3)
    tensors = [torch.full((2,), 10.0**index) for index in range(2)]
    order = (0, 1) if rank % 2 == 0 else (1, 0)
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in works:
        work.wait()
    expect([tensor[0].item() for tensor in tensors], [size * 1.0, size * 10.0])
    dist.destroy_process_group(groups[0])
    again = [dist.new_group(list(range(size))).cupy_coll_group for _ in range(2)]
    expect(again[0] is ours[0], True, "communicators are given back, and used again")
    expect(again[1] in (world, *ours), False, "those in use are not")
    dist.all_reduce(tensors[1], group=groups[1])
    expect(tensors[1][0].item(), size**2 * 10.0, "the other one goes on")


def test_tensors_that_do_not_belong_together(torch_world, size, expect, raises_everywhere):
    """Refused before anything is sent: the next call works."""
    pg = dist.group.WORLD
    wide, narrow = torch.ones(size * 4), torch.zeros(size * 4, dtype=torch.int16)
    with raises_everywhere(cc.ArgumentError, "all_gather_into_tensor: input is .* float32.*, expected the dtype"):
        dist.all_gather_into_tensor(narrow, wide[:4])
    with raises_everywhere(cc.ArgumentError, "reduce_scatter_tensor: input is .* float32.*, expected the dtype"):
        dist.reduce_scatter_tensor(narrow[:4], wide)
    with raises_everywhere(cc.ArgumentError, "all_to_all_single: input is .* float32.*, expected the dtype"):
        pg.all_to_all_single(narrow, wide)
    with raises_everywhere(cc.ArgumentError, "reduce_scatter_tensor: input is .* float32.*, expected the dtype"):
        pg.reduce_scatter_single_coalesced([narrow[:4]], [wide])
    with raises_everywhere(cc.ShapeError, "all_reduce: output is written, but its elements share memory"):
        dist.all_reduce(torch.zeros(1).expand(4))
    with raises_everywhere(cc.ArgumentError, "broadcast: output must be a dense tensor in memory"):
        dist.broadcast(torch.zeros(3, device="meta"), 0)
    dist.all_reduce(wide)
    expect(wide[0].item(), float(size), "and the next call works")


def test_what_cannot_work_says_so(torch_world, size, rank, raises_everywhere, expect):
    pg = dist.group.WORLD
    with raises_everywhere(cc.GroupError, "split_group cannot be used.*new_group"):
        pg.split_group([0])
    with raises_everywhere(cc.GroupError, "tag 3 cannot be used"):
        dist.send(torch.ones(1), (rank + 1) % size, tag=3) if size > 1 else pg.send([torch.ones(1)], 0, 3)
    with raises_everywhere(cc.GroupError, "recv without a source"):
        dist.recv(torch.ones(1))
    with raises_everywhere(cc.DTypeError, "all_reduce.*float32.*BXOR"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BXOR)
    with raises_everywhere(cc.ShapeError, "all_gather_into_tensor"):
        pg.all_gather_single(torch.ones(size + 1), torch.ones(1))
    with raises_everywhere(cc.GroupError, "init_torch: torch.distributed is initialised already"):
        cc.init_torch()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    expect(tensor.item(), float(size), "and the next call works")


def test_dropped_and_coalesced(torch_world, size, expect):
    tensors = [torch.ones(100) for _ in range(5)]
    for tensor in tensors:
        dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    expect([tensor[0].item() for tensor in tensors], [float(size)] * 5, "nobody has waited")
    work = dist.all_reduce(torch.ones(2), async_op=True)
    expect(work.get_future().wait()[0].tolist(), [float(size)] * 2)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    expect([tensor[0].item() for tensor in tensors], [float(size**2)] * 5)


def test_functional_collectives_also_traced(torch_world, size, rank, expect):
    import torch.distributed._functional_collectives as functional

    def step(x):
        x = functional.all_reduce(x, "sum", dist.group.WORLD)
        return functional.reduce_scatter_single(
            functional.all_gather_single(x * 2, 0, dist.group.WORLD), "sum", 0, dist.group.WORLD
        )

    x = torch.full((3,), float(rank))
    expected = torch.full((3,), float(size * (size - 1)) * size)
    expect(functional.wait_tensor(step(x)), expected, "eager")
    if size % 2 == 0:  # the compiler takes seconds to import
        expect(functional.wait_tensor(torch.compile(step, backend="aot_eager")(x)), expected, "traced")


def test_models(torch_world, size, rank, expect, tmp_path_factory, share):
    """DDP, FSDP2 and tensor parallel give the gradients of one process with all the data."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 8 * size), torch.nn.ReLU(), torch.nn.Linear(8 * size, 4))

    data = torch.randn(3 * size, 8, generator=torch.Generator().manual_seed(1))
    mine = data[3 * rank : 3 * rank + 3]
    alone = model()
    alone(data).square().mean().backward()
    expected = [p.grad for p in alone.parameters()]

    def check(parallel, batch, label):
        parallel(batch).square().mean().backward()
        for p, gradient in zip(parallel.parameters(), expected, strict=True):
            actual = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            expect(actual, gradient, label, rtol=1e-4, atol=1e-6)

    check(torch.nn.parallel.DistributedDataParallel(model()), mine, "DDP")
    sharded = model()
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer)
    check(sharded, mine, "FSDP2")
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    split = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    check(split, data, "tensor parallel")

    import torch.distributed.checkpoint as checkpoint

    path = share(str(tmp_path_factory.mktemp("checkpoint")))[0]
    checkpoint.save(split.state_dict(), checkpoint_id=path)
    other = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=path)
    for key, value in split.state_dict().items():
        expect(state[key].full_tensor(), value.full_tensor(), f"checkpoint {key}")


def test_leaving_before_the_others_are_there(no_torch, rank, monkeypatch):
    """Rank 0 has the store, and ends it: not before the others have found it."""
    if rank:
        make = dist.TCPStore
        monkeypatch.setattr(
            dist, "TCPStore", lambda *arguments, **options: time.sleep(0.2) or make(*arguments, **options)
        )
    cc.init_torch(timeout=20)
    dist.destroy_process_group()


def test_the_same_numbers_as_gloo(no_torch, world, size, expect, share, tmp_path_factory):
    def run():
        mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
        generator = torch.Generator().manual_seed(0)
        logits = distribute_tensor(torch.randn(2, 5, 16 * size, generator=generator), mesh, [Shard(2)]).requires_grad_()
        tokens = torch.randint(0, 16 * size, (2, 5), generator=generator)
        value = cc.get_logprobs_from_vocab_parallel_logits(logits, tokens)
        value.sum().backward()
        whole = logits.redistribute(mesh, [Replicate()]).to_local()
        return value.detach(), logits.grad.to_local(), whole.detach()

    cc.init_torch()
    ours = run()
    dist.destroy_process_group()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    path = share(str(tmp_path_factory.mktemp("store") / "file"))[0]
    dist.init_process_group("gloo", store=dist.FileStore(path, size), rank=world.rank, world_size=size)
    theirs = run()
    cc.barrier(world)
    dist.destroy_process_group()
    for one, other in zip(ours, theirs, strict=True):
        expect(one, other)


def test_begins_and_ends_with_its_context(no_torch, no_context, size, rank, expect):
    """No MASTER_ADDR: the backend meets over MPI, and ends the context that it has begun; twice."""
    for _ in range(2):
        if size == 1:  # no launcher: torch would ask for MASTER_ADDR
            cc.CommContext().init_distributed_env()
        dist.init_process_group("cupy_coll")
        expect(cc.CommContext().is_initialized(), True)
        expect((dist.get_rank(), dist.get_world_size(), dist.get_backend()), (rank, size, "cupy_coll"))
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        expect(tensor.item(), float(size))
        dist.destroy_process_group()
        expect(cc.CommContext().is_initialized(), size == 1, "who begins a context ends it")
        cc.CommContext().destroy()
