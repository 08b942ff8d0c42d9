"""Differentiable exchanges between ranks: sequence parallelism and sums."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from cupy_coll import bridge, check, dtypes
from cupy_coll.context import ParallelMode, resolve_group
from cupy_coll.errors import ArgumentError, ShapeError
from cupy_coll.group import Group

__all__ = [
    "all_to_all",
    "gather_from_sequence_parallel_region",
    "group_all_reduce_sum",
    "group_all_reduce_sum_with_grad",
    "scatter_to_sequence_parallel_region",
]

SEQUENCE_DIM = 1


# ---------------------------------------------------------------------- all-to-all


class _AllToAll(torch.autograd.Function):
    """Forward: scatter along one dimension, gather along another. Backward: the same with the two exchanged."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, gather_dim: int, scatter_dim: int, group: Group) -> torch.Tensor:
        ctx.gather_dim, ctx.scatter_dim, ctx.group = gather_dim, scatter_dim, group
        return _scatter_gather(input_, gather_dim, scatter_dim, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _scatter_gather(gradient, ctx.scatter_dim, ctx.gather_dim, ctx.group), None, None, None


def all_to_all(input_: Any, gather_dim: int, scatter_dim: int, group: Any) -> torch.Tensor | None:
    """Scatter a tensor along one dimension and gather it along another; differentiable.

    With attention's [batch, sequence / size, heads, ...], ``all_to_all(x, gather_dim=1, scatter_dim=2, group)`` gives
    [batch, sequence, heads / size, ...] (Jacobs et al., "DeepSpeed Ulysses", 2023).

    Args:
        input_: the same shape and dtype on every rank.
        gather_dim: the dimension that becomes ``size`` times as long: the ranks' parts in rank order.
        scatter_dim: another dimension, divisible by the group's size; rank r gets part r of everybody's.
        group: a Group, a mode or a ProcessGroup; None: the global group.

    Returns:
        A new tensor; None on a rank outside.

    Raises:
        ArgumentError: a dimension does not exist, or the two are the same.
        ShapeError: the group's size does not divide the scatter dimension.

    Communication: one message between each two ranks each way, in forward and in backward.
    """
    function = "all_to_all"
    members = resolve_group(group, function)
    if members is None:
        return None
    input_ = _tensor(function, input_)
    members.transport_for(input_)
    gather_dim = _dim(function, "gather_dim", gather_dim, input_)
    scatter_dim = _dim(function, "scatter_dim", scatter_dim, input_)
    if gather_dim == scatter_dim:
        raise ArgumentError(f"{function}: gather_dim and scatter_dim are both {gather_dim}, expected different ones")
    _divisible(function, "scatter_dim", scatter_dim, input_, members.size)
    return _AllToAll.apply(input_, gather_dim, scatter_dim, members)


def _scatter_gather(tensor: torch.Tensor, gather_dim: int, scatter_dim: int, group: Group) -> torch.Tensor:
    parts = tensor.chunk(group.size, scatter_dim)
    shape = list(parts[0].shape)
    shape[gather_dim] *= group.size
    output = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    group.transport_for(tensor).all_to_all(output.chunk(group.size, gather_dim), parts)
    return output


# ---------------------------------------------------------------------- sequence-parallel regions


class _ScatterToRegion(torch.autograd.Function):
    """Forward: this rank's part of dim 1. Backward: the gathered gradient divided by the group's size."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group, rank0_only: bool) -> torch.Tensor:
        ctx.group = group
        return _part_of_first(input_, group) if rank0_only else _own_part(input_, group).clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _concatenate(gradient, ctx.group).div_(ctx.group.size), None, None


class _GatherFromRegion(torch.autograd.Function):
    """Forward: all parts along dim 1. Backward: this rank's part of a gradient times the group's size."""

    @staticmethod
    def forward(ctx: Any, input_: torch.Tensor, group: Group, rank0_only: bool) -> torch.Tensor:
        ctx.group, ctx.rank0_only = group, rank0_only
        return _concatenate(input_, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        part = _part_of_first(gradient, ctx.group) if ctx.rank0_only else _own_part(gradient, ctx.group)
        return part * ctx.group.size, None, None


def scatter_to_sequence_parallel_region(input_: Any, rank0_only: bool = True) -> torch.Tensor | None:
    """Enter sequence parallelism: each rank of SEQUENCE_PARALLEL gets its part of dim 1; differentiable.

    Args:
        input_: [b, s, ...], s divisible by the group's size, the same shape and dtype on every rank.
        rank0_only: True: the parts are of the tensor of the group's first rank; False: of the rank's own.

    Returns:
        [b, s / size, ...]; None on a rank outside. The gradient of ``input_`` is, on every rank, the gathered gradient
        divided by the group's size, whatever ``rank0_only``.

    Raises:
        ShapeError: dim 1 is missing or not divisible.
        DTypeError: ``input_`` requires grad and is not floating point or complex.

    Communication: forward, one message from the first rank to each other one if ``rank0_only``, else none; backward,
    one all-gather.
    """
    function = "scatter_to_sequence_parallel_region"
    group = resolve_group(ParallelMode.SEQUENCE_PARALLEL, function)
    if group is None:
        return None
    input_ = _tensor(function, input_)
    group.transport_for(input_)
    _has_sequence(function, input_)
    _divisible(function, "dim", SEQUENCE_DIM, input_, group.size)
    return _ScatterToRegion.apply(input_, group, bool(rank0_only))


def gather_from_sequence_parallel_region(input_: Any, rank0_only: bool = True) -> torch.Tensor | None:
    """Leave sequence parallelism: every rank of SEQUENCE_PARALLEL gets all parts along dim 1; differentiable.

    Args:
        input_: [b, s, ...], the same shape and dtype on every rank.
        rank0_only: which gradient counts in the backward: True: that of the group's first rank; False: the rank's own.

    Returns:
        [b, size * s, ...], the same on every rank; None on a rank outside. The gradient of ``input_`` is the rank's
        part of the gradient that counts, times the group's size; nothing is summed.

    Raises:
        ShapeError: dim 1 is missing.

    Communication: forward, one all-gather; backward, one message from the first rank to each other one if
    ``rank0_only``, else none.
    """
    function = "gather_from_sequence_parallel_region"
    group = resolve_group(ParallelMode.SEQUENCE_PARALLEL, function)
    if group is None:
        return None
    input_ = _tensor(function, input_)
    group.transport_for(input_)
    _has_sequence(function, input_)
    return _GatherFromRegion.apply(input_, group, bool(rank0_only))


def _own_part(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    return tensor.chunk(group.size, SEQUENCE_DIM)[group.rank]


def _part_of_first(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    parts = tensor.chunk(group.size, SEQUENCE_DIM)
    output = torch.empty(parts[0].shape, dtype=tensor.dtype, device=tensor.device)
    group.transport_for(tensor).scatter(output, parts if group.rank == 0 else None, 0)
    return output


def _concatenate(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    parts = torch.empty((group.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
    group.transport_for(tensor).all_gather(parts, tensor)
    return torch.cat(parts.unbind(), dim=SEQUENCE_DIM)


# ---------------------------------------------------------------------- sums


class _AllReduceSum(torch.autograd.Function):
    """Forward: the sum over the ranks. Backward: the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


def group_all_reduce_sum_with_grad(x: Any, group: Any) -> torch.Tensor | None:
    """The sum of the ranks' tensors, on every rank; the gradient passes through unchanged.

    Args:
        x: [...], the same shape and dtype on every rank; read.
        group: a Group, a mode or a ProcessGroup; None: not split, ``x`` is the sum.

    Returns:
        [...], a new tensor with the same bits on every rank; None on a rank outside.

    Raises:
        DTypeError: the dtype has no sum.

    Communication: one all-reduce in the forward, none in the backward.
    """
    return _summed("group_all_reduce_sum_with_grad", x, group, _AllReduceSum.apply)


def group_all_reduce_sum(x: Any, group: Any) -> torch.Tensor | None:
    """The sum of the ranks' tensors, on every rank, without gradient.

    Args, returns, raises and communication as :func:`group_all_reduce_sum_with_grad`.
    """
    return _summed("group_all_reduce_sum", x, group, lambda x, members: _sum(x.detach(), members))


def _summed(function: str, x: Any, group: Any, total: Any) -> torch.Tensor | None:
    x = _tensor(function, x)
    if group is None:
        return x.clone() if total == _AllReduceSum.apply else x.detach().clone()
    members = resolve_group(group, function)
    if members is None:
        return None
    members.transport_for(x)
    dtypes.check_reduction(function, x.dtype, ReduceOp.SUM)
    return total(x, members)


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.transport_for(total).all_reduce(total, ReduceOp.SUM)
    return total


# ---------------------------------------------------------------------- arguments


def _tensor(function: str, input_: Any) -> torch.Tensor:
    tensor = bridge.as_tensor(function, "input_", input_, writable=False)
    check.storage(function, "input_", tensor, written=False)
    return tensor


def _dim(function: str, name: str, dim: Any, tensor: torch.Tensor) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(
            f"{function}: {name} must be a dimension of input_, which is {check.describe(tensor)}, got {dim!r}"
        )
    return dim % tensor.dim()


def _has_sequence(function: str, tensor: torch.Tensor) -> None:
    if tensor.dim() <= SEQUENCE_DIM:
        raise ShapeError(f"{function}: input_ is {check.describe(tensor)}, expected [batch, sequence, ...]")


def _divisible(function: str, name: str, dim: int, tensor: torch.Tensor, size: int) -> None:
    if tensor.shape[dim] % size:
        raise ShapeError(
            f"{function}: input_ is {check.describe(tensor)}; dimension {dim} ({name}) has {tensor.shape[dim]}, "
            f"expected a multiple of the group's {size} ranks"
        )
