"""Runs the tests of this directory on all ranks of one MPI job together (SPMD).

    mpiexec -n 4 python -c 'from mpi4py import MPI, run; run.main()' -m pytest tests/ranks

Every rank collects the same tests and runs them in the same order. After each phase of a test (set-up, call,
tear-down) the ranks agree on its outcome over a communicator of the harness's own, so that

- a failure on any rank is a failure on all; rank 0, which alone writes, shows each failing rank's traceback;
- a test that is skipped on some ranks and not on others is a failure;
- nobody enters a test that another rank has not reached.

A test that does not end is dumped on every rank and the job killed; ``@pytest.mark.limit(seconds)`` changes
its limit. When a test left the ranks out of step (one timed out, or lost a peer) the run ends there.

A test should not stop at the first wrong value, for its peers would then wait for it in the next operation:
the fixture ``expect`` notes what is wrong and fails the test at its end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

RANK = MPI.COMM_WORLD.Get_rank()
SIZE = MPI.COMM_WORLD.Get_size()
COMM = MPI.COMM_WORLD.Dup()

TEST_LIMIT = 90.0  # seconds a test may take, unless its marker says otherwise: a busy machine may stand still for long
START_LIMIT = 120.0  # collecting and leaving: imports of several ranks on few cores
OPERATION_TIMEOUT = 60  # seconds the library waits for a peer; below TEST_LIMIT, so that it reports first
SLOT = 1024  # bytes of a value that travels at once
LEFT_ALONE = ", this rank is still in it"
DUMP_TURN = 0.3  # ranks dump one after the other

out_of_step: list[str] = []  # why the run cannot go on, the same on every rank
real_stderr = 2
collection_errors: list[str] = []
failures: list[str] = []  # their reports so far


# --- Talking to the other ranks -----------------------------------------------------------------------------


def finish(request: MPI.Request) -> None:
    """Wait by polling; the time limit of the test around it is the deadline."""
    polls = 0
    while not request.Test():
        polls += 1
        if polls < 200:
            os.sched_yield()
        else:  # somebody works for longer: leave it the processor
            time.sleep(2e-4)


def exchange(value: Any) -> list[Any]:
    """Everybody's value by rank, without the library under test."""
    everyone = send_to_all(value)
    ended = [rank for rank, other in enumerate(everyone) if isinstance(other, Outcome)]
    if ended:
        raise AssertionError(f"rank {ended[0]} has ended the test{LEFT_ALONE}")
    return everyone


def exchange_outcomes(outcome: Outcome) -> list[Outcome]:
    """Everybody's outcome; ranks that still wait for a value of the test in `exchange` get an error first."""
    while True:
        everyone = send_to_all(outcome)
        if all(isinstance(other, Outcome) for other in everyone):
            return everyone


def send_to_all(value: Any) -> list[Any]:
    """One collective where everybody's value is short, two otherwise."""
    mine = pickle.dumps(value)
    slots = np.zeros((SIZE, SLOT), np.uint8)
    own = np.frombuffer((len(mine).to_bytes(8, "little") + mine)[:SLOT].ljust(SLOT), np.uint8)
    finish(COMM.Iallgather(own, slots))
    sizes = [int.from_bytes(slot[:8].tobytes(), "little") for slot in slots]
    if max(sizes) <= SLOT - 8:
        return [pickle.loads(slot[8:].tobytes()) for slot in slots]
    everything = bytearray(sum(sizes))
    finish(COMM.Iallgatherv([mine, MPI.BYTE], [everything, sizes, MPI.BYTE]))
    ends = np.cumsum(sizes).tolist()
    return [pickle.loads(everything[end - n : end]) for n, end in zip(sizes, ends, strict=True)]


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Dump all threads of every rank and kill the job unless the block ends in time.

    Neither the dump (faulthandler's own thread) nor the kill (SIGALRM's default action) needs a living
    interpreter.
    """
    turn = DUMP_TURN * RANK
    title = f"\n[rank {RANK} of {SIZE}] {what} did not end within {seconds:g} s\n"
    if RANK == 0:  # pytest's own report will not be written
        title += "".join(f"\nbefore that: {failure}\n" for failure in failures)
    timer = threading.Timer(seconds + turn, os.write, (real_stderr, title.encode()))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + turn + DUMP_TURN / 3, file=real_stderr)
    signal.setitimer(signal.ITIMER_REAL, seconds + DUMP_TURN * SIZE + 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


# --- The session --------------------------------------------------------------------------------------------


@pytest.hookimpl(trylast=True)  # after the terminal reporter's
def pytest_configure(config: pytest.Config) -> None:
    global real_stderr
    real_stderr = os.dup(2)  # pytest redirects 2 itself while a test runs
    config.addinivalue_line("markers", "limit(seconds): how long a test may take before the job is killed")
    for variable in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"):
        if int(os.environ.get(variable, SIZE)) != SIZE:
            raise pytest.UsageError(
                f"{variable}={os.environ[variable]}, but MPI reports {SIZE} ranks: "
                "mpiexec belongs to another MPI than mpi4py's"
            )
    if RANK != 0:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        config.pluginmanager.unregister(reporter)
        silent = type(reporter)(config, open(os.devnull, "w"))  # noqa: SIM115 - lives as long as the session
        config.pluginmanager.register(silent, "terminalreporter")
    with contextlib.suppress(ImportError):
        import hypothesis

        hypothesis.settings.register_profile("ranks", derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("ranks")  # every rank must draw the same


def pytest_report_header() -> str:
    return f"ranks: {SIZE}"


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        collection_errors.append(f"{report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    with time_limit(START_LIMIT, "the collection of the tests"):
        everyone = exchange(([item.nodeid for item in session.items], collection_errors))
    if all(seen == everyone[0] for seen in everyone):
        return
    lines = ["the ranks did not collect the same tests"]
    first = set(everyone[0][0])
    for rank, (names, errors) in enumerate(everyone):
        lines.append(f"rank {rank}: {len(names)} tests, {len(errors)} errors")
        lines += [f"  only on rank {rank}: {name}" for name in names if name not in first][:5]
        lines += [f"  not on rank {rank}: {name}" for name in first.difference(names)][:5]
        lines += errors
    session.config.add_cleanup(leave_together)
    pytest.exit("\n".join(lines), returncode=int(pytest.ExitCode.INTERNAL_ERROR))


def leave_together() -> None:
    """Nobody leaves (and ends the job by its status) before rank 0 has written its report."""
    with time_limit(START_LIMIT, "the end of the session"):
        finish(COMM.Ibarrier())


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if config.option.collectonly or config.option.help:
        return
    leave_together()
    if out_of_step:  # MPI_Finalize could wait for operations that will never end
        MPI.COMM_WORLD.Abort(1)


# --- One outcome for all ranks ------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one rank saw in one phase of a test."""

    where: tuple[str, str]  # node id, phase
    word: str  # passed, failed, skipped
    text: str  # traceback, or the reason of a skip
    message: str  # the error's line
    output: str  # what the test wrote
    lost_step: bool  # the rank gave up waiting, lost a peer, or its transport failed


class FailureOfRanks:
    """A failure's representation in pytest's report."""

    def __init__(self, text: str, message: str) -> None:
        self.text = text
        self.reprcrash = self
        self.message = message

    def __str__(self) -> str:
        return self.text

    def toterminal(self, writer: Any) -> None:
        for line in self.text.splitlines():
            writer.line(line)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    marker = item.get_closest_marker("limit")
    with time_limit(marker.args[0] if marker else TEST_LIMIT, item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    everyone = exchange_outcomes(outcome_of(report, call))
    if len({outcome.where for outcome in everyone}) > 1:
        stop(item, report, "the ranks are not in the same test", everyone)
    elif any(outcome.lost_step for outcome in everyone):
        stop(item, report, "a rank timed out, lost a peer or its transport: the run stops here", everyone)
    elif any(outcome.word == "failed" for outcome in everyone):
        fail(report, "", everyone)
    elif len({outcome.word for outcome in everyone}) > 1:
        fail(report, "skipped on some ranks only", everyone)
    return report


def outcome_of(report: pytest.TestReport, call: pytest.CallInfo[None]) -> Outcome:
    text = message = ""
    if report.skipped:
        text = str(report.longrepr[-1]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.failed:
        text = report.longreprtext
        crash = getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash else text.strip().splitlines()[-1]
    output = "".join(f"{title}\n{content}\n" for title, content in report.sections) if report.failed else ""
    lost = report.failed and call.excinfo is not None and lost_step(call.excinfo.value)
    return Outcome((report.nodeid, report.when), report.outcome, text, message, output, lost)


def lost_step(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, TimeoutError) or any(base.__name__ == "PeerError" for base in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False


def fail(report: pytest.TestReport, why: str, everyone: Sequence[Outcome]) -> None:
    """Make this rank's report one of failure that shows what all ranks saw."""
    by_message: dict[tuple[str, str], list[int]] = {}
    for rank, outcome in enumerate(everyone):
        by_message.setdefault((outcome.word, outcome.message), []).append(rank)
    lines = [why] if why else []
    for (word, _message), ranks in sorted(by_message.items(), key=lambda entry: entry[0][0] != "failed"):
        shown = everyone[ranks[0]]
        lines.append(f"===== {word} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {SIZE} =====")
        lines += [part for part in (shown.text, shown.output) if part]
    failing = [(rank, outcome.message) for rank, outcome in enumerate(everyone) if outcome.word == "failed"]
    failing.sort(key=lambda entry: LEFT_ALONE in entry[1])  # the cause before what follows from it
    message = f"rank {failing[0][0]}: {failing[0][1]}" if failing else why
    report.outcome = "failed"
    report.sections = []
    report.longrepr = FailureOfRanks("\n".join(lines), message)  # type: ignore[assignment]
    failures.append(f"{report.nodeid}, {report.when}\n{report.longrepr}")


def stop(item: pytest.Item, report: pytest.TestReport, why: str, everyone: Sequence[Outcome]) -> None:
    places = [f"rank {rank} in {' '.join(outcome.where)}" for rank, outcome in enumerate(everyone)]
    fail(report, f"{why} ({'; '.join(places)})", everyone)
    out_of_step.append(why)
    item.session.shouldfail = why


# --- Fixtures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def initialised() -> Iterator[None]:
    """An initialised context, ended when the session ends."""
    start_context()
    yield
    if not out_of_step:
        import cupy_coll as cc

        cc.CommContext().destroy()


def start_context() -> None:
    import cupy_coll as cc

    cc.CommContext().init_distributed_env(timeout=OPERATION_TIMEOUT)


@pytest.fixture
def world(initialised: None) -> Any:
    """The global group."""
    import cupy_coll as cc

    return cc.CommContext().get_group(cc.CommMode.GLOBAL)


@pytest.fixture
def no_context(initialised: None) -> Iterator[None]:
    """A test that begins without a context; the session's comes back after it."""
    import cupy_coll as cc

    cc.CommContext().destroy()
    all_groups.made.clear()
    yield
    if out_of_step:
        return
    if cc.CommContext().is_initialized():
        cc.CommContext().destroy()
    start_context()


@pytest.fixture
def rank(initialised: None) -> int:
    return RANK


@pytest.fixture
def size(initialised: None) -> int:
    return SIZE


class Groups:
    """Groups by their ranks, each made once: MPICH has no more than some 2,046 communicators."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Any] = {}

    def __call__(self, ranks: Sequence[int]) -> Any:
        """The group of these global ranks in this order, None on a rank outside. All ranks call it."""
        import cupy_coll as cc

        key = tuple(ranks)
        if key not in self.made:
            name = "TEST_" + "_".join(map(str, key))
            self.made[key] = cc.CommContext().init_group(list(key), mode=name)
        return self.made[key]

    def of(self, count: int) -> Any:
        """A group of so many ranks, the last ones of the world; skips where the world is smaller.

        Leaves rank 0 out where it can: a mistaken global rank for a rank in the group shows then.
        """
        if count > SIZE:
            pytest.skip(f"needs {count} ranks, this run has {SIZE}")
        return self(range(SIZE - count, SIZE))

    def several(self) -> list[tuple[int, ...]]:
        """Rank lists that differ in size, offset, stride and order; the whole world among them."""
        everyone = tuple(range(SIZE))
        lists = [everyone, everyone[::-1], everyone[1:], everyone[::2], everyone[-1:]]
        return [ranks for ranks in dict.fromkeys(lists) if ranks]


all_groups = Groups()


@pytest.fixture
def group_of(world: Any) -> Groups:
    return all_groups


@pytest.fixture
def share() -> Callable[[Any], list[Any]]:
    """Everybody's value by rank, without the library under test."""
    return exchange


class Expectations:
    """Collects what is wrong; the test fails at its end."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, actual: Any, expected: Any, label: str = "", *, rtol: float = 0.0, atol: float = 0.0) -> None:
        """Same type, dtype, shape and bits; with a tolerance, values within it."""
        difference = find_difference(actual, expected, rtol, atol)
        if difference:
            self.that(False, f"{label}: {difference}")

    def that(self, condition: Any, label: str) -> None:
        if not condition:
            caller = next(f for f in reversed(traceback.extract_stack()) if f.filename != __file__)
            self.problems.append(f"{os.path.basename(caller.filename)}:{caller.lineno}: {label}")

    def raise_if_wrong(self) -> None:
        if self.problems:
            shown = self.problems[:12]
            rest = len(self.problems) - len(shown)
            pytest.fail("\n".join(shown) + (f"\n... and {rest} more" if rest else ""), pytrace=False)


def find_difference(actual: Any, expected: Any, rtol: float, atol: float) -> str:
    import torch

    if not isinstance(expected, torch.Tensor):
        return "" if type(actual) is type(expected) and actual == expected else f"got {actual!r}, expected {expected!r}"
    if not isinstance(actual, torch.Tensor):
        return f"got {type(actual).__name__} {actual!r}, expected a tensor"
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"got {list(actual.shape)} {actual.dtype}, expected {list(expected.shape)} {expected.dtype}"
    # a clone, because a contiguous tensor of one element may have any stride
    plain = {"memory_format": torch.contiguous_format}
    actual, expected = (t.detach().cpu().reshape(-1).clone(**plain) for t in (actual, expected))
    if torch.equal(actual.view(torch.uint8), expected.view(torch.uint8)):
        return ""
    if rtol or atol:
        wide = torch.complex128 if expected.is_complex() else torch.float64
        if torch.allclose(actual.to(wide), expected.to(wide), rtol=rtol, atol=atol, equal_nan=True):
            return ""
    if actual.numel() <= 40:
        return f"got {actual.tolist()}, expected {expected.tolist()}"
    rows = (t.view(torch.uint8).reshape(t.numel(), -1) for t in (actual, expected))
    wrong = torch.ne(*rows).any(dim=1).nonzero().reshape(-1)
    at = int(wrong[0])
    return (
        f"{wrong.numel()} of {actual.numel()} elements differ, the first at {at}: "
        f"got {actual[at].item()}, expected {expected[at].item()}"
    )


@pytest.fixture
def expect() -> Expectations:
    return Expectations()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    expectations = pyfuncitem.funcargs.get("expect")
    try:
        result = yield
    except Exception as error:
        for problem in getattr(expectations, "problems", []):
            error.add_note(f"before that: {problem}")
        raise
    if isinstance(expectations, Expectations):
        expectations.raise_if_wrong()
    return result


class RaisesEverywhere:
    """``with raises_everywhere(ShapeError, "all_gather"):`` every rank raises it, and the next op works.

    Args:
        error: the class.
        match: a regular expression found in every rank's message.
        ranks: the global ranks that must raise; the others must not. None: all.
    """

    def __init__(self, error: type[BaseException], match: str = "", ranks: Sequence[int] | None = None) -> None:
        self.error = error
        self.match = match
        self.ranks = range(SIZE) if ranks is None else ranks
        self.messages: dict[int, str] = {}

    def __enter__(self) -> RaisesEverywhere:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None and not isinstance(error, Exception):
            return False
        right = isinstance(error, self.error) and re.search(self.match, str(error)) is not None
        if RANK not in self.ranks:
            right = error is None
        told = f"{type(error).__name__}: {error}" if error is not None else "nothing raised"
        everyone = exchange((right, told))
        wrong = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(everyone) if not fine]
        if wrong:
            wanted = f"{self.error.__name__} matching {self.match!r} on ranks {list(self.ranks)}"
            raise AssertionError("\n  ".join([f"expected {wanted}", *wrong])) from error
        self.messages = {rank: text for rank, (_fine, text) in enumerate(everyone) if rank in self.ranks}
        import cupy_coll as cc

        if cc.CommContext().is_initialized():
            cc.barrier()
        return True


@pytest.fixture
def raises_everywhere(initialised: None) -> type[RaisesEverywhere]:
    return RaisesEverywhere
