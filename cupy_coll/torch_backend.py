"""The torch.distributed backend "cupy_coll": process groups whose collectives are those of a Group.

``torch.distributed.init_process_group("cupy_coll")`` in a job that MPI started needs no MASTER_ADDR; :func:`init_torch`
does the same on a given communicator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from cupy_coll import bootstrap
from cupy_coll import check as checks
from cupy_coll.collective import barrier, broadcast_object_list
from cupy_coll.context import DEFAULT_TIMEOUT, CommContext
from cupy_coll.dtypes import Reduction, check_reduction
from cupy_coll.errors import ArgumentError, GroupError, ShapeError
from cupy_coll.group import Group
from cupy_coll.transport.base import Work

__all__ = ["NAME", "CupyCollProcessGroup", "create", "init_torch", "rendezvous"]

NAME = "cupy_coll"


class Works(dist.Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work | None], outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._works = [work for work in works if work is not None]
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception() is not None), None)

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> torch.futures.Future[Any]:
        """Wait, and return a completed future of the tensors."""
        devices: list[Any] = list({tensor.device for tensor in self._outputs if tensor.is_cuda})
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        try:
            future.set_result(self.result())
        except Exception as error:  # whoever waits for the future gets it
            future.set_exception(error)  # type: ignore[arg-type]  # typed as a value
        return future

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()


_ProcessGroup: Any = dist.ProcessGroup  # its overloads cannot be overridden one by one in the type checker's eyes


class CupyCollProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A torch process group over a :class:`~cupy_coll.Group`, whose communicators it shares.

    Args:
        group: the Group; its order of ranks is the process group's.
        owner: whether the end of this process group ends the context too, because its beginning has begun it.
        own_group: whether the Group was made for it, and is another's after its end.
    """

    def __init__(self, group: Group, owner: bool = False, own_group: bool = False) -> None:
        super().__init__(group.rank, group.size)
        self.cupy_coll_group = group
        self._owner = owner
        self._own_group = own_group
        self._name, self._desc = "", ""
        self._coalesced: list[tuple[Work | None, list[Tensor]]] | None = None

    # ------------------------------------------------------------------ what torch asks

    def getBackendName(self) -> str:
        return NAME

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: torch.device) -> CupyCollProcessGroup:
        return self

    supports_splitting = False
    supports_coalescing = True

    def _get_sequence_number_for_group(self) -> int:
        return self.cupy_coll_group.sequence

    def _set_sequence_number_for_group(self) -> None:
        """The group counts by itself."""

    def set_timeout(self, timeout: timedelta) -> NoReturn:
        self._cannot("set_timeout", "the timeout is that of init_process_group and of the context")

    def shutdown(self) -> None:
        """End the group; the default one ends the context that it has begun."""
        if self._owner:
            CommContext().destroy()
        elif self._own_group:
            # Closing it would wait for members that may have left without a word, as torch's users do.
            CommContext().give_back(self.cupy_coll_group)
            self._own_group = False

    abort = shutdown

    def _cannot(self, what: str, why: str) -> NoReturn:
        raise GroupError(f"torch.distributed over {NAME}: {what} cannot be used: {why}")

    # What torch's base class would end the process for.
    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("split_group", "make the group by torch.distributed.new_group")

    splitGroup = split_group  # noqa: N815 (torch's name)

    def merge_remote_group(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("merge_remote_group", "make the group by torch.distributed.new_group")

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> NoReturn:
        self._cannot("recv without a source", "name the source")

    def monitored_barrier(self, *_: Any, **__: Any) -> NoReturn:
        self._cannot("monitored_barrier", "barrier() already says who has not come")

    # ------------------------------------------------------------------ collectives

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.BroadcastOptions()
        tensor = self._one("broadcast", tensors)
        self._sound("broadcast", [tensor])
        return self._done(opts, [tensor], lambda t, a: t.broadcast(tensor, opts.rootRank, async_op=a))

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None, timeout: Any = None) -> dist.Work:
        opts = _options(opts, dist.AllreduceOptions)
        tensor = self._one("all_reduce", tensors)
        self._sound("all_reduce", [tensor])
        op = self._op("all_reduce", tensor, opts.reduceOp)
        return self._done(opts, [tensor], lambda t, a: t.all_reduce(tensor, op, async_op=a))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        for tensor in tensors:
            self._sound("all_reduce", [tensor])
            self._op("all_reduce", tensor, opts.reduceOp)
        op = opts.reduceOp
        return self._several([lambda t, a, x=x: t.all_reduce(x, op, async_op=a) for x in tensors], tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.ReduceOptions()
        tensor = self._one("reduce", tensors)
        self._sound("reduce", [tensor])
        op = self._op("reduce", tensor, opts.reduceOp)
        return self._done(opts, [tensor], lambda t, a: t.reduce(tensor, opts.rootRank, op, async_op=a))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        tensor, found = self._one("all_gather", inputs), list(self._one("all_gather", outputs))
        self._expect_members("all_gather", "tensor_list", found)
        self._expect_size("all_gather", found, [tensor.numel()] * len(found))
        self._sound("all_gather", found, [tensor])
        sources = [tensor] * self.size()
        return self._done(opts, found, lambda t, a: t.all_to_all(found, sources, async_op=a))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None, timeout: Any = None) -> dist.Work:
        self._expect_size("all_gather_into_tensor", [output], [self.size() * source.numel()])
        self._sound("all_gather_into_tensor", [output], [source])
        return self._done(opts, [output], lambda t, a: t.all_gather(output, source, async_op=a))

    _allgather_base = all_gather_into_tensor = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        self._expect_size("all_gather_into_tensor", outputs, [self.size() * x.numel() for x in inputs])
        pairs = list(zip(outputs, inputs, strict=True))
        for output, source in pairs:
            self._sound("all_gather_into_tensor", [output], [source])
        return self._several([lambda t, a, p=p: t.all_gather(*p, async_op=a) for p in pairs], outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        self._expect_members("all_gather_coalesced", "output_tensor_lists", output_lists)
        for found in output_lists:
            self._expect_size("all_gather_coalesced", found, [x.numel() for x in inputs])
            self._sound("all_gather_coalesced", found, inputs)
        # One list a rank, of one output an input.
        by_input = [[of_rank[index] for of_rank in output_lists] for index in range(len(inputs))]
        calls = [
            lambda t, a, found=found, x=x: t.all_to_all(found, [x] * self.size(), async_op=a)
            for found, x in zip(by_input, inputs, strict=True)
        ]
        return self._several(calls, [tensor for found in by_input for tensor in found])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        output, parts = self._one("reduce_scatter", outputs), list(self._one("reduce_scatter", inputs))
        self._expect_members("reduce_scatter", "input_list", parts)
        self._expect_size("reduce_scatter", [output], [parts[self.rank()].numel()])
        self._sound("reduce_scatter", [output], parts)
        op = self._op("reduce_scatter", output, opts.reduceOp)
        if len({part.numel() for part in parts}) == 1:
            source = torch.stack([part.reshape(-1) for part in parts])
            return self._done(opts, [output], lambda t, a: t.reduce_scatter(output, source, op, async_op=a))
        output.copy_(parts[self.rank()].view(output.shape))  # uneven: each part is reduced to its rank
        parts[self.rank()] = output
        calls = [lambda t, a, i=i, x=x: t.reduce(x, i, op, async_op=a) for i, x in enumerate(parts)]
        return self._several(calls, [output])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None, timeout: Any = None) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        self._expect_size("reduce_scatter_tensor", [source], [self.size() * output.numel()])
        self._sound("reduce_scatter_tensor", [output], [source])
        op = self._op("reduce_scatter_tensor", output, opts.reduceOp)
        return self._done(opts, [output], lambda t, a: t.reduce_scatter(output, source, op, async_op=a))

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = _options(opts, dist.ReduceScatterOptions)
        self._expect_size("reduce_scatter_tensor", inputs, [self.size() * x.numel() for x in outputs])
        op, pairs = opts.reduceOp, list(zip(outputs, inputs, strict=True))
        for output, source in pairs:
            self._sound("reduce_scatter_tensor", [output], [source])
            self._op("reduce_scatter_tensor", output, op)
        return self._several([lambda t, a, p=p: t.reduce_scatter(*p, op, async_op=a) for p in pairs], outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.GatherOptions()
        tensor, root = self._one("gather", inputs), self.rank() == opts.rootRank
        found = list(self._one("gather", outputs)) if root else []
        if root:
            self._expect_members("gather", "gather_list", found)
            self._expect_size("gather", found, [tensor.numel()] * len(found))
        self._sound("gather", found, [tensor])
        return self._done(
            opts, found, lambda t, a: t.gather(tensor, found if root else None, opts.rootRank, async_op=a), tensor
        )

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> dist.Work:
        opts = opts or dist.ScatterOptions()
        tensor, root = self._one("scatter", outputs), self.rank() == opts.rootRank
        parts = list(self._one("scatter", inputs)) if root else []
        if root:
            self._expect_members("scatter", "scatter_list", parts)
            self._expect_size("scatter", parts, [tensor.numel()] * len(parts))
        self._sound("scatter", [tensor], parts)
        return self._done(
            opts, [tensor], lambda t, a: t.scatter(tensor, parts if root else None, opts.rootRank, async_op=a)
        )

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        for name, tensors in (("output_tensor_list", outputs), ("input_tensor_list", inputs)):
            self._expect_members("all_to_all", name, tensors)
        self._sound("all_to_all", outputs, inputs)
        return self._done(opts, list(outputs), lambda t, a: t.all_to_all(list(outputs), list(inputs), async_op=a))

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: Any = None,
    ) -> dist.Work:
        self._sound("all_to_all_single", [output], [source])
        found = self._cut("output_split_sizes", output, output_split_sizes)
        parts = self._cut("input_split_sizes", source, input_split_sizes)
        return self._done(opts, [output], lambda t, a: t.all_to_all(found, parts, async_op=a), output)

    alltoall_base = all_to_all_single

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        tensor = self._one("send", tensors)
        self._sound("send", [], [tensor])
        self._no_tag("send", tag)
        return self._done(None, [tensor], lambda t, a: t.send(tensor, dst, async_op=True))

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        tensor = self._one("recv", tensors)
        self._sound("recv", [tensor])
        self._no_tag("recv", tag)
        return self._done(None, [tensor], lambda t, a: t.recv(tensor, src, async_op=True))

    def barrier(self, opts: Any = None, timeout: Any = None) -> dist.Work:
        return self._done(None, [], lambda t, a: t.barrier(async_op=True))

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        started, self._coalesced = self._coalesced or [], None
        return Works([work for work, _ in started], [tensor for _, outputs in started for tensor in outputs])

    # ------------------------------------------------------------------ what they share

    def _done(self, opts: Any, outputs: list[Tensor], call: Any, like: Tensor | None = None) -> dist.Work:
        """Start an operation; torch waits for what it gets where its caller did not ask for a handle.

        On a GPU an operation that is not asynchronous belongs on the caller's own stream.
        """
        like = like if like is not None else (outputs[0] if outputs else None)
        transport = self.cupy_coll_group.host if like is None else self.cupy_coll_group.transport_for(like)
        on_own_stream = like is None or not like.is_cuda or getattr(opts, "asyncOp", True)
        work = call(transport, bool(on_own_stream))
        if self._coalesced is not None:
            self._coalesced.append((work, outputs))
        return Works([work], outputs)

    def _several(self, calls: Sequence[Any], outputs: Sequence[Tensor]) -> dist.Work:
        if not calls:
            return Works([], [])
        transport = self.cupy_coll_group.transport_for(outputs[0])
        works = [call(transport, True) for call in calls]
        if self._coalesced is not None:
            self._coalesced += [(work, []) for work in works]
        return Works(works, outputs)

    def _one(self, function: str, tensors: Any) -> Any:
        if isinstance(tensors, Tensor):
            return tensors
        if len(tensors) != 1:
            raise ArgumentError(f"{function}: got {len(tensors)} tensors, expected one a process")
        return tensors[0]

    def _sound(self, function: str, written: Sequence[Tensor], read: Sequence[Tensor] = ()) -> None:
        """Refuse, before anything is sent, what would be sent or written wrongly."""
        checks.open_group(function, self.cupy_coll_group)
        tensors = [("output", tensor, True) for tensor in written] + [("input", tensor, False) for tensor in read]
        first = tensors[0][1]
        for name, tensor, is_written in tensors:
            checks.storage(function, name, tensor, is_written)
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise ArgumentError(
                    f"{function}: {name} is {checks.describe(tensor)}, expected the dtype and device of the others, "
                    f"{checks.describe(first)}"
                )

    def _op(self, function: str, tensor: Tensor, op: Reduction) -> Reduction:
        check_reduction(function, tensor.dtype, op)
        return op

    def _no_tag(self, function: str, tag: int) -> None:
        if tag:
            self._cannot(f"{function} with tag {tag}", "messages between two ranks arrive in the order of their sends")

    def _expect_members(self, function: str, name: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise ArgumentError(f"{function}: {name} has {len(tensors)} tensors, expected one a rank, {self.size()}")

    def _expect_size(self, function: str, tensors: Sequence[Tensor], counts: Sequence[int]) -> None:
        if len(tensors) != len(counts):
            raise ArgumentError(f"{function}: got {len(tensors)} and {len(counts)} tensors, expected as many of each")
        for tensor, count in zip(tensors, counts, strict=True):
            if tensor.numel() != count:
                raise ShapeError(f"{function}: a tensor is {checks.describe(tensor)}, expected {count} elements")

    def _cut(self, name: str, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        if tensor.dim() == 0:
            raise ShapeError("all_to_all_single: a tensor is a scalar, expected at least one dimension")
        if not sizes:
            if tensor.shape[0] % self.size():
                raise ShapeError(
                    f"all_to_all_single: a tensor is {checks.describe(tensor)}, expected {self.size()} x n rows"
                )
            sizes = [tensor.shape[0] // self.size()] * self.size()
        if len(sizes) != self.size() or sum(sizes) != tensor.shape[0]:
            raise ShapeError(
                f"all_to_all_single: {name} is {list(sizes)}, expected {self.size()} sizes that add up to "
                f"{tensor.shape[0]} rows"
            )
        return list(tensor.split(list(sizes)))


def _options(opts: Any, kind: Any) -> Any:
    """torch calls with options, with a reduction, or with neither."""
    if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        made = kind()
        made.reduceOp = opts
        return made
    return kind() if opts is None else opts


# ---------------------------------------------------------------------- beginning


_adopted = threading.local()  # .group: what Group.torch() is being called on
_begun: Any = None  # the lifecycle of a context that torch.distributed has begun, and so ends


def _begin(timeout: float | timedelta, comm: Any = None) -> Group:
    """The world, in the context that there is, else in a new one."""
    global _begun
    context = CommContext()
    if not context.is_initialized():
        context.init_distributed_env(timeout=timeout, comm=comm)
        _begun = context._lifecycle
    world = context.get_group("GLOBAL")
    assert world is not None, "every rank is in it"
    return world


def create(options: Any, _: Any = None) -> CupyCollProcessGroup:
    """Make a process group; torch calls it on the members only, with its DistributedBackendOptions."""
    group: Group | None = getattr(_adopted, "group", None)
    if group is not None:
        return CupyCollProcessGroup(group)
    context, ranks = CommContext(), tuple(options.global_ranks_in_group)
    if not ranks:  # the default group
        world = _begin(options.timeout)
        if (world.rank, world.size) != (options.group_rank, options.group_size):
            raise ArgumentError(
                f"init_process_group: rank {options.group_rank} of {options.group_size}, but MPI says rank "
                f"{world.rank} of {world.size}; leave both out"
            )
        return CupyCollProcessGroup(world, owner=context._lifecycle is _begun)
    # torch's groups are independent of each other also where they have the same ranks: threads rely on that.
    return CupyCollProcessGroup(context.group_among(ranks, new=True), own_group=True)


def rendezvous(url: str = "", timeout: timedelta = timedelta(seconds=DEFAULT_TIMEOUT), **_: Any) -> Iterator[Any]:
    """The store, rank and size of a job that MPI started: rank 0 makes the store, and tells the others where it is."""
    world = _begin(timeout)
    yield _store(world, CommContext(), timeout), world.rank, world.size
    raise RuntimeError("an MPI job has one rendezvous")


def _store(world: Group, context: CommContext, timeout: timedelta) -> Any:
    alone = context.get_local_world_size() == world.size
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store: Any = None
    where: list[Any] = [None]
    if world.rank == 0:
        host = "127.0.0.1" if alone else bootstrap.mpi().Get_processor_name()
        store = dist.TCPStore(host, 0, world.size, True, timeout, wait_for_workers=False)
        where = [(host, store.port)]
    broadcast_object_list(where, world)
    if store is None:
        host, port = where[0]
        store = dist.TCPStore(host, port, world.size, False, timeout)
    barrier(world)  # rank 0 has the store, and may end it: not before everybody has reached it
    return store


def init_torch(comm: Any = None, *, timeout: float | timedelta = DEFAULT_TIMEOUT) -> None:
    """``torch.distributed.init_process_group`` with this backend; called by every rank.

    Args:
        comm: an mpi4py communicator that is the world, instead of COMM_WORLD; None where the context is initialised.
        timeout: of the context, where this initialises it.

    Raises:
        GroupError: torch.distributed is initialised already, or ``comm`` is given and the context is.
    """
    function = "init_torch"
    if dist.is_initialized():
        raise GroupError(f"{function}: torch.distributed is initialised already; destroy_process_group() first")
    context = CommContext()
    if context.is_initialized() and comm is not None:
        raise GroupError(f"{function}: comm is given, but the context is initialised already; destroy() it first")
    world = _begin(timeout, comm)
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    dist.init_process_group(
        NAME, store=_store(world, context, limit), rank=world.rank, world_size=world.size, timeout=limit
    )


def process_group_of(group: Group) -> dist.ProcessGroup:
    """A ProcessGroup with the communicators of ``group``; called by its members."""
    if not dist.is_initialized() or dist.get_backend() != NAME:
        raise GroupError(f"Group.torch: torch.distributed is not initialised with backend {NAME!r}; call init_torch()")
    default = dist.group.WORLD
    if isinstance(default, CupyCollProcessGroup) and default.cupy_coll_group is group:
        return default
    _adopted.group = group
    try:
        return dist.new_group(list(group.ranks), backend=NAME, use_local_synchronization=True, sort_ranks=False)
    finally:
        _adopted.group = None
