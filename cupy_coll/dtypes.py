"""The table of dtypes: which reductions each allows, in what it is accumulated, and how NCCL takes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.distributed import ReduceOp

from cupy_coll.errors import ArgumentError, DTypeError

__all__ = [
    "UNSIGNED",
    "NcclType",
    "Reduction",
    "accumulation_dtype",
    "check_reduction",
    "name_of",
    "nccl_copy",
    "nccl_reduction",
    "reduction_name",
]

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


# ---------------------------------------------------------------------- NCCL

# ncclDataType_t and ncclRedOp_t
_NCCL_TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
    torch.float8_e4m3fn: 10,
    torch.float8_e5m2: 11,
}
_NCCL_OPS = {"SUM": 0, "PRODUCT": 1, "MAX": 2, "MIN": 3, "AVG": 4}
_NCCL_BOOL = {"SUM": "MAX", "MAX": "MAX", "PRODUCT": "MIN", "MIN": "MIN"}  # of bytes that are 0 or 1
_FLOAT8_CAPABILITY = (9, 0)


@dataclass(frozen=True)
class NcclType:
    """How NCCL takes the elements of a dtype.

    Attributes:
        code: ncclDataType_t.
        units: how many of these an element is.
        op: ncclRedOp_t; -1 where nothing is reduced.
        truth: the elements are bytes of bool, which must be made 0 or 1 first.
    """

    code: int
    units: int = 1
    op: int = -1
    truth: bool = False


def nccl_copy(dtype: torch.dtype) -> NcclType:
    """How elements are moved: those of a type that NCCL lacks as bytes."""
    code = _NCCL_TYPES.get(dtype)
    return NcclType(_NCCL_TYPES[torch.uint8], dtype.itemsize) if code is None else NcclType(code)


def nccl_reduction(function: str, dtype: torch.dtype, op: Reduction, capability: tuple[int, int]) -> NcclType:
    """How elements are reduced: complex numbers as pairs, bool by the largest or smallest byte.

    Args:
        capability: the GPU's compute capability.

    Raises:
        ArgumentError: ``op`` is none of the reductions.
        DTypeError: the dtype, or NCCL, does not allow it.
    """
    check_reduction(function, dtype, op)
    name = reduction_name(function, op)
    refused = f"{function}: tensor is {name_of(dtype)}, and NCCL "
    if name in _BITWISE:
        raise DTypeError(f"{refused}has no {name}; reduce a copy on the CPU")
    if dtype == torch.bool:
        return NcclType(_NCCL_TYPES[torch.uint8], op=_NCCL_OPS[_NCCL_BOOL[name]], truth=True)
    if dtype.is_complex:
        if name == "PRODUCT":
            raise DTypeError(f"{refused}has no complex PRODUCT; reduce a copy on the CPU")
        return NcclType(_NCCL_TYPES[dtype.to_real()], units=2, op=_NCCL_OPS[name])
    if dtype not in _NCCL_TYPES:
        raise DTypeError(f"{refused}does not reduce this type; convert it, or reduce a copy on the CPU")
    if dtype in _FLOAT8 and capability < _FLOAT8_CAPABILITY:
        needed, got = (".".join(map(str, version)) for version in (_FLOAT8_CAPABILITY, capability))
        raise DTypeError(f"{refused}reduces this type from compute capability {needed} on; this GPU has {got}")
    return NcclType(_NCCL_TYPES[dtype], op=_NCCL_OPS[name])
