"""``python -m cupy_coll doctor`` for real: on ranks, and with planted problems."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starting import Finished, mpiexec, run_command

from cupy_coll.bootstrap import mpi_library

DOCTOR = [sys.executable, "-m", "cupy_coll", "doctor"]
OPEN_MPI = "Open MPI" in mpi_library()


def on_ranks(n: int) -> list[str]:
    root = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if OPEN_MPI else []
    return [mpiexec(), "-n", str(n), *root, *DOCTOR]


def test_four_ranks() -> None:
    """One report of all; times, and no problem."""
    done = run_command([*on_ranks(4), "--json"], 60)
    assert done.status == 0, done.output
    report = json.loads(done.output)
    assert report["problems"] == []
    ranks = report["ranks"]
    assert [(rank["rank"], rank["size"], rank["local_rank"], rank["local_size"]) for rank in ranks] == [
        (rank, 4, rank, 4) for rank in range(4)
    ]
    for rank in ranks:
        assert rank["mpi"].startswith(("MPICH 5", "Open MPI 5", "MPICH 4", "Open MPI 4", "Intel")), rank["mpi"]
        assert "libmpi" in rank["mpi_file"]
        assert rank["launcher"]["rank"] == rank["rank"]
        assert rank["launcher"]["size"] == 4
        assert rank["versions"]["torch"]
        assert rank["tests"]["objects"]["seconds"] > 0
        assert rank["tests"]["host"]["seconds"] > 0
        assert rank["tests"]["objects"]["error"] == rank["tests"]["host"]["error"] == ""


def test_alone() -> None:
    done = run_command(DOCTOR, 60)
    assert done.status == 0, done.output
    assert done.output.startswith("cupy_coll doctor: 1 rank, 1 host\n\nrank  host"), done.output
    assert done.output.endswith("\nno problem found\n"), done.output


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_launcher_of_another_mpi(rank: int) -> None:
    """Its variables, and the library of mpi4py: MPI is not started, for it might end the process; one of the ranks
    speaks.
    """
    here, there = ("Open MPI", "MPICH") if OPEN_MPI else ("MPICH", "Open MPI")
    variables = (
        {"PMI_RANK": rank, "PMI_SIZE": 2, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": 2}
        if OPEN_MPI
        else {
            "OMPI_COMM_WORLD_RANK": rank,
            "OMPI_COMM_WORLD_SIZE": 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank,
            "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
        }
    )
    done = run_command(DOCTOR, 60, {name: str(value) for name, value in variables.items()})
    assert done.status == 1, done.output
    if rank:
        assert done.output == ""
        return
    assert f"problem: this process was started by mpiexec of {there}" in done.output
    assert f"but the MPI library of mpi4py is {here}" in done.output
    assert f"advice: start with the mpiexec of {here}" in done.output


def test_worlds_of_one() -> None:
    """srun without the PMI of the MPI library: so many worlds."""
    variables = {"SLURM_LOCALID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4"}
    done = run_command(DOCTOR, 60, variables)
    assert done.status == 1, done.output
    assert "problem: srun started 4 ranks (SLURM_PROCID=0, " in done.output, done.output
    assert "but MPI counts 1: each process believes that it is a job of its own" in done.output
    assert f"advice: srun --mpi={'pmix' if OPEN_MPI else 'pmi2'}" in done.output


@pytest.mark.slow
def test_a_tiny_shm() -> None:
    """In a mount of its own, where MPICH hangs or dies: nothing is started."""
    if OPEN_MPI:
        pytest.skip("how much Open MPI needs has not been measured")
    private = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    can = shutil.which("unshare") and subprocess.run([*private, "sh", "-c", mount], capture_output=True, timeout=20)
    if not can or can.returncode:
        pytest.skip("this user cannot mount a /dev/shm of its own (unshare --mount)")
    done = run_command([*private, "sh", "-c", f"{mount}; exec {shlex.join(on_ranks(4))}"], 60)
    assert done.status == 1, done.output
    assert done.output.count("problem: ") == 1, done.output
    assert " has 1 MB, 1 MB of it free; MPICH " in done.output
    assert "needs about 22 MB for 4 ranks on a node" in done.output
    assert "--shm-size=1g" in done.output


TESTS = Path(__file__).resolve().parents[1]
GPUS = f"""
import os, sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / "nccl")!r}]
import nccl_standin
standin = nccl_standin.load()
from cupy_coll import device
from cupy_coll.__main__ import main
from fake_device import FakeDevice
from mpi4py import MPI
rank = MPI.COMM_WORLD.rank


def doctor(gpu, *words):
    with device.installed(FakeDevice(standin, enabled=True, gpu=gpu)):
        return main(["doctor", *words])
"""


def reports(output: str) -> list[dict[str, Any]]:
    """JSON documents, one after another."""
    found, decoder = [], json.JSONDecoder()
    while output.strip():
        report, end = decoder.raw_decode(output := output.lstrip())
        found.append(report)
        output = output[end:]
    return found


@pytest.mark.slow
def test_made_up_gpus(job: Callable[..., Finished]) -> None:
    """A GPU a rank, then two ranks on one. NCCL is a stand-in on host memory, the GPUs are made up."""
    program = """
assert doctor(f"GPU-{rank}", "--json") == 0
assert doctor("GPU-7", "--json") == 1
assert len(standin.calls("CommInitRank")) == 1, "NCCL is not asked for what it refuses"
"""
    done = job(GPUS + program, 2, env={"CUDA_VISIBLE_DEVICES": "0"})  # each rank is shown one
    assert done.status == 0, done.output
    good, bad = reports(done.output)
    assert good["problems"] == []
    for number, rank in enumerate(good["ranks"]):
        assert rank["gpu"] == {"index": 0, "name": "no GPU", "uuid": f"GPU-{number}", "bus": "none"}
        assert rank["tests"]["nccl"]["error"] == ""
        assert rank["tests"]["nccl"]["seconds"] > 0
        assert "libnccl" in rank["nccl_file"]
    assert "nccl" not in bad["ranks"][0]["tests"]
    (problem,) = bad["problems"]
    assert problem["problem"].startswith("ranks 0, 1 are on the same GPU (GPU-7 of ")
    assert problem["advice"].startswith("start at most one rank a GPU, and give each rank a GPU of its own")


def test_more_ranks_than_gpus(job: Callable[..., Finished]) -> None:
    """The table and the problem come from the function that chooses: no rank takes the one that all see."""
    done = job(GPUS + "sys.exit(doctor('GPU-7'))", 2, env={"CUDA_VISIBLE_DEVICES": "0,1"})
    assert done.status == 1, done.output
    says = "problem: ranks 0, 1: logical_device: 2 ranks on this node, but only 1 GPU that all of them see"
    assert done.output.count("problem: ") == done.output.count(says) == 1, done.output


@pytest.mark.slow
@pytest.mark.parametrize(("planted", "says"), [("BLOCK_INIT", "not ended after 2 s"), ("FAIL_INIT", "ncclSystemError")])
def test_nccl_that_does_not_connect(planted: str, says: str, job: Callable[..., Finished]) -> None:
    """The job has to end, but not before the report is out."""
    program = f"""
os.environ["NCCL_STANDIN_TIMEOUT"] = "60"
if rank == 0:
    os.environ["NCCL_STANDIN_{planted}"] = "{2 if planted == "FAIL_INIT" else 0}"
sys.exit(doctor(f"GPU-{{rank}}", "--timeout", "2"))
"""
    done = job(GPUS + program, 2, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert done.status == 1, done.output
    assert done.output.count("problem: rank 0: GPU tensors over NCCL do not work: ") == 1, done.output
    assert says in done.output
    assert "advice: NCCL_DEBUG=INFO shows what NCCL tries." in done.output
    assert done.seconds < 30
