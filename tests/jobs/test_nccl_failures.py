"""How jobs end that use NCCL: over the stand-in (tests/nccl_standin), which is **not NCCL**, and a fake device.

Every job here must end by itself, with one report that says what happened.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

START = f"""
import os, sys, time
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "nccl")!r}]
import nccl_standin
standin = nccl_standin.load()
import torch
import cupy_coll as cc
from cupy_coll import device
from fake_device import FakeDevice
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank
fake = FakeDevice(standin, enabled=True, gpu=f"GPU-{{rank}}")
seam = device.installed(fake)
seam.__enter__()
context = cc.CommContext()


def plant(**variables):
    os.environ.update({{f"NCCL_STANDIN_{{name}}": str(value) for name, value in variables.items()}})
"""


@pytest.fixture
def nccl_job(job):
    def run(body, n=2, **options):
        return job(START + textwrap.dedent(body), n, **options)

    return run


@pytest.mark.slow
def test_destroy(nccl_job):
    """Everything is finished, then the communicator is destroyed, not aborted."""
    done = nccl_job("""
        context.init_distributed_env(timeout=15)
        standin.asynchronous(True)
        tensor = torch.ones(1000)
        cc.all_reduce(tensor, "GLOBAL", async_op=True)  # nobody waits for it
        context.destroy()
        assert tensor.eq(2).all()
        names = [call.name for call in standin.calls()]
        assert names[-1] == "CommDestroy" and "CommAbort" not in names, names
        context.init_distributed_env(timeout=15)
        cc.all_reduce(tensor, "GLOBAL")
        context.destroy()
        print("right\\n", end="")
    """)
    assert done.status == 0, done.output
    assert done.output.count("right") == 2


@pytest.mark.slow
def test_forgotten_destroy(nccl_job):
    """The end of the program finishes what is in flight and gives up the communicators; nothing hangs."""
    done = nccl_job("""
        import atexit
        atexit.register(lambda: print(f"{tensor[0].item()} {standin.calls()[-1].name}\\n", end="", flush=True))
        context.init_distributed_env(timeout=15)  # its own hook runs before the one above
        standin.asynchronous(True)
        tensor = torch.ones(1000)
        cc.all_reduce(tensor, "GLOBAL", async_op=True)
    """)
    assert done.status == 0, done.output
    assert done.output.count("2.0 CommAbort") == 2, done.output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["launcher", "plain"])
def test_exception_while_an_operation_is_in_flight(nccl_job, how):
    done = nccl_job(
        """
        context.init_distributed_env(timeout=30)
        standin.asynchronous(True)
        tensor = torch.ones(10)
        cc.all_reduce(tensor, "GLOBAL")
        work = cc.all_reduce(tensor, "GLOBAL", async_op=True) if rank == 0 else None
        if rank == 0:
            raise RuntimeError("the program's own")
        time.sleep(30)
        """,
        how=how,
        limit=30,
    )
    assert done.status != 0
    assert done.output.count("RuntimeError: the program's own") == 1, done.output
    assert done.seconds < 25


def test_a_member_that_leaves(nccl_job):
    """The watchdog of the one that waits on its GPU sees it."""
    done = nccl_job("""
        context.init_distributed_env(timeout=30)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        standin.asynchronous(True)
        if rank == 0:
            cc.all_reduce(torch.ones(5), "GLOBAL", async_op=True)
            time.sleep(30)
    """)
    assert done.status != 0
    assert "rank 0 ends the job: PeerError: " in done.output
    assert "rank 1 left: its program ended" in done.output
    assert done.seconds < 25


def test_a_member_that_never_comes(nccl_job):
    """After the timeout: who has arrived, who has not, and what that one does."""
    done = nccl_job("""
        context.init_distributed_env(timeout=2)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        standin.asynchronous(True)
        if rank == 0:
            cc.all_reduce(torch.ones(5), "GLOBAL")  # synchronous: the host does not wait
        time.sleep(30)
    """)
    assert done.status != 0
    assert "CommTimeoutError: all_reduce (group GLOBAL [0, 1], operation 1, [5] float32): not ended after 2 s" in (
        done.output
    )
    assert "not arrived:\n    rank 1: last operation all_reduce (group GLOBAL [0, 1], operation 0)" in done.output
    assert done.seconds < 25


@pytest.mark.slow
def test_a_call_that_does_not_return(nccl_job):
    """NCCL itself blocks the host: the watchdog ends the job."""
    done = nccl_job("""
        context.init_distributed_env(timeout=2)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        plant(NEVER_ARRIVE=2 if rank == 1 else 0)
        cc.all_reduce(torch.ones(5), "GLOBAL")
    """)
    assert done.status != 0
    assert "CommTimeoutError: all_reduce" in done.output, done.output
    assert done.seconds < 25


def test_asynchronous_error(nccl_job):
    """NCCL's own notice of a failure, with code and name; seen by the watchdog while the program computes."""
    done = nccl_job("""
        context.init_distributed_env(timeout=30)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        if rank == 0:
            plant(ASYNC_ERROR="1:6")
        time.sleep(30)
    """)
    assert done.status != 0
    assert (
        "rank 0 ends the job: TransportError: group GLOBAL [0, 1], asynchronous error (nothing in flight)"
        in done.output
    )
    assert "NCCL_ERROR_REMOTE_ERROR" in done.output or "ncclRemoteError (code 6)" in done.output
    assert done.seconds < 25


@pytest.mark.slow
def test_an_error_of_a_call(nccl_job):
    """Raised where the operation is called; what follows on the group is refused."""
    done = nccl_job("""
        context.init_distributed_env(timeout=15)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        plant(ASYNC_ERROR="1:5")
        try:
            cc.all_reduce(torch.ones(3), "GLOBAL")
        except cc.TransportError as error:
            assert error.code == 5 and "ncclInvalidUsage" in str(error), error
            try:
                cc.all_reduce(torch.ones(3), "GLOBAL")
            except cc.TransportError as again:
                assert "failed earlier" in str(again), again
                print("right\\n", end="", flush=True)
        time.sleep(1)
        raise SystemExit(3)
    """)
    assert done.status != 0
    assert done.output.count("right") == 2, done.output


@pytest.mark.slow
def test_init_that_fails_on_one_rank(nccl_job):
    done = nccl_job(
        """
        context.init_distributed_env(timeout=30)
        plant(TIMEOUT=60)
        if rank == 1:
            plant(FAIL_INIT=2)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        """,
        n=3,
    )
    assert done.status != 0
    assert "TransportError: all_reduce: connecting group GLOBAL [0, 1, 2] by NCCL: NCCL failed: ncclSystemError" in (
        done.output
    )
    assert done.seconds < 25


@pytest.mark.slow
def test_init_that_fails_and_is_caught(nccl_job):
    """The others are inside NCCL and cannot come back: their deadline ends the job."""
    done = nccl_job("""
        context.init_distributed_env(timeout=2)
        plant(TIMEOUT=60)
        if rank == 1:
            plant(FAIL_INIT=2)
        try:
            cc.all_reduce(torch.ones(1), "GLOBAL")
        except cc.TransportError:
            time.sleep(30)
    """)
    assert done.status != 0
    assert "rank 0 ends the job: CommTimeoutError: all_reduce: connecting group GLOBAL [0, 1] by NCCL: not ended" in (
        done.output
    )
    assert done.seconds < 25


@pytest.mark.slow
def test_init_that_blocks_on_one_rank(nccl_job):
    done = nccl_job("""
        context.init_distributed_env(timeout=2)
        plant(TIMEOUT=60)
        if rank == 1:
            plant(BLOCK_INIT=0)
        context.get_group("GLOBAL").warm_up()
    """)
    assert done.status != 0
    assert "CommTimeoutError: warm_up: connecting group GLOBAL [0, 1] by NCCL: not ended after 2 s" in done.output
    assert done.seconds < 25


@pytest.mark.slow
def test_check_mode(nccl_job):
    """The members compare before anything is given to NCCL; all raise, and the next operation works."""
    done = nccl_job("""
        context.init_distributed_env(timeout=15, check=True)
        try:
            cc.all_reduce(torch.ones(2 + rank), "GLOBAL")
        except cc.MismatchError as error:
            assert "[3] float32" in str(error) and "[2] float32" in str(error), error
            assert not standin.data_calls()
        tensor = torch.ones(4)
        cc.all_reduce(tensor, "GLOBAL")
        assert tensor.eq(2).all()
        context.destroy()
        print("right\\n", end="")
    """)
    assert done.status == 0, done.output
    assert done.output.count("right") == 2


@pytest.mark.slow
def test_flight_recorder(nccl_job, tmp_path):
    """An operation's end is the time at which its event has passed."""
    done = nccl_job(f"""
        import json
        context.init_distributed_env(timeout=15)
        cc.all_reduce(torch.ones(1), "GLOBAL")
        standin.asynchronous(True)
        standin.hold(True)
        fake.holding = True
        work = cc.all_reduce(torch.ones(7), "GLOBAL", async_op=True)
        def last():
            path = context.dump_trace({str(tmp_path)!r})
            return [one for one in json.loads(path.read_text())["operations"] if one["channel"].endswith(".nccl")][-1]
        before = last()
        assert before["op"] == "all_reduce" and before["shape"] == [7] and before["end"] is None, before
        cc.barrier()
        standin.hold(False)
        work.wait(timeout=10)
        assert last()["end"] > before["start"], last()
        context.destroy()
        print("right\\n", end="")
    """)
    assert done.status == 0, done.output
    assert done.output.count("right") == 2


@pytest.mark.slow
def test_a_world_of_one(nccl_job):
    done = nccl_job(
        """
        context.init_distributed_env()
        tensor = torch.arange(3.0)
        work = cc.all_reduce(tensor, "GLOBAL", async_op=True)
        work.wait()
        assert standin.data_calls() and tensor.tolist() == [0, 1, 2]
        print("right\\n", end="")
        """,
        n=1,
        how="plain",
    )
    assert done.status == 0, done.output
    assert done.output.count("right") == 1
