"""The second read of the logits, when all shards' maxima and sums are known: log-softmax, and the gradient.

Both go block by block and write each result once, straight to where it belongs, rounded once; nothing of the
vocabulary's size is allocated but that result. They are elementwise: the bits do not depend on how they are
cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from cupy_coll.logprob.partials import IGNORED, LOWEST, SUBTILE_COLUMNS, Summary
from cupy_coll.logprob.rows import Rows, RowSelector, block_elements, row_blocks

__all__ = [
    "Upstream",
    "write_gradient",
    "write_log_softmax",
    "write_log_softmax_gradient",
    "write_soft_target_gradient",
]


@torch.inference_mode()  # views of blocks cost less where autograd does not watch them
def _sweep(
    rows: Rows,
    source: Tensor,
    result: Tensor,
    dtype: torch.dtype,
    compute: Callable[[RowSelector, Tensor, Tensor], None],
    active: Tensor | None = None,
    chunk_size: int | None = None,
) -> None:
    """Call ``compute(rows, x, out)`` for every block of ``source``, and store each ``out``.

    ``x`` is the block as it is, ``out`` has dtype ``dtype`` and may be ``x`` itself (in place). Rows that are
    not active (bool [rows in memory order]) are skipped.
    """
    width = source.shape[-1]
    columns = min(max(width, 1), SUBTILE_COLUMNS)
    step = min(block_elements(source.device) // columns, chunk_size or rows.count or 1)
    buffer = torch.empty(min(step, rows.count) * columns, dtype=dtype, device=source.device)
    for first, (x_run, out_run) in rows.runs(source, result):
        count = x_run.shape[0]
        blocks = list(row_blocks(count, step, None if active is None else active[first : first + count]))
        for column in range(0, width, columns):
            x_strip, out_strip = x_run[:, column : column + columns], out_run[:, column : column + columns]
            for block in blocks:
                is_view = isinstance(block, slice)
                at = slice(first + block.start, first + block.stop) if isinstance(block, slice) else first + block
                x = x_strip[block]
                if is_view and result.dtype == dtype:  # straight into the result
                    compute(at, x, out_strip[block])
                    continue
                out = buffer[: x.numel()].view(x.shape)
                compute(at, x, out)
                out_strip[block] = out if is_view else out.to(result.dtype)


def _shift(x: Tensor, maximum: Tensor, scale: float, out: Tensor) -> Tensor:
    """(x - maximum) * scale into ``out``; ``maximum`` is [rows, 1]."""
    if x.dtype == out.dtype:
        torch.sub(x, maximum, out=out)
    else:
        out.copy_(x).sub_(maximum)
    return out if scale == 1.0 else out.mul_(scale)


def write_log_softmax(result: Tensor, logits: Tensor, summary: Summary, scale: float = 1.0) -> None:
    """Write this shard's part of the log-softmax over the whole vocabulary into ``result`` [..., columns]."""
    rows = Rows(logits)
    maximum, log_sum = (
        rows.flatten(v.view(logits.shape[:-1])).unsqueeze(-1) for v in (summary.maximum, summary.log_sum)
    )

    def compute(at: RowSelector, x: Tensor, out: Tensor) -> None:
        _shift(x, maximum[at], scale, out).sub_(log_sum[at])

    _sweep(rows, logits, result, maximum.dtype, compute)


@dataclass(frozen=True)
class Upstream:
    """Incoming gradients, each [...] or None for zero, and what they belong to."""

    logprob: Tensor | None  # [...], or [..., targets] where a row has several
    entropy: Tensor | None
    local_target: Tensor | None  # of the same shape, as Shard.local_target gives it; None where there is no target


def write_log_softmax_gradient(
    result: Tensor,
    logits: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    upstream: Tensor,
    total: Tensor,
    scale: float,
) -> None:
    """Write ``scale * (g - p * total)``, the gradient of this shard's part of the log-softmax, into ``result``.

    Args:
        upstream: g, [..., columns].
        total: the sum of g over the whole vocabulary, as ``maximum`` and ``log_sum`` [...].
    """
    rows = Rows(logits)
    maximum, log_sum, total = (rows.flatten(v).unsqueeze(-1) for v in (maximum, log_sum, total))
    for at, (x, g, out) in _blocks(rows, logits, upstream, result):
        d = torch.empty(x.shape, dtype=maximum.dtype, device=x.device)
        p = _shift(x, maximum[at], scale, d).sub_(log_sum[at]).exp_()
        out.copy_(p.mul_(total[at]).neg_().add_(g).mul_(scale))


def write_soft_target_gradient(
    result: Tensor, upstream: Tensor, sides: tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
) -> None:
    """Write ``g * (q - p)`` into ``result`` for g [...] and two softmaxes, each by its logits, maximum and log sum."""
    rows = Rows(result)
    g = rows.flatten(upstream).unsqueeze(-1)
    (student, *of_student), (teacher, *of_teacher) = sides
    flat = [[rows.flatten(v).unsqueeze(-1) for v in of] for of in (of_student, of_teacher)]
    for at, (x, y, out) in _blocks(rows, student, teacher, result):
        q, p = (
            _shift(z, maximum[at], 1.0, torch.empty(z.shape, dtype=g.dtype, device=z.device)).sub_(log_sum[at]).exp_()
            for z, (maximum, log_sum) in zip((x, y), flat, strict=True)
        )
        out.copy_(q.sub_(p).mul_(g[at]))


def _blocks(rows: Rows, *tensors: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Cut tensors [..., columns] into blocks: the rows in memory order, and a view of each."""
    width = tensors[0].shape[-1]
    columns = min(max(width, 1), SUBTILE_COLUMNS)
    for first, runs in rows.runs(*tensors):
        for block in row_blocks(runs[0].shape[0], max(1, block_elements(tensors[0].device) // columns)):
            assert isinstance(block, slice), "all rows are active"
            at = slice(first + block.start, first + block.stop)
            for column in range(0, width, columns):
                yield at, [run[block, column : column + columns] for run in runs]


def write_gradient(
    result: Tensor,
    logits: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    upstream: Upstream,
    width: int,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> None:
    """Write the gradient with respect to the logits [..., columns] into ``result``, which may be ``logits``
    itself.

    With p = exp((x - maximum) * scale - log_sum):
    ``scale * (g * 1[target] - p * (g + h * (log p + entropy)))`` for g, h the gradients of log-probability
    and entropy. A row whose incoming gradients are all zero is written without being read, also where it
    holds NaN.

    Args:
        result: written; columns past ``width`` get zeros. Its dtype is the logits'.
        maximum, log_sum, entropy: [...] as merged; ``entropy`` is needed where its gradient is not None.
    """
    logits = logits.detach()
    rows = Rows(logits)

    def column(values: Tensor) -> Tensor:
        flat = rows.flatten(values)
        return flat if flat.dim() == 2 else flat.unsqueeze(-1)

    zero = torch.zeros((), dtype=maximum.dtype, device=logits.device).expand(maximum.shape)
    of_targets = column(zero if upstream.logprob is None else upstream.logprob)  # [rows, targets]
    local = None if upstream.local_target is None else column(upstream.local_target)
    if local is not None:  # the log-probability of an ignored target is constant
        of_targets = torch.where(local == IGNORED, 0.0, of_targets)
    g, maximum, log_sum = of_targets.sum(-1, keepdim=True), column(maximum), column(log_sum)
    h = None if upstream.entropy is None else column(upstream.entropy)
    entropy = None if entropy is None else column(entropy)
    active = (of_targets != 0).any(-1) if h is None else ((of_targets != 0).any(-1)) | (h != 0).squeeze(-1)
    weight = -(g * scale) * log_sum.neg().exp()
    largest = max(
        min(block_elements(logits.device), rows.count * width), of_targets.numel()
    )  # of a block; of all targets
    scratch = torch.empty(0 if h is None else largest, dtype=maximum.dtype, device=logits.device)

    def compute(at: RowSelector, x: Tensor, out: Tensor) -> None:
        d = _shift(x, maximum[at], scale, out)
        if h is None or entropy is None:  # exp(d - log_sum) as exp(d) / sum: one pass less, and as precise
            d.exp_().mul_(weight[at])
        else:
            p = torch.exp(d.sub_(log_sum[at]), out=scratch[: d.numel()].view(d.shape))
            d.clamp_(min=LOWEST).add_(entropy[at]).mul_(h[at]).add_(g[at]).mul_(p).mul_(-scale)

    # The sweep does not know of the targets' elements: they are computed before it, which may overwrite the logits,
    # and written after it.
    patches = []
    for first, (run, out) in rows.runs(logits, result):
        if local is None:
            break
        here = slice(first, first + run.shape[0])
        row, columns, amount = _target_elements(local[here], of_targets[here] * scale, active[here], width)
        values = torch.empty(row.numel(), 1, dtype=maximum.dtype, device=logits.device)
        compute(first + row, run[row, columns].unsqueeze(-1), values)
        patches.append((out, row, columns, values.squeeze(-1).add_(amount).to(result.dtype)))
    _clear(result, rows, active, width)
    _sweep(rows, logits[..., :width], result[..., :width], maximum.dtype, compute, active, chunk_size)
    for out, row, columns, values in patches:
        out[row, columns] = values


def _target_elements(local: Tensor, amount: Tensor, active: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, columns and amounts of the targets [rows, targets] that this rank owns, each element once."""
    row, which = ((local >= 0) & active.unsqueeze(-1)).nonzero(as_tuple=True)
    columns, amount = local[row, which], amount[row, which]
    if local.shape[-1] == 1:
        return row, columns, amount
    element, where = torch.unique(row * width + columns, return_inverse=True)
    summed = torch.zeros(element.numel(), dtype=amount.dtype, device=amount.device).index_add_(0, where, amount)
    return element // width, element % width, summed


def _clear(result: Tensor, rows: Rows, active: Tensor, width: int) -> None:
    """Zero the columns past the width, and the rows that are not active."""
    for first, (out,) in rows.runs(result):
        out[:, width:] = 0
        idle = ~active[first : first + out.shape[0]]
        if bool(idle.any()):
            for block in row_blocks(out.shape[0], out.shape[0], idle):
                out[block] = 0
