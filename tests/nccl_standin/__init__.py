"""A stand-in for libnccl.so.2, so that CuPy's NCCL binding runs on machines without a GPU. **This is not NCCL.**

It exports the 22 functions that CuPy's binding needs and works on *host* pointers, between processes of one machine,
over shared memory. Nothing here says how NCCL performs, how it orders a reduction, or that a GPU would do the same;
what it does check is how the caller uses NCCL: which call, pointer, count, type, reduction, root and stream, in which
order and group, and what the caller makes of failures.

    import nccl_standin
    standin = nccl_standin.load()       # before anything imports CuPy; builds the library with `cc` when needed
    from cupy.cuda import nccl          # this is now CuPy's binding over the stand-in
    ...
    standin.calls()                     # every call so far

What it does
    All type codes and reductions, rounded at every step as NCCL rounds (reductions.h); ranks are reduced in the order
    0, 1, 2, ... Any count; in place where NCCL allows it. Grouped calls are issued at the outermost group end and move
    forward together: collectives of one communicator in order, messages between two ranks in order, everything else
    independently. Initialisation and split act at once, also inside a group. At most 127 ranks.

What it refuses that NCCL would leave undefined, with one line on stderr
    Ranks that disagree on the operation, count, type, reduction or root: ``ncclInvalidUsage`` on every rank involved,
    naming two ranks and what each called; for a send and its receive on those two. Also for empty collectives, which
    NCCL ignores. Null or misaligned pointers, buffers that overlap otherwise than in place: ``ncclInvalidArgument``.
    After a failure the communicator is of no more use: its later calls return the same error at once, and peers that
    wait for it get ``ncclRemoteError``.

How waiting ends
    Without any progress for NCCL_STANDIN_TIMEOUT seconds: ``ncclRemoteError``, and a line naming who is missing.
    A peer that aborted, failed or destroyed its communicator: ``ncclRemoteError``. An abort in this process, from
    another thread: ``ncclInternalError``. The communicator's asynchronous error is then the same.

Environment variables, read at each call, of this process alone (so a test sets them on the rank that shall fail)
    NCCL_STANDIN_TIMEOUT=SECONDS         how long to wait for a peer; 30
    NCCL_STANDIN_FAIL_UNIQUE_ID=CODE     ncclGetUniqueId returns this result (2 is ncclSystemError)
    NCCL_STANDIN_FAIL_INIT=CODE          initialisation returns this result here; the peers wait for this rank
    NCCL_STANDIN_BLOCK_INIT=SECONDS      initialisation first sleeps; 0 for ever
    NCCL_STANDIN_ASYNC_ERROR=N[:CODE]    once N calls with data are complete, every communicator reports this
                                         asynchronous error (2 unless given) and its calls return it
    NCCL_STANDIN_NEVER_ARRIVE=N          the N-th call with data never takes part, until its communicator is aborted
    NCCL_STANDIN_VERSION=N               what ncclGetVersion says; 29999
    NCCL_STANDIN_DEVICE=N                what ncclCommCuDevice says; 0
    NCCL_STANDIN_AVG=post                floats: scale after the sum rather than each rank's values before it
    Calls with data are the eight operations, in groups or not; they are counted from the start or `clear()`.

Synchronous and asynchronous
    A call normally returns when it is done. After ``standin.asynchronous(True)`` it returns at once and a thread does
    the work: operations of one stream or one communicator in the order issued, others independently. `pending` and
    `wait` are then what a stream's query and synchronise are, and `hold(True)` keeps the thread from starting anything
    until `hold(False)`, so that a test can see what happens before an operation has run. Errors show as the
    communicator's asynchronous error.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VERSION", "Call", "StandIn", "build", "build_driver", "load"]

VERSION = 29999  # 2.99.99
HERE = Path(__file__).resolve().parent
SOURCES = ("nccl_standin.c", "reductions.h", "driver.c")
WARNINGS = ("-std=c11", "-Wall", "-Wextra", "-Werror")
LIBRARY = ("-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libnccl.so.2")
SANITIZERS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
LIBRARIES = ("-lm", "-pthread")
ALL_STREAMS = ctypes.c_size_t(-1).value


def build(directory: str | os.PathLike[str] | None = None) -> Path:
    """Compile the library where that has not been done yet; any number of processes may call it at once.

    Args:
        directory: the cache; by default one of this user in the directory for temporary files.

    Raises:
        RuntimeError: there is no C compiler, or it fails; with what it said.
    """
    return _compiled("libnccl.so.2", (*WARNINGS, *LIBRARY), ("nccl_standin.c",), directory)


def build_driver(directory: str | os.PathLike[str] | None = None) -> Path:
    """The program of driver.c under the address and undefined-behaviour sanitizers. Raises as `build`."""
    return _compiled("driver", (*WARNINGS, *SANITIZERS), ("driver.c", "nccl_standin.c"), directory)


def _compiled(
    name: str, flags: tuple[str, ...], sources: tuple[str, ...], directory: str | os.PathLike[str] | None
) -> Path:
    place = Path(directory) if directory is not None else _cache()
    digest = hashlib.sha256(repr(flags).encode())
    for source in SOURCES:
        digest.update((HERE / source).read_bytes())
    target = place / digest.hexdigest()[:16] / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _compile([*flags, *(str(HERE / source) for source in sources)], target)
    return target


def _cache() -> Path:
    place = Path(tempfile.gettempdir()) / f"cupy_coll-nccl_standin-{os.getuid()}"
    place.mkdir(mode=0o700, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.getuid():
        raise RuntimeError(f"{place} is not this user's: what lies in it cannot be loaded")
    return place


def _compile(arguments: list[str], target: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        raise RuntimeError("no C compiler: `cc` is not on PATH. The tests of the NCCL transport need one")
    new = target.with_suffix(".new")
    command = [compiler, *arguments, "-o", str(new), *LIBRARIES]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with status {done.returncode}:\n{done.stdout}")
    new.replace(target)


@dataclass(frozen=True)
class Call:
    """One call, as the caller made it. Also those that failed."""

    name: str  # AllReduce, Reduce, Broadcast, Bcast, AllGather, ReduceScatter, Send, Recv: these have data.
    #            GetUniqueId, CommInitRank (if it succeeded), CommSplit, CommDestroy, CommAbort, GroupStart, GroupEnd
    send: int  # the pointers; 0 for none
    receive: int
    count: int
    type: int  # NCCL's codes; -1 where there is none
    reduction: int
    root: int  # or the peer; -1 where there is none
    stream: int
    communicator: int  # the same number on all its ranks
    rank: int  # in it
    size: int
    group: int  # 0, or the number of the outermost group of this process that it was called in

    @property
    def has_data(self) -> bool:
        return self.type >= 0


class _Entry(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("kind", "type", "reduction", "root", "rank", "size")),
        *((name, ctypes.c_uint64) for name in ("count", "send", "receive", "stream", "communicator", "group")),
    )


class StandIn:
    """The loaded library: its log of calls, and its asynchronous mode."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.library = ctypes.CDLL(os.fspath(path), mode=ctypes.RTLD_GLOBAL)
        self.library.standin_log_count.restype = ctypes.c_size_t
        self.library.standin_log_entry.argtypes = (ctypes.c_size_t, ctypes.POINTER(_Entry))
        self.library.standin_kind_name.restype = ctypes.c_char_p
        self.library.standin_pending.argtypes = (ctypes.c_size_t,)
        self.library.standin_pending.restype = ctypes.c_size_t
        self.library.standin_wait.argtypes = (ctypes.c_size_t,)
        self.library.standin_wait.restype = None

    def calls(self, *names: str) -> list[Call]:
        """The calls of this process since the start or `clear`, in order; if names are given, only those."""
        found = []
        entry = _Entry()
        for i in range(self.library.standin_log_count()):
            if not self.library.standin_log_entry(i, ctypes.byref(entry)):
                break
            name = self.library.standin_kind_name(entry.kind).decode()
            if not names or name in names:
                values = {field: getattr(entry, field) for field, _ in _Entry._fields_ if field != "kind"}
                found.append(Call(name=name, **values))
        return found

    def data_calls(self) -> list[Call]:
        """The calls of the eight operations alone."""
        return [call for call in self.calls() if call.has_data]

    def clear(self) -> None:
        """Forget the calls; what the environment plants counts from here."""
        self.library.standin_log_clear()

    def asynchronous(self, on: bool) -> None:
        """Return from calls before they are done; switching it off waits for everything in flight."""
        error = self.library.standin_asynchronous(int(on))
        if error:
            raise OSError(error, f"no thread for the asynchronous mode: {os.strerror(error)}")

    def hold(self, on: bool) -> None:
        """Keep the thread of the asynchronous mode from starting anything."""
        self.library.standin_hold(int(on))

    def pending(self, stream: int | None = None) -> int:
        """How many calls or groups on a stream (on any, for None) are not done."""
        return self.library.standin_pending(ALL_STREAMS if stream is None else stream)

    def wait(self, stream: int | None = None) -> None:
        """Return when nothing on a stream (on any, for None) is pending; a call that never arrives is until aborted."""
        self.library.standin_wait(ALL_STREAMS if stream is None else stream)


_loaded: StandIn | None = None


def load(path: str | os.PathLike[str] | None = None) -> StandIn:
    """Load the stand-in and CuPy's binding over it; once a process, later calls return the same.

    Args:
        path: the library; built when None.

    Raises:
        RuntimeError: the binding was imported before, or uses another library.
        ImportError: CuPy is not installed.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    if "cupy.cuda.nccl" in sys.modules or "cupy_backends.cuda.libs.nccl" in sys.modules:
        raise RuntimeError("nccl_standin.load() comes too late: CuPy's NCCL binding has been imported already")
    standin = StandIn(build() if path is None else path)  # its name is libnccl.so.2: the binding takes what is loaded
    from cupy.cuda import nccl

    expected = int(os.environ.get("NCCL_STANDIN_VERSION") or VERSION)
    if not nccl.available or nccl.get_version() != expected:
        got = f"NCCL {nccl.get_version()}" if nccl.available else "none (see CuPy's warning above)"
        raise RuntimeError(f"CuPy's NCCL binding did not take the stand-in {standin.path}; it has {got}")
    _loaded = standin
    return standin
