"""Log-probabilities and entropy from vocabulary-sharded logits: the autograd functions.

One all-gather in the forward, nothing in the backward. Both directions read the logits once; the forward
writes nothing of the vocabulary's size, the backward only the gradient. See docs/logprob.md for what is
promised.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cupy_coll.context import resolve_tensor_parallel
from cupy_coll.errors import ArgumentError, DTypeError, ShapeError
from cupy_coll.group import Group
from cupy_coll.logprob import launch
from cupy_coll.logprob.memory import empty_gradient
from cupy_coll.logprob.partials import (
    MessageLayout,
    Shard,
    Summary,
    compute_dtype,
    merge_messages,
    shard_message,
)
from cupy_coll.logprob.sweeps import Upstream, write_gradient, write_log_softmax

__all__ = [
    "ChunkedDistributedEntropy",
    "ChunkedDistributedGatherLogprob",
    "ChunkedDistributedLogprob",
    "DistributedLogprob",
    "_compute_distributed_log_softmax",
    "vocab_parallel_logprob_and_entropy",
]

_LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TARGET_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Call:
    """One call's arguments besides the tensors, checked."""

    function: str
    group: Group | None  # None: the vocabulary is not split
    shard: Shard
    entropy: bool = False
    inference_only: bool = False
    inplace_backward: bool = False
    chunk_size: int | None = None
    scale: float = 1.0  # 1 / temperature

    def gather(self, logits: Tensor, target: Tensor | None, local_target: Tensor | None) -> Summary:
        """Summarise this rank's logits, gather everybody's summaries (one message), merge them."""
        rows = math.prod(logits.shape[:-1])
        targets = 0 if target is None else 1 if target.dim() < logits.dim() else target.shape[-1]
        layout = MessageLayout(self.shard.ranks, rows, self.entropy, compute_dtype(logits.dtype), targets)
        device = launch.device_with_kernels(logits)
        if device is not None:
            message = launch.softmax_partials(device, logits, local_target, self.shard, layout, self.scale)
            return launch.merge_partials(device, gathered(self.group, message), target, layout, self.scale)
        message = shard_message(logits, local_target, self.shard, layout, scale=self.scale, chunk_size=self.chunk_size)
        return merge_messages(self.function, gathered(self.group, message), target, layout, scale=self.scale)

    def write_gradient(
        self,
        result: Tensor,
        logits: Tensor,
        maximum: Tensor,
        log_sum: Tensor,
        entropy: Tensor | None,
        upstream: Upstream,
    ) -> None:
        """``sweeps.write_gradient`` of this call, by the kernels where the logits are on a device that has them."""
        of_rows = maximum, log_sum, entropy, upstream, self.shard.width, self.scale
        device = launch.device_with_kernels(logits)
        if device is None:
            write_gradient(result, logits, *of_rows, self.chunk_size)
        else:
            launch.logprob_backward(device, result, logits, *of_rows)

    def write_log_softmax(self, result: Tensor, logits: Tensor, summary: Summary) -> None:
        """Write this shard's part of the log-softmax over the whole vocabulary into ``result`` [..., columns]."""
        device = launch.device_with_kernels(logits)
        if device is None:
            write_log_softmax(result, logits, summary, self.scale)
        else:
            launch.log_softmax(device, result, logits, summary, self.scale)


def gathered(group: Group | None, message: Tensor) -> Tensor:
    """All members' messages [n], one after another; the message itself where there is no group."""
    if group is None:
        return message
    everybodys = torch.empty(group.size * message.numel(), dtype=message.dtype, device=message.device)
    group.transport_for(message).all_gather(everybodys, message)
    return everybodys


def check_logits(function: str, logits: Any, name: str = "vocab_parallel_logits") -> None:
    if not isinstance(logits, Tensor):
        raise ArgumentError(f"{function}: {name} is a {type(logits).__name__}, expected a torch.Tensor")
    if logits.layout != torch.strided:
        raise ArgumentError(f"{function}: {name} is a {logits.layout} tensor, expected a dense one")
    if logits.dtype not in _LOGITS_DTYPES:
        raise DTypeError(f"{function}: {name} has dtype {logits.dtype}, expected float16, bfloat16, float32 or float64")
    if logits.dim() == 0:
        raise ShapeError(f"{function}: {name} is a scalar, expected [..., vocabulary / ranks]")


def check_target(function: str, target: Any, logits: Tensor, name: str = "target") -> None:
    if not isinstance(target, Tensor):
        raise ArgumentError(f"{function}: {name} is a {type(target).__name__}, expected a torch.Tensor")
    if target.dtype not in _TARGET_DTYPES:
        raise DTypeError(f"{function}: {name} has dtype {target.dtype}, expected int64 or int32")
    if target.device != logits.device:
        raise ArgumentError(
            f"{function}: {name} is on {target.device}, expected {logits.device} as vocab_parallel_logits"
        )


def _check_aligned(function: str, target: Tensor, logits: Tensor) -> None:
    check_target(function, target, logits)
    if target.shape != logits.shape[:-1]:
        raise ShapeError(
            f"{function}: target has shape {list(target.shape)}, expected {list(logits.shape[:-1])} "
            f"(vocab_parallel_logits is {list(logits.shape)})"
        )


def check_indices(function: str, indices: Any, logits: Tensor) -> None:
    """``global_indices`` [..., K] for logits [..., columns]."""
    check_target(function, indices, logits, "global_indices")
    if indices.dim() != logits.dim() or indices.shape[:-1] != logits.shape[:-1]:
        raise ShapeError(
            f"{function}: global_indices has shape {list(indices.shape)}, expected {[*logits.shape[:-1], 'K']} "
            f"(vocab_parallel_logits is {list(logits.shape)})"
        )


def check_integer(function: str, name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{function}: {name} is {value!r}, expected an integer") from None


def check_chunk_size(function: str, chunk_size: Any) -> int:
    size = check_integer(function, "chunk_size", chunk_size)
    if size < 1:
        raise ArgumentError(f"{function}: chunk_size is {size}, expected at least 1")
    return size


def check_temperature(function: str, temperature: Any) -> float:
    """1 / temperature."""
    try:
        value = float(temperature)
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ArgumentError(f"{function}: temperature is {temperature!r}, expected a finite number above 0")
    return 1.0 / value


class _Once(torch.autograd.Function):
    """Forward: the gradient as it is. Backward: an error, for there is no second derivative.

    torch's ``once_differentiable`` raises only where the incoming gradients require grad; elsewhere a second
    derivative would silently lack what it gets from here.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, logits: Tensor, *upstream: Tensor | None) -> Tensor:  # type: ignore[override]
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "log-probabilities and entropies of vocabulary-parallel logits can be differentiated once, not twice"
        )


class VocabParallel(torch.autograd.Function):
    """Forward: log-probability of ``target`` (and entropy) of each row, one all-gather.

    Backward: this rank's gradient from its logits and two (three) numbers a row, no communication.
    """

    @classmethod
    def logprob(
        cls,
        function: str,
        logits: Tensor,
        target: Tensor,
        start: Any,
        end: Any,
        group: Any,
        *,
        temperature: float = 1.0,
        **options: Any,
    ) -> Any:
        """Check what one rank can see, in the name of ``function``, and apply; None on a rank outside the group.

        ``options`` are fields of a call: inference_only, chunk_size, entropy (a pair is returned), inplace_backward.
        """
        check_logits(function, logits)
        _check_aligned(function, target, logits)
        call = cls.prepare(function, logits, target, start, end, group, temperature=temperature, **options)
        return None if call is None else super().apply(logits, target, call)

    @classmethod
    def logprob_unsplit(
        cls, function: str, logits: Tensor, target: Tensor, *, temperature: float = 1.0, **options: Any
    ) -> Any:
        """As :meth:`logprob` where this rank has the whole vocabulary: no group, no communication."""
        check_logits(function, logits)
        _check_aligned(function, target, logits)
        shard = Shard(0, 1, logits.shape[-1], 0, logits.shape[-1])
        call = Call(function, None, shard, scale=check_temperature(function, temperature), **options)
        return super().apply(logits, target, call)

    @staticmethod
    def prepare(
        function: str,
        logits: Tensor,
        target: Tensor,
        start: Any,
        end: Any,
        group: Any,
        *,
        temperature: float = 1.0,
        **options: Any,
    ) -> Call | None:
        """Check what one rank can see; the call to apply to ``(logits, target)``, None on a rank outside the group."""
        check_logits(function, logits)
        check_target(function, target, logits)
        start = check_integer(function, "vocab_start_index", start)
        end = check_integer(function, "vocab_end_index", end)
        scale = check_temperature(function, temperature)
        members = resolve_tensor_parallel(group, function)
        if members is None:
            return None
        members.transport_for(logits)
        shard = Shard(members.rank, members.size, logits.shape[-1], start, end)
        return Call(function, members, shard, scale=scale, **options)

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, logits: Tensor, target: Tensor | None, call: Call
    ) -> Tensor | tuple[Tensor, ...]:
        local_target = None if target is None else call.shard.local_target(target)
        summary = call.gather(logits, target, local_target)
        found = []
        if target is not None and summary.logprob is not None:
            found.append(summary.logprob.view(target.shape))
        if summary.entropy is not None:
            found.append(summary.entropy.view(logits.shape[:-1]))
        ctx.set_materialize_grads(False)
        if call.inference_only:
            ctx.mark_non_differentiable(*found)
        elif ctx.needs_input_grad[0]:
            ctx.call = call
            ctx.save_for_backward(logits, local_target, summary.maximum, summary.log_sum, summary.entropy)
        return found[0] if len(found) == 1 else tuple(found)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, None, None]:  # type: ignore[override]
        if all(g is None for g in upstream):
            return None, None, None
        call: Call = ctx.call
        logits, local_target, maximum, log_sum, entropy = ctx.saved_tensors
        by_output = iter(upstream)
        g_logprob = None if local_target is None else next(by_output)
        g_entropy = next(by_output) if call.entropy else None
        with torch.no_grad():
            result = logits.detach() if call.inplace_backward else empty_gradient(logits)
            call.write_gradient(
                result,
                logits,
                maximum.view(logits.shape[:-1]),
                log_sum.view(logits.shape[:-1]),
                None if entropy is None else entropy.view(logits.shape[:-1]),
                Upstream(g_logprob, g_entropy, local_target),
            )
        if torch.is_grad_enabled():  # create_graph
            result = _Once.apply(result, logits, *upstream)
        return result, None, None


class DistributedLogprob(VocabParallel):
    """Log-probability of each row's target, from logits whose vocabulary is split over a group.

    Forward: one all-gather. Backward: none; ``g * (1[target] - softmax)`` in the logits' dtype, rounded once.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Any,
        inference_only: bool = False,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """Log-probability of each row's target under the softmax over the whole vocabulary.

        Args:
            vocab_parallel_logits: [..., V/TP], this rank's columns; float16, bfloat16, float32 or float64;
                any layout; not modified. Columns past ``vocab_end_index - vocab_start_index`` are padding:
                they count for nothing and get a zero gradient.
            target: [...] global token ids (int64 or int32), aligned with the logits, the same on every rank.
                -100 gives 0 and a zero gradient.
            vocab_start_index, vocab_end_index: this rank's half-open range; the ranges of the group's ranks
                follow each other from 0 without gaps; widths may differ.
            group: the tensor-parallel group: a Group, a mode or a ProcessGroup.
            inference_only: save nothing; the result does not require grad.
            temperature: divides the logits.

        Returns:
            [...] float32 (float64 for float64 logits), the same bits on every rank; None on a rank outside
            the group.

        Raises:
            ArgumentError: on every rank: a target that nobody owns and that is not -100; a range that does
                not fit its columns. On the rank that sees it, before anything is sent: DTypeError,
                ShapeError, temperature.
            MismatchError: on every rank: ranges with a gap, an overlap or in a wrong order.

        Communication: one all-gather of 2 * 16 / TP + 1 numbers a row in the forward, none in the backward.

        Source: the merge of (max, sum) pairs is that of the online softmax (Milakov and Gimelshein, 2018).
        """
        return cls.logprob(
            "DistributedLogprob",
            vocab_parallel_logits,
            target,
            vocab_start_index,
            vocab_end_index,
            group,
            temperature=temperature,
            inference_only=bool(inference_only),
        )


class ChunkedDistributedLogprob(VocabParallel):
    """:class:`DistributedLogprob`, working on at most ``chunk_size`` rows at a time.

    Forward: one all-gather, whatever the chunk. Backward: none.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
        *,
        temperature: float = 1.0,
    ) -> Tensor:
        """As :meth:`DistributedLogprob.apply`, with bounded scratch memory; no bit of a value changes.

        Args:
            chunk_size: rows worked on at a time, at least 1. The others are those of DistributedLogprob.

        Returns:
            As DistributedLogprob.

        Raises:
            As DistributedLogprob, and ArgumentError where ``chunk_size`` is below 1, before anything is sent.

        Communication: as DistributedLogprob: one message for all chunks.
        """
        function = "ChunkedDistributedLogprob"
        return cls.logprob(
            function,
            vocab_parallel_logits,
            target,
            vocab_start_index,
            vocab_end_index,
            tp_group,
            temperature=temperature,
            inference_only=bool(inference_only),
            chunk_size=check_chunk_size(function, chunk_size),
        )


class ChunkedDistributedGatherLogprob(VocabParallel):
    """Log-probabilities of several tokens of each row, from logits whose vocabulary is split over a group.

    Forward: one all-gather, whatever the chunk and however many tokens. Backward: none.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls,
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """Log-probability of each of a row's tokens under the softmax over the whole vocabulary.

        Args:
            vocab_parallel_logits: [B, S, V/TP] (any [..., V/TP]), as :meth:`DistributedLogprob.apply`.
            global_indices: [B, S, K] ([..., K]) global token ids (int64 or int32), the same on every rank; a row may
                name a token twice. -100 gives 0 and a zero gradient.
            chunk_size: rows worked on at a time; changes no bit of a value.

        Returns:
            [B, S, K] ([..., K]) float32 (float64 for float64 logits), the same bits on every rank; None on a rank
            outside the group.

        Raises:
            As :meth:`ChunkedDistributedLogprob.apply`.

        Communication: one all-gather of 2 * 16 / TP + K numbers a row in the forward, none in the backward.
        """
        function = "ChunkedDistributedGatherLogprob"
        size = check_chunk_size(function, chunk_size)
        check_logits(function, vocab_parallel_logits)
        check_indices(function, global_indices, vocab_parallel_logits)
        call = cls.prepare(
            function,
            vocab_parallel_logits,
            global_indices,
            vocab_start_index,
            vocab_end_index,
            tp_group,
            inference_only=bool(inference_only),
            chunk_size=size,
        )
        return None if call is None else super().apply(vocab_parallel_logits, global_indices, call)  # type: ignore[return-value]


class ChunkedDistributedEntropy(VocabParallel):
    """Sum of p * log p over the whole vocabulary (the negative entropy) of each row.

    Forward: one all-gather, whatever the chunk. Backward: none; ``g * p * (log p - sum p log p)``.
    """

    @classmethod
    def apply(  # type: ignore[override]
        cls, vocab_parallel_logits: Tensor, chunk_size: int, tp_group: Any, inference_only: bool = False
    ) -> Tensor:
        """Sum of p * log p of each row, where 0 * log 0 is 0, also in the gradient.

        Args:
            vocab_parallel_logits: [..., V/TP], this rank's columns, in rank order; widths may differ; not
                modified.
            chunk_size: rows worked on at a time; changes no bit of a value.
            tp_group: the tensor-parallel group: a Group, a mode or a ProcessGroup.
            inference_only: save nothing; the result does not require grad.

        Returns:
            [...] float32 (float64 for float64 logits), the same bits on every rank; None on a rank outside
            the group.

        Raises:
            ArgumentError: ``chunk_size`` below 1, or (DTypeError, ShapeError) unfit logits, before anything
            is sent.

        Communication: one all-gather of 3 * 16 / TP numbers a row in the forward, none in the backward.
        """
        function = "ChunkedDistributedEntropy"
        size = check_chunk_size(function, chunk_size)
        check_logits(function, vocab_parallel_logits)
        group = resolve_tensor_parallel(tp_group, function)
        if group is None:
            return None  # type: ignore[return-value]
        shard = Shard(group.rank, group.size, vocab_parallel_logits.shape[-1])
        call = Call(function, group, shard, entropy=True, inference_only=bool(inference_only), chunk_size=size)
        return -super().apply(vocab_parallel_logits, None, call)


def vocab_parallel_logprob_and_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    group: Any,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    temperature: float = 1.0,
    inplace_backward: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target, and each row's entropy, both differentiable, in one message.

    Args:
        vocab_parallel_logits, target, group, vocab_start_index, vocab_end_index: as
            :meth:`DistributedLogprob.apply`. A row whose target is -100 has an entropy like any other.
        temperature: divides the logits; log-probability and entropy are those of the divided logits.
        inplace_backward: write the gradient into the logits' memory. Their values are gone after the
            backward: nothing else may need them (autograd raises where something else saved them).

    Returns:
        (logprob, entropy), each [...] float32 (float64 for float64 logits), the same bits on every rank; in
        the entropy 0 * log 0 is 0. (None, None) on a rank outside the group.

    Raises:
        As :meth:`DistributedLogprob.apply`; ShapeError also where ``inplace_backward`` meets logits whose
        elements share memory (expanded).

    Communication: one all-gather of 3 * 16 / TP + 1 numbers a row in the forward, none in the backward.
    """
    function = "vocab_parallel_logprob_and_entropy"
    if inplace_backward and torch._debug_has_internal_overlap(vocab_parallel_logits) == 1:
        raise ShapeError(
            f"{function}: vocab_parallel_logits {list(vocab_parallel_logits.shape)} with strides "
            f"{list(vocab_parallel_logits.stride())} share memory, expected distinct elements with inplace_backward"
        )
    found = VocabParallel.logprob(
        function,
        vocab_parallel_logits,
        target,
        vocab_start_index,
        vocab_end_index,
        group,
        temperature=temperature,
        entropy=True,
        inplace_backward=bool(inplace_backward),
    )
    return (None, None) if found is None else found  # type: ignore[return-value]


@torch.no_grad()
def _compute_distributed_log_softmax(vocab_parallel_logits: Tensor, group: Any) -> Tensor:
    """This rank's columns of the log-softmax over the whole vocabulary.

    Args:
        vocab_parallel_logits: [..., V/TP], this rank's columns, in rank order; widths may differ; not
            modified.
        group: the tensor-parallel group: a Group, a mode or a ProcessGroup.

    Returns:
        [..., V/TP] in the logits' dtype, computed in float32 (float64) and rounded once, without gradient.
        None on a rank outside the group.

    Raises:
        DTypeError, ShapeError: logits that are not floating point or have no dimension.

    Communication: one all-gather of 2 * 16 / TP numbers a row.
    """
    function = "_compute_distributed_log_softmax"
    check_logits(function, vocab_parallel_logits)
    members = resolve_tensor_parallel(group, function)
    if members is None:
        return None  # type: ignore[return-value]
    logits = vocab_parallel_logits.detach()
    shard = Shard(members.rank, members.size, logits.shape[-1])
    call = Call(function, members, shard)
    result = torch.empty_like(logits)
    call.write_log_softmax(result, logits, call.gather(logits, None, None))
    return result
