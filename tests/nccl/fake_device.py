"""A GPU that is none: it owns CPU tensors, and records in which order streams and events are used.

Host memory has no streams: what torch does in a block of :meth:`FakeDevice.on` happens at once, after waiting for what
is on the stream, which is what a stream would do. A stream is a number, and also the handle that NCCL is given.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kernels_on_host.device import launch_on_host
from nccl_standin import StandIn

from cupy_coll.device import Geometry, Kernel, KernelArgument

TORCH_STREAM, CUPY_STREAM = 0x100, 0x200  # the ones that the program is on


@dataclass
class FakeEvent:
    stream: int
    number: int
    passed: bool = False


@dataclass
class FakeDevice:
    """See ``cupy_coll.device.Device``.

    Attributes:
        standin: the library that stands in for NCCL.
        enabled: whether it owns CPU tensors.
        gpu: the UUID.
        recording: whether the log is written.
        log: (what, stream, event's number or kernel's name) in order; ("nccl", stream, name of the call) where NCCL was
            called between.
        checks: whether kernels run with all checks.
    """

    standin: StandIn
    enabled: bool = False
    gpu: str = "GPU-0"
    sm: tuple[int, int] = (9, 0)
    capturing: bool = False
    stream: int = TORCH_STREAM
    holding: bool = False
    _log: list[tuple[str, int, object]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _streams: Iterator[int] = field(default_factory=lambda: itertools.count(0x1000))
    _calls: int = 0
    polite: bool = False
    recording: bool = False
    checks: bool = True

    def count(self) -> int:
        return int(self.enabled)

    def current(self) -> int:
        return 0

    def owns(self, tensor: torch.Tensor) -> bool:
        return self.enabled and tensor.device.type == "cpu"

    def index_of(self, tensor: torch.Tensor) -> int:
        return 0

    def name(self, index: int) -> str:
        return f"fake:{index}"

    def identity(self, index: int) -> str:
        return self.gpu

    def describe(self, index: int) -> tuple[str, str]:
        return "no GPU", "none"

    def capability(self, index: int) -> tuple[int, int]:
        return self.sm

    def empty(self, count: int, dtype: torch.dtype, index: int) -> torch.Tensor:
        return torch.empty(count, dtype=dtype)

    def pointer(self, tensor: torch.Tensor) -> int:
        return tensor.data_ptr()

    def current_stream(self, index: int, cupy: bool = False) -> int:
        return CUPY_STREAM if cupy else self.stream

    def side_stream(self, index: int) -> int:
        return next(self._streams)

    def handle(self, stream: int) -> int:
        return stream

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        self._note("on", stream, None)
        if not self.holding:
            self.standin.wait(stream)
        yield

    def at(self, index: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self, stream: int) -> FakeEvent:
        event = FakeEvent(stream, next(self._numbers))
        self._note("record", stream, event.number)
        return event

    def wait(self, stream: int, event: FakeEvent) -> None:
        self._note("wait", stream, event.number)

    def has_passed(self, event: FakeEvent) -> bool:
        if self.capturing and threading.current_thread() is threading.main_thread():
            raise AssertionError("CUDA ends a capture when its thread asks for an event")
        if not event.passed:  # later, when nothing at all is on its stream
            event.passed = not self.standin.pending(event.stream)
        return event.passed

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def let_captures_be(self) -> None:
        self.polite = True

    def launch(self, kernel: Kernel, geometry: Geometry, arguments: Sequence[KernelArgument], index: int) -> None:
        self._note("launch", self.stream, kernel.name)
        self.standin.wait(self.stream)
        launch_on_host(kernel, geometry, arguments, checks=self.checks)

    # ------------------------------------------------------------------ for tests

    def synchronize(self) -> None:
        """Wait for everything on all streams."""
        self.standin.wait()

    def take_log(self) -> list[tuple[str, int, object]]:
        """What has been recorded since the last call."""
        self._note_calls()
        log, self._log = self._log, []
        return log

    def _note(self, what: str, stream: int, number: object) -> None:
        if not self.recording:
            return
        self._note_calls()
        self._log.append((what, stream, number))

    def _note_calls(self) -> None:
        calls = self.standin.data_calls()
        self._log += [("nccl", call.stream, call.name) for call in calls[self._calls :]]
        self._calls = len(calls)
