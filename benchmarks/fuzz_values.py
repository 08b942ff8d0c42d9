"""The fuzz program's values: what they reduce to, how they lie in memory, and what is wrong with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLOATS_OF_8_BITS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
DTYPES = [*FLOATS, *FLOATS_OF_8_BITS, *COMPLEX, *SIGNED, *UNSIGNED, torch.bool]
WITH_GRADIENT = [*FLOATS, torch.complex64, torch.complex128]


# ------------------------------------------------------------------------------------------------ the right answers

ARITHMETIC = {
    "SUM": np.add,
    "AVG": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
LOGIC = {
    "SUM": np.logical_or,
    "MAX": np.logical_or,
    "BOR": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "BAND": np.logical_and,
    "BXOR": np.logical_xor,
}


def reductions_of(dtype: torch.dtype) -> list[str]:
    if dtype == torch.bool:
        return list(LOGIC)
    if dtype.is_complex:
        return ["SUM", "AVG", "PRODUCT"]
    return ["SUM", "AVG", "PRODUCT", "MIN", "MAX"] if dtype.is_floating_point else list(ARITHMETIC)


def reduced(parts: Sequence[Tensor], name: str) -> Tensor:
    """((x0 op x1) op x2) ...; types of 16 bits and less in float32, averages of integers in 64 bits."""
    dtype, shape = parts[0].dtype, parts[0].shape
    wide = {torch.complex32: torch.complex64}.get(dtype, dtype)
    if dtype.is_floating_point and dtype.itemsize <= 2:
        wide = torch.float32
    elif name == "AVG" and not dtype.is_floating_point and not dtype.is_complex:
        wide = torch.uint64 if dtype in UNSIGNED else torch.int64
    arrays = [part.to(wide).reshape(-1).numpy() for part in parts]
    combine = LOGIC[name] if dtype == torch.bool else ARITHMETIC[name]
    with np.errstate(all="ignore"):
        total = arrays[0].copy()
        for array in arrays[1:]:
            total = combine(total, array)
        if name == "AVG" and total.dtype.kind in "iu":
            size = total.dtype.type(len(parts))
            total = np.sign(total) * (np.abs(total) // size)  # truncates toward zero
        elif name == "AVG":
            total = (total / total.real.dtype.type(len(parts))).astype(total.dtype)
    return torch.from_numpy(total).to(dtype).reshape(shape)


def difference(actual: Any, expected: Any) -> str:
    """What is wrong with ``actual``, in words; empty where type, shape and every bit are right. NaNs count as equal."""
    if isinstance(expected, (list, tuple)):
        if type(actual) is not type(expected) or len(actual) != len(expected):
            return f"got {actual!r:.200}, expected {expected!r:.200}"
        return next((text for pair in zip(actual, expected, strict=True) if (text := difference(*pair))), "")
    if isinstance(expected, dict):
        if type(actual) is not dict or list(actual) != list(expected):
            return f"got {actual!r:.200}, expected {expected!r:.200}"
        return difference(list(actual.values()), list(expected.values()))
    if isinstance(expected, np.ndarray):
        if not isinstance(actual, np.ndarray):
            return f"got {type(actual).__name__}, expected an array"
        return difference(torch.from_numpy(actual), torch.from_numpy(expected))
    if not isinstance(expected, Tensor):
        same = type(actual) is type(expected) and (actual == expected or (actual != actual and expected != expected))
        return "" if same else f"got {actual!r:.200}, expected {expected!r:.200}"
    if not isinstance(actual, Tensor):
        return f"got {type(actual).__name__}, expected a tensor"
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"got {list(actual.shape)} {actual.dtype}, expected {list(expected.shape)} {expected.dtype}"
    actual, expected = flat(actual), flat(expected)
    rows = [one.view(torch.uint8).view(one.numel(), -1) for one in (actual, expected)] if actual.numel() else []
    if not rows or torch.equal(*rows):
        return ""
    wrong = torch.ne(*rows).any(dim=1)
    if actual.dtype.is_floating_point or actual.dtype.is_complex:
        actual, expected = (
            one.to(torch.complex128 if one.dtype.is_complex else torch.float64) for one in (actual, expected)
        )
        wrong &= ~(actual.isnan() & expected.isnan())
    if not wrong.any():
        return ""
    at = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {at}: "
        f"got {actual[at].item()}, expected {expected[at].item()}"
    )


def flat(tensor: Tensor) -> Tensor:
    """A contiguous copy in one dimension."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([part.unsqueeze(0) if part.dim() == 0 else part for part in parts], dim)


def part_of(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Part ``index`` of ``size`` equal ones."""
    width = tensor.shape[dim] // size
    return tensor.narrow(dim, index * width, width)


# ------------------------------------------------------------------------------------------------ memory

LAYOUTS = ("contiguous", "contiguous", "transposed", "strided", "offset")


def of_bytes(raw: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A tensor of one dimension over the bytes."""
    return torch.from_numpy(raw).view(dtype) if raw.size else torch.empty(0, dtype=dtype)


class Buffer:
    """Values in a memory layout, with other bytes around them that an operation must leave alone.

    ``argument`` is what an operation is called with: a tensor, or a NumPy array over it.
    """

    def __init__(self, values: Tensor, own: random.Random, written: bool) -> None:
        self.values = values
        self.layout = own.choice(LAYOUTS)
        self.base = self._noise()
        self.view = self._place(self.base)
        self.view.copy_(values)
        dtype = values.dtype
        if not written and values.dim() and values.stride(0) == 0:  # expanded
            self.view = values
        if not written and dtype.is_complex and dtype != torch.complex32 and own.random() < 0.3:
            self.view = values.conj().resolve_conj().conj()
        self.argument: Any = self.view
        if own.random() < 0.15 and dtype not in (torch.bfloat16, torch.complex32, *FLOATS_OF_8_BITS):
            self.argument = self.view.resolve_conj().numpy()
        elif dtype in WITH_GRADIENT and own.random() < 0.1:
            self.argument = self.view.detach().requires_grad_()

    def _noise(self) -> Tensor:
        room = {"strided": 3 * self.values.numel(), "offset": self.values.numel() + 8}
        elements = room.get(self.layout, self.values.numel())
        byte = 1 if self.values.dtype == torch.bool else 0xA5
        return of_bytes(np.full(elements * self.values.itemsize, byte, np.uint8), self.values.dtype)

    def _place(self, base: Tensor) -> Tensor:
        shape, numel = self.values.shape, self.values.numel()
        if self.layout == "transposed":
            return base.view(shape[::-1]).permute(list(range(len(shape)))[::-1])
        if self.layout == "strided":
            return base.view([*shape, 3])[..., 1]
        if self.layout == "offset":
            return base[5 : 5 + numel].view(shape)
        return base.view(shape)

    def unchanged(self) -> str:
        """What is wrong with a buffer that was only read."""
        return self.holds(self.values)

    def holds(self, expected: Tensor) -> str:
        """What is wrong with a buffer that should hold ``expected``, and nothing else in the memory around it."""
        problem = difference(self.view, expected)
        if not problem and self.layout in ("strided", "offset"):
            other = self._noise()
            self._place(other).copy_(self.view)
            beside = difference(self.base.view(torch.uint8), other.view(torch.uint8))
            problem = f"memory beside the tensor: {beside}" if beside else ""
        return f"{problem} ({self.layout} {list(self.values.shape)} {self.values.dtype})" if problem else ""
