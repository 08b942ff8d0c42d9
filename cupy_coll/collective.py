"""The collectives by mode.

Every function takes a ``comm_mode``: a mode, a Group, a torch.distributed.ProcessGroup, or None for the global group.
All members of the group call it, in the same order; on a rank outside it returns None at once. Tensors may be torch
tensors, CuPy or NumPy arrays, of any memory layout; tensors that require grad are read and written outside autograd.
Roots (``src``, ``dst``) are global ranks; ``group_src`` and ``group_dst`` are indices in the group instead.

Every function raises, before anything is sent: NotInitializedError where the context or the mode is not initialised;
ArgumentError, ShapeError, DTypeError or GroupError where an argument is wrong. It raises PeerError where a member has
left, and CommTimeoutError where the context's timeout has passed; the group cannot be used any more then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from cupy_coll import bridge, check, dtypes
from cupy_coll.context import CommMode, resolve_group
from cupy_coll.errors import ArgumentError, CupyCollError
from cupy_coll.transport.base import Transport, Work
from cupy_coll.transport.objects import all_gather_objects
from cupy_coll.transport.reduction import reduce_in_rank_order

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_dict",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def scatter(
    tensor: Any,
    comm_mode: Any,
    scatter_list: Sequence[Any] | None = None,
    src: int = check.DEFAULT_ROOT,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> Work | None:
    """Send one tensor of a list to each rank.

    Args:
        tensor: [...], written on every rank.
        scatter_list: on the source one tensor a rank, each like ``tensor``; None on the others.
        src, group_src: the source.
        async_op: return a Work at once; the tensors must not be touched before ``wait()``.

    Communication: one message from the source to each other rank.
    """
    group = resolve_group(comm_mode, "scatter")
    if group is None:
        return None
    root = check.root("scatter", group, "src", src, group_src)
    tensor = _tensor("scatter", "tensor", tensor, written=True)
    parts = _root_list("scatter", "scatter_list", scatter_list, tensor, group.size, group.rank == root, written=False)
    return group.transport_for(tensor).scatter(tensor, parts, root, async_op=async_op)


def broadcast(
    tensor: Any,
    comm_mode: Any,
    src: int = check.DEFAULT_ROOT,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> Work | None:
    """Send the source's tensor to every rank.

    Args:
        tensor: [...], the same shape and dtype on every rank; read on the source, written on the others.
        src, group_src: the source.
        async_op: return a Work at once; the tensor must not be touched before ``wait()``.

    Communication: one ``MPI_Ibcast``, or one ncclBroadcast.
    """
    group = resolve_group(comm_mode, "broadcast")
    if group is None:
        return None
    root = check.root("broadcast", group, "src", src, group_src)
    tensor = _tensor("broadcast", "tensor", tensor, written=group.rank != root)
    return group.transport_for(tensor).broadcast(tensor, root, async_op=async_op)


def broadcast_object_list(
    object_list: list[Any], comm_mode: Any, src: int = check.DEFAULT_ROOT, *, group_src: int | None = None
) -> None:
    """Replace the objects of a list by the source's, on every rank.

    Args:
        object_list: lists of equal length on all ranks; written in place on all but the source.
        src, group_src: the source. Objects travel by pickle: take them only from whom you trust.

    Raises:
        ArgumentError: on every rank, where an argument is wrong on one or an object cannot be pickled or unpickled.
        MismatchError: on every rank, where lengths or sources differ.
    """
    function = "broadcast_object_list"
    group = resolve_group(comm_mode, function)
    if group is None:
        return
    error: CupyCollError | None = None
    root, sent = 0, None
    try:
        root = check.root(function, group, "src", src, group_src)
        if not isinstance(object_list, list):
            raise ArgumentError(f"{function}: object_list must be a list, got {type(object_list).__name__}")
        sent = (len(object_list), root, object_list if group.rank == root else None)
    except CupyCollError as problem:
        error = problem
    received = all_gather_objects(group.objects, function, "object_list", sent, error)
    check.same_on_all(function, "the length of object_list", group.ranks, [length for length, _, _ in received])
    check.same_on_all(function, "the index of the source", group.ranks, [source for _, source, _ in received])
    if group.rank != root:
        object_list[:] = received[root][2]


def gather(
    tensor: Any,
    comm_mode: Any,
    gather_list: Sequence[Any] | None = None,
    dst: int = check.DEFAULT_ROOT,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> Work | None:
    """Send every rank's tensor to one.

    Args:
        tensor: [...], the same shape and dtype on every rank; read.
        gather_list: on the destination one tensor a rank, each like ``tensor``, written; None on the others.
        dst, group_dst: the destination.
        async_op: return a Work at once; the tensors must not be touched before ``wait()``.

    Communication: one message from each other rank to the destination.
    """
    group = resolve_group(comm_mode, "gather")
    if group is None:
        return None
    root = check.root("gather", group, "dst", dst, group_dst)
    tensor = _tensor("gather", "tensor", tensor, written=False)
    parts = _root_list("gather", "gather_list", gather_list, tensor, group.size, group.rank == root, written=True)
    return group.transport_for(tensor).gather(tensor, parts, root, async_op=async_op)


def all_gather(output_tensor: Any, input_tensor: Any, comm_mode: Any, async_op: bool = False) -> Work | None:
    """Gather equal-shaped tensors of all ranks into one tensor on every rank.

    Args:
        output_tensor: [size * n, ...] (concatenated along dim 0) or [size, n, ...] (stacked), written.
        input_tensor: [n, ...], the same shape and dtype on every rank; read.
        async_op: return a Work at once; the tensors must not be touched before ``wait()``.

    Communication: one ``MPI_Iallgather`` of n rows a rank, or one ncclAllGather.
    """
    group = resolve_group(comm_mode, "all_gather")
    if group is None:
        return None
    whole = _tensor("all_gather", "output_tensor", output_tensor, written=True)
    part = _tensor("all_gather", "input_tensor", input_tensor, written=False)
    check.gathered_shape("all_gather", "output_tensor", whole, "input_tensor", part, group.size)
    return group.transport_for(part).all_gather(whole, part, async_op=async_op)


def all_reduce(tensor: Any, comm_mode: Any, op: dtypes.Reduction = ReduceOp.SUM, async_op: bool = False) -> Work | None:
    """Reduce the tensors of all ranks, element by element, into every rank's tensor.

    On the host elements are combined in rank order, 16-bit types in float32 and rounded once; MIN and MAX propagate
    NaN; the result has the same bits on all ranks. bool: SUM and MAX mean OR, PRODUCT and MIN mean AND. Averages of
    integers truncate toward zero.

    On GPUs NCCL reduces: it rounds at every step, MIN and MAX drop NaN, and an average of integers is that of a sum in
    their own type. It has no bitwise reductions, no complex PRODUCT, and none of int16 and uint16: DTypeError.

    Args:
        tensor: [...], the same shape and dtype on every rank; written in place.
        op: a torch.distributed.ReduceOp; complex tensors have SUM, AVG and PRODUCT, only integers and bool the
            bitwise ones, bool no AVG.
        async_op: return a Work at once; the tensor must not be touched before ``wait()``.

    Communication: below 32 KiB in all one ``MPI_Iallgather``; above, each rank sends 2 (size - 1) / size of the
    tensor (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005).
    On GPUs one ncclAllReduce.
    """
    group = resolve_group(comm_mode, "all_reduce")
    if group is None:
        return None
    tensor = _tensor("all_reduce", "tensor", tensor, written=True)
    dtypes.check_reduction("all_reduce", tensor.dtype, op)
    return group.transport_for(tensor).all_reduce(tensor, op, async_op=async_op)


def all_reduce_dict(
    dictionary: Mapping[str, Any],
    comm_mode: Any,
    op: dtypes.Reduction = ReduceOp.SUM,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any] | None:
    """Reduce a dictionary of numbers by key.

    Args:
        dictionary: the same keys, strings, on every rank; values are Python numbers, NumPy or 0-d tensors.
        op: how the values of a key are reduced; AVG is its main use.
        dtype: in which they are reduced, on the host.

    Returns:
        Python numbers of ``dtype`` by key, in sorted order, the same on every rank.

    Raises:
        MismatchError: on every rank, where the keys, ``op`` or ``dtype`` differ.
        ArgumentError, DTypeError: on every rank, where an argument is wrong on one.

    Communication: one exchange of short messages, one more a rank where they are long.
    """
    function = "all_reduce_dict"
    group = resolve_group(comm_mode, function)
    if group is None:
        return None
    error: CupyCollError | None = None
    sent: Any = None
    try:
        dtypes.check_reduction(function, dtype, op)
        keys = _string_keys(function, dictionary)
        numbers = [_number(function, key, dictionary[key], dtype) for key in keys]
        values = torch.stack(numbers) if numbers else torch.empty(0, dtype=dtype)
        sent = (keys, dtypes.reduction_name(function, op), dtypes.name_of(dtype), values)
    except CupyCollError as problem:
        error = problem
    received = all_gather_objects(group.objects, function, "dictionary", sent, error)
    check.same_on_all(function, "the keys", group.ranks, [keys for keys, _, _, _ in received])
    check.same_on_all(function, "(op, dtype)", group.ranks, [(name, kind) for _, name, kind, _ in received])
    total = torch.empty_like(sent[3])
    reduce_in_rank_order([values for _, _, _, values in received], op, out=total)
    return dict(zip(sent[0], total.tolist(), strict=True))


def barrier(comm_mode: Any = CommMode.GLOBAL) -> None:
    """Return when every rank of the group has called it."""
    group = resolve_group(comm_mode, "barrier")
    if group is not None:
        group.host.barrier()


def reduce(
    tensor: Any,
    comm_mode: Any,
    dst: int = check.DEFAULT_ROOT,
    op: dtypes.Reduction = ReduceOp.SUM,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> Work | None:
    """Reduce the tensors of all ranks, element by element, into one rank's tensor.

    Args:
        tensor: [...], the same shape and dtype on every rank; written in place on the destination, and only there.
        dst, group_dst: the destination.
        op: as in :func:`all_reduce`.
        async_op: return a Work at once; the tensor must not be touched before ``wait()``.

    Communication: each rank sends its tensor once, in parts to all ranks, and its reduced part to the destination; on
    GPUs one ncclReduce.
    """
    group = resolve_group(comm_mode, "reduce")
    if group is None:
        return None
    root = check.root("reduce", group, "dst", dst, group_dst)
    tensor = _tensor("reduce", "tensor", tensor, written=group.rank == root)
    dtypes.check_reduction("reduce", tensor.dtype, op)
    return group.transport_for(tensor).reduce(tensor, root, op, async_op=async_op)


def reduce_scatter(
    output_tensor: Any, input_tensor: Any, comm_mode: Any, op: dtypes.Reduction = ReduceOp.SUM, async_op: bool = False
) -> Work | None:
    """Reduce the tensors of all ranks, element by element, and give each rank its part.

    Args:
        output_tensor: [n, ...], written: part r of the reduction on the group's rank r.
        input_tensor: [size * n, ...] or [size, n, ...], the same shape and dtype on every rank; read.
        op: as in :func:`all_reduce`.
        async_op: return a Work at once; the tensors must not be touched before ``wait()``.

    Communication: one message of n rows between each two ranks, each way; on GPUs one ncclReduceScatter.
    """
    function = "reduce_scatter"
    group = resolve_group(comm_mode, function)
    if group is None:
        return None
    part = _tensor(function, "output_tensor", output_tensor, written=True)
    whole = _tensor(function, "input_tensor", input_tensor, written=False)
    check.gathered_shape(function, "input_tensor", whole, "output_tensor", part, group.size)
    dtypes.check_reduction(function, part.dtype, op)
    return group.transport_for(part).reduce_scatter(part, whole, op, async_op=async_op)


def send(
    tensor: Any,
    dst: int | None,
    comm_mode: Any,
    async_op: bool = False,
    *,
    group_dst: int | None = None,
) -> Work | None:
    """Send a tensor to one rank, which calls :func:`recv`; messages between two ranks keep their order.

    Args:
        tensor: [...], read.
        dst, group_dst: another rank of the group.
        async_op: return a Work at once; the tensor must not be changed before ``wait()``.
    """
    return _peer_to_peer("send", tensor, comm_mode, "dst", dst, group_dst, async_op)


def recv(
    tensor: Any,
    src: int | None,
    comm_mode: Any,
    async_op: bool = False,
    *,
    group_src: int | None = None,
) -> Work | None:
    """Receive a tensor from one rank, which calls :func:`send`.

    Args:
        tensor: [...], written; holds as many bytes as the tensor that is sent.
        src, group_src: another rank of the group.
        async_op: return a Work at once; the tensor must not be touched before ``wait()``.

    Raises:
        MismatchError: the message has another size.
    """
    return _peer_to_peer("recv", tensor, comm_mode, "src", src, group_src, async_op)


# ---------------------------------------------------------------------- shared by the ops


def _peer_to_peer(
    function: str, tensor: Any, comm_mode: Any, name: str, rank: Any, group_rank: Any, async_op: bool
) -> Work | None:
    group = resolve_group(comm_mode, function)
    if group is None:
        return None
    peer = check.root(function, group, name, rank, group_rank)
    if peer == group.rank:
        raise ArgumentError(f"{function}: {name} is rank {group.ranks[peer]} itself, expected another one")
    tensor = _tensor(function, "tensor", tensor, written=function == "recv")
    transport: Transport = group.transport_for(tensor)
    operation: Callable[..., Work | None] = transport.send if function == "send" else transport.recv
    return operation(tensor, peer, async_op=async_op)


def _tensor(function: str, name: str, array: Any, written: bool) -> torch.Tensor:
    tensor = bridge.as_tensor(function, name, array, writable=written)
    check.storage(function, name, tensor, written)
    return tensor


def _root_list(
    function: str, name: str, arrays: Any, like: torch.Tensor, size: int, is_root: bool, written: bool
) -> list[torch.Tensor] | None:
    """The list of tensors that the root gives, and nobody else."""
    if not is_root:
        if arrays:
            raise ArgumentError(f"{function}: {name} is given on a rank that is not the root, expected None")
        return None
    if not isinstance(arrays, (list, tuple)):
        raise ArgumentError(f"{function}: {name} must be a list of {size} tensors on the root, got {arrays!r}")
    tensors = [bridge.as_tensor(function, f"{name}[{i}]", array, written) for i, array in enumerate(arrays)]
    check.tensor_list(function, name, tensors, "tensor", like, size, written)
    return tensors


def _string_keys(function: str, dictionary: Any) -> list[str]:
    if not isinstance(dictionary, Mapping):
        raise ArgumentError(f"{function}: dictionary must be a dictionary, got {type(dictionary).__name__}")
    wrong = [key for key in dictionary if not isinstance(key, str)]
    if wrong:
        raise ArgumentError(f"{function}: dictionary has the key {wrong[0]!r}, expected strings")
    return sorted(dictionary)


def _number(function: str, key: str, value: Any, dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.tensor(value.item() if hasattr(value, "item") else value, dtype=dtype).reshape(())
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ArgumentError(
            f"{function}: dictionary[{key!r}] must be one number that {dtypes.name_of(dtype)} can hold, got {value!r}"
        ) from error
