"""What goes wrong in a job of several ranks ends it soon, with a reason on the screen and in the flight recorder.

How jobs end that are stopped by a rank's exit is in test_exits.py; signals to ranks that only sleep, in
test_launcher.py. Here ranks are inside operations.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starting import ROOT, Finished, clean_environment

from cupy_coll.__main__ import main

HEAD = """
import os, signal, sys, threading, time
import torch
import cupy_coll as cc

context = cc.CommContext()
context.init_distributed_env(timeout={timeout})
rank, size = context.get_global_rank(), context.get_world_size()
"""


@dataclass(frozen=True)
class Setting:
    """What a transport needs to run the jobs of this file: lines after the start, and environment variables."""

    lines: str
    environment: dict[str, str] = field(default_factory=dict)


TESTS = ROOT / "tests"
# ``ones(*shape)`` makes a tensor in the transport's memory, ``recv`` and ``all_reduce`` wait on the host for their end,
# and ``connect(mode or group)`` connects its members.
SETTINGS = {
    "host": Setting("ones, recv, all_reduce, connect = torch.ones, cc.recv, cc.all_reduce, lambda group: None\n"),
    # A stand-in for NCCL, and a made-up GPU a rank. The work goes on while the program does, as on a GPU.
    "nccl": Setting(f"""
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "nccl")!r}]
import nccl_standin
standin = nccl_standin.load()
from cupy_coll import device
from fake_device import FakeDevice
seam = device.installed(FakeDevice(standin, enabled=True, gpu=f"GPU-{{rank}}"))
seam.__enter__()
standin.asynchronous(True)

def connect(group):
    (context.get_group(group) if isinstance(group, str) else group).warm_up()

kept = []  # the stand-in writes to host memory, which belongs to no stream

def ones(*shape):
    kept.append(torch.ones(*shape))
    return kept[-1]

def recv(*arguments):
    cc.recv(*arguments, async_op=True).wait(100)

def all_reduce(*arguments):
    cc.all_reduce(*arguments, async_op=True).wait(100)
"""),
}

Run = Callable[..., Finished]


@pytest.fixture
def run_on_host(job: Run) -> Run:
    """The same on the host's transport alone."""
    return started(job, SETTINGS["host"])


@pytest.fixture(params=["host", pytest.param("nccl", marks=pytest.mark.slow)])
def run(request: pytest.FixtureRequest, job: Run) -> Run:
    """``job`` with a start in front of the program and on each transport."""
    return started(job, SETTINGS[request.param])


def started(job: Run, setting: Setting) -> Run:
    def start(program: str, n: int = 3, timeout: float = 100, limit: float = 40, **env: str) -> Finished:
        source = HEAD.format(timeout=timeout) + setting.lines + program
        return job(source, n, limit=limit, env=setting.environment | env)

    return start


def has(result: Finished, *words: str) -> None:
    for word in words:
        assert word in result.output, f"{word!r} is not in the output:\n{result.output}"


def soon(result: Finished, after: float = 0) -> None:
    """Ranks need seconds to start, on a busy machine many; what they wait for here is 100 s."""
    assert result.seconds < after + 30, result.output


# --- Signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_to_a_rank(number: signal.Signals, run: Run) -> None:
    """It waits in an operation, as others do in another one; MPI gives the status, but an interrupt's own is 130."""
    result = run(
        f"""
connect("GLOBAL")
if rank == 1:
    threading.Timer(0.3, os.kill, (os.getpid(), {number.value})).start()
    recv(ones(3), 0, "GLOBAL")
cc.barrier()
print("passed the barrier", flush=True)
""",
        n=2,
    )
    assert result.status != 0, result.output
    assert "passed the barrier" not in result.output
    soon(result)
    if number == signal.SIGINT:
        assert result.status == 130, result.output
        has(result, "KeyboardInterrupt", "recv(ones(3)")


def test_an_interrupt_while_the_others_are_not_there_yet(job: Run) -> None:
    """In init_distributed_env."""
    result = job(
        """
import os, signal, sys, threading, time
from mpi4py import MPI
import cupy_coll as cc

if MPI.COMM_WORLD.rank == 0:
    time.sleep(100)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
cc.CommContext().init_distributed_env()
"""
    )
    assert result.status == 130, result.output
    has(result, "KeyboardInterrupt", "init_distributed_env()")
    soon(result)


def is_running(pid: int) -> bool:
    """Whether it runs; one that has ended and only waits to be collected by its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"])
def test_a_signal_to_the_launcher(number: int, status: int, tmp_path: Path) -> None:
    """While all ranks wait in an operation; none of them lives on."""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD.format(timeout=100)
        + """
cc.barrier()
os.mkdir(f"pid {os.getpid()}")  # not printed: the ranks' lines may mix
cc.recv(torch.ones(3), (rank + 1) % size, "GLOBAL")
"""
    )

    def signals_as_in_a_terminal() -> None:  # a shell cannot trap what it was started to ignore
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_DFL)

    command = [str(ROOT / "mpi_launch.sh"), "-n", "2", str(script)]
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=signals_as_in_a_terminal,
    ) as process:
        pids: list[int] = []
        try:
            deadline = time.monotonic() + 40
            while len(pids) < 2:
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline, f"the ranks did not start: {pids}"
                time.sleep(0.02)
                pids = [int(path.name.split()[1]) for path in tmp_path.glob("pid *")]
            time.sleep(0.3)
            process.send_signal(number)
            output, _ = process.communicate(timeout=30)
            assert process.returncode == status, output
            deadline = time.monotonic() + 3
            while any(map(is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert [pid for pid in pids if is_running(pid)] == []
        finally:
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)
            process.kill()


# --- Exceptions and differing calls ----------------------------------------------------------------------------------


def test_an_exception_in_a_backward(run: Run) -> None:
    """On one rank, before its part of the exchange for which the others wait."""
    result = run(
        """
def fail(gradient):
    raise ValueError("on purpose")

input_ = ones(size, 2).requires_grad_()
output = cc.all_to_all_uneven(input_, [1] * size, [1] * size, "GLOBAL")
if rank == 1:
    output.register_hook(fail)
(output * 2).sum().backward()
cc.barrier()
print("all have a gradient", flush=True)
"""
    )
    assert result.status != 0, result.output
    has(result, "ValueError: on purpose")
    assert "all have a gradient" not in result.output
    soon(result)


def test_differing_calls_in_check_mode(run: Run) -> None:
    """Nobody catches the error: it says what each called. The first rank to end may cut what the others print."""
    result = run('all_reduce(ones(4 if rank == 2 else 3), "GLOBAL")', CUPY_COLL_CHECK="1")
    assert result.status != 0, result.output
    assert "MismatchError: all_reduce [" in result.output, result.output
    assert "] float32, SUM (group GLOBAL [0, 1, 2], call 0): rank 2 differs from ranks 0, 1\n" in result.output
    has(result, "    ranks 0, 1: all_reduce [3] float32, SUM\n    rank 2: all_reduce [4] float32, SUM\n")
    soon(result)


@pytest.mark.slow
def test_memory_of_an_operation_that_was_given_up(run_on_host: Run) -> None:
    """A program that goes on after a time-out finds nothing in its memory that a late member has sent.

    On a GPU it does not go on.
    """
    result = run_on_host(
        """
def reduce_a_lot(value):
    try:
        all_reduce(value * ones(20_000), "GLOBAL")
    except cc.CommTimeoutError:
        print("gave up", flush=True)

if rank == 1:
    time.sleep(2)
    reduce_a_lot(7)
    time.sleep(100)
reduce_a_lot(3)
fresh = [torch.zeros(2, 10_000) for _ in range(50)]
time.sleep(2.5)
print("untouched" if not any(bool(one.any()) for one in fresh) else "written to", flush=True)
""",
        n=2,
        timeout=1,
    )
    assert result.status != 0, result.output
    has(result, "untouched")
    assert result.output.count("gave up") == 2, result.output


# --- Time-outs and the flight recorder -------------------------------------------------------------------------------


def trace(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, list[dict[str, Any]]]:
    """What ``python -m cupy_coll trace`` says, and the events that it writes."""
    assert main(["trace", str(directory)]) == 0
    events = json.loads((directory / "trace.json").read_text())["traceEvents"]
    return capsys.readouterr().out, events


def dumps(directory: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem[4:]): json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))}


def test_a_time_out(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    """Every rank that waits reports once, also one whose own time is not over; the ranks' traces say the same.

    On a GPU the watchdog may report besides the program.
    """
    times = {1, 2} if request.node.callspec.params["run"] == "nccl" else {1}
    directory = tmp_path / "traces"
    result = run(
        """
group = context.init_group([3, 1, 0], "THREE")
if group is not None:
    connect(group)
def compute():
    time.sleep(100)

cc.broadcast(ones(2), "GLOBAL")
if rank == 3:
    compute()
if rank == 1:
    time.sleep(2)
    cc.all_reduce(ones(3, 5), group, async_op=True).wait(60)
if group is not None:
    all_reduce(ones(3, 5), group)
time.sleep(100)
""",
        n=4,
        timeout=3,
        CUPY_COLL_TRACE_DIR=str(directory),
    )
    assert result.status != 0, result.output
    soon(result)
    host = socket.gethostname()
    reports = 0
    for rank in (0, 1):
        report = (
            "CommTimeoutError: all_reduce (group THREE [3, 1, 0], operation 0, [3, 5] float32): not ended after 3 s; "
            f"rank {rank} on {host}\n"
        )
        found = result.output.count(report)
        assert found in times, f"{report!r} is there {found} times:\n{result.output}"
        reports += found
    assert result.output.count("not ended after") == reports, result.output
    waits = (
        r"last operation all_reduce \(group THREE \[3, 1, 0\], operation 0\), in it for \d+\.\d s; the program is at "
    )
    missing = r"last operation broadcast \(group GLOBAL \[0, 1, 2, 3\], operation 0\), ended \d+\.\d s ago"
    # A rank may just then be inside the library that stands in for NCCL.
    place = r"(?:script\.py:\d+ in (?:<module>|all_reduce)|__init__\.py:\d+ in pending|an unknown place)"
    for pattern in (
        rf"  arrived:\n    rank 1: {waits}{place}\n    rank 0: {waits}{place}\n",
        rf"  not arrived:\n    rank 3: {missing}; the program is at script\.py:\d+ in compute\n",
    ):
        assert len(re.findall(pattern, result.output)) == reports, f"{pattern} is not everywhere:\n{result.output}"

    written = dumps(directory)
    assert list(written) == [0, 1, 2, 3], "rank 2, which does not wait, and rank 3 write as well"
    assert any(reason == "timeout" or "CommTimeoutError" in reason for reason in written[0]["reasons"])
    text, events = trace(directory, capsys)
    stuck = text[text.index("stuck: ") :].splitlines()
    assert stuck[0] == "stuck: all_reduce [3, 5] float32 (group THREE [3, 1, 0], operation 0)"
    assert re.fullmatch(r"  waiting for up to \d+\.\d s: ranks 0, 1", stuck[1])
    last = r"its last was broadcast \(group GLOBAL \[0, 1, 2, 3\], operation 0\), which ended \d+\.\d s before"
    assert re.fullmatch(rf"  rank 3: has not come; {last}; it is at script\.py:\d+ in compute", stuck[2])
    assert text.count("stuck: ") == 1
    assert {event["pid"] for event in events if event["name"] == "broadcast"} == {0, 1, 2, 3}


def test_a_rank_that_cannot_answer(run: Run) -> None:
    """It is stopped; a process that is busy outside Python is silent alike. The report says what it does not know."""
    result = run(
        """
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
all_reduce(ones(3), "GLOBAL")
""",
        n=2,
        timeout=1,
    )
    assert result.status != 0, result.output
    has(result, "CommTimeoutError: all_reduce (", "  unknown:\n    rank 1: does not answer within 2 s\n")
    soon(result)


def test_a_rank_that_does_not_call_destroy(run: Run) -> None:
    result = run(
        """
if rank == 1:
    time.sleep(100)
context.destroy()
""",
        n=2,
        timeout=1,
    )
    assert result.status != 0, result.output
    has(result, "CommTimeoutError: destroy: after 1 s not called by\n    rank 1: last operation init_distributed_env (")
    soon(result)


@pytest.mark.slow
def test_the_trace_of_a_rank_missing_in_check_mode(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others raise alike; the trace shows the comparison that they wait in."""
    directory = tmp_path / "traces"
    result = run(
        """
cc.gather_jagged_object_lists([rank])
if rank == 1:
    time.sleep(100)
all_reduce(ones(3), "GLOBAL")
""",
        timeout=1.5,
        CUPY_COLL_CHECK="1",
        CUPY_COLL_TRACE_DIR=str(directory),
    )
    assert result.status != 0, result.output
    soon(result)
    call = "MismatchError: all_reduce [3] float32, SUM (group GLOBAL [0, 1, 2], call 0)"
    assert result.output.count(f"{call}: rank 1 did not call it within 1.5 s") == 2, result.output
    said, _ = trace(directory, capsys)
    stuck = said[said.index("stuck: ") :].splitlines()
    assert stuck[0] == "stuck: check all_reduce [3] float32, SUM (group GLOBAL [0, 1, 2], operation 0)"
    assert stuck[1].endswith(" s: ranks 0, 2")
    assert stuck[2].startswith(
        "  rank 1: has not come; its last was gather_jagged_object_lists (group GLOBAL [0, 1, 2], "
    )


def test_the_trace_of_an_exception(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is written by the rank that fails and by all others, also one that computes; sends and receives are in it."""
    directory = tmp_path / "traces"
    result = run(
        """
connect("GLOBAL")
cc.barrier()
if rank == 1:
    time.sleep(0.5)
    raise ValueError("on purpose")
elif rank == 0:
    recv(ones(7), 1, "GLOBAL")
time.sleep(100)
""",
        CUPY_COLL_TRACE_DIR=str(directory),
    )
    assert result.status != 0, result.output
    soon(result)
    has(result, "ValueError: on purpose")
    written = dumps(directory)
    assert [dump["reasons"] for dump in written.values()] == [
        ["rank 1 ends the job: ValueError: on purpose"],
        ["this rank ends the job: ValueError: on purpose"],
        ["rank 1 ends the job: ValueError: on purpose"],
    ]
    text, _ = trace(directory, capsys)
    stuck = text[text.index("stuck: ") :].splitlines()
    assert stuck[0] == "stuck: recv [7] float32 (group GLOBAL [0, 1, 2], operation 0, from rank 1)"
    assert stuck[2].startswith("  rank 1: has not come; its last was barrier (group GLOBAL [0, 1, 2], operation ")


@pytest.mark.slow
def test_traces_of_a_healthy_job(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On SIGUSR1 and on request. Nothing is stuck, and the ranks' clocks fit: they start at different times."""
    by_signal, asked_for = tmp_path / "by_signal", tmp_path / "asked_for"
    result = run(
        f"""
for turn in range(3):
    time.sleep(0.3 * rank)
    cc.barrier()
os.kill(os.getpid(), signal.SIGUSR1)
cc.barrier()
print(context.dump_trace({str(asked_for)!r}), flush=True)
context.destroy()
""",
        CUPY_COLL_TRACE_DIR=str(by_signal),
    )
    assert result.status == 0, result.output
    for rank in range(3):
        has(result, str(asked_for / f"rank0000{rank}.json"))
    assert [dump["reasons"] for dump in dumps(by_signal).values()] == [["SIGUSR1"]] * 3
    assert [dump["reasons"] for dump in dumps(asked_for).values()] == [["SIGUSR1", "on request"]] * 3
    text, events = trace(asked_for, capsys)
    assert "3 of 3 ranks wrote a file\n" in text
    assert "no operation is stuck: every one that was started has ended" in text
    barriers = [event for event in events if event["name"] == "barrier"]
    assert {event["pid"] for event in barriers} == {0, 1, 2}
    for number in range(3):
        same = [event for event in barriers if event["args"]["number"] == number]
        assert len(same) == 3
        # The last one comes when the others have waited for long; 0.2 s is for a machine that is busy.
        last, first_end = max(e["ts"] for e in same), min(e["ts"] + e["dur"] for e in same)
        assert last <= first_end + 0.2e6, same
        assert max(event["dur"] for event in same) > 0.3e6, same
