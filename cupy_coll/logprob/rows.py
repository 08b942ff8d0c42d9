"""How logits are walked: rows in memory order, cut into blocks that stay in the L2 cache.

Nothing here depends on what is computed. A row's values never depend on the rows beside it, so the order of
the walk and the size of a block are free; they are chosen for speed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["BLOCK_ELEMENTS", "RowSelector", "Rows", "block_elements", "row_blocks"]

BLOCK_ELEMENTS = 1 << 17
"""Logits a block holds at most (unless one row of it is wider): 512 KiB in float32, a part of an L2 cache."""

BLOCK_ELEMENTS_ON_GPU = 1 << 26
"""The same where torch's operations run on a GPU: they are fast on large blocks alone."""

RowSelector = slice | Tensor
"""Rows of a 2-D view: a slice (then indexing gives a view), or an int64 index (then it gives a copy)."""


class Rows:
    """The leading dimensions of ``like`` [..., width], seen as one dimension of rows in memory order.

    Logits arrive as slices (``logits[:, :-1]``), as transposes ([S, B, V] seen as [B, S, V]) or expanded.
    Walking them
    in memory order keeps them views: ``reshape`` would copy all of them.
    """

    def __init__(self, like: Tensor) -> None:
        leading = like.shape[:-1]
        strides = like.stride()
        # Dimensions of size 1 come first: their strides mean nothing and must not end a run.
        self._order = sorted(range(len(leading)), key=lambda d: (leading[d] != 1, -strides[d] * (leading[d] != 1)))
        self._shape = [leading[d] for d in self._order]
        self.count = math.prod(leading)

    def flatten(self, values: Tensor) -> Tensor:
        """[..., *rest] in the caller's order -> [count, *rest] in memory order. May share memory."""
        leading = len(self._order)
        turned = values.permute([*self._order, *range(leading, values.dim())])
        return turned.reshape([self.count, *values.shape[leading:]])

    def restore(self, values: Tensor) -> Tensor:
        """[count, *rest] in memory order -> [count, *rest] in the caller's order, contiguous."""
        leading, rest = len(self._order), values.shape[1:]
        inverse = sorted(range(leading), key=self._order.__getitem__)
        turned = values.reshape([*self._shape, *rest]).permute([*inverse, *range(leading, leading + len(rest))])
        return turned.reshape([self.count, *rest])

    def runs(self, *tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Cut tensors [..., width] of the same leading shape into the longest runs of rows that are views.

        Yields ``(first, views)``: the index of the run's first row in memory order, and for each tensor its
        [n, width].
        """
        if self.count == 0:
            return
        views = [t.permute([*self._order, t.dim() - 1]) for t in tensors]
        outer = max(len(self._order) - 1, 0)
        while outer and all(v.stride(outer - 1) == v.stride(outer) * v.shape[outer] for v in views):
            outer -= 1
        length = math.prod(self._shape[outer:])
        for run, at in enumerate(itertools.product(*map(range, self._shape[:outer]))):
            yield run * length, [v[at].view(length, v.shape[-1]) for v in views]


def block_elements(device: torch.device) -> int:
    """Logits that a block of torch's operations on ``device`` holds at most (unless one row of it is wider)."""
    return BLOCK_ELEMENTS if device.type == "cpu" else BLOCK_ELEMENTS_ON_GPU


def row_blocks(count: int, step: int, active: Tensor | None = None) -> Iterator[RowSelector]:
    """Cut ``count`` rows into blocks of at most ``step``; where ``active`` (bool [count]) is given, only its
    rows."""
    if active is None or bool(active.all()):
        for first in range(0, count, step):
            yield slice(first, min(first + step, count))
        return
    for index in active.nonzero().flatten().split(step):
        if index.numel() == 0:
            continue
        first, last = int(index[0]), int(index[-1])
        yield slice(first, last + 1) if last - first + 1 == index.numel() else index
