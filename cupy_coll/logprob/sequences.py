"""Log-probabilities of sequences around the core in ``autograd.py``: the shift by one token, padding, packed
sequences, sequences split over ranks.

Everything that depends on where a token stands is an index map of ``layout``, computed once for the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cupy_coll.device import owner_of
from cupy_coll.errors import ArgumentError, DTypeError, MismatchError, ShapeError
from cupy_coll.group import Group
from cupy_coll.layout import (
    next_token_index,
    packed_next_token_index,
    place_of_position,
    position_of_place,
    unpacked_positions,
)
from cupy_coll.logprob.autograd import VocabParallel, check_chunk_size, check_integer, check_logits, check_target
from cupy_coll.logprob.context_parallel import Collect, check_splittable, split_over
from cupy_coll.logprob.partials import IGNORED, compute_dtype

__all__ = ["from_parallel_logits_to_logprobs", "from_parallel_logits_to_logprobs_packed_sequences"]


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each next token, from logits whose vocabulary is split over a group.

    Args:
        vocab_parallel_logits: [B, S'/CP, V/TP], this rank's columns; float16, bfloat16, float32 or float64; any
            layout; not modified. Columns past ``vocab_end_index - vocab_start_index`` are padding.
        target: [B, S] the sequences' tokens themselves, not shifted (int64 or int32), the same on every rank;
            S <= S'. Token i + 1 is taken as the target of position i. -100 gives 0 and a zero gradient.
        vocab_start_index, vocab_end_index: this rank's half-open range of the vocabulary.
        tp_group: the tensor-parallel group: a Group, a mode or a ProcessGroup.
        inference_only: save nothing; the result does not require grad.
        cp_group: the context-parallel group, whose rank r holds parts r and 2 * CP - 1 - r of the 2 * CP equal parts
            of the sequence; None: sequences are not split. All of its ranks make the call, and the backward.
        chunk_size: rows worked on at a time; bounds scratch memory and changes no bit of a value.
        temperature: divides the logits.

    Returns:
        [B, S - 1] float32 (float64 for float64 logits), the same bits on every rank of both groups; position
        i holds the log-probability of token i + 1. The logits of the last position and of padding get a zero
        gradient. Gradients are summed over ``cp_group``: a loss that is the same on all of its ranks gives CP times
        its gradient. None on a rank outside ``tp_group`` or ``cp_group``.

    Raises:
        As :meth:`DistributedLogprob.apply`, on every rank of both groups; before anything is sent ShapeError where
        the shapes do not fit, the target is longer than the logits, or S'/CP is odd where CP > 1, and ArgumentError
        where ``chunk_size`` is below 1.

    Communication: over ``tp_group`` one all-gather of 2 * 16 / TP + 1 numbers a position in the forward; over
    ``cp_group`` one all-gather of a number a position in the forward and one reduce-scatter in the backward, none
    in a group of one.
    """
    function = "from_parallel_logits_to_logprobs"
    check_logits(function, vocab_parallel_logits)
    check_target(function, target, vocab_parallel_logits)
    inside, cp_members = split_over(function, cp_group)
    if not inside:
        return None  # type: ignore[return-value]
    size = 1 if cp_members is None else cp_members.size
    _check_sequences(function, vocab_parallel_logits, target, size)
    positions = size * vocab_parallel_logits.shape[1]
    whole = torch.arange(2, device=target.device) * positions  # each row is one sequence
    predicted = next_token_index(target.shape[1], positions).to(target.device)
    return _logprobs(
        function,
        vocab_parallel_logits,
        _pick(target, _own(predicted, whole, cp_members)),
        vocab_start_index,
        vocab_end_index,
        tp_group,
        cp_members,
        _value_index(whole, positions, size, target.shape[0])[:, : max(target.shape[1] - 1, 0)],
        temperature=temperature,
        inference_only=bool(inference_only),
        chunk_size=None if chunk_size is None else check_chunk_size(function, chunk_size),
    )


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    target_is_pre_rolled: bool = False,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each next token of packed sequences, a row for each sequence.

    Args:
        vocab_parallel_logits: [1, T/CP, V/TP], this rank's columns, the sequences one after another; as for
            :func:`from_parallel_logits_to_logprobs`.
        target: [1, T] the packed tokens themselves, not shifted (int64 or int32), the same on every rank. With
            ``target_is_pre_rolled`` [1, T/CP], this rank's: what each of its positions predicts; what stands at a
            sequence's last position counts for nothing.
        cu_seqlens_padded: int32 or int64 [batch + 1], from 0 to T: where each sequence begins in the whole packing,
            its padding included. Sequences may be empty. Where CP > 1 each is split over the ranks by itself, so its
            length is a multiple of 2 * CP. Its values are checked where it is in host memory.
        unpacked_seqlen: the rows' length before the shift; longer sequences are cut off.
        vocab_start_index, vocab_end_index: this rank's half-open range of the vocabulary.
        group: the tensor-parallel group: a Group, a mode or a ProcessGroup.
        inference_only, cp_group, chunk_size, temperature: as for :func:`from_parallel_logits_to_logprobs`.
        target_is_pre_rolled: the target is shifted and split already.

    Returns:
        [batch, unpacked_seqlen - 1] float32 (float64 for float64 logits), the same bits on every rank of both groups:
        column i of a row holds the log-probability of the sequence's token i + 1, up to the last token of its padded
        length, then zeros. Gradients as for :func:`from_parallel_logits_to_logprobs`. None on a rank outside ``group``
        or ``cp_group``.

    Raises:
        As :func:`from_parallel_logits_to_logprobs`; before anything is sent DTypeError, ShapeError or ArgumentError
        where ``cu_seqlens_padded`` is not as above or ``unpacked_seqlen`` is negative.

    Communication: as :func:`from_parallel_logits_to_logprobs`, however many sequences there are.
    """
    function = "from_parallel_logits_to_logprobs_packed_sequences"
    check_logits(function, vocab_parallel_logits)
    check_target(function, target, vocab_parallel_logits)
    inside, cp_members = split_over(function, cp_group)
    if not inside:
        return None  # type: ignore[return-value]
    size = 1 if cp_members is None else cp_members.size
    _check_packed(function, vocab_parallel_logits, target, size, target_is_pre_rolled)
    positions = size * vocab_parallel_logits.shape[1]
    _check_cu_seqlens(function, cu_seqlens_padded, positions, size)
    columns = max(_unpacked_seqlen(function, unpacked_seqlen) - 1, 0)
    begins = cu_seqlens_padded.to(device=target.device, dtype=torch.int64)
    predicted = _own(packed_next_token_index(begins, positions), begins, cp_members)
    targets = torch.where(predicted < 0, IGNORED, target) if target_is_pre_rolled else _pick(target, predicted)
    of_position = _value_index(begins, positions, size, batch=1).squeeze(0)
    return _logprobs(
        function,
        vocab_parallel_logits,
        targets,
        vocab_start_index,
        vocab_end_index,
        group,
        cp_members,
        _at(of_position, unpacked_positions(begins, columns), none=0),
        temperature=temperature,
        inference_only=bool(inference_only),
        chunk_size=None if chunk_size is None else check_chunk_size(function, chunk_size),
    )


def _logprobs(
    function: str,
    logits: Tensor,
    targets: Tensor,
    start: int,
    end: int,
    tp_group: Any,
    cp_members: Group | None,
    index: Tensor,
    **options: Any,
) -> Tensor:
    """Log-probabilities of this rank's positions, then those of all, put where ``index`` says."""
    call = VocabParallel.prepare(function, logits, targets, start, end, tp_group, **options)
    if call is None:
        return None  # type: ignore[return-value]
    fault = None
    try:
        values = VocabParallel.apply(logits, targets, call)
    except (ArgumentError, MismatchError) as error:  # raised by this tensor-parallel group alone
        if cp_members is None:
            raise
        fault = error
        values = torch.zeros(targets.shape, dtype=compute_dtype(logits.dtype), device=logits.device)
    return Collect.apply(values, index, cp_members, function, fault)


# ---------------------------------------------------------------------- index maps


def _at(values: Tensor, index: Tensor, none: int) -> Tensor:
    """``values[..., index]``, and ``none`` where the index is -1; without a look at the index on the host."""
    return torch.nn.functional.pad(values, (1, 0), value=none)[..., index + 1]


def _pick(target: Tensor, predicted: Tensor) -> Tensor:
    """Tokens [B, S] -> the token that each position predicts, [B, positions]; -100 where there is none."""
    return _at(target, predicted, none=IGNORED)


def _own(of_position: Tensor, begins: Tensor, cp_members: Group | None) -> Tensor:
    """What belongs to this rank's positions, of what belongs to all."""
    if cp_members is None:
        return of_position
    return of_position[position_of_place(begins, of_position.numel(), cp_members.rank, cp_members.size)]


def _value_index(begins: Tensor, positions: int, size: int, batch: int) -> Tensor:
    """Where in the ranks' gathered (0, values [batch, positions / size]) each position's is, [batch, positions]."""
    row = torch.arange(batch, device=begins.device).unsqueeze(-1) * (positions // size)
    if size == 1:
        return 1 + row + torch.arange(positions, device=begins.device)
    rank, place = place_of_position(begins, positions, size)
    return rank * (1 + batch * (positions // size)) + 1 + row + place


# ---------------------------------------------------------------------- arguments


def _check_sequences(function: str, logits: Tensor, target: Tensor, cp_size: int) -> None:
    if logits.dim() != 3:
        raise ShapeError(
            f"{function}: vocab_parallel_logits has shape {list(logits.shape)}, expected 3 dimensions "
            "[batch, sequence, vocabulary / ranks]"
        )
    if target.dim() != 2 or target.shape[0] != logits.shape[0]:
        raise ShapeError(
            f"{function}: target has shape {list(target.shape)}, expected [batch, sequence] with the batch "
            f"{logits.shape[0]} of vocab_parallel_logits {list(logits.shape)}"
        )
    positions = cp_size * logits.shape[1]
    if target.shape[1] > positions:
        split = f" on each of {cp_size} context-parallel ranks" if cp_size > 1 else ""
        raise ShapeError(
            f"{function}: target has {target.shape[1]} tokens, expected at most the {positions} positions of "
            f"vocab_parallel_logits {list(logits.shape)}{split}"
        )
    if cp_size > 1:
        check_splittable(function, "vocab_parallel_logits", logits, 1, cp_size)


def _check_packed(function: str, logits: Tensor, target: Tensor, cp_size: int, pre_rolled: bool) -> None:
    if logits.dim() != 3 or logits.shape[0] != 1:
        raise ShapeError(
            f"{function}: vocab_parallel_logits has shape {list(logits.shape)}, expected "
            "[1, packed tokens, vocabulary / ranks]"
        )
    expected = logits.shape[1] if pre_rolled else cp_size * logits.shape[1]
    if list(target.shape) != [1, expected]:
        why = (
            "as many as vocab_parallel_logits, with target_is_pre_rolled"
            if pre_rolled
            else f"{cp_size} context-parallel ranks x {logits.shape[1]} positions of vocab_parallel_logits"
        )
        raise ShapeError(f"{function}: target has shape {list(target.shape)}, expected [1, {expected}] ({why})")


def _check_cu_seqlens(function: str, cu_seqlens: Any, positions: int, cp_size: int) -> None:
    name = f"{function}: cu_seqlens_padded"
    if not isinstance(cu_seqlens, Tensor):
        raise ArgumentError(f"{name} is a {type(cu_seqlens).__name__}, expected a torch.Tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{name} has dtype {cu_seqlens.dtype}, expected int32 or int64")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ShapeError(f"{name} has shape {list(cu_seqlens.shape)}, expected [batch + 1]")
    if owner_of(cu_seqlens) is not None:  # to look at the values would wait for the device
        return
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != positions:
        raise ArgumentError(
            f"{name} goes from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}, expected 0 to the {positions} packed "
            f"tokens"
        )
    lengths = cu_seqlens.diff()
    multiple = 2 * cp_size if cp_size > 1 else 1
    wrong = ((lengths < 0) | (lengths % multiple != 0)).nonzero()
    if wrong.numel():
        first = int(wrong[0])
        expected = f"a multiple of 2 x {cp_size} context-parallel ranks = {multiple}" if cp_size > 1 else "at least 0"
        raise ArgumentError(
            f"{name} gives sequence {first} the length {int(lengths[first])} (from {int(cu_seqlens[first])} to "
            f"{int(cu_seqlens[first + 1])}), expected {expected}"
        )


def _unpacked_seqlen(function: str, unpacked_seqlen: Any) -> int:
    length = check_integer(function, "unpacked_seqlen", unpacked_seqlen)
    if length < 0:
        raise ArgumentError(f"{function}: unpacked_seqlen is {length}, expected at least 0")
    return length
