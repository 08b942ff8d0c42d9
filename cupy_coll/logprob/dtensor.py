"""Log-probabilities from logits that are a DTensor, or whose sequence a DTensor's mesh splits.

Positions are split over the mesh's "cp" dimension as DTensor's Shard(1) cuts them, contiguously; ``seq_index`` says
which position of the sequence each of them is.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from cupy_coll.context import resolve_group
from cupy_coll.device import owner_of
from cupy_coll.errors import ArgumentError, DTypeError, ShapeError
from cupy_coll.group import Group
from cupy_coll.logprob.autograd import VocabParallel, check_chunk_size, check_logits, check_target
from cupy_coll.logprob.sequences import from_parallel_logits_to_logprobs

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "dtensor_from_parallel_logits_to_logprobs",
    "get_logprobs_from_vocab_parallel_logits",
    "get_next_token_logprobs_from_logits",
]

CONTEXT_DIM, TENSOR_DIM = "cp", "tp"


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each next token, from this rank's part of the logits of a mesh.

    Args:
        vocab_parallel_logits: [B, S/CP, V/TP], this rank's columns, and positions by Shard(1) over "cp"; a DTensor
            stands for its local part.
        target: [B, S] the unshifted tokens (int64 or int32), the same on every rank: a Tensor, or a DTensor that is
            replicated or Shard(1) over "cp". Where its mesh has a dimension "cp" larger than 1 it is in the order of
            ``seq_index``.
        vocab_start_index, vocab_end_index: this rank's half-open range of the vocabulary.
        tp_group: a Group, a mode, a ProcessGroup or a mesh dimension.
        inference_only: save nothing; the result does not require grad.
        seq_index: int [S], a permutation: position i of the whole tensor holds position ``seq_index[i]`` of the
            sequence. Needed where the target's mesh has a dimension "cp" larger than 1.
        chunk_size: rows worked on at a time; changes no bit of a value.
        temperature: divides the logits.

    Returns:
        [B, S - 1] float32 (float64 for float64 logits) in the sequence's own order, on every rank: column i holds the
        log-probability of token i + 1. A position's gradient goes to the rank that holds it, once: nothing is summed
        over "cp". None on a rank outside ``tp_group``.

    Raises:
        DTypeError, ShapeError, ArgumentError: before anything is sent; as :meth:`DistributedLogprob.apply`.

    Communication: one all-gather over ``tp_group``; with CP one more of a number a position (and torch's own where the
    target is sharded). None in the backward.
    """
    function = "dtensor_from_parallel_logits_to_logprobs"
    logits = _local(vocab_parallel_logits)
    check_logits(function, logits)
    options = {
        "temperature": temperature,
        "inference_only": bool(inference_only),
        "chunk_size": None if chunk_size is None else check_chunk_size(function, chunk_size),
    }
    cp = _context_group(function, target)
    whole = _whole(target)
    check_target(function, whole, logits)
    if logits.dim() != 3 or whole.dim() != 2 or whole.shape[0] != logits.shape[0]:
        raise ShapeError(
            f"{function}: vocab_parallel_logits has shape {list(logits.shape)} and target {list(whole.shape)}, "
            "expected [B, S/CP, V/TP] and [B, S]"
        )
    positions = whole.shape[1]
    if cp is None:
        if logits.shape[1] != positions:
            raise ShapeError(
                f"{function}: target has {positions} positions, expected the {logits.shape[1]} of vocab_parallel_logits"
            )
        # The last position predicts nothing; -100 is not read and gets no gradient.
        next_tokens = torch.nn.functional.pad(whole[:, 1:], (0, min(1, positions)), value=-100)
        values = _logprob(function, logits, next_tokens, vocab_start_index, vocab_end_index, tp_group, options)
        return None if values is None else values[:, : max(positions - 1, 0)]  # type: ignore[return-value]
    order = _check_seq_index(function, seq_index, positions, whole.device)
    step = -(-positions // cp.size)  # as torch.chunk cuts
    mine = slice(min(cp.rank * step, positions), min((cp.rank + 1) * step, positions))
    if logits.shape[1] != mine.stop - mine.start:
        raise ShapeError(
            f"{function}: vocab_parallel_logits has {logits.shape[1]} positions, expected {mine.stop - mine.start}: "
            f"this rank's part of {positions} over {cp.size} context-parallel ranks"
        )
    place = torch.empty_like(order)
    place[order] = torch.arange(positions, device=order.device)  # where each position of the sequence is
    in_order = torch.nn.functional.pad(whole[:, place][:, 1:], (0, 1), value=-100)
    values = _logprob(
        function, logits, in_order[:, order][:, mine], vocab_start_index, vocab_end_index, tp_group, options
    )
    if values is None:
        return None  # type: ignore[return-value]
    return _GatherParts.apply(values, cp, step)[:, place][:, : max(positions - 1, 0)]


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    *,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probability of each next token, from logits that are a DTensor.

    Args:
        vocab_parallel_logits: DTensor [B, S, V] on a mesh with a dimension "tp", Shard(-1) there and replicated or
            Shard(1) over "cp"; uneven shards as DTensor cuts them.
        input_ids: [B, S] the unshifted tokens, a Tensor or a DTensor; as ``target`` of
            :func:`dtensor_from_parallel_logits_to_logprobs`.
        seq_index, chunk_size, temperature: as there.

    Returns:
        As there. Nothing is saved for the backward where grad is disabled.

    Raises:
        ArgumentError: the logits are no DTensor, their mesh has no dimension "tp", or they are not sharded over it in
            the last dimension; else as there.

    Communication: as there.
    """
    function = "get_logprobs_from_vocab_parallel_logits"
    logits = vocab_parallel_logits
    if not _is_dtensor(logits):
        raise ArgumentError(f"{function}: vocab_parallel_logits is a {type(logits).__name__}, expected a DTensor")
    names = logits.device_mesh.mesh_dim_names or ()
    if TENSOR_DIM not in names:
        raise ArgumentError(f"{function}: the mesh of vocab_parallel_logits has dimensions {names}, expected one 'tp'")
    placement = logits.placements[names.index(TENSOR_DIM)]
    size = logits.device_mesh.size(names.index(TENSOR_DIM))
    if not placement.is_shard(logits.dim() - 1) and not placement.is_shard(-1) and size > 1:
        raise ArgumentError(
            f"{function}: vocab_parallel_logits has placement {placement} over 'tp', expected Shard({logits.dim() - 1})"
        )
    if seq_index is not None and CONTEXT_DIM not in names:
        raise ArgumentError(f"{function}: seq_index is given, but the mesh {names} has no dimension 'cp'")
    vocabulary = logits.shape[-1]
    step = -(-vocabulary // size)  # as torch.chunk cuts
    rank = logits.device_mesh.get_local_rank(TENSOR_DIM)
    return dtensor_from_parallel_logits_to_logprobs(
        logits.to_local(),
        input_ids,
        min(rank * step, vocabulary),
        min((rank + 1) * step, vocabulary),
        logits.device_mesh.get_group(TENSOR_DIM),
        inference_only=not torch.is_grad_enabled(),
        seq_index=seq_index,
        chunk_size=chunk_size,
        temperature=temperature,
    )


def get_next_token_logprobs_from_logits(
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Any = None,
    context_parallel_group: Any = None,
    sampling_params: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Log-probability of each next token, from logits of any of three kinds.

    Args:
        input_ids: [B, S] the unshifted tokens.
        next_token_logits: with ``vocab_parallel_group`` [B, S/CP, V/TP], equal shards in rank order, and load-balanced
            positions; a DTensor as :func:`get_logprobs_from_vocab_parallel_logits` takes it; else [B, S, V].
        seq_index: for a DTensor.
        vocab_parallel_rank: the rank in ``vocab_parallel_group``; None: as the group says.
        vocab_parallel_group, context_parallel_group: a Group, a mode or a ProcessGroup; None: not split.
        sampling_params: None: top-k and top-p sampling are not in this version.
        chunk_size: rows worked on at a time; changes no bit of a value.

    Returns:
        [B, S - 1] float32 (float64 for float64 logits). None on a rank outside a group.

    Raises:
        ArgumentError: ``sampling_params`` is not None; ``vocab_parallel_rank`` is not this rank's; else as
            :func:`from_parallel_logits_to_logprobs`.

    Communication: that of :func:`from_parallel_logits_to_logprobs` or :func:`get_logprobs_from_vocab_parallel_logits`;
    none where the vocabulary is not split.
    """
    function = "get_next_token_logprobs_from_logits"
    if sampling_params is not None:
        raise ArgumentError(
            f"{function}: sampling_params is {sampling_params!r}, expected None: no top-k and top-p in this version"
        )
    if vocab_parallel_group is None:
        if _is_dtensor(next_token_logits):
            return get_logprobs_from_vocab_parallel_logits(next_token_logits, input_ids, seq_index, chunk_size)
        if context_parallel_group is not None:
            raise ArgumentError(f"{function}: context_parallel_group is given without vocab_parallel_group")
        check_logits(function, next_token_logits, "next_token_logits")
        return dtensor_from_parallel_logits_to_logprobs(
            next_token_logits, _whole(input_ids), 0, next_token_logits.shape[-1], _UNSPLIT, chunk_size=chunk_size
        )
    group = resolve_group(vocab_parallel_group, function)
    if group is None:
        return None  # type: ignore[return-value]
    if vocab_parallel_rank is not None and vocab_parallel_rank != group.rank:
        raise ArgumentError(
            f"{function}: vocab_parallel_rank is {vocab_parallel_rank!r}, expected {group.rank}, this rank's in "
            f"{group.name}"
        )
    logits = _local(next_token_logits)
    check_logits(function, logits, "next_token_logits")
    width = logits.shape[-1]
    return from_parallel_logits_to_logprobs(
        logits,
        _whole(input_ids),
        group.rank * width,
        (group.rank + 1) * width,
        group,
        cp_group=context_parallel_group,
        chunk_size=chunk_size,
    )


_UNSPLIT = object()
"""In place of a group: the vocabulary is not split."""


def _logprob(
    function: str, logits: Tensor, target: Tensor, start: int, end: int, tp_group: Any, options: dict[str, Any]
) -> Tensor | None:
    if tp_group is _UNSPLIT:
        return VocabParallel.logprob_unsplit(function, logits, target, **options)
    return VocabParallel.logprob(function, logits, target, start, end, tp_group, **options)


class _GatherParts(torch.autograd.Function):
    """Forward: the ranks' columns of [B, S], one all-gather. Backward: each rank's own, nothing is summed or sent."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group, step: int) -> Tensor:  # type: ignore[override]
        ctx.first, ctx.count = group.rank * step, values.shape[1]
        padded = torch.nn.functional.pad(values, (0, step - values.shape[1]))
        everybodys = values.new_empty((group.size, *padded.shape))
        group.transport_for(values).all_gather(everybodys, padded)
        return everybodys.movedim(0, 1).flatten(1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[:, ctx.first : ctx.first + ctx.count], None, None


def _context_group(function: str, target: Any) -> Group | None:
    """The group of the dimension "cp" of the target's mesh; None where there is none, or of size 1."""
    if not _is_dtensor(target):
        return None
    mesh = target.device_mesh
    names = mesh.mesh_dim_names or ()
    if CONTEXT_DIM not in names or mesh.size(names.index(CONTEXT_DIM)) == 1:
        return None
    return resolve_group(mesh.get_group(CONTEXT_DIM), function)


def _check_seq_index(function: str, seq_index: Any, positions: int, device: torch.device) -> Tensor:
    if seq_index is None:
        raise ArgumentError(f"{function}: seq_index is None, expected int [S]: the target's mesh has a dimension 'cp'")
    index = _whole(seq_index)
    if not isinstance(index, Tensor):
        raise ArgumentError(f"{function}: seq_index is a {type(index).__name__}, expected a torch.Tensor")
    if index.dtype not in (torch.int32, torch.int64):
        raise DTypeError(f"{function}: seq_index has dtype {index.dtype}, expected int64 or int32")
    if list(index.shape) != [positions]:
        raise ShapeError(f"{function}: seq_index has shape {list(index.shape)}, expected [{positions}]")
    if owner_of(index) is None and not torch.equal(index.sort().values, torch.arange(positions, dtype=index.dtype)):
        raise ArgumentError(f"{function}: seq_index is {index.tolist()}, expected each of 0 to {positions - 1} once")
    return index.to(device=device, dtype=torch.int64)


def _is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether it is one, without the time to import their module where nobody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def _whole(tensor: Any) -> Any:
    """A DTensor's whole value; torch's own communication, and none where it is replicated."""
    if not _is_dtensor(tensor):
        return tensor
    if all(placement.is_replicate() for placement in tensor.placements):
        return tensor.to_local()
    return tensor.full_tensor()
