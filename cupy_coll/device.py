"""GPUs: their memory, streams and events. The seam that tests replace, to run what follows on machines without one."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias

import torch

__all__ = ["CudaDevice", "Device", "Event", "Stream", "devices", "installed", "is_cupy", "mark_as_cupy", "owner_of"]

# Whatever the device makes them: torch.cuda's, or a test's. Only the device looks inside.
Stream: TypeAlias = Any
Event: TypeAlias = Any

_CUPY = "_cupy_coll_is_cupy"
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


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
