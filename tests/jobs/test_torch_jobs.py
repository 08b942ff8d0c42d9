"""Jobs that use torch.distributed over this package's backend: how they end, and the examples."""

from __future__ import annotations

import pytest
from starting import ROOT, run_command

TORCH_JOB = """
import os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("cupy_coll")  # no MASTER_ADDR, and no import of cupy_coll
assert "MASTER_ADDR" not in os.environ
if dist.get_rank() == 1:
    time.sleep(0.3)
    {leave}
dist.all_reduce(torch.ones(1))
print("passed", flush=True)
"""


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param('raise ValueError("on purpose")', id="raises"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", id="killed", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_ends_the_job(job, leave):
    result = job(TORCH_JOB.format(leave=leave))
    assert result.status != 0, result.output
    assert result.seconds < 30, result.output
    assert "passed" not in result.output
    if "raise" in leave:
        assert "ValueError: on purpose" in result.output


GROUP_JOB = """
import datetime, time
import torch
import torch.distributed as dist

dist.init_process_group("cupy_coll", timeout=datetime.timedelta(seconds=3))
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.new_group([0, 1], use_local_synchronization=True)
    print("passed", flush=True)
else:
    {instead}
"""


@pytest.mark.parametrize(
    ("instead", "error"),
    [
        pytest.param("time.sleep(60)", "not ended after 3 s", id="never comes", marks=pytest.mark.slow),
        pytest.param("pass", "PeerError", id="has left"),
    ],
)
def test_a_group_that_a_member_does_not_make(job, instead, error):
    result = job(GROUP_JOB.format(instead=instead), limit=40)
    assert result.status != 0, result.output
    assert result.seconds < 30, result.output
    assert "passed" not in result.output
    assert error in result.output
    assert "making the group PROCESS_GROUP [0, 1]" in result.output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_examples(ranks):
    launch = [str(ROOT / "mpi_launch.sh"), "-n", str(ranks)]
    lines = {}
    for backend in ("cupy_coll", "gloo"):
        result = run_command([*launch, "examples/02_dtensor_logprobs.py", "--backend", backend], limit=120)
        assert result.status == 0, result.output
        line = next(line for line in result.output.splitlines() if "mean" in line)
        assert backend in line
        lines[backend] = line.replace(backend, "")
    assert lines["cupy_coll"] == lines["gloo"]
    result = run_command([*launch, "examples/03_ddp_fsdp.py"], limit=120)
    assert result.status == 0, result.output
    ends = [line.split()[-1] for line in result.output.splitlines() if "->" in line]
    assert len(ends) == 2
    assert ends[0] == ends[1]
    assert float(ends[0]) < 2
