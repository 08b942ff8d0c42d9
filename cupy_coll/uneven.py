"""Collectives whose ranks hold different amounts: they exchange the amounts first, and so always check."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from cupy_coll import bridge, check
from cupy_coll.context import resolve_group
from cupy_coll.dtypes import name_of
from cupy_coll.errors import ArgumentError, CupyCollError, MismatchError, ShapeError
from cupy_coll.group import Group
from cupy_coll.transport.objects import all_gather_objects

__all__ = ["all_to_all_uneven", "gather_jagged_object_lists", "rebalance_nd_tensor"]

T = TypeVar("T")


def rebalance_nd_tensor(tensor: Any, group: Any = None) -> torch.Tensor | None:
    """Concatenate the ranks' tensors along dim 0, in rank order, on every rank, bit for bit.

    Args:
        tensor: [n, ...] with another n on each rank (0 too); the other dimensions and the dtype are equal.
        group: a Group, a mode or a ProcessGroup; None: the global group.

    Returns:
        [sum of n, ...], a new tensor; None on a rank outside.

    Raises:
        MismatchError: on every rank, where dtypes or other dimensions differ.
        ArgumentError, ShapeError: on every rank, where the argument is wrong on one.

    Communication: one exchange of shapes; one all-gather where all n are equal, else one message between each two
    ranks each way.
    """
    function = "rebalance_nd_tensor"
    members = resolve_group(group, function)
    if members is None:
        return None
    error: CupyCollError | None = None
    sent: Any = None
    try:
        tensor = bridge.as_tensor(function, "tensor", tensor, writable=False)
        check.storage(function, "tensor", tensor, written=False)
        if tensor.dim() == 0:
            raise ShapeError(f"{function}: tensor has no dimension, expected [n, ...]")
        transport = members.transport_for(tensor)
        sent = (tensor.shape[0], name_of(tensor.dtype), tuple(tensor.shape[1:]))
    except CupyCollError as problem:
        error = problem
    received = all_gather_objects(members.objects, function, "tensor", sent, error)
    check.same_on_all(function, "(dtype, shape[1:])", members.ranks, [call[1:] for call in received])
    counts = [count for count, _, _ in received]
    output = torch.empty((sum(counts), *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)
    if len(set(counts)) == 1:
        transport.all_gather(output, tensor)
    else:
        transport.all_to_all(output.split(counts), [tensor] * members.size)
    return output


def gather_jagged_object_lists(local_objects: list[T], group: Any = None) -> list[T] | None:
    """Concatenate the ranks' lists, in rank order, on every rank.

    Args:
        local_objects: a list of any length of objects that pickle takes.
        group: a Group, a mode or a ProcessGroup; None: the global group.

    Returns:
        The objects of all ranks; None on a rank outside. Objects travel by pickle: take them only from whom you
        trust.

    Raises:
        ArgumentError: on every rank, where one did not give a list, or an object cannot be pickled or unpickled.

    Communication: one exchange of short messages, one more a rank where they are long.
    """
    function = "gather_jagged_object_lists"
    members = resolve_group(group, function)
    if members is None:
        return None
    error: CupyCollError | None = None
    given: Any = local_objects
    if not isinstance(given, list):
        error = ArgumentError(f"{function}: local_objects must be a list, got {type(local_objects).__name__}")
    lists = all_gather_objects(members.objects, function, "local_objects", local_objects, error)
    return [item for items in lists for item in items]


class _AllToAllUneven(torch.autograd.Function):
    """Forward: rows by ``input_splits`` to the ranks. Backward: the gradient's rows go back the same way."""

    @staticmethod
    def forward(
        ctx: Any, input_: torch.Tensor, input_splits: list[int], output_splits: list[int], group: Group
    ) -> torch.Tensor:
        ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group
        return _exchange_rows(input_, input_splits, output_splits, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(gradient, ctx.output_splits, ctx.input_splits, ctx.group), None, None, None


def all_to_all_uneven(
    input_: Any, input_splits: Sequence[int], output_splits: Sequence[int], group: Any
) -> torch.Tensor | None:
    """Send ``input_splits[i]`` rows to rank i and receive ``output_splits[i]`` rows from it; differentiable.

    Args:
        input_: [sum of input_splits, ...]; the other dimensions and the dtype are equal on all ranks.
        input_splits, output_splits: one count a rank of the group; rank s's ``input_splits[r]`` is rank r's
            ``output_splits[s]``.
        group: a Group, a mode or a ProcessGroup; None: the global group.

    Returns:
        [sum of output_splits, ...], in rank order; None on a rank outside.

    Raises:
        MismatchError: on every rank, where splits, dtypes or other dimensions do not belong together.
        ArgumentError, ShapeError: on every rank, where an argument is wrong on one.

    Communication: one exchange of splits, then one message between each two ranks each way; the backward has the
    messages alone.
    """
    function = "all_to_all_uneven"
    members = resolve_group(group, function)
    if members is None:
        return None
    error: CupyCollError | None = None
    sent: Any = None
    try:
        input_ = bridge.as_tensor(function, "input_", input_, writable=False)
        check.storage(function, "input_", input_, written=False)
        members.transport_for(input_)
        sending = _splits(function, "input_splits", input_splits, members.size)
        receiving = _splits(function, "output_splits", output_splits, members.size)
        if input_.dim() == 0 or input_.shape[0] != sum(sending):
            raise ShapeError(
                f"{function}: input_ is {check.describe(input_)}, expected {sum(sending)} rows: the sum of "
                f"input_splits {sending}"
            )
        sent = (sending, receiving, name_of(input_.dtype), tuple(input_.shape[1:]))
    except CupyCollError as problem:
        error = problem
    received = all_gather_objects(members.objects, function, "arguments", sent, error)
    check.same_on_all(function, "(dtype, shape[1:])", members.ranks, [call[2:] for call in received])
    for i, source in enumerate(members.ranks):
        for j, target in enumerate(members.ranks):
            if received[i][0][j] != received[j][1][i]:
                raise MismatchError(
                    f"{function}: rank {source} sends {received[i][0][j]} rows to rank {target}, which expects "
                    f"{received[j][1][i]}"
                )
    return _AllToAllUneven.apply(input_, sending, receiving, members)


def _exchange_rows(rows: torch.Tensor, sending: list[int], receiving: list[int], group: Group) -> torch.Tensor:
    output = torch.empty((sum(receiving), *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
    group.transport_for(rows).all_to_all(output.split(receiving), rows.split(sending))
    return output


def _splits(function: str, name: str, splits: Any, size: int) -> list[int]:
    try:
        counts = [operator.index(count) for count in splits]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{function}: {name} must be a list of {size} counts, got {splits!r}") from error
    if len(counts) != size or min(counts, default=0) < 0:
        raise ArgumentError(f"{function}: {name} must be {size} counts of 0 or more, one a rank, got {counts}")
    return counts
