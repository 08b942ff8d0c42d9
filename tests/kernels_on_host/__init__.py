"""Runs the kernels of ``kernels/`` on the processor, with the geometry and arguments that a GPU would get.

    kernel = kernels_on_host.compiled(source, "softmax_partials<Bf16, 16, true>")
    counts = kernel.launch(geometry.grid, geometry.block, arguments, geometry.shared_bytes, buffers)

``cuda_on_host.h`` says what is checked. **It shows what kernels compute and touch, not how a GPU would perform.**
Compiled libraries are kept per user, by a hash of all that went into them.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Buffer", "Counts", "HostKernel", "KernelError", "compiled"]

HERE = Path(__file__).resolve().parent
HEADER, RUNTIME = "cuda_on_host.h", "cuda_on_host.cpp"
FLAGS = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror")
# longjmp between stacks, which fortified C libraries refuse; and one source in which much is not used.
FLAGS += ("-U_FORTIFY_SOURCE", "-Wno-unused-parameter", "-Wno-clobbered", "-Wno-unknown-pragmas", "-Wno-sign-compare")
_CHECK, _COUNT, _REVERSE = 1, 2, 4
_ENTRY = """
extern "C" int launch_kernel(const on_host::Launch* launch) {{ return on_host::launch({expression}, *launch); }}
"""
_lock = threading.Lock()  # a library has one state


class KernelError(AssertionError):
    """A kernel does not compile, is called with the wrong arguments, or does what CUDA leaves undefined."""


@dataclass(frozen=True)
class Buffer:
    """Memory that a kernel may touch."""

    name: str
    address: int
    nbytes: int
    writable: bool = True


class _Buffer(ctypes.Structure):
    _fields_ = (("address", ctypes.c_uint64), ("nbytes", ctypes.c_uint64), ("writable", ctypes.c_int64))


class _Counts(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_int64 * 2),
        ("accesses", ctypes.c_int64 * 5 * 2),
        ("warp_accesses", ctypes.c_int64 * 2),
        ("sectors", ctypes.c_int64 * 2),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_int64),
        ("arguments", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("argument_count", ctypes.c_int64),
        ("buffers", ctypes.c_void_p),
        ("buffer_count", ctypes.c_int64),
        ("flags", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("error", ctypes.c_void_p),
        ("error_size", ctypes.c_int64),
    )


@dataclass
class Counts:
    """What a launch has read or written in one buffer.

    Attributes:
        nbytes: through the helpers.
        accesses: {width in bytes: accesses by threads}.
        warp_accesses: accesses of a warp: the same instruction, for the same time, of its lanes.
        sectors: 32-byte sectors that each warp access touches, summed.
    """

    nbytes: int = 0
    accesses: dict[int, int] = field(default_factory=dict)
    warp_accesses: int = 0
    sectors: int = 0


@dataclass(frozen=True)
class HostKernel:
    """A compiled kernel."""

    expression: str
    library: Any

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[np.generic],
        shared_bytes: int = 0,
        buffers: Sequence[Buffer] = (),
        *,
        checks: bool = True,
        sectors: bool = False,
        reverse: bool = False,
    ) -> dict[str, tuple[Counts, Counts]]:
        """Run all blocks. With ``checks`` every access is checked and counted, with ``sectors`` by warp also.

        Args:
            arguments: NumPy scalars of the parameters' sizes; an address is a ``np.uint64``.
            buffers: all memory that may be touched, where there are ``checks``.
            reverse: blocks and threads run in the opposite order.

        Returns:
            {buffer's name: (reads, writes)}, empty without ``checks``.

        Raises:
            KernelError: says which thread of which block did what.
        """
        values = [np.ascontiguousarray(value) for value in arguments]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        sizes = (ctypes.c_int64 * len(values))(*(value.nbytes for value in values))
        may_touch = (_Buffer * len(buffers))(*(_Buffer(b.address, b.nbytes, b.writable) for b in buffers))
        counted = (_Counts * len(buffers))()
        error = ctypes.create_string_buffer(1000)
        extents = [(ctypes.c_uint * 3)(*extent, *(1,) * (3 - len(extent))) for extent in (grid, block)]
        launch = _Launch(
            self.expression.encode(),
            *extents,
            shared_bytes,
            *(ctypes.addressof(array) for array in (pointers, sizes)),
            len(values),
            ctypes.addressof(may_touch),
            len(buffers),
            _CHECK * (checks or sectors) | _COUNT * sectors | _REVERSE * reverse,
            ctypes.addressof(counted),
            ctypes.addressof(error),
            len(error),
        )
        with _lock:
            failed = self.library.launch_kernel(ctypes.byref(launch))
        if failed:
            text = error.value.decode()
            for i, buffer in enumerate(buffers):
                text = text.replace(f" buffer {i},", f" {buffer.name},").replace(f" buffer {i} ", f" {buffer.name} ")
            raise KernelError(text)
        if not checks:
            return {}
        found: dict[str, tuple[Counts, Counts]] = {}
        for buffer, count in zip(buffers, counted, strict=True):
            found[buffer.name] = tuple(  # type: ignore[assignment]
                Counts(
                    count.bytes[way],
                    {1 << i: n for i, n in enumerate(count.accesses[way]) if n},
                    count.warp_accesses[way],
                    count.sectors[way],
                )
                for way in (0, 1)
            )
        return found


@cache
def compiled(source: str, expression: str) -> HostKernel:
    """The instance ``expression`` of a kernel in ``source``; compiled by ``c++`` where it has not been before.

    Raises:
        KernelError: with the compiler's words.
    """
    text = f'#include "{HEADER}"\n{source}\n' + _ENTRY.format(expression=expression)
    return HostKernel(expression, ctypes.CDLL(str(_built(text, (str(_runtime()),)))))


@cache
def _runtime() -> Path:
    return _built((HERE / RUNTIME).read_text(encoding="utf-8"))


def _built(text: str, libraries: tuple[str, ...] = ()) -> Path:
    """The library made of a source; any number of processes may ask for it at once."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise KernelError("no C++ compiler (c++, g++ or clang++) is on PATH")
    parts = [text, (HERE / HEADER).read_text(encoding="utf-8"), compiler, *FLAGS, *libraries]
    directory = Path(tempfile.gettempdir()) / f"cupy_coll-kernels-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    library = directory / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.so"
    if library.exists():
        return library
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=directory) as scratch:
                source, result = Path(scratch, "kernel.cpp"), Path(scratch, "kernel.so")
                source.write_text(text, encoding="utf-8")
                command = [compiler, *FLAGS, f"-I{HERE}", str(source), *libraries, "-o", str(result)]
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
                if done.returncode:
                    raise KernelError(f"{' '.join(command)} failed ({done.returncode}):\n{done.stderr}")
                result.rename(library)
    return library
