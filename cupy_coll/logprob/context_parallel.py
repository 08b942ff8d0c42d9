"""Sequences split over the ranks of a context-parallel group: putting them together again, differentiably.

Each takes one message in the forward and one in the backward. The order of positions is that of ``layout``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from cupy_coll import check
from cupy_coll.context import resolve_group
from cupy_coll.device import owner_of
from cupy_coll.errors import ArgumentError, CupyCollError, MismatchError, ShapeError
from cupy_coll.group import Group
from cupy_coll.layout import place_of_position, position_of_place

__all__ = [
    "AllGatherCPTensor",
    "Collect",
    "_get_tokens_on_this_cp_rank",
    "allgather_cp_sharded_tensor",
    "cp_load_balanced_to_contiguous",
    "cp_shift_next",
]

_PartsOf: TypeAlias = Callable[[int, int], tuple[int, int]]  # (rank, size) -> the two parts that it holds
_FAULTS: dict[int, type[CupyCollError]] = {1: ArgumentError, 2: MismatchError}
"""What a rank says in its message of :class:`Collect` where it has no values."""


class Collect(torch.autograd.Function):
    """Forward: pick values out of all ranks' parts, one all-gather. Backward: sum over the ranks, one reduce-scatter.

    A rank whose part could not be computed takes part and says so, and every rank raises: else the others would wait
    for it.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor, index: Tensor, group: Group | None, function: str, fault: CupyCollError | None
    ) -> Tensor:
        """Args: values: [...] this rank's part, n of them, the same number on every rank.
        index: [*result] into the ranks' (0, part), one after another; 0 picks the value 0.
        group: the ranks that the values are split over; None: not split.
        fault: why this rank has no values.
        """
        ctx.group, ctx.shape = group, values.shape
        ctx.save_for_backward(index)
        code = next((code for code, kind in _FAULTS.items() if isinstance(fault, kind)), 0)
        message = torch.nn.functional.pad(values.reshape(-1), (1, 0), value=code)
        if group is None:
            return message[index]
        gathered = torch.empty((group.size, message.numel()), dtype=message.dtype, device=message.device)
        group.transport_for(message).all_gather(gathered, message)
        if fault is not None:
            raise fault
        _check_all_have_values(function, gathered[:, 0], group)
        return gathered.view(-1)[index]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        group: Group | None = ctx.group
        mine = gradient.new_zeros(1 + ctx.shape.numel())
        if group is None:
            mine[index] = gradient
        else:
            everybodys = gradient.new_zeros(group.size * mine.numel())
            everybodys[index] = gradient  # each value is picked once, except for the zero
            group.transport_for(mine).reduce_scatter(mine, everybodys, ReduceOp.SUM)
        return mine[1:].view(ctx.shape), None, None, None, None


def _check_all_have_values(function: str, codes: Tensor, group: Group) -> None:
    if owner_of(codes) is not None:  # there a fault is NaN in the values, and looking would wait for the device
        return
    for rank, code in enumerate(codes.tolist()):
        if code:
            raise _FAULTS[int(code)](
                f"{function}: rank {rank} of cp_group (global rank {group.ranks[rank]}) has no log-probabilities of "
                "its part of the sequences; the error there says why"
            )


class AllGatherCPTensor(torch.autograd.Function):
    """A tensor split along its sequence over a context-parallel group, whole and in order on every rank.

    Forward: one all-gather. Backward: the ranks' gradients summed, each rank's own parts of them; one reduce-scatter.
    """

    @classmethod
    def apply(cls, tensor: Tensor, cp_group: Any, seq_dim: int = 1) -> Tensor:  # type: ignore[override]
        """The whole sequence, in order, on every rank of ``cp_group``.

        Args:
            tensor: [..., S/CP, ...] with parts r and 2 * CP - 1 - r of the sequence's 2 * CP equal parts on rank r;
                the same shape and dtype (any) on every rank; read.
            cp_group: a Group, a mode or a ProcessGroup; None: not split.
            seq_dim: the sequence's dimension.

        Returns:
            [..., S, ...], a new tensor with the same bits on every rank; None on a rank outside. The gradients of all
            ranks are summed, so a loss that is the same on all of them gives CP times its gradient.

        Raises:
            ShapeError: S/CP is odd where CP > 1. ArgumentError: no such dimension. Before anything is sent.

        Communication: one all-gather in the forward, one reduce-scatter in the backward; none in a group of one.
        """
        function = "AllGatherCPTensor"
        _check_tensor(function, "tensor", tensor)
        dim = _sequence_dim(function, "tensor", tensor, seq_dim)
        split, group = split_over(function, cp_group)
        if not split:
            return None  # type: ignore[return-value]
        if group is None:
            return tensor.clone()
        check_splittable(function, "tensor", tensor, dim, group.size)
        group.transport_for(tensor)
        return super().apply(tensor, group, dim)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, dim: int) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.dim = group, dim
        gathered = torch.empty((group.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        group.transport_for(tensor).all_gather(gathered, tensor)
        length = tensor.shape[dim]
        rank, place = place_of_position(_one_sequence(length * group.size, tensor), length * group.size, group.size)
        return torch.cat(gathered.unbind(), dim).index_select(dim, rank * length + place)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group, dim = ctx.group, ctx.dim
        total = gradient.shape[dim]
        whole = _one_sequence(total, gradient)
        parts = torch.stack(
            [
                gradient.index_select(dim, position_of_place(whole, total, rank, group.size))
                for rank in range(group.size)
            ]
        )  # [cp, ..., S/CP, ...]
        mine = torch.empty_like(parts[0])
        group.transport_for(mine).reduce_scatter(mine, parts, ReduceOp.SUM)
        return mine, None, None


def allgather_cp_sharded_tensor(tensor: Tensor, cp_group: Any, seq_dim: int = 1) -> Tensor:
    """The whole sequence, in order, on every rank of ``cp_group``; differentiable.

    Args, returns, raises and communication as :meth:`AllGatherCPTensor.apply`.
    """
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


class _ToContiguous(torch.autograd.Function):
    """Forward: the parts that this rank holds go where their positions belong, one all-to-all. Backward: back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:  # type: ignore[override]
        ctx.group, ctx.dim = group, dim
        return _exchange_parts(x, group, dim, _balanced_parts, _contiguous_parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_parts(gradient, ctx.group, ctx.dim, _contiguous_parts, _balanced_parts), None, None


def _balanced_parts(rank: int, size: int) -> tuple[int, int]:
    return rank, 2 * size - 1 - rank


def _contiguous_parts(rank: int, size: int) -> tuple[int, int]:
    return 2 * rank, 2 * rank + 1


def _exchange_parts(x: Tensor, group: Group, dim: int, before: _PartsOf, after: _PartsOf) -> Tensor:
    """From a layout in which rank r holds the parts ``before(r, size)`` of 2 * size to ``after(r, size)``."""
    own = dict(zip(before(group.rank, group.size), x.chunk(2, dim), strict=True))
    wanted = {part: torch.empty_like(next(iter(own.values()))) for part in after(group.rank, group.size)}
    nothing = x.new_empty(0)
    inputs, outputs = [], []
    for rank in range(group.size):
        sent = [own[part].flatten() for part in after(rank, group.size) if part in own]
        held = [part for part in before(rank, group.size) if part in wanted]
        inputs.append(torch.cat(sent) if sent else nothing)
        outputs.append(x.new_empty(len(held) * next(iter(wanted.values())).numel()))
    group.transport_for(x).all_to_all(outputs, inputs)
    for rank, received in enumerate(outputs):
        # The sender's order is that of the receiver's parts.
        held = [part for part in after(group.rank, group.size) if part in before(rank, group.size)]
        for part, flat in zip(held, received.chunk(len(held)) if held else (), strict=True):
            wanted[part].copy_(flat.view(wanted[part].shape))
    return torch.cat([wanted[part] for part in after(group.rank, group.size)], dim)


def cp_load_balanced_to_contiguous(x: Tensor, *, cp_group: Any = None, seq_dim: int = 1) -> Tensor:
    """From the load-balanced layout of a sequence to the contiguous one; differentiable.

    Args:
        x: [..., S/CP, ...] with parts r and 2 * CP - 1 - r of the sequence's 2 * CP equal parts on rank r; the same
            shape and dtype (any) on every rank; read. A DTensor stands for its local part.
        cp_group: a Group, a mode or a ProcessGroup; None: not split.
        seq_dim: the sequence's dimension.

    Returns:
        [..., S/CP, ...], a new tensor: positions r * S/CP to (r + 1) * S/CP. ``x`` itself where it is not split.
        None on a rank outside.

    Raises:
        ShapeError: S/CP is odd where CP > 1. ArgumentError: no such dimension. Before anything is sent.

    Communication: one all-to-all each in forward and backward, in which a rank sends at most what it holds.
    """
    function = "cp_load_balanced_to_contiguous"
    x = x.to_local() if hasattr(x, "to_local") else x
    _check_tensor(function, "x", x)
    dim = _sequence_dim(function, "x", x, seq_dim)
    inside, group = split_over(function, cp_group)
    if not inside:
        return None  # type: ignore[return-value]
    if group is None:
        return x
    check_splittable(function, "x", x, dim, group.size)
    group.transport_for(x)
    return _ToContiguous.apply(x, group, dim)


class _ShiftNext(torch.autograd.Function):
    """Forward: each position gets the next one's value. Backward: each gives its gradient to the next one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group | None, fill: float) -> Tensor:  # type: ignore[override]
        ctx.group = group
        last = torch.full_like(x[:, 0], fill)
        if group is not None:
            firsts = x.new_empty((group.size, *last.shape))
            group.transport_for(x).all_gather(firsts, x[:, 0].contiguous())
            if group.rank + 1 < group.size:
                last = firsts[group.rank + 1]
        return torch.cat((x[:, 1:], last.unsqueeze(1)), 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        group: Group | None = ctx.group
        first = torch.zeros_like(gradient[:, 0])
        if group is not None:
            lasts = gradient.new_empty((group.size, *first.shape))
            group.transport_for(gradient).all_gather(lasts, gradient[:, -1].contiguous())
            if group.rank:
                first = lasts[group.rank - 1]
        return torch.cat((first.unsqueeze(1), gradient[:, :-1]), 1), None, None


def cp_shift_next(x: Tensor, cp_group: Any = None, *, fill: float) -> Tensor:
    """``out[:, t] = x[:, t + 1]`` over a sequence in the contiguous layout; differentiable.

    Args:
        x: [B, S/CP, ...], positions r * S/CP to (r + 1) * S/CP on rank r, at least one; the same shape and dtype (any)
            on every rank; read.
        cp_group: a Group, a mode or a ProcessGroup; None: not split.
        fill: the value at the whole sequence's last position.

    Returns:
        [B, S/CP, ...], a new tensor; None on a rank outside.

    Raises:
        ShapeError: fewer than two dimensions, or no positions where the sequence is split. Before anything is sent.

    Communication: one all-gather of a position each in forward and backward; none in a group of one.
    """
    function = "cp_shift_next"
    _check_tensor(function, "x", x)
    if x.dim() < 2:
        raise ShapeError(f"{function}: x is {check.describe(x)}, expected at least two dimensions [B, S/CP, ...]")
    inside, group = split_over(function, cp_group)
    if not inside:
        return None  # type: ignore[return-value]
    if group is None and x.shape[1] == 0:
        return x.clone()
    if x.shape[1] == 0:
        raise ShapeError(f"{function}: x is {check.describe(x)}, expected at least one position on every rank")
    if group is not None:
        group.transport_for(x)
    return _ShiftNext.apply(x, group, fill)


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """What a context-parallel rank holds of a sequence: parts r and 2 * CP - 1 - r of its 2 * CP equal parts.

    Args:
        input_ids: [..., S, ...] the whole sequence; any dtype; read.
        cp_rank: r, the rank in the context-parallel group.
        cp_size: CP, the number of its ranks.
        seq_dim: the sequence's dimension.

    Returns:
        [..., S/CP, ...], a new tensor.

    Raises:
        ShapeError: 2 * CP does not divide S where CP > 1. ArgumentError: no such rank or dimension.

    Communication: none.
    """
    function = "_get_tokens_on_this_cp_rank"
    _check_tensor(function, "input_ids", input_ids)
    dim = _sequence_dim(function, "input_ids", input_ids, seq_dim)
    if not isinstance(cp_size, int) or cp_size < 1:
        raise ArgumentError(f"{function}: cp_size is {cp_size!r}, expected at least 1")
    if not isinstance(cp_rank, int) or not 0 <= cp_rank < cp_size:
        raise ArgumentError(f"{function}: cp_rank is {cp_rank!r}, expected 0 to {cp_size - 1} (cp_size is {cp_size})")
    length = input_ids.shape[dim]
    if cp_size > 1 and length % (2 * cp_size):
        raise ShapeError(
            f"{function}: input_ids is {check.describe(input_ids)}, expected dimension {dim} to be a multiple of "
            f"2 x {cp_size} ranks = {2 * cp_size}, got {length}"
        )
    positions = position_of_place(_one_sequence(length, input_ids), length, cp_rank, cp_size)
    return input_ids.index_select(dim, positions)


def _one_sequence(length: int, like: Tensor) -> Tensor:
    """``cu_seqlens`` of a single sequence, made without a copy to the device."""
    return torch.arange(2, device=like.device) * length


def split_over(function: str, cp_group: Any) -> tuple[bool, Group | None]:
    """Whether this rank takes part, and the group that sequences are split over: None where they are not."""
    if cp_group is None:
        return True, None
    group = resolve_group(cp_group, function)
    return group is not None, group if group is not None and group.size > 1 else None


def check_splittable(function: str, name: str, tensor: Tensor, dim: int, size: int) -> None:
    """Raise where a rank's part of the sequence cannot be two equal ones."""
    if tensor.shape[dim] % 2:
        raise ShapeError(
            f"{function}: {name} is {check.describe(tensor)}, expected dimension {dim} to be even: two equal parts of "
            f"a sequence that is split over {size} ranks"
        )


def _check_tensor(function: str, name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{function}: {name} is a {type(tensor).__name__}, expected a torch.Tensor")


def _sequence_dim(function: str, name: str, tensor: Tensor, dim: Any) -> int:
    if not isinstance(dim, int) or not -tensor.dim() <= dim < tensor.dim():
        raise ArgumentError(f"{function}: seq_dim is {dim!r}, expected a dimension of {name} {check.describe(tensor)}")
    return dim % tensor.dim()
