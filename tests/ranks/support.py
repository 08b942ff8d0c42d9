"""Values, dtypes and memory layouts for the tests on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
COPIED = [torch.bool, *INTEGERS, *FLOAT8, *FLOATS, *COMPLEX]  # dtypes of operations that only move data
REDUCED = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
KINDS = [torch.bool, torch.uint8, torch.int64, torch.uint16, torch.bfloat16, torch.float32, torch.complex64]

SHAPES = [(4, 3), (5,), (2, 3, 2), (), (0, 3), (3, 0)]
LAYOUTS = ["contiguous", "strided", "offset", "transposed", "columns"]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases(dtype: torch.dtype) -> Iterator[tuple[tuple[int, ...], str]]:
    """Shapes and layouts to try: all of them for float32, a few that differ for the other dtypes."""
    if dtype == torch.float32:
        yield from ((shape, layout) for shape in SHAPES for layout in LAYOUTS)
    else:
        yield from [((4, 3), "contiguous"), ((4, 3), "transposed"), ((5,), "strided"), ((), "offset")]


def roots(dtype: torch.dtype, ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(index, rank) of the roots to try: every member for float32, the last for the other dtypes."""
    everyone = list(enumerate(ranks))
    return everyone if dtype == torch.float32 else everyone[-1:]


def tensor_of(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """Small integers (below 128) as a tensor of the dtype; what it cannot hold is folded in."""
    whole = torch.from_numpy(np.array(values, np.int64))
    if dtype == torch.bool:
        return whole % 3 == 1
    if dtype.is_complex:
        return torch.complex(whole.double(), (whole % 5).double()).to(dtype)
    if dtype in FLOAT8:
        return (whole % 8).float().to(dtype)
    return whole.to(dtype)


def marked(shape: Sequence[int], rank: int) -> np.ndarray:
    """Values by which position and rank are recognised."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 3 + 17 * rank + 1) % 101).reshape(shape)


class Placed:
    """A tensor's values in memory of a certain layout, and a look at the memory around them.

    layouts: contiguous; strided (every second element of the last dimension); offset (not at the start of its
    memory); transposed (dimensions in reverse order in memory); columns (a part of each row).
    """

    def __init__(self, values: torch.Tensor, layout: str) -> None:
        shape = values.shape
        if layout == "contiguous" or (not shape and layout != "offset"):
            self.memory = torch.zeros(shape, dtype=values.dtype)
            self.view = self.memory
        elif layout == "strided":
            self.memory = torch.zeros(*shape[:-1], 2 * shape[-1], dtype=values.dtype)
            self.view = self.memory[..., ::2]
        elif layout == "offset":
            self.memory = torch.zeros(values.numel() + 5, dtype=values.dtype)
            self.view = self.memory[3 : 3 + values.numel()].view(shape)
        elif layout == "transposed":
            self.memory = torch.zeros(shape[::-1], dtype=values.dtype)
            self.view = self.memory.permute(*range(len(shape) - 1, -1, -1))
        elif layout == "columns":
            self.memory = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=values.dtype)
            self.view = self.memory[..., 1 : 1 + shape[-1]]
        self.view.copy_(values)
        self.before = self.memory.clone()

    def spilled(self) -> bool:
        """Whether memory beside the view has changed."""
        probe = self.before.clone()
        probe.as_strided(self.view.shape, self.view.stride(), self.view.storage_offset()).copy_(self.view)
        return raw(probe) != raw(self.memory)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes, in order."""
    flat = tensor.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def ended(expect: Any, work: Any, async_op: bool, label: str) -> None:
    """Wait for an asynchronous operation; a synchronous one returns None."""
    if async_op:
        expect.that(isinstance(work, torch.distributed.Work), f"{label}: returned {work!r}, expected a Work")
        work.wait()
        expect.that(work.is_completed(), f"{label}: not completed after wait()")
    else:
        expect(work, None, label)
