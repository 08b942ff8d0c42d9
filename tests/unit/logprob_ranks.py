"""Vocabulary-parallel calls of several ranks in one process, and the unsharded float64 reference.

Each rank is a thread; their all-gather is a barrier. Values are compared with ``torch.log_softmax`` in float64.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from cupy_coll.group import Group
from cupy_coll.logprob import DistributedLogprob

TIME_LIMIT = 20.0
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class ThreadTransport:
    """The operations that log-probabilities use: all-gather, and over context-parallel ranks reduce-scatter."""

    def __init__(self, group: ThreadGroup) -> None:
        self.group = group

    def all_gather(self, output: Tensor, source: Tensor) -> None:
        self._exchange(source, lambda sources: output.view(-1).copy_(torch.cat(sources)))

    def reduce_scatter(self, output: Tensor, source: Tensor, op: Any) -> None:
        assert op == ReduceOp.SUM
        shares = (self.group.size, output.numel())
        self._exchange(
            source, lambda sources: output.view(-1).copy_(sum(s.view(shares)[self.group.rank] for s in sources))
        )

    def _exchange(self, source: Tensor, combine: Callable[[list[Tensor]], Any]) -> None:
        group = self.group
        group.calls += 1
        group.sent += source.numel()
        group.mailbox[group.rank] = source.detach().reshape(-1)
        group.barrier.wait(TIME_LIMIT)
        combine(list(group.mailbox))
        group.barrier.wait(TIME_LIMIT)


class ThreadGroup(Group):
    """What the log-probabilities need of a group; counts calls and elements sent."""

    def __init__(self, rank: int, size: int, mailbox: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.mailbox, self.barrier = rank, size, mailbox, barrier
        self.ranks = tuple(range(size))
        self.name = f"threads {list(self.ranks)}"
        self.calls = self.sent = 0
        self._closed = False

    def transport_for(self, tensor: Tensor) -> Any:
        return ThreadTransport(self)


def groups_of(count: int, size: int) -> list[list[ThreadGroup]]:
    """``count`` groups of ``size`` members each."""
    made = [([None] * size, threading.Barrier(size)) for _ in range(count)]
    return [[ThreadGroup(rank, size, mailbox, barrier) for rank in range(size)] for mailbox, barrier in made]


def on_ranks(size: int, call: Callable[[ThreadGroup], Any], errors: bool = False) -> list[Any]:
    """``call(group)`` on each of ``size`` ranks; their results in rank order (or the exceptions, with ``errors``)."""
    members = groups_of(1, size)[0]
    return in_threads([lambda group=group: call(group) for group in members], errors)


def on_mesh(tp: int, cp: int, call: Callable[[ThreadGroup, ThreadGroup], Any], errors: bool = False) -> list[list[Any]]:
    """``call(tp_group, cp_group)`` on each of cp x tp ranks; [cp][tp] results."""
    rows, columns = groups_of(cp, tp), groups_of(tp, cp)
    results = in_threads(
        [lambda c=c, t=t: call(rows[c][t], columns[t][c]) for c in range(cp) for t in range(tp)], errors
    )
    return [results[c * tp : (c + 1) * tp] for c in range(cp)]


def in_threads(calls: Sequence[Callable[[], Any]], errors: bool) -> list[Any]:
    """The calls' results, all running at once."""
    results: list[Any] = [TimeoutError("the rank did not end")] * len(calls)

    def work(rank: int) -> None:
        try:
            results[rank] = calls[rank]()
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT)
    for result in results:
        if isinstance(result, Exception) and not errors:
            raise result
    return results


def ranges(vocab: int, size: int, widths: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """[start, end) of each rank: equal shares, or these widths."""
    widths = [vocab // size] * size if widths is None else list(widths)
    assert (len(widths), sum(widths)) == (size, vocab)
    ends = [sum(widths[: i + 1]) for i in range(size)]
    return [(end - width, end) for end, width in zip(ends, widths, strict=True)]


@dataclass
class Sharded:
    """What the ranks of one call got."""

    values: list[Any]  # by rank
    shards: list[Tensor]  # leaves, by rank
    groups: list[ThreadGroup]

    @property
    def value(self) -> Tensor:
        """The value, the same bits on every rank."""
        assert same_bits(*self.values)
        return self.values[0]

    def gradient(self, upstream: Tensor) -> Tensor:
        """Backward on every rank; the ranks' gradients side by side."""
        for value, shard in zip(self.values, self.shards, strict=True):
            value.backward(upstream.to(value.dtype))
            assert shard.grad is not None
            assert shard.grad.dtype == shard.dtype
        return torch.cat([shard.grad for shard in self.shards], -1)


def sharded(
    logits: Tensor,
    size: int,
    call: Callable[[Tensor, int, int, ThreadGroup], Any],
    widths: Sequence[int] | None = None,
) -> Sharded:
    """``call(shard, start, end, group)`` on each rank, with the shard a leaf of its own that requires grad."""
    bounds = ranges(logits.shape[-1], size, widths)
    shards = [logits[..., start:end].clone().requires_grad_() for start, end in bounds]
    found = on_ranks(size, lambda group: (call(shards[group.rank], *bounds[group.rank], group), group))
    return Sharded([value for value, _ in found], shards, [group for _, group in found])


def logprob(logits: Tensor, target: Tensor, size: int, widths: Sequence[int] | None = None, **options: Any) -> Sharded:
    """DistributedLogprob of logits that are split over ``size`` ranks."""
    return sharded(
        logits,
        size,
        lambda shard, start, end, group: DistributedLogprob.apply(shard, target, start, end, group, **options),
        widths,
    )


def context_order(lengths: Sequence[int], cp: int) -> list[list[int]]:
    """The positions that each context-parallel rank holds of sequences of these lengths, one sequence at a time."""
    order: list[list[int]] = [[] for _ in range(cp)]
    first = 0
    for length in lengths:
        positions = range(first, first + length)
        part = length // (2 * cp)
        parts = [positions[i * part : (i + 1) * part] for i in range(2 * cp)]
        for rank in range(cp):
            order[rank] += positions if cp == 1 else [*parts[rank], *parts[2 * cp - 1 - rank]]
        first += length
    return order


@dataclass
class Meshed:
    """What the ranks of one call on a mesh got."""

    values: list[Any]
    shards: list[Tensor]
    tp_groups: list[ThreadGroup]
    cp_groups: list[ThreadGroup]
    places: list[tuple[list[int], int, int]]  # positions, first and last column + 1 of each shard
    shape: torch.Size

    @property
    def value(self) -> Tensor:
        assert same_bits(*self.values)
        return self.values[0]

    def gradient(self, upstream: Tensor) -> Tensor:
        """Backward on every rank with the same gradient; what the ranks got, in the logits' order."""
        in_threads([lambda value=value: value.backward(upstream.to(value.dtype)) for value in self.values], False)
        whole = torch.full(self.shape, float("nan"), dtype=self.shards[0].dtype)
        for shard, (positions, start, end) in zip(self.shards, self.places, strict=True):
            assert shard.grad is not None
            whole[:, positions, start:end] = shard.grad
        return whole

    @property
    def calls(self) -> tuple[set[int], set[int]]:
        """How many messages the ranks sent over tensor-parallel and over context-parallel groups."""
        return {group.calls for group in self.tp_groups}, {group.calls for group in self.cp_groups}


def meshed(logits: Tensor, tp: int, cp: int, call: Callable[..., Any], lengths: Sequence[int] | None = None) -> Meshed:
    """``call(shard, start, end, tp_group, cp_group)`` on each rank of a mesh.

    ``logits`` [B, S, V] are split by columns over tp and by positions over cp; ``lengths`` are those of packed
    sequences, None: one of S.
    """
    order = context_order([logits.shape[1]] if lengths is None else lengths, cp)
    bounds = ranges(logits.shape[-1], tp, None if logits.shape[-1] % tp == 0 else uneven(logits.shape[-1], tp))
    places = [(positions, *bound) for positions in order for bound in bounds]
    shards = [logits[:, p, a:b].clone().requires_grad_() for p, a, b in places]

    def work(tp_group: ThreadGroup, cp_group: ThreadGroup) -> Any:
        index = cp_group.rank * tp + tp_group.rank
        return call(shards[index], *places[index][1:], tp_group, cp_group), tp_group, cp_group

    found = [one for row in on_mesh(tp, cp, work) for one in row]
    values, tp_groups, cp_groups = zip(*found, strict=True)
    return Meshed(list(values), shards, list(tp_groups), list(cp_groups), places, logits.shape)


def uneven(vocab: int, size: int) -> list[int]:
    """Widths that differ."""
    return [vocab // size + (1 if rank < vocab % size else 0) for rank in range(size)]


@dataclass
class Reference:
    """Unsharded, in float64."""

    logprob: Tensor
    entropy: Tensor
    logits: Tensor

    def gradient(self, logprob: Tensor | None = None, entropy: Tensor | None = None) -> Tensor:
        """Of sum(logprob * g + entropy * h)."""
        total = self.logits.sum() * 0
        if logprob is not None:
            total = total + (self.logprob * logprob.double()).sum()
        if entropy is not None:
            total = total + (self.entropy * entropy.double()).sum()
        return torch.autograd.grad(total, self.logits, retain_graph=True)[0]


def reference(logits: Tensor, target: Tensor, temperature: float = 1.0) -> Reference:
    """Log-probability (0 for a target of -100) and entropy (0 * log 0 = 0) of float64 log_softmax."""
    wide = logits.detach().double().requires_grad_()
    logs = torch.log_softmax(wide / temperature, -1)
    picked = logs.gather(-1, target.clamp(min=0).long().unsqueeze(-1)).squeeze(-1)
    terms = torch.where(logs == float("-inf"), 0.0, logs) * logs.exp()
    return Reference(torch.where(target == -100, 0.0, picked), -terms.sum(-1), wide)


def within_tolerance(actual: Tensor, expected: Tensor) -> bool:
    """1e-5 relative plus 1e-6 * max(1, |expected|); infinities and NaN where expected."""
    finite = expected.isfinite()
    if not torch.equal(actual[~finite].double().nan_to_num(9.9), expected[~finite].nan_to_num(9.9)):
        return False
    error = (actual.double() - expected)[finite].abs()
    size = expected[finite].abs()
    return bool((error <= 1e-5 * size + 1e-6 * size.clamp(min=1)).all())


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that -0 and NaN compare as what they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(*tensors: Tensor) -> bool:
    return all(t.dtype == tensors[0].dtype and torch.equal(bits(tensors[0]), bits(t)) for t in tensors)
