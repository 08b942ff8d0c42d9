"""Log-probabilities of sequences: the shift by one token, and padding, around the core in ``autograd.py``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cupy_coll.context import resolve_group
from cupy_coll.errors import GroupError, ShapeError
from cupy_coll.layout import next_token_index
from cupy_coll.logprob.autograd import VocabParallel, check_chunk_size, check_logits, check_target
from cupy_coll.logprob.partials import IGNORED

__all__ = ["from_parallel_logits_to_logprobs"]


def shift_to_next(target: Tensor, positions: int) -> Tensor:
    """Tokens [B, S] -> the token that each of ``positions`` predicts, [B, positions]; -100 where there is none."""
    index = next_token_index(target.shape[1], positions).to(target.device)
    shifted = target.new_full((target.shape[0], positions), IGNORED)
    predicts = index >= 0
    shifted[:, predicts] = target[:, index[predicts]]
    return shifted


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
        vocab_parallel_logits: [B, S', V/TP], this rank's columns; float16, bfloat16, float32 or float64; any
            layout; not modified. Columns past ``vocab_end_index - vocab_start_index`` are padding.
        target: [B, S] the sequences' tokens themselves, not shifted (int64 or int32), the same on every rank;
            S <= S'. Token i + 1 is taken as the target of position i. -100 gives 0 and a zero gradient.
        vocab_start_index, vocab_end_index: this rank's half-open range of the vocabulary.
        tp_group: the tensor-parallel group: a Group, a mode or a ProcessGroup.
        inference_only: save nothing; the result does not require grad.
        cp_group: None, or a group of one rank: sequences are not split.
        chunk_size: rows worked on at a time; bounds scratch memory and changes no bit of a value.
        temperature: divides the logits.

    Returns:
        [B, S - 1] float32 (float64 for float64 logits), the same bits on every rank of ``tp_group``; position
        i holds the log-probability of token i + 1. The logits of the last position and of padding get a zero
        gradient. None on a rank outside ``tp_group`` or ``cp_group``.

    Raises:
        As :meth:`DistributedLogprob.apply`; before anything is sent ShapeError where the shapes do not fit or
        the target is longer than the logits, ArgumentError where ``chunk_size`` is below 1, GroupError where
        ``cp_group`` has more than one rank.

    Communication: one all-gather of 2 * 16 / TP + 1 numbers a position in the forward, none in the backward.
    """
    function = "from_parallel_logits_to_logprobs"
    check_logits(function, vocab_parallel_logits)
    check_target(function, target, vocab_parallel_logits)
    _check_sequences(function, vocab_parallel_logits, target)
    if not _is_member(function, cp_group):
        return None  # type: ignore[return-value]
    logprob = VocabParallel.logprob(
        function,
        vocab_parallel_logits,
        shift_to_next(target, vocab_parallel_logits.shape[1]),
        vocab_start_index,
        vocab_end_index,
        tp_group,
        temperature=temperature,
        inference_only=bool(inference_only),
        chunk_size=None if chunk_size is None else check_chunk_size(function, chunk_size),
    )
    if logprob is None:
        return None  # type: ignore[return-value]
    return logprob[:, : max(target.shape[1] - 1, 0)]


def _check_sequences(function: str, logits: Tensor, target: Tensor) -> None:
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
    if target.shape[1] > logits.shape[1]:
        raise ShapeError(
            f"{function}: target has {target.shape[1]} tokens, expected at most the {logits.shape[1]} positions of "
            f"vocab_parallel_logits {list(logits.shape)}"
        )


def _is_member(function: str, cp_group: Any) -> bool:
    """Whether this rank is in ``cp_group``; None means that sequences are not split over ranks.

    Raises:
        GroupError: they are.
    """
    if cp_group is None:
        return True
    group = resolve_group(cp_group, function)
    if group is not None and group.size > 1:
        raise GroupError(
            f"{function}: cp_group has {group.size} ranks, expected None or a group of one: sequences split over ranks "
            "(context parallelism) are not supported by this version"
        )
    return group is not None
