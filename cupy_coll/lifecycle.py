"""Waiting and leaving: the one loop in which this process waits for others, and how it says that it is gone.

Every communication is an operation that advances in small steps (see ``transport.base.Operation``). The loop in
:meth:`Lifecycle.wait` advances all operations in flight and looks, now and then, for members that have left and for
the deadline. A process that leaves tells every other process how many operations it has started on each channel, so
that a member which still waits knows whether what it waits for can come.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from cupy_coll.bootstrap import mpi
from cupy_coll.checkmode import CheckMode
from cupy_coll.errors import (
    ArgumentError,
    CommTimeoutError,
    CupyCollError,
    MismatchError,
    PeerError,
    TransportError,
)
from cupy_coll.mailbox import Mailbox
from cupy_coll.recorder import Recorder

__all__ = ["TRACE_VARIABLE", "Lifecycle", "Notice", "Waitable", "install_exit_hooks", "seconds"]

logger = logging.getLogger("cupy_coll")

SPINS = 50  # tests before the processor is offered to others
LOOKS = 16  # turns of the loop, after the first ones, between two looks for messages and the deadline
PATIENCE = 200e-6  # seconds of waiting after which the loop sleeps between its turns
NAP = 100e-6  # seconds at most, and at most an eighth of the time waited
WATCH = 0.1  # seconds between two looks of the watchdog
ANSWER = 2.0  # seconds that others have to say what they are doing
ABORTING = 2.0  # seconds that communicators on GPUs have to abort
LAST_WORDS = 0.5  # seconds in which the others write what they know before the job is ended
TRACE_VARIABLE = "CUPY_COLL_TRACE_DIR"


class Waitable(Protocol):
    """What the loop asks of an operation."""

    done: bool
    identity: Hashable  # the same on all ranks
    ranks: Sequence[int]  # the global ranks that take part

    def advance(self) -> bool:
        """Take the steps that are possible now; tell whether the operation has ended."""

    def missing(self, departed: dict[int, Notice]) -> list[int]:
        """The global ranks among ``departed`` without which this operation cannot end."""

    def describe(self) -> str:
        """The operation in words: name, group, sequence number, shapes."""

    def fail(self, error: Exception) -> None:
        """Give up: the operation, and what follows on its channel, raise ``error`` from now on."""


class Countable(Protocol):
    """What the lifecycle asks of a channel."""

    key: str
    ranks: tuple[int, ...]

    def started_with(self, rank: int) -> dict[str, int]:
        """How many operations of each kind have been started that concern ``rank``."""

    def started_in_all(self) -> dict[str, Any]:
        """How many operations of each kind have been started, point-to-point ones by rank."""


class Watched(Protocol):
    """What runs by itself, on a GPU, and the watchdog looks after."""

    def poll(self) -> None:
        """Look for what has ended, failed or taken too long; called by the watchdog, raises nothing."""

    def drain(self) -> None:
        """Wait for everything in flight."""

    def abort(self) -> None:
        """Give up what is in flight; may not come back."""


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
        comm: a communicator of the world that nobody else uses.
        timeout: seconds after which a wait raises :class:`CommTimeoutError`.
    """

    def __init__(self, comm: Any, timeout: float) -> None:
        self.timeout = timeout
        self.mailbox = Mailbox(comm)
        self.recorder = Recorder(comm.rank, comm.size)
        self.check: CheckMode | None = None
        self.departed: dict[int, Notice] = {}
        self.lock = threading.RLock()
        self.in_flight: list[Waitable] = []
        self.failure: Exception | None = None
        self.active = True
        self._pid = os.getpid()
        self._said = False
        self.abandoned: list[Waitable] = []  # operations that failed, whose memory MPI may still use
        self._channels: list[Countable] = []
        self._watched: list[Watched] = []
        self._asking = threading.Lock()  # one question to the others at a time
        self._expired: set[Hashable] = set()
        self._answers: dict[int, tuple[Notice, str]] = {}
        self._ending: dict[int, str] = {}  # who is about to end the whole job, and how
        self._here: dict[str, set[int]] = {}  # who has come to a meeting
        self.mailbox.handlers |= {
            "gone": self._take_notice,
            "query": self._answer,
            "answer": self._take_answer,
            "abort": self._take_abort,
            "ending": lambda source, how: self._ending.update({source: how}),
            "here": lambda source, key: self._here.setdefault(key, set()).add(source),
        }
        _set_current(self)
        _dump_on_signal()
        self._stop = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="cupy_coll watchdog", daemon=True)
        if comm.size > 1:
            self._watchdog.start()

    # ------------------------------------------------------------------ operations

    def register(self, channel: Countable) -> None:
        """Add a channel."""
        self._channels.append(channel)
        self.recorder.members[channel.key] = channel.ranks

    def unregister(self, channel: Countable) -> None:
        """Remove a channel that is closed."""
        self._channels.remove(channel)

    def watch(self, one: Watched) -> None:
        """From now on the watchdog polls it, and the end of this process waits for it."""
        with self.lock:
            self._watched.append(one)
            if self.active and not self._watchdog.is_alive():  # a world of one has nobody to answer
                self._watchdog.start()

    def unwatch(self, one: Watched) -> None:
        """Look after it no more."""
        with self.lock:
            if one in self._watched:
                self._watched.remove(one)

    def require_own_process(self, what: str) -> None:
        """Refuse to communicate in a forked child."""
        if os.getpid() != self._pid:
            raise TransportError(f"{what}: MPI belongs to the process that this one was forked from")

    def start(self, operation: Waitable) -> None:
        """Begin an operation; it stays in flight until it ends, whether anybody waits for it or not."""
        self.require_own_process(operation.describe())
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
                for again. None: the world's timeout, after which the operation has failed on every rank that waits.

        Raises:
            PeerError: a member has left without taking part.
            CommTimeoutError: the time is over.
        """
        for _ in range(SPINS):
            if operation.done:
                return
            self.progress()
        limit = self.timeout if timeout is None else timeout

        try:
            given_up = self.given_up
            if self.wait_until(
                lambda: operation.done, operation.missing, operation.describe, limit, lambda: given_up(operation)
            ):
                return
        except PeerError as error:
            self._give_up(operation, error)
            raise
        if timeout is not None and not given_up(operation):
            raise CommTimeoutError(f"{operation.describe()}: not ended after {limit:g} s; it goes on")
        timed_out = self.timed_out(operation, self.timeout)
        self._give_up(operation, timed_out)
        self.dump_if_wanted("timeout")
        raise timed_out

    def drain(self) -> None:
        """Wait for everything in flight."""
        while self.in_flight:
            self.wait(self.in_flight[0])
            self.progress()
        for one in list(self._watched):
            one.drain()

    def wait_until(
        self,
        done: Callable[[], bool],
        missing: Callable[[dict[int, Notice]], list[int]],
        describe: Callable[[], str],
        limit: float,
        given_up: Callable[[], bool] = lambda: False,
    ) -> bool:
        """The loop in which this process waits for others.

        Args:
            done: what is waited for.
            missing: which of the departed processes it cannot come without.
            describe: it in words.
            limit: seconds.
            given_up: whether another process' time for it is over.

        Returns:
            Whether it is done; False where the time is over.

        Raises:
            PeerError: a process that it cannot come without has departed.
        """
        begin = time.monotonic()
        turn = 0
        while not done():
            self.progress()
            turn += 1
            if turn > SPINS and turn % LOOKS:
                os.sched_yield()
                continue
            waited = time.monotonic() - begin
            self.deliver()
            gone = missing(self.departed)
            if done():
                return True
            if gone:
                raise self._left(describe(), gone)
            if waited > limit or given_up():
                return False
            if waited > PATIENCE:
                time.sleep(min(NAP, waited / 8))
        return True

    def meet(self, what: str, key: str, ranks: Sequence[int]) -> None:
        """Wait until all of ``ranks`` have come here: what they call next waits inside MPI, without a limit.

        Args:
            what: it in words.
            key: the same on all of them, and never used again.

        Raises:
            PeerError: one of them has departed.
        """
        with self.lock:
            self.mailbox.post("here", key, ranks)
            here = self._here.setdefault(key, set())
        others = set(ranks) - {self.mailbox.rank}
        if not self.wait_until(
            lambda: here >= others,
            lambda departed: sorted((others - here) & departed.keys()),
            lambda: what,
            self.timeout,
        ):
            states = self.states(ranks)
            report = f"{what}: not ended after {self.timeout:g} s{self.states_in_words(ranks, states)}"
            # Whoever comes later finds this rank's message, and would wait for it inside MPI.
            self.end_job(CommTimeoutError(report))
        del self._here[key]

    def given_up(self, operation: Waitable) -> bool:
        """Whether another process' time for it is over."""
        return operation.identity in self._expired

    def trouble(self, operation: Waitable, since: float) -> CupyCollError | None:
        """Why an operation that runs by itself will not end: a member has left without it, or its time is over.

        Args:
            since: when it began, by ``time.monotonic``.
        """
        gone = operation.missing(self.departed)
        if gone:
            return self._left(operation.describe(), gone)
        if time.monotonic() - since > self.timeout or self.given_up(operation):
            return self.timed_out(operation, self.timeout)
        return None

    def _left(self, what: str, gone: Sequence[int]) -> PeerError:
        reasons = ", ".join(f"rank {rank} {self.departed[rank].reason}" for rank in gone)
        return PeerError(f"{what}: {reasons}", tuple(gone))

    def deliver(self) -> None:
        """Take in the messages that have come."""
        with self.lock:
            if self.active:
                self.mailbox.deliver()

    def _give_up(self, operation: Waitable, error: Exception) -> None:
        with self.lock:
            self.failure = self.failure or error
            operation.fail(error)
            self.in_flight = [other for other in self.in_flight if not other.done]

    def _watch(self) -> None:
        # While the program computes or sleeps it is this thread that answers the others.
        while not self._stop.wait(WATCH):
            self.deliver()
            for one in list(self._watched):
                one.poll()

    # ------------------------------------------------------------------ what the others are doing

    def states(self, ranks: Sequence[int], expired: Hashable = None) -> dict[int, tuple[Notice, str]]:
        """Ask ``ranks`` what they have started and do, and wait a little for their answers.

        Args:
            expired: the identity of an operation whose time is over here; who waits for it gives up too.

        Returns:
            For each rank that answers its counts and its last operation in words; also for this one.
        """
        with self._asking:
            with self.lock:
                self._answers = {}
                self.mailbox.post("query", expired, ranks)
            begin = time.monotonic()
            others = set(ranks) - {self.mailbox.rank} - set(self.departed)
            while not others <= self._answers.keys() | self._ending.keys() and time.monotonic() - begin < ANSWER:
                self.deliver()
                time.sleep(NAP)
            answers = dict(self._answers)
            own = self.mailbox.rank
            if own in ranks:
                answers[own] = Notice(False, "", self._started_with(own)), self.recorder.last()
        return answers

    def states_in_words(self, ranks: Sequence[int], states: dict[int, tuple[Notice, str]]) -> str:
        """One line a rank: its last operation, that it has left, or that it does not answer."""
        return "".join(f"\n    rank {rank}: {self._state_in_words(rank, states)}" for rank in ranks)

    def _state_in_words(self, rank: int, states: dict[int, tuple[Notice, str]]) -> str:
        if rank in states:
            return states[rank][1]
        if rank in self.departed:
            return self.departed[rank].reason
        if rank in self._ending:
            return self._ending[rank]
        return f"does not answer within {ANSWER:g} s"

    def timed_out(self, operation: Waitable, limit: float) -> CommTimeoutError:
        """The report on an operation that has not ended after ``limit`` seconds: who has arrived and who has not."""
        states = self.states(operation.ranks, operation.identity)
        counts = {rank: notice for rank, (notice, _) in states.items()} | self.departed
        absent = operation.missing(counts)
        silent = [rank for rank in operation.ranks if rank not in counts]
        arrived = [rank for rank in operation.ranks if rank not in absent and rank not in silent]
        report = (
            f"{operation.describe()}: not ended after {limit:g} s; rank {self.mailbox.rank} on {socket.gethostname()}"
        )
        for title, ranks in (("arrived", arrived), ("not arrived", absent), ("unknown", silent)):
            if ranks:
                report += f"\n  {title}:{self.states_in_words(ranks, states)}"
        return CommTimeoutError(report)

    def _started_with(self, rank: int) -> dict[str, dict[str, int]]:
        return {channel.key: channel.started_with(rank) for channel in self._channels if rank in channel.ranks}

    def _answer(self, source: int, expired: Hashable) -> None:
        if expired is not None:
            self._expired.add(expired)
        self.mailbox.post("answer", (self._started_with(source), self.recorder.last()), [source])

    def _take_answer(self, source: int, content: tuple[dict[str, dict[str, int]], str]) -> None:
        started, last = content
        self._answers[source] = Notice(False, "", started), last

    # ------------------------------------------------------------------ the flight recorder's dumps

    def dump(self, directory: str | os.PathLike[str], reason: str) -> Path:
        """Write the flight recorder's file of this process."""
        started = {channel.key: channel.started_in_all() for channel in self._channels}
        return self.recorder.dump(directory, reason, started)

    def dump_if_wanted(self, reason: str) -> bool:
        """The same into CUPY_COLL_TRACE_DIR, where it is set; never raises, for what it reports on matters more."""
        directory = os.environ.get(TRACE_VARIABLE)
        if not directory:
            return False
        try:
            self.dump(directory, reason)
        except OSError as error:
            print(f"cupy_coll: rank {self.mailbox.rank}: cannot write to {directory}: {error}", file=sys.stderr)
        return True

    def _take_abort(self, source: int, reason: str) -> None:
        self.dump_if_wanted(f"rank {source} ends the job: {reason}")

    # ------------------------------------------------------------------ departures

    def _take_notice(self, source: int, content: tuple[bool, str, dict[str, dict[str, int]]]) -> None:
        self.departed[source] = Notice(*content)

    def _say(self, together: bool, reason: str) -> None:
        """Tell every other process, once, that this one starts no further operation."""
        with self.lock:
            if not self._said:
                self._said = True
                for rank in range(self.mailbox.size):
                    self.mailbox.post("gone", (together, reason, self._started_with(rank)), [rank])

    def leave_together(self) -> bool:
        """The end that everybody calls: finish what is in flight and wait until all others are at their end too.

        Returns:
            True if every process ended this way, so that communicators can be freed; False where one has left
            without, or an operation has failed.
        """
        pending = sys.exc_info()[1]
        if pending is not None and self.mailbox.size > 1:
            # In a finally: another rank's PeerError may end the job before the interpreter shows what went wrong.
            print(f"cupy_coll: rank {self.mailbox.rank} calls destroy() while handling", file=sys.stderr)
            traceback.print_exception(pending)
        self._say(True, "called destroy()" + (f" while handling {pending!r}" if pending else ""))
        if self.failure is not None:
            return False  # still active: the interpreter's exit ends the job
        self.drain()
        others = [rank for rank in range(self.mailbox.size) if rank != self.mailbox.rank]

        def arrived() -> bool:
            self.deliver()
            return len(self.departed) == len(others) and self.mailbox.all_sent()

        if not self.wait_until(arrived, lambda departed: [], lambda: "destroy", self.timeout):
            waiting = [rank for rank in others if rank not in self.departed]
            states = self.states_in_words(waiting, self.states(waiting))
            self.failure = CommTimeoutError(f"destroy: after {self.timeout:g} s not called by{states}")
            raise self.failure
        self._end()
        return all(notice.together for notice in self.departed.values())

    def dismiss(self) -> None:
        """Forget a world that did not come about; every process does so."""
        self._end()
        self.mailbox.free()

    def _end(self) -> None:
        self._stop.set()
        if self._watchdog.is_alive():
            self._watchdog.join()
        self.active = False

    def leave(self) -> None:
        """The end of a process that has not called :meth:`leave_together`; called by the interpreter's exit."""
        if not self.alive():
            return
        if _exit_status:  # mpi4py ends the job with it, after this
            with self.lock:
                self.mailbox.post("ending", f"ends the job with status {_exit_status}", range(self.mailbox.size))
            self._announce_abort(f"exit status {_exit_status}")
            self._abort_watched()
            self._end()
            return
        if self.failure is None:
            self._say(False, "left: its program ended")
            try:
                self.drain()
            except CupyCollError as error:
                self.failure = error
        if self.failure is not None:
            print(f"cupy_coll: rank {self.mailbox.rank}: {self.failure}", file=sys.stderr)
            self.abort(1, _in_one_line(self.failure))
        self._abort_watched()  # before MPI ends: the members that still run must not wait for this one
        self._end()

    def alive(self) -> bool:
        """Whether this process is in this world."""
        return self.active and self._pid == os.getpid() and not mpi().Is_finalized()

    def abort(self, status: int, reason: str) -> None:
        """End the whole job with ``status``."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._announce_abort(reason)
        if self.mailbox.size > 1:  # else the interpreter ends with a status of its own
            _abort(self.mailbox.comm, status)

    def end_job(self, error: Exception) -> None:
        """End the job for ``error``, from whatever thread: the program's own may be stuck on a GPU."""
        self.failure = self.failure or error
        print(
            f"cupy_coll: rank {self.mailbox.rank} ends the job: {type(error).__name__}: {error}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(LAST_WORDS)  # the others see the same, and each writes its own report
        self._abort_watched()
        self.abort(1, _in_one_line(error))
        _abort(self.mailbox.comm, 1)  # also where this process is alone

    def _abort_watched(self) -> None:
        """From threads, for a communicator may not come back."""
        threads = [threading.Thread(target=one.abort, daemon=True) for one in list(self._watched)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + ABORTING
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _announce_abort(self, reason: str) -> None:
        if self.dump_if_wanted(f"this rank ends the job: {reason}") and self.mailbox.size > 1:
            with self.lock:
                self.mailbox.post("abort", reason, range(self.mailbox.size))
            time.sleep(LAST_WORDS)  # the others write their files


# ---------------------------------------------------------------------- the interpreter's end

_current: Lifecycle | None = None
_starting: Any = None  # the communicator of a world that has not come about yet
_exit_status = 0  # set by mpi4py's runner when the program ends by an exception or a non-zero sys.exit
_installed = False


def _in_one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _abort(comm: Any, status: int) -> None:
    """End the job of ``comm``. mpi_launch.sh learns of the status where mpi4py's runner does: see its ``run_job``."""
    runner_sets = getattr(mpi(), "_set_abort_status", None)
    if runner_sets is not None:
        runner_sets(status)
    comm.Abort(status)


def _leave() -> None:
    if _current is not None:
        _current.leave()


def _dump_on_signal() -> None:
    """SIGUSR1 writes the flight recorder's file, where it has a directory and the program has no other use for it."""
    ours = threading.current_thread() is threading.main_thread()
    if ours and os.environ.get(TRACE_VARIABLE) and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda number, frame: _current and _current.dump_if_wanted("SIGUSR1"))


def _set_current(lifecycle: Lifecycle) -> None:
    global _current, _starting
    _current, _starting = lifecycle, None


def install_exit_hooks(comm: Any) -> None:
    """From now on an uncaught exception ends the job of ``comm``, and the program's end is told to the others."""
    global _starting, _installed
    _starting = comm
    if _installed:
        return
    _installed = True
    atexit.register(_leave)
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        # torch.distributed's hook, which calls this one, collects in memory what is written, to mark it with the rank:
        # the job would end before it is shown.
        collected = isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None
        with contextlib.redirect_stderr(sys.__stderr__ if collected else sys.stderr):
            previous(kind, value, trace)
        if hasattr(sys, "ps1") or sys.flags.interactive:
            return
        status = 130 if issubclass(kind, KeyboardInterrupt) else 1
        if _current is not None and _current.alive():
            if isinstance(value, (CommTimeoutError, MismatchError)):
                time.sleep(LAST_WORDS)  # the others raise it too, and each writes its own report
            _current.abort(status, _in_one_line(value))
        elif _starting is not None and _starting.size > 1:
            _abort(_starting, status)

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
