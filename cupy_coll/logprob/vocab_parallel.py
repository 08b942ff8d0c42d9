"""For distillation and sampling from vocabulary-parallel logits: soft targets, log-softmax, logits of tokens, top-k.

Each sends one message in the forward. Where a group may be None, None means that the vocabulary is not split.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from cupy_coll.context import resolve_tensor_parallel
from cupy_coll.errors import ArgumentError, ShapeError
from cupy_coll.group import Group
from cupy_coll.logprob.autograd import (
    Call,
    check_chunk_size,
    check_indices,
    check_integer,
    check_logits,
    check_target,
    check_temperature,
    gathered,
)
from cupy_coll.logprob.context_parallel import (
    _get_tokens_on_this_cp_rank,
    allgather_cp_sharded_tensor,
    check_splittable,
    split_over,
)
from cupy_coll.logprob.memory import empty_gradient
from cupy_coll.logprob.partials import (
    IGNORED,
    SUBTILE_COLUMNS,
    MessageLayout,
    Shard,
    check_ranges,
    check_rows,
    compute_dtype,
    owners_of,
    pivot_of,
    sum_in_order,
)
from cupy_coll.logprob.rows import Rows, block_elements
from cupy_coll.logprob.sweeps import write_log_softmax_gradient, write_soft_target_gradient

__all__ = [
    "DistributedCrossEntropy",
    "distributed_vocab_topk",
    "gather_logits_at_global_indices",
    "vocab_parallel_argmax",
    "vocab_parallel_log_softmax",
]


# ---------------------------------------------------------------------- log-softmax


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, call: Call) -> Tensor:  # type: ignore[override]
        summary = call.gather(logits, None, None)
        result = torch.empty(logits.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
        call.write_log_softmax(result, logits, summary)
        ctx.call = call
        ctx.save_for_backward(logits, summary.maximum, summary.log_sum)
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        call: Call = ctx.call
        logits, maximum, log_sum = ctx.saved_tensors
        total = gradient.sum(-1)
        if call.group is not None:
            call.group.transport_for(total).all_reduce(total, ReduceOp.SUM)
        result, shape = empty_gradient(logits), logits.shape[:-1]
        write_log_softmax_gradient(
            result, logits, maximum.view(shape), log_sum.view(shape), gradient, total, call.scale
        )
        return result, None


def vocab_parallel_log_softmax(logits: Tensor, temperature: float, *, tp_group: Any = None) -> Tensor:
    """This rank's columns of ``log_softmax(logits / temperature)`` over the whole vocabulary, differentiable.

    Args:
        logits: [..., V/TP], this rank's columns, in rank order; widths may differ; float16, bfloat16, float32 or
            float64; a DTensor stands for its local part.
        temperature: divides the logits; above 0.
        tp_group: a Group, a mode or a ProcessGroup; None: the vocabulary is not split.

    Returns:
        [..., V/TP] float32 (float64 for float64 logits); None on a rank outside the group.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is sent.
        MismatchError: on every rank, where the ranks have different numbers of rows.

    Communication: one all-gather of 2 * 16 / TP numbers a row in the forward; one all-reduce of a number a row in the
    backward, the sum of the gradient over the vocabulary.
    """
    function = "vocab_parallel_log_softmax"
    logits = _local(logits)
    check_logits(function, logits)
    scale = check_temperature(function, temperature)
    inside, group = split_over(function, tp_group)
    if not inside:
        return None  # type: ignore[return-value]
    return _LogSoftmax.apply(logits, Call(function, group, _follows(group, logits), scale=scale))


# ---------------------------------------------------------------------- soft targets


class _CrossLayout(MessageLayout):
    """A slot is (m, s) of the student, (m, s) of the target, and the sum of exp(target - m) * (student - m)."""

    MAXIMA = (0, 2)

    @property
    def fields(self) -> int:
        return 5


def _merge_cross(tiles: Tensor) -> Tensor:
    """Merge tiles [..., n, 5] in column order into one [..., 5]."""
    m_student, s_student, m_target, s_target, cross = tiles.unbind(-1)
    maximum, maximum_target = m_student.amax(-1), m_target.amax(-1)
    moved = m_student - pivot_of(maximum).unsqueeze(-1)
    factor = (m_target - pivot_of(maximum_target).unsqueeze(-1)).exp()
    # Where the target has no mass the student may be -inf: 0 * (-inf) counts as 0.
    crossed = cross + torch.where(s_target == 0, 0.0, moved * s_target)
    merged = (
        maximum,
        sum_in_order(s_student * moved.exp()),
        maximum_target,
        sum_in_order(s_target * factor),
        sum_in_order(torch.where(factor == 0, 0.0, crossed * factor)),
    )
    return torch.stack(merged, -1)


def _cross_partials(student: Tensor, target: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, tiles, 5] of two blocks [rows, tiles, columns]."""
    x, y = student.to(dtype), target.to(dtype)
    m_student, m_target = x.amax(-1), y.amax(-1)
    x = x - pivot_of(m_student).unsqueeze(-1)
    mass = (y - pivot_of(m_target).unsqueeze(-1)).exp_()
    cross = torch.where(mass == 0, 0.0, x * mass).sum(-1)
    return torch.stack((m_student, x.exp_().sum(-1), m_target, mass.sum(-1), cross), -1)


def _cross_tiles(student: Tensor, target: Tensor, shard: Shard, dtype: torch.dtype) -> Tensor:
    """[rows in memory order, shard.tiles, 5] in one read of both."""
    rows, tiles, width = Rows(student), shard.tiles, shard.width // shard.tiles
    out = torch.zeros(rows.count, tiles, 5, dtype=dtype, device=student.device)
    out[..., 0] = out[..., 2] = -torch.inf
    if width == 0:
        return out
    columns = min(width, SUBTILE_COLUMNS)
    step = max(1, block_elements(student.device) // (tiles * columns))
    for first, runs in rows.runs(student, target):
        x, y = (run.unflatten(-1, (tiles, width)) for run in runs)
        for row in range(0, x.shape[0], step):
            some = slice(row, row + step)
            parts = [
                _cross_partials(x[some, :, column : column + columns], y[some, :, column : column + columns], dtype)
                for column in range(0, width, columns)
            ]
            merged = parts[0] if len(parts) == 1 else _merge_cross(torch.stack(parts, -2))
            out[first + row : first + row + merged.shape[0]] = merged
    return rows.restore(out)


class DistributedCrossEntropy(torch.autograd.Function):
    """Cross entropy of the student's softmax against the target logits' softmax, both split over a group.

    Forward: one all-gather. Backward: none; ``g * (softmax(student) - softmax(target))``.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls, student_logits: Tensor, target_logits: Tensor, group: Any, inference_only: bool = False
    ) -> Tensor:
        """``-sum(p * log q)`` of each row, p the target's and q the student's probabilities over the whole vocabulary.

        Args:
            student_logits: [..., V/TP], this rank's columns, in rank order; widths may differ; read.
            target_logits: of the same shape, and the same or another floating-point dtype; gets no gradient.
            group: the tensor-parallel group: a Group, a mode or a ProcessGroup.
            inference_only: save nothing; the result does not require grad.

        Returns:
            [...] float32 (float64 where one of the logits is), the same bits on every rank. Where p is 0 a student's
            -inf counts as 0. None on a rank outside the group.

        Raises:
            DTypeError, ShapeError, ArgumentError: before anything is sent.
            MismatchError: on every rank, where the ranks have different numbers of rows.

        Communication: one all-gather of 5 * 16 / TP numbers a row in the forward, none in the backward.
        """
        function = "DistributedCrossEntropy"
        for name, logits in (("student_logits", student_logits), ("target_logits", target_logits)):
            check_logits(function, logits, name)
        if student_logits.shape != target_logits.shape:
            raise ShapeError(
                f"{function}: target_logits has shape {list(target_logits.shape)}, expected that of student_logits, "
                f"{list(student_logits.shape)}"
            )
        if student_logits.device != target_logits.device:
            raise ArgumentError(
                f"{function}: target_logits is on {target_logits.device}, expected {student_logits.device} as "
                "student_logits"
            )
        members = resolve_tensor_parallel(group, function)
        if members is None:
            return None  # type: ignore[return-value]
        members.transport_for(student_logits)
        return super().apply(student_logits, target_logits.detach(), members, function, bool(inference_only))

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, student: Tensor, target: Tensor, group: Group, function: str, inference_only: bool
    ) -> Tensor:
        shape, rows = student.shape[:-1], math.prod(student.shape[:-1])
        dtype = torch.promote_types(compute_dtype(student.dtype), compute_dtype(target.dtype))
        shard = _follows(group, student)
        layout = _CrossLayout(group.size, rows, False, dtype, targets=0)
        tiles = _cross_tiles(student, target, shard, dtype)
        headers, everybodys, _ = layout.unpack(gathered(group, layout.pack(shard, tiles, tiles.new_empty(rows, 0))))
        check_rows(function, headers, rows)
        maximum, total, maximum_target, total_target, cross = (
            v.view(shape) for v in _merge_cross(everybodys).unbind(-1)
        )
        log_sum = total.log()
        loss = log_sum - cross / total_target
        if inference_only:
            ctx.mark_non_differentiable(loss)
        else:
            ctx.save_for_backward(student, target, maximum, log_sum, maximum_target, total_target.log())
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        student, target, maximum, log_sum, maximum_target, log_sum_target = ctx.saved_tensors
        result = empty_gradient(student)
        sides = ((student, maximum, log_sum), (target, maximum_target, log_sum_target))
        write_soft_target_gradient(result, gradient, sides)
        return result, None, None, None, None


# ---------------------------------------------------------------------- logits at indices


class _LogitsAt(torch.autograd.Function):
    """Forward: the logits of tokens [..., K] from the ranks that own them, one all-gather. Backward: none."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, indices: Tensor, shard: Shard, group: Group | None, function: str
    ) -> Tensor:
        dtype = compute_dtype(logits.dtype)
        local = shard.local_target(indices)
        mine = local >= 0
        picked = logits.gather(-1, local.clamp(min=0)) if logits.shape[-1] else logits.new_zeros(local.shape)
        values = torch.where(mine, picked, 0).to(dtype)
        message = _with_header(shard, values.reshape(1, -1), math.prod(logits.shape[:-1]))
        headers, everybodys = _without_header(gathered(group, message), shard.ranks)
        check_rows(function, headers, math.prod(logits.shape[:-1]))
        check_ranges(function, headers)
        owner = owners_of(function, indices, headers, "global_indices")
        ctx.width = shard.width
        ctx.save_for_backward(local, logits)
        result = everybodys.view(shard.ranks, -1).gather(0, owner.unsqueeze(0)).view(indices.shape)
        return result.masked_fill_(indices == IGNORED, 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        local, logits = ctx.saved_tensors
        # Summed in float32 where a row names a token twice, and rounded once.
        columns, order = local.sort(-1)
        g = gradient.gather(-1, order)
        result = torch.zeros(logits.shape, dtype=logits.dtype, device=logits.device)
        flat, at, amount = result.flatten(0, -2), columns.flatten(0, -2), g.flatten(0, -2)
        row, which = (at >= 0).nonzero(as_tuple=True)
        element, where = torch.unique_consecutive(row * ctx.width + at[row, which], return_inverse=True)
        summed = torch.zeros(element.numel(), dtype=g.dtype, device=g.device).index_add_(0, where, amount[row, which])
        if element.numel():
            flat[element // ctx.width, element % ctx.width] = summed.to(result.dtype)
        return result, None, None, None, None


def gather_logits_at_global_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: Any = None,
    cp_group: Any = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Tensor:
    """The logits of given tokens, on every rank; differentiable.

    Args:
        vocab_parallel_logits: [B, S/CP, V/TP], this rank's columns (and positions: parts r and 2 * CP - 1 - r).
        global_indices: [B, S, K] global token ids (int64 or int32), the same on every rank; a row may name a token
            twice. S may be shorter than CP times the local length. -100 gives 0 and a zero gradient.
        tp_group, cp_group: a Group, a mode or a ProcessGroup; None: not split.
        vocab_start_index, vocab_end_index: this rank's half-open range of the vocabulary.
        chunk_size: accepted for compatibility, at least 1: nothing of the vocabulary's size is needed in the forward.

    Returns:
        [B, S, K] float32 (float64 for float64 logits): the logits' own values. Gradients as for
        ``allgather_cp_sharded_tensor``. None on a rank outside.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is sent; ArgumentError, MismatchError: on every rank of
        ``tp_group``: a token that nobody owns; ranges that do not fit each other.

    Communication: one all-gather of K numbers a row over ``tp_group``; with CP one more in forward and backward.
    """
    function = "gather_logits_at_global_indices"
    logits = _local(vocab_parallel_logits)
    check_logits(function, logits)
    check_target(function, global_indices, logits, "global_indices")
    start = check_integer(function, "vocab_start_index", vocab_start_index)
    end = check_integer(function, "vocab_end_index", vocab_end_index)
    if chunk_size is not None:
        check_chunk_size(function, chunk_size)
    inside_tp, tp = split_over(function, tp_group)
    inside_cp, cp = split_over(function, cp_group)
    if not (inside_tp and inside_cp):
        return None  # type: ignore[return-value]
    if logits.dim() != 3 or global_indices.dim() != 3:
        raise ShapeError(
            f"{function}: vocab_parallel_logits has shape {list(logits.shape)} and global_indices "
            f"{list(global_indices.shape)}, expected [B, S/CP, V/TP] and [B, S, K]"
        )
    size, tokens = 1 if cp is None else cp.size, global_indices.shape[1]
    missing = logits.shape[1] * size - tokens
    if missing < 0:
        raise ShapeError(
            f"{function}: global_indices has {tokens} positions, expected at most {size} context-parallel ranks x "
            f"{logits.shape[1]} of vocab_parallel_logits"
        )
    indices = torch.nn.functional.pad(global_indices, (0, 0, 0, missing), value=IGNORED)
    if cp is not None:
        check_splittable(function, "vocab_parallel_logits", logits, 1, size)
        indices = _get_tokens_on_this_cp_rank(indices, cp.rank, size)
    check_indices(function, indices, logits)
    ranks = (0, 1) if tp is None else (tp.rank, tp.size)
    values = _LogitsAt.apply(logits, indices, Shard(*ranks, logits.shape[-1], start, end), tp, function)
    return (values if cp is None else allgather_cp_sharded_tensor(values, cp))[:, :tokens]


# ---------------------------------------------------------------------- top-k


@torch.no_grad()
def distributed_vocab_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    tp_group: Any,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row over the whole vocabulary, and their tokens; without gradient.

    Args:
        vocab_parallel_logits: [B, S, V/TP] (any [..., V/TP]), this rank's columns.
        k: at least 1; more than the vocabulary gives the whole vocabulary.
        tp_group: a Group, a mode or a ProcessGroup.
        vocab_start_index, vocab_end_index: this rank's half-open range; columns past it are padding.
        chunk_size: rows worked on at a time; changes no value.

    Returns:
        (values [..., k] float32 (float64 for float64 logits), tokens int64 [..., k]), from the largest on; of equal
        values the lower token comes first. NaN counts as the largest. The same on every rank; (None, None) on a rank
        outside.

    Raises:
        ArgumentError, DTypeError, ShapeError: before anything is sent; ArgumentError, MismatchError: on every rank:
        ranges that do not fit each other.

    Communication: one all-gather of 2 * k numbers a row, whatever the chunk.
    """
    function = "distributed_vocab_topk"
    logits = _local(vocab_parallel_logits)
    check_logits(function, logits)
    count = check_integer(function, "k", k)
    if count < 1:
        raise ArgumentError(f"{function}: k is {count}, expected at least 1")
    start = check_integer(function, "vocab_start_index", vocab_start_index)
    end = check_integer(function, "vocab_end_index", vocab_end_index)
    rows_at_once = None if chunk_size is None else check_chunk_size(function, chunk_size)
    group = resolve_tensor_parallel(tp_group, function)
    if group is None:
        return None, None  # type: ignore[return-value]
    shard = Shard(group.rank, group.size, logits.shape[-1], start, end)
    return _topk(function, logits, count, shard, group, rows_at_once)


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, *, tp_group: Any = None) -> Tensor:
    """The token of each row's largest logit over the whole vocabulary; without gradient.

    Args:
        logits: [..., V/TP], this rank's columns, in rank order; widths may differ; a DTensor stands for its local part.
        tp_group: a Group, a mode or a ProcessGroup; None: the vocabulary is not split.

    Returns:
        int64 [...]: of equal logits the lowest token; NaN counts as the largest. None on a rank outside.

    Raises:
        DTypeError, ShapeError: before anything is sent.
        MismatchError: on every rank, where the ranks have different numbers of rows.

    Communication: one all-gather of 2 numbers a row.
    """
    function = "vocab_parallel_argmax"
    logits = _local(logits)
    check_logits(function, logits)
    inside, group = split_over(function, tp_group)
    if not inside:
        return None  # type: ignore[return-value]
    return _topk(function, logits, 1, _follows(group, logits), group)[1].squeeze(-1)


def _topk(
    function: str, logits: Tensor, k: int, shard: Shard, group: Group | None, rows_at_once: int | None = None
) -> tuple[Tensor, Tensor]:
    dtype, shape = compute_dtype(logits.dtype), logits.shape[:-1]
    rows = math.prod(shape)
    values = torch.full((rows, k), -torch.inf, dtype=torch.float64, device=logits.device)
    columns = torch.full((rows, k), float(2**53), dtype=torch.float64, device=logits.device)  # behind every token
    here = min(k, shard.width)
    own = logits[..., : shard.width].reshape(rows, shard.width)
    for first in range(0, rows, rows_at_once or max(1, rows)) if here else ():
        some = slice(first, first + (rows_at_once or rows))
        largest, where = _first_largest(own[some], here)
        values[some, :here], columns[some, :here] = largest.double(), where.double()
    message = _with_header(shard, torch.stack((values, columns)), rows)
    headers, everybodys = _without_header(gathered(group, message), shard.ranks)
    check_rows(function, headers, rows)
    if shard.start is None:
        widths = [columns_there for _, _, columns_there, _ in headers]
        starts = [sum(widths[:rank]) for rank in range(shard.ranks)]
        vocabulary = sum(widths)
    else:
        check_ranges(function, headers)
        starts = [start for start, *_ in headers]
        vocabulary = max(end for _, end, *_ in headers)
    candidates = everybodys.view(shard.ranks, 2, rows, k)
    offset = torch.tensor(starts, dtype=torch.float64, device=logits.device).view(-1, 1, 1)
    found, tokens = candidates[:, 0], candidates[:, 1] + offset
    found, tokens = (v.transpose(0, 1).reshape(rows, shard.ranks * k) for v in (found, tokens))
    order = tokens.argsort(dim=-1, stable=True)  # so that of equal values the lower token comes first
    found, tokens = found.gather(-1, order), tokens.gather(-1, order)
    order = found.argsort(dim=-1, descending=True, stable=True)[:, : min(k, vocabulary)]
    found, tokens = found.gather(-1, order).to(dtype), tokens.gather(-1, order).long()
    return found.view(*shape, -1), tokens.view(*shape, -1)


def _first_largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of ``x`` [rows, columns]; of values equal to the smallest of them the first columns."""
    if k == 1:
        largest = x.max(-1, keepdim=True)  # documented to give the first one
        return largest.values, largest.indices
    values, columns = x.topk(k, -1)
    last = values[:, -1:]
    split = ((x == last).sum(-1) > (values == last).sum(-1)).nonzero().flatten()  # rows that leave equal ones out
    if split.numel():
        order = x[split].argsort(dim=-1, descending=True, stable=True)[:, :k]
        columns[split] = order
    return values, columns


# ---------------------------------------------------------------------- messages


def _with_header(shard: Shard, values: Tensor, rows: int) -> Tensor:
    """[4 int64 bit for bit | values]: range, columns, rows, as in the summaries' messages."""
    header = torch.tensor([shard.start or 0, shard.end or 0, shard.columns, rows], device=values.device)
    return torch.cat((header.view(values.dtype), values.flatten()))


def _without_header(everybodys: Tensor, ranks: int) -> tuple[list[list[int]], Tensor]:
    messages = everybodys.view(ranks, -1)
    length = 4 * 8 // everybodys.dtype.itemsize
    return messages[:, :length].clone().view(torch.int64).tolist(), messages[:, length:]


def _follows(group: Group | None, logits: Tensor) -> Shard:
    """The shard of a rank that does not say which range it has: the ranks' shards follow each other."""
    rank, ranks = (0, 1) if group is None else (group.rank, group.size)
    return Shard(rank, ranks, logits.shape[-1])


def _local(logits: Any) -> Any:
    """A DTensor's local part; anything else as it is."""
    return logits.to_local() if hasattr(logits, "to_local") else logits
