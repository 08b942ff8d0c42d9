"""Waiting and leaving: the one loop in which this process waits for others, and how it says that it is gone.

Every communication is an operation that advances in small steps (see ``transport.base.Operation``). The loop in
:meth:`Lifecycle.wait` advances all operations in flight and looks, now and then, for members that have left and for
the deadline. A process that leaves tells every other process how many operations it has started on each channel, so
that a member which still waits knows whether what it waits for can come.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Protocol

from cupy_coll.bootstrap import mpi
from cupy_coll.errors import ArgumentError, CommTimeoutError, CupyCollError, PeerError, TransportError

__all__ = ["Lifecycle", "Waitable", "seconds"]

logger = logging.getLogger("cupy_coll")

SPINS = 50  # tests before the processor is offered to others
LOOKS = 16  # turns of the loop between two looks for departures and the deadline
PATIENCE = 200e-6  # seconds of waiting after which the loop sleeps between its turns
NAP = 100e-6  # seconds at most, and at most an eighth of the time waited
NOTICE_TAG = 1


class Waitable(Protocol):
    """What the loop asks of an operation."""

    done: bool

    def advance(self) -> bool:
        """Take the steps that are possible now; tell whether the operation has ended."""

    def missing(self, departed: dict[int, Notice]) -> list[int]:
        """The global ranks among ``departed`` without which this operation cannot end."""

    def describe(self) -> str:
        """The operation in words: name, group, sequence number, shapes."""

    def fail(self, error: Exception) -> None:
        """Give up: the operation, and what follows on its channel, raise ``error`` from now on."""


class Notice:
    """What a departing process leaves behind.

    Args:
        together: whether it called ``destroy()``, and so waits for the others.
        reason: why it went, in words that follow its rank.
        started: for each channel how many operations of each kind it had started that concern the reader.
    """

    def __init__(self, together: bool, reason: str, started: dict[str, dict[str, int]]) -> None:
        self.together = together
        self.reason = reason
        self.started = started

    def count(self, channel: str, kind: str) -> int:
        """How many operations of a kind ("collective", "send", "recv") it had started on the channel."""
        return self.started.get(channel, {}).get(kind, 0)


def seconds(function: str, timeout: float | timedelta) -> float:
    """A timeout given as seconds or as a timedelta, in seconds."""
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ArgumentError(f"{function}: timeout must be a positive number of seconds or timedelta, got {timeout!r}")
    return float(value)


class Lifecycle:
    """The waiting and the end of one process in one world of processes.

    Args:
        comm: a communicator of the world that nobody else uses; notices travel on it.
        timeout: seconds after which a wait raises :class:`CommTimeoutError`.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self.comm = comm
        self.timeout = timeout
        self.departed: dict[int, Notice] = {}
        self.lock = threading.RLock()
        self.in_flight: list[Waitable] = []
        self.failure: Exception | None = None
        self.active = True
        self._pid = os.getpid()
        self._notices_sent: list[tuple[Any, bytes]] | None = None
        self._counters: list[Callable[[int], tuple[str, dict[str, int]]]] = []
        _install_exit_hooks(self)

    # ------------------------------------------------------------------ operations

    def register(self, counters: Callable[[int], tuple[str, dict[str, int]]]) -> None:
        """Add a channel; ``counters(rank)`` tells its key and what has been started on it that concerns rank."""
        self._counters.append(counters)

    def unregister(self, counters: Callable[[int], tuple[str, dict[str, int]]]) -> None:
        """Remove a channel that is closed."""
        self._counters.remove(counters)

    def start(self, operation: Waitable) -> None:
        """Begin an operation; it stays in flight until it ends, whether anybody waits for it or not."""
        if os.getpid() != self._pid:
            raise TransportError(f"{operation.describe()}: MPI belongs to the process that this one was forked from")
        with self.lock:
            if not operation.advance():
                self.in_flight.append(operation)

    def progress(self) -> None:
        """Advance everything in flight."""
        with self.lock:
            self.in_flight = [operation for operation in self.in_flight if not operation.advance()]

    def wait(self, operation: Waitable, timeout: float | None = None) -> None:
        """Return when ``operation`` has ended.

        Args:
            timeout: seconds for this wait alone; when they have passed the operation goes on and can be waited
                for again. None: the world's timeout, after which the operation has failed.

        Raises:
            PeerError: a member has left without taking part.
            CommTimeoutError: the time is over.
        """
        if self._spin(lambda: operation.done):
            return
        limit = self.timeout if timeout is None else timeout
        try:
            self._loop(lambda: operation.done, lambda: operation.missing(self.departed), operation.describe, limit)
        except CupyCollError as error:
            if timeout is None or isinstance(error, PeerError):
                self._give_up(operation, error)
            raise

    def drain(self) -> None:
        """Wait for everything in flight."""
        while self.in_flight:
            operation = self.in_flight[0]
            self.wait(operation)
            if operation in self.in_flight:
                self.progress()

    def _spin(self, done: Callable[[], bool]) -> bool:
        for _ in range(SPINS):
            if done():
                return True
            self.progress()
        return done()

    def _loop(
        self,
        done: Callable[[], bool],
        missing: Callable[[], list[int]],
        describe: Callable[[], str],
        limit: float,
    ) -> None:
        begin = time.monotonic()
        turn = 0
        while not done():
            self.progress()
            turn += 1
            if turn % LOOKS:
                os.sched_yield()
                continue
            waited = time.monotonic() - begin
            self._look_for_notices()
            gone = missing()
            if gone and not done():
                raise PeerError(f"{describe()}: {self._reasons(gone)}", tuple(gone))
            if waited > limit:
                raise CommTimeoutError(f"{describe()}: not ended after {limit:g} s")
            if waited > PATIENCE:
                time.sleep(min(NAP, waited / 8))

    def _give_up(self, operation: Waitable, error: Exception) -> None:
        with self.lock:
            self.failure = self.failure or error
            operation.fail(error)
            self.in_flight = [other for other in self.in_flight if not other.done]

    def _reasons(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {rank} {self.departed[rank].reason}" for rank in ranks)

    # ------------------------------------------------------------------ departures

    def _look_for_notices(self) -> None:
        MPI = mpi()
        with self.lock:
            status = MPI.Status()
            while self.active and self.comm.Iprobe(MPI.ANY_SOURCE, NOTICE_TAG, status):
                message = bytearray(status.Get_count(MPI.BYTE))
                source = status.Get_source()
                self.comm.Recv([message, MPI.BYTE], source, NOTICE_TAG)
                self.departed[source] = Notice(*pickle.loads(message))

    def _say(self, together: bool, reason: str) -> None:
        """Tell every other process, once, that this one starts no further operation."""
        if self._notices_sent is not None:
            return
        MPI = mpi()
        self._notices_sent = []
        for rank in range(self.comm.size):
            if rank != self.comm.rank:
                started = dict(counters(rank) for counters in self._counters)
                message = pickle.dumps((together, reason, started))
                request = self.comm.Isend([message, MPI.BYTE], rank, NOTICE_TAG)
                self._notices_sent.append((request, message))

    def leave_together(self) -> bool:
        """The end that everybody calls: finish what is in flight and wait until all others are at their end too.

        Returns:
            True if every process ended this way, so that communicators can be freed; False where one has left
            without, or an operation has failed.
        """
        pending = sys.exc_info()[1]  # destroy() in a finally: the reason that the others want to read
        self._say(True, "called destroy()" + (f" while handling {pending!r}" if pending else ""))
        if self.failure is not None:
            return False  # still active: the interpreter's exit ends the job
        self.drain()
        others = [rank for rank in range(self.comm.size) if rank != self.comm.rank]
        MPI = mpi()

        def arrived() -> bool:
            self._look_for_notices()
            sent = [request for request, _ in self._notices_sent or []]
            return len(self.departed) == len(others) and MPI.Request.Testall(sent)

        def describe() -> str:
            waiting = [rank for rank in others if rank not in self.departed]
            return f"destroy: waiting for rank{'s' * (len(waiting) > 1)} {', '.join(map(str, waiting))}"

        self._loop(arrived, list, describe, self.timeout)
        self.active = False
        return all(notice.together for notice in self.departed.values())

    def dismiss(self) -> None:
        """Forget a world that did not come about; every process does so."""
        self.active = False
        self.comm.Free()

    def leave(self) -> None:
        """The end of a process that has not called :meth:`leave_together`; called by the interpreter's exit."""
        if not self.active or self._pid != os.getpid() or mpi().Is_finalized() or _exit_status:
            return
        if self.failure is None:
            self._say(False, "left: its program ended")
            try:
                self.drain()
            except CupyCollError as error:
                self.failure = error
        if self.failure is not None:
            print(f"cupy_coll: rank {self.comm.rank}: {self.failure}", file=sys.stderr)
            self.abort(1)

    def abort(self, status: int) -> None:
        """End the whole job with ``status``."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.comm.Abort(status)


# ---------------------------------------------------------------------- the interpreter's end

_current: Lifecycle | None = None
_exit_status = 0  # set by mpi4py's runner when the program ends by an exception or a non-zero sys.exit
_installed = False


def _leave() -> None:
    if _current is not None:
        _current.leave()


def _install_exit_hooks(lifecycle: Lifecycle) -> None:
    global _current, _installed
    _current = lifecycle
    if _installed:
        return
    _installed = True
    atexit.register(_leave)
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        previous(kind, value, trace)
        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        alive = _current is not None and _current.active and _current._pid == os.getpid()
        if alive and not interactive and _current is not None and _current.comm.size > 1:
            _current.abort(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = excepthook

    # mpi4py's runner stores the status here and aborts with it after atexit: a departure notice in between would
    # let a waiting member's PeerError, status 1, win over the program's own status.
    MPI = mpi()
    runner_sets = getattr(MPI, "_set_abort_status", None)
    if runner_sets is not None:

        def set_abort_status(status: int) -> None:
            global _exit_status
            _exit_status = status
            runner_sets(status)

        setattr(MPI, "_set_abort_status", set_abort_status)  # noqa: B010 - not in the module's types
