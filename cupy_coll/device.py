"""GPUs: their memory, streams and events. The seam that tests replace, to run what follows on machines without one."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch

from cupy_coll.errors import TransportError

__all__ = [
    "CudaDevice",
    "Device",
    "Event",
    "Geometry",
    "Kernel",
    "KernelArgument",
    "Stream",
    "devices",
    "installed",
    "is_cupy",
    "mark_as_cupy",
    "owner_of",
]

# Whatever the device makes them: torch.cuda's, or a test's. Only the device looks inside.
Stream: TypeAlias = Any
Event: TypeAlias = Any

_CUPY = "_cupy_coll_is_cupy"
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

KernelArgument: TypeAlias = torch.Tensor | np.generic | None
"""A tensor stands for the address of its first element, None for a null pointer."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``kernels/``, compiled when it is first launched.

    Attributes:
        name: the function, and the file without ``.cu``.
        arguments: of the template, such as ``Bf16, 16, true``.
    """

    name: str
    arguments: str

    OPTIONS = ("-std=c++17",)

    @cached_property
    def expression(self) -> str:
        """What C++ calls this instance."""
        return f"{self.name}<{self.arguments}>"

    @cached_property
    def source(self) -> str:
        """The whole text, what it includes in place: CuPy's cache on disk knows a kernel by its text alone."""
        return _text_of(f"{self.name}.cu").replace('#include "common.cuh"', _text_of("common.cuh"))


@cache
def _text_of(file: str) -> str:
    return resources.files("cupy_coll.kernels").joinpath(file).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Geometry:
    """Of a launch: blocks, threads of a block, bytes of dynamic shared memory."""

    grid: tuple[int, int]
    block: tuple[int, int]
    shared_bytes: int = 0


class Device(Protocol):
    """The GPUs of one kind that this process sees; ``index`` is one of them."""

    def count(self) -> int:
        """How many there are."""

    def current(self) -> int:
        """The index of the one that the program works on."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is on one of them."""

    def index_of(self, tensor: torch.Tensor) -> int:
        """Which of them it is on."""

    def name(self, index: int) -> str:
        """``cuda:0``."""

    def identity(self, index: int) -> str:
        """The same in all processes that see the GPU, and different for different GPUs: its UUID."""

    def describe(self, index: int) -> tuple[str, str]:
        """The product's name, and the address on the PCI bus."""

    def capability(self, index: int) -> tuple[int, int]:
        """The compute capability."""

    def empty(self, count: int, dtype: torch.dtype, index: int) -> torch.Tensor:
        """New memory, of the stream that the program is on."""

    def pointer(self, tensor: torch.Tensor) -> int:
        """The address of the first element."""

    def current_stream(self, index: int, cupy: bool = False) -> Stream:
        """The stream that the program is on by torch, or by CuPy."""

    def side_stream(self, index: int) -> Stream:
        """A new stream."""

    def handle(self, stream: Stream) -> int:
        """What C calls the stream."""

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """Torch's work in the block goes to ``stream``, and new memory belongs to it."""

    def at(self, index: int) -> AbstractContextManager[Any]:
        """The GPU is this thread's current one in the block."""

    def record(self, stream: Stream) -> Event:
        """An event that passes when what is on the stream by now has ended."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What follows on the stream begins after the event; the host goes on."""

    def has_passed(self, event: Event) -> bool:
        """Whether the event has passed; the host goes on."""

    def is_capturing(self, stream: Stream) -> bool:
        """Whether the stream is being captured into a graph."""

    def let_captures_be(self) -> None:
        """From now on this thread's questions about events do not end a graph capture of another thread."""

    def launch(self, kernel: Kernel, geometry: Geometry, arguments: Sequence[KernelArgument], index: int) -> None:
        """Enqueue a kernel on the stream that the program is on by torch."""


def mark_as_cupy(tensor: torch.Tensor) -> torch.Tensor:
    """Remember that a tensor stands for a CuPy array: its operations go to the stream that CuPy is on."""
    setattr(tensor, _CUPY, True)
    return tensor


def is_cupy(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors stands for a CuPy array."""
    return any(hasattr(tensor, _CUPY) for tensor in tensors)


class CudaDevice:
    """CUDA's, by torch (see :class:`Device`)."""

    def count(self) -> int:
        return torch.cuda.device_count()

    def current(self) -> int:
        return torch.cuda.current_device()

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def index_of(self, tensor: torch.Tensor) -> int:
        return tensor.get_device()

    def name(self, index: int) -> str:
        return f"cuda:{index}"

    def identity(self, index: int) -> str:
        return str(torch.cuda.get_device_properties(index).uuid)

    def describe(self, index: int) -> tuple[str, str]:
        device, address = ctypes.c_int(), ctypes.create_string_buffer(32)
        with self.at(index):
            torch.cuda.init()
            driver = ctypes.CDLL("libcuda.so.1")
            if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetPCIBusId(address, 32, device):
                address.value = b"unknown"
        return torch.cuda.get_device_properties(index).name, address.value.decode()

    def capability(self, index: int) -> tuple[int, int]:
        return torch.cuda.get_device_capability(index)

    def empty(self, count: int, dtype: torch.dtype, index: int) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.name(index))

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def current_stream(self, index: int, cupy: bool = False) -> Stream:
        if not cupy:
            return torch.cuda.current_stream(index)
        from cupy.cuda import get_current_stream  # whose array it is, so it is there

        pointer = get_current_stream(index).ptr
        if not pointer:
            return torch.cuda.default_stream(index)
        return torch.cuda.ExternalStream(pointer, device=index)

    def side_stream(self, index: int) -> Stream:
        return torch.cuda.Stream(index)

    def handle(self, stream: Stream) -> int:
        return stream.cuda_stream

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def at(self, index: int) -> AbstractContextManager[Any]:
        return torch.cuda.device(index)

    def record(self, stream: Stream) -> Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def has_passed(self, event: Event) -> bool:
        return event.query()

    def is_capturing(self, stream: Stream) -> bool:
        if stream == torch.cuda.current_stream():
            return torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(stream):
            return torch.cuda.is_current_stream_capturing()

    def let_captures_be(self) -> None:
        # CUDA ends a capture in its default ("global") mode when any other thread queries an event, unless that thread
        # has said that it does not care. torch does not expose the call; the driver is loaded whenever CUDA is used.
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def launch(self, kernel: Kernel, geometry: Geometry, arguments: Sequence[KernelArgument], index: int) -> None:
        function = _function(kernel, index)
        from cupy.cuda import Device as OfCupy  # is there, for _function has imported it
        from cupy.cuda import ExternalStream

        values = [
            np.uint64(0 if a is None else a.data_ptr()) if a is None or isinstance(a, torch.Tensor) else a
            for a in arguments
        ]
        with OfCupy(index), ExternalStream(torch.cuda.current_stream(index).cuda_stream, index):
            function(geometry.grid, geometry.block, values, shared_mem=geometry.shared_bytes)


@cache
def _function(kernel: Kernel, index: int) -> Any:
    """The kernel, compiled by CuPy for the GPU (from its cache on disk where it has been before)."""
    try:
        import cupy
    except ImportError as error:
        raise TransportError(
            f"log-probabilities of CUDA tensors need CuPy, which cannot be imported: {error} "
            "(pip install 'cupy_coll[cuda13]' or 'cupy_coll[cuda12]')"
        ) from error
    with cupy.cuda.Device(index):
        module = cupy.RawModule(code=kernel.source, options=kernel.OPTIONS, name_expressions=[kernel.expression])
        return module.get_function(kernel.expression)


_known: list[Device] = [CudaDevice()]


def devices() -> list[Device]:
    """All kinds of GPUs, in the order in which they are asked for a tensor."""
    return list(_known)


def owner_of(tensor: torch.Tensor) -> Device | None:
    """The device whose memory the tensor is in; None: the host's."""
    return next((device for device in _known if device.owns(tensor)), None)


@contextlib.contextmanager
def installed(device: Device) -> Iterator[None]:
    """Ask ``device`` first, in the block."""
    _known.insert(0, device)
    try:
        yield
    finally:
        _known.remove(device)
