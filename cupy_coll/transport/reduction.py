"""Reductions on the host, in rank order: every element is ((x0 op x1) op x2) ..., whoever computes it.

MPI's own reductions may add in another order on each rank, know neither bfloat16 nor a bool sum, and answer NaN
under MAX differently from rank to rank. Here the transport moves bytes and torch reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from cupy_coll import dtypes

__all__ = ["reduce_in_rank_order"]

_TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
# torch has no arithmetic for unsigned integers of more than 8 bits; NumPy has.
_NUMPY: dict[str, Callable[..., object]] = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_BOOL = {
    "SUM": "BOR",
    "MAX": "BOR",
    "BOR": "BOR",
    "PRODUCT": "BAND",
    "MIN": "BAND",
    "BAND": "BAND",
    "BXOR": "BXOR",
}


def reduce_in_rank_order(parts: Sequence[torch.Tensor], op: dtypes.Reduction, out: torch.Tensor) -> None:
    """Write the reduction of ``parts`` into ``out``.

    Types of 16 bits and less are accumulated in float32 and rounded once; an average of integers truncates toward
    zero; MIN and MAX propagate NaN.

    Args:
        parts: one contiguous tensor a rank, all of the shape and dtype of ``out``; overwritten.
        out: may share no memory with ``parts`` but be one of them.
    """
    name = dtypes.reduction_name("reduce", op)
    if out.dtype == torch.bool:
        # A bool tensor may hold other bytes than 0 and 1.
        parts = [part.view(torch.uint8).ne_(0) for part in parts]
        out, name = out.view(torch.uint8), _BOOL[name]
    accumulation = dtypes.accumulation_dtype(out.dtype, name)
    total = parts[0].to(accumulation)
    for part in parts[1:]:
        _combine(name, total, part.to(accumulation))
    if name == "AVG":
        _divide(total, len(parts))
    out.copy_(total)


def _combine(name: str, total: torch.Tensor, part: torch.Tensor) -> None:
    if total.dtype in dtypes.UNSIGNED:
        target = total.numpy()
        _NUMPY[name](target, part.numpy(), out=target)
    else:
        _TORCH[name](total, part, out=total)


def _divide(total: torch.Tensor, count: int) -> None:
    if total.dtype in dtypes.UNSIGNED:
        target = total.numpy()
        np.floor_divide(target, target.dtype.type(count), out=target)
    elif total.dtype.is_floating_point or total.dtype.is_complex:
        total.div_(count)
    else:
        total.div_(count, rounding_mode="trunc")
