"""The CUDA kernels of ``kernels/``: which instance is launched, with which geometry and arguments.

Nothing here depends on the GPU, and no bit of a result on the geometry; what each kernel computes, reads and writes
stands at the top of its file. The host waits for nothing: launches go to torch's current stream.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cupy_coll.device import Device, Geometry, Kernel, owner_of
from cupy_coll.errors import ShapeError
from cupy_coll.logprob.partials import MessageLayout, Shard, Summary
from cupy_coll.logprob.sweeps import Upstream

__all__ = ["device_with_kernels", "log_softmax", "logprob_backward", "merge_partials", "softmax_partials"]

WARP = 32
THREADS = 256  # of a block; those of the second read's kernels are fixed in their files
VECTOR_BYTES = 16
VECTORS = 4  # of a thread, as in the files
UNIT_COLUMNS = 4096
"""Columns that a warp sums before it goes on; part of the order of summation."""
MOST_UNITS = 1024
"""Units of a tile; wider tiles have wider units, so that a block's summaries fit its shared memory."""
ENOUGH_BLOCKS = 2048
"""Rows x splits from which on more splits do not fill a GPU any better."""
MERGE_THREADS = 128
MOST_ROWS = 2**31 - 1
STRIDED = 0

_TYPES = {torch.bfloat16: "Bf16", torch.float16: "Half", torch.float32: "Float"}
_LOG2_E = math.log2(math.e)


def device_with_kernels(logits: Tensor) -> Device | None:
    """The device that runs the kernels on these logits; None where torch does the work (host memory, float64)."""
    return owner_of(logits) if logits.dtype in _TYPES else None


@dataclass(frozen=True)
class _Rows:
    """Consecutive rows of tensors [..., columns], each seen as [outer, inner, columns]."""

    first: int
    count: int
    views: list[Tensor]

    @property
    def inner(self) -> int:
        return self.views[0].shape[1]


def _rows_of(*tensors: Tensor) -> Iterator[_Rows]:
    """The rows of tensors of the same leading shape, in the caller's order, in as few pieces as views allow.

    One piece where the leading dimensions are at most two steps, as those of contiguous tensors, of slices of a batch
    of sequences, of transposed and of expanded ones are.
    """
    dimensions: list[tuple[int, tuple[int, ...]]] = []  # (size, each tensor's stride)
    for d, size in enumerate(tensors[0].shape[:-1]):
        strides = tuple(t.stride(d) for t in tensors)
        if size == 1:
            continue
        if dimensions and dimensions[-1][1] == tuple(size * stride for stride in strides):
            dimensions[-1] = (dimensions[-1][0] * size, strides)
        else:
            dimensions.append((size, strides))
    while len(dimensions) < 2:
        dimensions.insert(0, (1, (0,) * len(tensors)))
    *others, outer, inner = dimensions
    count = outer[0] * inner[0]
    for piece, at in enumerate(itertools.product(*(range(size) for size, _ in others))):
        views = []
        for which, t in enumerate(tensors):
            offset = t.storage_offset() + sum(i * strides[which] for i, (_, strides) in zip(at, others, strict=True))
            strides = (outer[1][which], inner[1][which], t.stride(-1))
            views.append(t.as_strided((outer[0], inner[0], t.shape[-1]), strides, offset))
        yield _Rows(piece * count, count, views)


def _width(device: Device, view: Tensor, tile_columns: int = 0) -> int:
    """WIDTH of a kernel for a view [outer, inner, columns]: the widest pieces that all its rows (and tiles) allow."""
    if view.stride(-1) != 1 and view.shape[-1] > 1:
        return STRIDED
    steps = [stride for size, stride in zip(view.shape[:2], view.stride()[:2], strict=True) if size > 1]
    return math.gcd(
        VECTOR_BYTES, device.pointer(view), *(step * view.element_size() for step in (*steps, tile_columns))
    )


def _strides(view: Tensor) -> list[np.generic]:
    return [np.int64(stride) for stride in view.stride()]


def _floats(values: Tensor | None, rows: _Rows, shape: tuple[int, ...]) -> Tensor | None:
    """These rows of values of any layout, contiguous."""
    return None if values is None else values.reshape(shape)[rows.first : rows.first + rows.count].contiguous()


def _check_rows(count: int) -> None:
    if count > MOST_ROWS:
        raise ShapeError(f"vocab_parallel_logits has {count} rows, expected at most {MOST_ROWS} on a GPU")


def softmax_partials(
    device: Device, logits: Tensor, local_target: Tensor | None, shard: Shard, layout: MessageLayout, scale: float
) -> Tensor:
    """Summarise this rank's logits [..., columns] in one read; the message to gather, [layout.length].

    Args:
        local_target: [...] or [..., layout.targets] as :meth:`Shard.local_target` gives it, or None. Rows of which all
            targets are ignored are not read, unless for their entropy.
        scale: 1 / temperature.
    """
    _check_rows(layout.rows)
    logits = logits.detach()
    index = device.index_of(logits)
    message = device.empty(layout.length, torch.float32, index)
    tiles, tile_columns = shard.tiles, shard.width // shard.tiles
    unit_columns = UNIT_COLUMNS * max(1, -(-tile_columns // (UNIT_COLUMNS * MOST_UNITS)))
    target = None if local_target is None else local_target.contiguous()
    for rows in _rows_of(logits):
        (view,) = rows.views
        width = _width(device, view, tile_columns if tiles > 1 else 0)
        splits = 1
        while splits < tiles and rows.count * splits < ENOUGH_BLOCKS:
            splits *= 2
        units = tiles // splits * -(-tile_columns // unit_columns)
        warps = 1  # of a row
        while warps < units and warps * WARP < THREADS:
            warps *= 2
        together = THREADS // (warps * WARP)  # rows of a block
        device.launch(
            Kernel("softmax_partials", f"{_TYPES[logits.dtype]}, {width}, {str(layout.entropy).lower()}"),
            Geometry(
                (max(1, -(-rows.count // together)), splits),
                (warps * WARP, together),
                together * units * layout.fields * 4,
            ),
            [
                view,
                np.int32(rows.inner),
                *_strides(view),
                np.int32(rows.count),
                np.int64(rows.first),
                np.int64(layout.rows),
                np.int64(shard.columns),
                np.int64(shard.start or 0),
                np.int64(shard.end or 0),
                np.int32(tiles),
                np.int64(tile_columns),
                np.int32(layout.slots),
                np.int32(unit_columns),
                target,
                np.int32(layout.targets),
                np.float32(scale * _LOG2_E),
                message,
            ],
            index,
        )
    return message


def merge_partials(
    device: Device, gathered: Tensor, target: Tensor | None, layout: MessageLayout, scale: float
) -> Summary:
    """Merge all ranks' messages [ranks * layout.length] in column order.

    As ``partials.merge_messages``, but what is wrong gives NaN: a target that nobody owns in its place; ranges with a
    gap, an overlap or in a wrong order, and other numbers of rows, everywhere.
    """
    index = device.index_of(gathered)
    maximum, log_sum, *entropy = device.empty(layout.fields * layout.rows, torch.float32, index).view(
        layout.fields, layout.rows
    )
    logprob = None if target is None else device.empty(target.numel(), torch.float32, index)
    if layout.rows:
        device.launch(
            Kernel("merge_partials", str(layout.entropy).lower()),
            Geometry((-(-layout.rows // MERGE_THREADS), 1), (MERGE_THREADS, 1)),
            [
                gathered,
                np.int32(layout.ranks),
                np.int32(layout.rows),
                np.int32(layout.slots),
                None if target is None else target.to(torch.int64).contiguous(),
                np.int32(layout.targets),
                np.float32(scale * _LOG2_E),
                np.float32(scale),
                maximum,
                log_sum,
                logprob,
                entropy[0] if entropy else None,
            ],
            index,
        )
    return Summary(maximum, log_sum, logprob, entropy[0] if entropy else None)


def _second_read(view: Tensor) -> tuple[int, int]:
    """Grid of a kernel that reads each of the view's logits and writes one value for it."""
    columns_of_block = THREADS * VECTORS * VECTOR_BYTES // view.element_size()
    return view.shape[0] * view.shape[1], -(-view.shape[-1] // columns_of_block)


def logprob_backward(
    device: Device,
    result: Tensor,
    logits: Tensor,
    maximum: Tensor,
    log_sum: Tensor,
    entropy: Tensor | None,
    upstream: Upstream,
    width: int,
    scale: float,
) -> None:
    """Write the gradient with respect to the logits [..., columns] into ``result``, which may be ``logits`` itself.

    Arguments and meaning as those of ``sweeps.write_gradient``.
    """
    logits = logits.detach()
    if result.numel() == 0:
        return
    count, local = math.prod(logits.shape[:-1]), upstream.local_target
    targets = 0 if local is None else local.numel() // count
    with_entropy = upstream.entropy is not None
    for rows in _rows_of(logits, result):
        x, out = rows.views
        of_x, of_out = _width(device, x), _width(device, out)
        grid = _second_read(x)
        marks = 0 if targets <= 1 else THREADS * VECTORS * VECTOR_BYTES // x.element_size() // 8
        device.launch(
            Kernel("logprob_backward", f"{_TYPES[logits.dtype]}, {min(of_x, of_out)}, {str(with_entropy).lower()}"),
            Geometry(grid, (THREADS, 1), marks),
            [
                x,
                np.int32(rows.inner),
                *_strides(x),
                out,
                *_strides(out),
                np.int64(logits.shape[-1]),
                np.int64(width),
                _floats(maximum, rows, (count,)),
                _floats(log_sum, rows, (count,)),
                _floats(entropy, rows, (count,)),
                _floats(upstream.logprob, rows, (count, targets)),
                _floats(local, rows, (count, targets)),
                np.int32(targets),
                _floats(upstream.entropy, rows, (count,)),
                np.float32(scale),
            ],
            device.index_of(logits),
        )
    torch.autograd.graph.increment_version(result)  # so that autograd notices where something else saved the logits


def log_softmax(device: Device, result: Tensor, logits: Tensor, summary: Summary, scale: float) -> None:
    """Write this shard's part of the log-softmax over the whole vocabulary into ``result`` [..., columns]."""
    logits = logits.detach()
    if result.numel() == 0:
        return
    for rows in _rows_of(logits, result):
        x, out = rows.views
        device.launch(
            Kernel(
                "log_softmax",
                f"{_TYPES[x.dtype]}, {_width(device, x)}, {_TYPES[out.dtype]}, {_width(device, out)}",
            ),
            Geometry(_second_read(x), (THREADS, 1)),
            [
                x,
                np.int32(rows.inner),
                *_strides(x),
                out,
                *_strides(out),
                np.int64(x.shape[-1]),
                _floats(summary.maximum, rows, (-1,)),
                _floats(summary.log_sum, rows, (-1,)),
                np.float32(scale),
            ],
            device.index_of(logits),
        )
