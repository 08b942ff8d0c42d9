"""The table of dtypes: which reductions each allows, and in what it is accumulated."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch.distributed import ReduceOp

from cupy_coll.errors import ArgumentError, DTypeError

__all__ = ["UNSIGNED", "Reduction", "accumulation_dtype", "check_reduction", "name_of", "reduction_name"]

Reduction: TypeAlias = ReduceOp | ReduceOp.RedOpType  # ReduceOp.SUM is of the second

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_SMALL_FLOATS = (torch.float16, torch.bfloat16, *_FLOAT8)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED)

_ARITHMETIC = ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
_BITWISE = ("BAND", "BOR", "BXOR")
_REDUCTIONS: dict[torch.dtype, tuple[str, ...]] = {
    torch.bool: ("SUM", "PRODUCT", "MIN", "MAX", *_BITWISE),
    **dict.fromkeys(_INTEGERS, (*_ARITHMETIC, *_BITWISE)),
    **dict.fromkeys((*_SMALL_FLOATS, torch.float32, torch.float64), _ARITHMETIC),
    **dict.fromkeys((torch.complex32, torch.complex64, torch.complex128), ("SUM", "AVG", "PRODUCT")),
}
_NAMES = (*_ARITHMETIC, *_BITWISE)


def name_of(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def reduction_name(function: str, op: Reduction) -> str:
    """The name of a torch.distributed.ReduceOp: ``"SUM"`` for ``ReduceOp.SUM``."""
    if isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        for name in _NAMES:
            if op == getattr(ReduceOp, name):
                return name
    raise ArgumentError(f"{function}: op must be one of ReduceOp.{', '.join(_NAMES)}, got {op!r}")


def check_reduction(function: str, dtype: torch.dtype, op: Reduction) -> None:
    """Refuse a reduction that the dtype does not have.

    Raises:
        ArgumentError: ``op`` is none of the reductions.
        DTypeError: the dtype does not allow it.
    """
    name = reduction_name(function, op)
    allowed = _REDUCTIONS.get(dtype, ())
    if name not in allowed:
        instead = f"it allows {', '.join(allowed)}" if allowed else "it allows no reduction"
        raise DTypeError(f"{function}: tensor is {name_of(dtype)}, which cannot be reduced by {name}; {instead}")


def accumulation_dtype(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """The dtype in which a reduction is computed before it is rounded to ``dtype``, once."""
    if dtype in _SMALL_FLOATS:
        return torch.float32
    if dtype == torch.complex32:
        return torch.complex64
    if reduction == "AVG":  # a sum of narrow integers may pass their range where the average does not
        if dtype in UNSIGNED:
            return torch.uint64
        if dtype in _INTEGERS:
            return torch.int64
    return dtype
