"""A GPU that is none: it owns CPU tensors and runs kernels on the processor."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from cupy_coll import device
from cupy_coll.device import Geometry, Kernel, KernelArgument
from kernels_on_host import Buffer, Counts, compiled

__all__ = ["HostDevice", "launch_on_host"]

CHECKED_ELEMENTS = 1 << 21
"""Launches that touch more than this are run without checks, unless these are asked for: they take 10 times as long."""


def _parameters(kernel: Kernel) -> list[tuple[str, bool]]:
    """(name, whether it points to what is written) of each parameter, as the source declares them."""
    declared = re.search(rf"{kernel.name}\(([^)]*)\) \{{", kernel.source)
    assert declared is not None
    parameters = [one.split() for one in declared[1].replace("*", "* ").split(",")]
    return [(words[-1], words[0] != "const" and words[-2].endswith("*")) for words in parameters]


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    if tensor.numel() == 0:
        return 0
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))) * tensor.element_size()


def launch_on_host(
    kernel: Kernel,
    geometry: Geometry,
    arguments: Sequence[KernelArgument],
    *,
    checks: bool | None = None,
    sectors: bool = False,
    reverse: bool = False,
) -> dict[str, tuple[Counts, Counts]]:
    """Run a kernel; it may touch the memory that its tensors span, and write where it declares no ``const``."""
    parameters = _parameters(kernel)
    assert len(parameters) == len(arguments), (parameters, len(arguments))
    values, buffers = [], []
    for (name, written), argument in zip(parameters, arguments, strict=True):
        if isinstance(argument, np.generic):
            values.append(argument)
            continue
        values.append(np.uint64(0 if argument is None else argument.data_ptr()))
        if argument is not None:
            buffers.append(Buffer(name, argument.data_ptr(), _extent(argument), written))
    buffers.sort(key=lambda buffer: not buffer.writable)  # in place, what is read is written too
    if checks is None:
        checks = sum(a.numel() for a in arguments if isinstance(a, torch.Tensor)) <= CHECKED_ELEMENTS
    host = compiled(kernel.source, kernel.expression)
    return host.launch(
        geometry.grid,
        geometry.block,
        values,
        geometry.shared_bytes,
        buffers,
        checks=checks,
        sectors=sectors,
        reverse=reverse,
    )


@dataclass
class Launch:
    """One that has been made."""

    kernel: Kernel
    geometry: Geometry
    counts: dict[str, tuple[Counts, Counts]]


@dataclass
class HostDevice:
    """What log-probabilities need of ``cupy_coll.device.Device``; float64 stays with torch.

    Attributes:
        checks, sectors, reverse: of each launch (:func:`launch_on_host`).
        launches: in order.
    """

    checks: bool | None = None
    sectors: bool = False
    reverse: bool = False
    launches: list[Launch] = field(default_factory=list)

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def index_of(self, tensor: torch.Tensor) -> int:
        return 0

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def empty(self, count: int, dtype: torch.dtype, index: int) -> torch.Tensor:
        return torch.full((count,), float("nan"), dtype=dtype)  # what a kernel does not write shows

    def launch(self, kernel: Kernel, geometry: Geometry, arguments: Sequence[KernelArgument], index: int) -> None:
        counts = launch_on_host(
            kernel, geometry, arguments, checks=self.checks, sectors=self.sectors, reverse=self.reverse
        )
        self.launches.append(Launch(kernel, geometry, counts))

    @contextmanager
    def installed(self) -> Iterator[HostDevice]:
        """CPU tensors are this device's in the block."""
        with device.installed(self):  # type: ignore[arg-type]
            yield self
