"""How jobs end: promptly, with the right status, and with a reason on the screen. Never by hanging.

The context's timeout is longer than a job may take here: what ends a job is that the departure of a rank is noticed.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
from starting import Finished, clean_environment

HEAD = """
import os, sys, time
import torch
import cupy_coll as cc

context = cc.CommContext()
context.init_distributed_env(timeout=100)
rank, size = context.get_global_rank(), context.get_world_size(cc.CommMode.GLOBAL)
"""

BARRIER = (
    HEAD
    + """
if rank == 1:
    time.sleep(0.3)
    {leave}
cc.barrier()
print("passed the barrier", flush=True)
"""
)


def has(result: Finished, *words: str) -> None:
    for word in words:
        assert word in result.output, f"{word!r} is not in the output:\n{result.output}"


@pytest.mark.parametrize("how", ["launcher", pytest.param("plain", marks=pytest.mark.slow)])
def test_a10_exception(job, how):
    """One traceback says what happened; also without the launcher, under mpiexec with plain Python."""
    result = job(BARRIER.format(leave='raise ValueError("on purpose")'), how=how)
    assert result.status != 0
    has(result, "ValueError: on purpose")
    assert result.output.count("Traceback") == 1, result.output
    assert "passed the barrier" not in result.output


def test_a10_own_status(job):
    result = job(BARRIER.format(leave="sys.exit(7)"))
    assert result.status == 7, result.output
    assert "passed the barrier" not in result.output


@pytest.mark.parametrize("how", ["launcher", pytest.param("plain", marks=pytest.mark.slow)])
def test_a10_leaving_as_if_all_were_well(job, how):
    """sys.exit(0), also as the end of the script, while another rank waits."""
    result = job(BARRIER.format(leave="sys.exit(0)"), how=how)
    assert result.status != 0, result.output
    has(result, "PeerError", "barrier", "rank 1 left")
    assert "passed the barrier" not in result.output


def test_own_status_without_the_launcher(job):
    """sys.exit passes no hook that could see the status; the job ends all the same, and not with 0."""
    result = job(BARRIER.format(leave="sys.exit(7)"), how="plain")
    assert result.status != 0, result.output
    has(result, "rank 1 left")


def test_outsiders_may_leave_early(job):
    """Rank 0 is not in the group of the others, which go on without it; nobody calls destroy()."""
    result = job(
        HEAD
        + """
group = context.init_group([1, 2], mode="WITHOUT_0")
if group is not None:
    for turn in range(20):
        tensor = torch.ones(3)
        cc.all_reduce(tensor, group)
        time.sleep(0.05)
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    print(f"rank {rank} has done its work", flush=True)
""",
        n=3,
    )
    assert result.status == 0, result.output
    has(result, "rank 1 has done its work", "rank 2 has done its work")
    assert "rank 0 has done" not in result.output


def test_leaving_without_destroy(job):
    """At different times, one after destroy() and one without.

    Worker processes, as a data loader forks them, that end or fail take nobody along.
    """
    result = job(
        HEAD
        + """
import multiprocessing
for code in (
    "cc.to_torch(__import__('numpy').ones(3))",
    "raise ValueError('a worker of its own')",
    "sys.excepthook(ValueError, ValueError('reported by a worker'), None)",
):
    worker = multiprocessing.get_context("fork").Process(target=exec, args=(code, globals()))
    worker.start()
    worker.join()
    assert worker.exitcode == ("raise" in code), (code, worker.exitcode)
tensor = torch.ones(2)
cc.all_reduce(tensor, "GLOBAL")
assert tensor.tolist() == [2.0, 2.0]
if rank == 1:
    time.sleep(0.5)
    context.destroy()
print(f"rank {rank} ends", flush=True)
"""
    )
    assert result.status == 0, result.output
    has(result, "rank 0 ends", "rank 1 ends")


@pytest.mark.slow
def test_leaving_after_destroy(job):
    """Also from a with block, and after a second life; ranks may end at different times then."""
    result = job(
        HEAD
        + """
cc.barrier()
context.destroy()
with cc.CommContext() as context:
    context.init_distributed_env(timeout=100)
    cc.barrier()
time.sleep(0.5 * rank)
print(f"rank {rank} ends", flush=True)
""",
        how="runner",
    )
    assert result.status == 0, result.output
    has(result, "rank 0 ends", "rank 1 ends")


def test_dropped_operations_complete_before_the_end(job):
    """Rank 0 starts them, keeps no handle and is at its end before rank 1 has begun."""
    result = job(
        HEAD
        + """
big = torch.full((300_000,), rank + 1.0)
if rank == 0:
    cc.send(torch.arange(400_000.0), 1, "GLOBAL", async_op=True)
    cc.all_reduce(big, "GLOBAL", async_op=True)
else:
    time.sleep(0.7)
    message = torch.zeros(400_000)
    cc.recv(message, 0, "GLOBAL")
    cc.all_reduce(big, "GLOBAL")
    assert torch.equal(message, torch.arange(400_000.0))
    assert torch.equal(big, torch.full((300_000,), 3.0))
    print("rank 1 has got all", flush=True)
"""
    )
    assert result.status == 0, result.output
    has(result, "rank 1 has got all")


def test_exception_with_an_operation_in_flight(job):
    result = job(
        HEAD
        + """
tensor = torch.ones(1000)
work = cc.all_reduce(tensor, "GLOBAL", async_op=True) if rank == 1 else None
if rank == 1:
    raise ValueError("on purpose")
time.sleep(0.5)
cc.all_reduce(tensor, "GLOBAL")
cc.barrier()
print("passed the barrier", flush=True)
"""
    )
    assert result.status != 0
    has(result, "ValueError: on purpose")
    assert "passed the barrier" not in result.output


def test_destroy_while_another_waits(job):
    """The rank that waits is told who has gone; the one in destroy() does not hang."""
    result = job(
        HEAD
        + """
if rank == 1:
    context.destroy()
    print("destroyed", flush=True)
else:
    try:
        cc.all_reduce(torch.ones(3), "GLOBAL")
    except cc.PeerError as error:
        print("gone:", error.ranks, flush=True)
        raise
"""
    )
    assert result.status != 0, result.output
    has(result, "gone: (1,)", "PeerError", "all_reduce", "rank 1 called destroy()")


def test_destroy_in_a_finally(job):
    """The reader sees the exception, also where the waiting rank's error ends the job; nobody waits for the timeout."""
    result = job(
        HEAD
        + """
try:
    if rank == 1:
        raise ValueError("on purpose")
    cc.barrier()
finally:
    context.destroy()
""",
    )
    assert result.status != 0, result.output
    has(result, "calls destroy() while handling", "ValueError: on purpose")


def test_exception_in_a_with_block(job):
    result = job(
        HEAD
        + """
with context:
    if rank == 1:
        raise ValueError("on purpose")
    cc.barrier()
""",
        how="plain",
    )
    assert result.status != 0, result.output
    has(result, "ValueError: on purpose")


def test_a_rank_that_never_comes(job):
    """The timeout ends the job, whatever the other does; the message names operation, group and shape."""
    result = job(
        HEAD.replace("timeout=100", "")
        + """
if rank == 0:
    cc.all_reduce(torch.ones(3, 5), "GLOBAL")
time.sleep(100)
""",
        env={"CUPY_COLL_TIMEOUT": "1.5"},
    )
    assert result.status != 0, result.output
    has(result, "CommTimeoutError", "all_reduce", "GLOBAL", "[3, 5]", "1.5 s")


def test_too_many_communicators(job):
    """An error that says so, on every rank; the context goes on, and closing groups makes room."""
    result = job(
        HEAD
        + """
groups = []
try:
    for number in range(1000):
        groups.append(context.init_group([0, 1], mode=f"NUMBER_{number}"))
except cc.TransportError as error:
    print(f"rank {rank}, {len(groups) > 100}: {error}", flush=True)
    assert error.code is not None and error.text
cc.barrier()
for group in groups[:10]:
    group.close()
tensor = torch.ones(1)
cc.all_reduce(tensor, context.init_group([1, 0], mode="ONE_MORE"))
print(f"rank {rank} goes on with {tensor.item()}", flush=True)
context.destroy()
""",
        how="runner",
    )
    assert result.status == 0, result.output
    has(result, "rank 0, True: ", "rank 1, True: ", "communicator", "close()")
    has(result, "rank 0 goes on with 2.0", "rank 1 goes on with 2.0")


def test_without_mpiexec(tmp_path):
    """A world of one: the same script runs as a plain program."""
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + """
tensor = torch.full((2,), 5.0)
cc.all_reduce(tensor, "GLOBAL")
group = context.init_group([0], mode="TENSOR_PARALLEL")
cc.all_gather(torch.zeros(2), tensor, group)
print(rank, size, tensor.tolist(), cc.all_reduce_dict({"a": 1}, None), flush=True)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=clean_environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "0 1 [5.0, 5.0] {'a': 1.0}"
